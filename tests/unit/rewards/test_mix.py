"""Weighted sums of rewards."""

import pytest
import torch

from sfgrpo.rewards import REWARDS, FailurePolicy, Guard, Mix, Term, combine, get_reward, mix, number_names
from sfgrpo.rewards.jpeg import jpeg_size_reward
from sfgrpo.rewards.shapes import shapes_reward
from sfgrpo.shapes.captions import parse
from sfgrpo.shapes.scenes import render, scenes_for

TEXTS = ["a red circle", "two squares", "a red circle"]


@pytest.fixture
def images():
    drawn = render(scenes_for([parse(t) for t in TEXTS], torch.Generator().manual_seed(0)))
    drawn[2] = drawn[1]
    return drawn


def test_rewards_by_name(images):
    assert get_reward("shapes") is shapes_reward and get_reward("jpeg_size") is jpeg_size_reward
    strict = get_reward("shapes_strict")(images, TEXTS, [{}] * 3)
    assert strict.tolist() == [1.0, 1.0, 0.0]
    assert torch.equal(strict, shapes_reward(images, TEXTS, mode="strict"))


def test_mix_is_the_weighted_sum_and_keeps_the_parts(images):
    scores = mix({"shapes_strict": 2.0, "jpeg_size": -0.5})(images, TEXTS, [{}] * 3)
    sizes = jpeg_size_reward(images, TEXTS)
    assert list(scores.parts) == ["shapes_strict", "jpeg_size"]
    assert scores.parts["shapes_strict"].tolist() == [1.0, 1.0, 0.0]
    assert torch.equal(scores.parts["jpeg_size"], sizes)
    torch.testing.assert_close(scores.total, torch.tensor([2.0, 2.0, 0.0]) - 0.5 * sizes)
    assert scores.total.dtype == torch.float32 and scores.total.shape == (3,)


def test_one_reward_with_weight_1_is_itself(images):
    scores = mix({"shapes": 1.0})(images, TEXTS, [{}] * 3)
    assert torch.equal(scores.total, shapes_reward(images, TEXTS)) and torch.equal(scores.parts["shapes"], scores.total)


def test_unknown_and_missing_rewards_are_rejected():
    names = ", ".join(REWARDS)
    with pytest.raises(ValueError, match=f"unknown reward 'jpeg'; choose one of {names}"):
        get_reward("jpeg")
    with pytest.raises(ValueError, match="unknown reward 'beauty'; choose one of"):
        mix({"shapes": 1.0, "beauty": 0.1})
    with pytest.raises(ValueError, match="no reward given; name at least one, with its weight"):
        mix({})


def brightness(images, prompts, metadata):
    return images.double().mean((1, 2, 3))


def length(images, prompts, metadata):
    return torch.tensor([len(p) + m.get("extra", 0) for p, m in zip(prompts, metadata, strict=True)])


def test_any_functions_are_combined(images):
    score = combine([Term("bright", brightness, 3.0), Term("length", length), Term("off", brightness, 0.0)])
    scores = score(images, TEXTS, [{"extra": 1}, {}, {}])
    assert list(scores.parts) == ["bright", "length", "off"]
    assert scores.parts["length"].tolist() == [13.0, 11.0, 12.0]
    means = torch.tensor([float(image.double().mean()) for image in images])
    torch.testing.assert_close(scores.parts["bright"], means)
    torch.testing.assert_close(scores.total, 3 * means + torch.tensor([13.0, 11.0, 12.0]))
    assert {v.dtype for v in (scores.total, *scores.parts.values())} == {torch.float32}


def test_a_term_weighs_1_unless_told_and_cannot_be_changed():
    term = Term("bright", brightness)
    assert term.weight == 1.0
    with pytest.raises(AttributeError):
        term.weight = 2.0


def test_mix_is_combine_of_the_named_rewards(images):
    weights = {"jpeg_size": -0.3, "shapes": 0.7}
    named = mix(weights)(images, TEXTS, [{}] * 3)
    built = combine([Term("jpeg_size", jpeg_size_reward, -0.3), Term("shapes", shapes_reward, 0.7)])
    other = built(images, TEXTS, [{}] * 3)
    assert torch.equal(named.total, other.total) and list(named.parts) == list(other.parts)
    assert all(torch.equal(named.parts[name], other.parts[name]) for name in named.parts)


@pytest.mark.parametrize(
    "names, numbered",
    (
        ([], []),
        (["a", "b"], ["a", "b"]),
        (["a", "a", "b", "a"], ["a", "a_2", "b", "a_3"]),
        (["a", "a", "a_2"], ["a", "a_3", "a_2"]),
        (["a_2", "a", "a"], ["a_2", "a", "a_3"]),
        (["a_2", "a_2", "a"], ["a_2", "a_2_2", "a"]),
    ),
)
def test_names_that_come_again_are_numbered(names, numbered):
    terms = [Term(name, brightness, weight) for weight, name in enumerate(names)]
    out = number_names(terms)
    assert [t.name for t in out] == numbered
    assert [(t.fn, t.weight) for t in out] == [(t.fn, t.weight) for t in terms]
    assert number_names(out) == out


def test_no_term_and_equal_names_are_rejected():
    with pytest.raises(ValueError, match="no reward given; name at least one, with its weight"):
        combine([])
    with pytest.raises(ValueError, match="two rewards have the same name: a, b, a"):
        combine([Term("a", brightness), Term("b", brightness), Term("a", length)])


def spoil(images, prompts, metadata):
    scores = images.mean((1, 2, 3))
    images.zero_()
    prompts[:] = ["spoilt"] * len(prompts)
    for m in metadata:
        m["tags"].append("spoilt")
    return scores


@pytest.mark.parametrize("guard", (None, Guard(FailurePolicy(retry_wait=0))), ids=("bare", "guarded"))
def test_a_reward_that_writes_into_what_it_is_given_spoils_nothing(images, guard):
    seen = []

    def brightness(images, prompts, metadata):
        seen.append((list(prompts), [dict(m) for m in metadata]))
        return images.mean((1, 2, 3))

    before, metadata = images.clone(), [{"tags": [n]} for n in range(3)]
    texts = list(TEXTS)
    scores = Mix((Term("spoil", spoil), Term("brightness", brightness)), guard)(images, texts, metadata)
    assert torch.equal(images, before) and texts == TEXTS and metadata == [{"tags": [n]} for n in range(3)]
    assert torch.equal(scores.parts["brightness"], before.mean((1, 2, 3)))
    assert torch.equal(scores.parts["spoil"], scores.parts["brightness"])
    assert seen == [(TEXTS, metadata)]


def test_a_second_try_sees_what_the_first_one_saw(images):
    answers = []

    def fails_once(images, prompts, metadata):
        answers.append(images.mean((1, 2, 3)))
        images.zero_()
        if len(answers) == 1:
            raise OSError("not now")
        return answers[-1]

    Mix((Term("it", fails_once),), Guard(FailurePolicy(retry_wait=0)))(images, TEXTS, [{}] * 3)
    assert len(answers) == 2 and torch.equal(*answers)
