"""Names, settings and weights of rewards, as code and run files give them."""

import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import torch

from sfgrpo.prompts import Prompt
from sfgrpo.rewards import REWARDS, Term, check_prompts, check_rewards, combine, get_reward, mix, read_term
from sfgrpo.rewards.jpeg import jpeg_size_reward
from sfgrpo.rewards.registry import settings_of
from sfgrpo.rewards.shapes import shapes_reward
from sfgrpo.shapes.captions import parse
from sfgrpo.shapes.scenes import render, scenes_for

ROOT = Path(__file__).parents[2]
MODELS = ("pickscore", "clip_score", "aesthetic", "hps_v2", "image_reward")


def noise(count=2, size=32):
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(0))


def test_functions_take_their_keyword_arguments_as_settings():
    images = noise()
    coarse = get_reward("jpeg_size", quality=30)(images, ["x"] * 2, [{}] * 2)
    assert torch.equal(coarse, jpeg_size_reward(images, ["x"] * 2, quality=30))
    assert not torch.equal(coarse, jpeg_size_reward(images, ["x"] * 2))
    texts = ["two squares", "a circle"]
    drawn = render(scenes_for([parse(t) for t in texts], torch.Generator().manual_seed(0)))
    assert torch.equal(get_reward("shapes", mode="strict")(drawn, texts), shapes_reward(drawn, texts, mode="strict"))


def test_equal_settings_are_one_object_and_settings_stay():
    one = get_reward("pickscore", batch_size=3)
    assert get_reward("pickscore", batch_size=3) is one
    assert get_reward("pickscore", batch_size=4) is not one and get_reward("clip_score", batch_size=3) is not one
    assert (one.batch_size, one.dtype, one.device) == (3, "fp32", "auto")
    with pytest.raises(FrozenInstanceError):
        one.batch_size = 5


@pytest.mark.parametrize("kind", MODELS)
def test_models_take_the_settings_of_a_model(kind):
    settings = {"device": "cpu", "dtype": "bf16", "batch_size": 2, "offload": True}
    needed = {"head": "x.pth"} if kind == "aesthetic" else {}
    reward = get_reward(kind, **settings, **needed)
    assert {name: getattr(reward, name) for name in settings} == settings
    assert all(hasattr(reward, name) for name in settings_of(type(reward)))


WRONG = {
    "kind": ({"kind": "picscore"}, "unknown reward 'picscore'; choose one of shapes, shapes_strict, jpeg_size"),
    "typo": ({"batchsize": 2}, r"pickscore has no setting 'batchsize'; did you mean batch_size\?"),
    "far from all": ({"zzzz": 2}, "pickscore has no setting 'zzzz'; its settings are device, dtype, .*model"),
    "private": ({"_kept": {}}, "pickscore has no setting '_kept'"),
    "no settings": ({"kind": "brightness", "quality": 1}, "brightness has no setting 'quality'; it takes none"),
    "fixed": ({"kind": "shapes_strict", "mode": "soft"}, "shapes_strict has no setting 'mode'; it takes none"),
    "text": ({"batch_size": "2"}, "batch_size of pickscore must be a whole number, got '2'"),
    "fraction": ({"batch_size": 2.0}, "batch_size of pickscore must be a whole number, got 2.0"),
    "truth": ({"batch_size": True}, "batch_size of pickscore must be a whole number, got True"),
    "number": ({"model": 3}, "model of pickscore must be text, got 3"),
    "flag": ({"offload": 1}, "offload of pickscore must be true or false, got 1"),
    "choice": ({"dtype": "fp8"}, "dtype of pickscore must be one of 'fp32', 'bf16', 'fp16', got 'fp8'"),
    "quality": ({"kind": "jpeg_size", "quality": "x"}, "quality of jpeg_size must be a whole number, got 'x'"),
    "none": ({"batch_size": 0}, "batch_size must be 1 or more"),
    "device": ({"device": "gpu"}, "device 'gpu' is no device"),
    "scale": ({"scale": 0}, "scale must be above 0"),
    "scale nan": ({"scale": float("nan")}, "scale must be above 0"),
    "needed": ({"kind": "aesthetic"}, "aesthetic needs the setting head"),
}


@pytest.mark.parametrize(("table", "message"), WRONG.values(), ids=WRONG)
def test_wrong_settings_are_named(table, message):
    with pytest.raises(ValueError, match=message) as error:
        read_term("pickscore", table)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", ["much", True, [1.0], {"weight": "much"}, {"weight": False}, None])
def test_weights_are_numbers(value):
    with pytest.raises(ValueError, match="needs a weight, or a table of settings, got"):
        read_term("shapes", value)


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -float("inf")])
def test_weights_are_finite(weight):
    for value in (weight, {"weight": weight}):
        with pytest.raises(ValueError, match="the weight must be finite, got"):
            read_term("shapes", value)


def test_read_term():
    assert read_term("shapes", 2) == (shapes_reward, 2.0, False)
    assert read_term("shapes", {}) == (shapes_reward, 1.0, False)
    assert read_term("mine", {"kind": "shapes", "weight": -0.5, "normalise": True}) == (shapes_reward, -0.5, True)
    with pytest.raises(ValueError, match="kind must be the name of a reward, got 3"):
        read_term("mine", {"kind": 3})
    reward, weight, _ = read_term("p", {"kind": "pickscore", "dtype": "fp16"})
    assert (type(reward).__name__, reward.dtype, weight) == ("PickScore", "fp16", 1.0)


def test_one_kind_stands_twice_under_names_of_its_own():
    images = noise()
    score = mix({"fine": {"kind": "jpeg_size", "weight": 2.0}, "coarse": {"kind": "jpeg_size", "quality": 20}})
    scores = score(images, ["x"] * 2, [{}] * 2)
    fine, coarse = (jpeg_size_reward(images, [], quality=q) for q in (95, 20))
    assert torch.equal(scores.parts["fine"], fine) and torch.equal(scores.parts["coarse"], coarse)
    torch.testing.assert_close(scores.total, 2 * fine + coarse)


def test_a_function_can_be_added(monkeypatch):
    def gamma(images, prompts, metadata, *, power: float = 2.0):
        return images.mean((1, 2, 3)) ** power

    monkeypatch.setitem(REWARDS, "gamma", gamma)
    images = noise()
    assert torch.equal(get_reward("gamma", power=3)(images, [], []), images.mean((1, 2, 3)) ** 3)
    with pytest.raises(ValueError, match="power of gamma must be a number, got 'x'"):
        get_reward("gamma", power="x")


class Picky:
    """A reward with the optional methods."""

    def __init__(self):
        self.freed = 0

    def __call__(self, images, prompts, metadata):
        raise AssertionError("scoring is not a check")

    def check(self):
        raise ValueError("no file here")

    def check_prompt(self, prompt, metadata, size):
        if prompt == "bad":
            raise ValueError(f"the prompt {prompt!r} of {metadata['n']} cannot be scored at {size}")

    def free(self):
        self.freed += 1


def test_rewards_with_a_check_are_not_asked_to_score():
    picky = Picky()
    score = combine([Term("picky", picky), Term("size", jpeg_size_reward)])
    for check in (check_rewards, lambda s: check_prompts(s, [Prompt("good")], (8, 8))):
        with pytest.raises(ValueError, match="reward picky: no file here"):
            check(score)
    picky.check = lambda: None
    check_rewards(score)
    check_prompts(score, [Prompt("good", metadata={"n": 1})], (8, 8))
    with pytest.raises(ValueError, match=r"'bad' of 2 cannot be scored at \(8, 16\)"):
        check_prompts(score, [Prompt("good"), Prompt("bad", metadata={"n": 2})], (8, 16))
    score.free()
    assert picky.freed == 1


def test_a_reward_without_a_check_scores_grey():
    score = mix({"shapes": 1.0, "jpeg_size": 1.0})
    check_prompts(score, [Prompt("two squares")], (32, 32))
    with pytest.raises(ValueError, match="reads 32 x 32 pictures, not 64 x 32"):
        check_prompts(score, [Prompt("two squares")], (32, 64))
    with pytest.raises(ValueError, match="dragon"):
        check_prompts(score, [Prompt("two squares"), Prompt("a dragon")], (32, 32))


def test_making_rewards_loads_no_heavy_package():
    code = (
        "import sys; from sfgrpo.rewards import REWARDS, get_reward\n"
        f"for name in {MODELS!r}: get_reward(name, **({{'head': 'x'}} if name == 'aesthetic' else {{}}))\n"
        "print([m for m in ('transformers', 'safetensors', 'huggingface_hub', 'PIL', 'scipy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_prompts_of_one_text_are_checked_with_each_metadata():
    score = mix({"geneval": 1.0})
    good = {"tag": "single_object", "include": [{"class": "cat", "count": 1}]}
    seen = []

    class Watched(type(score)):
        def check(self):
            pass

        def check_prompt(self, prompt, metadata, size):
            seen.append(metadata)
            super().check_prompt(prompt, metadata, size)

    watched = Watched(score.terms)
    with pytest.raises(ValueError, match="a photo of a cat"):
        check_prompts(
            watched, [Prompt("a photo of a cat", metadata=m) for m in (good, good, {"tag": "nothing"})], (64, 64)
        )
    assert seen == [good, {"tag": "nothing"}]
