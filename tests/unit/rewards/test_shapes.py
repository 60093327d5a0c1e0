"""The shapes verifier: what it passes and what it must not."""

import math
from itertools import permutations

import pytest
import torch

from sfgrpo.rewards.shapes import find_objects, shapes_reward, verify
from sfgrpo.shapes.captions import COLOUR_NAMES, SHAPES, all_captions, parse
from sfgrpo.shapes.scenes import AREAS, PALETTE, place, render, scenes_for

CAPTIONS = all_captions()
AXIS = torch.arange(32) + 0.5
Y, X = torch.meshgrid(AXIS, AXIS, indexing="ij")


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def edge(distance):
    return (0.5 - distance).clamp(0, 1)


def disc(x, y, radius):
    return edge(((X - x).square() + (Y - y).square()).sqrt() - radius)


def square(x, y, radius):
    return edge(torch.maximum((X - x).abs(), (Y - y).abs()) - 0.9 * radius)


def paint(*layers, ground=0.9):
    """A picture (3, 32, 32) of (coverage (32, 32), colour name or RGB) on grey ground."""
    image = torch.full((3, 32, 32), ground)
    for alpha, colour in layers:
        rgb = torch.tensor(PALETTE[COLOUR_NAMES.index(colour)] if isinstance(colour, str) else colour).view(3, 1, 1)
        image = image * (1 - alpha) + rgb * alpha
    return image


def scores(image, text):
    """(strict, soft) of one picture."""
    verdict = verify(image.unsqueeze(0), [parse(text)])
    return float(verdict.strict), float(verdict.soft)


def fails(image, text):
    strict, soft = scores(image, text)
    return strict == 0 and 0 <= soft <= 0.5


FOUR = [disc(7, 7, 4), disc(24, 7, 4.5), disc(7, 24, 4), disc(24, 24, 4)]


# ----- right pictures


def test_every_caption_is_passed_when_drawn():
    captions = CAPTIONS * 3
    verdict = verify(render(scenes_for(captions, seeded())), captions)
    # In a few pictures two corners come so close that they are one component (scenes.GAP).
    failed = [c for c, ok in zip(captions, verdict.strict, strict=True) if ok != 1]
    assert len(failed) <= 4 and all(c.count > 1 for c in failed)
    assert float(verdict.soft[verdict.strict == 1].min()) > 0.99 and float(verdict.soft.max()) <= 1


def test_objects_are_found_where_they_were_drawn():
    scenes = scenes_for(CAPTIONS[:200], seeded(0))
    found = find_objects(render(scenes))
    assert len(found.image) == int(scenes.present.sum())
    for m in range(len(found.image)):
        i = int(found.image[m])
        distance = (scenes.centre[i] - found.centre[m]).norm(dim=-1).where(scenes.present[i], torch.tensor(99.0))
        j = int(distance.argmin())
        assert float(distance[j]) < 0.2
        assert int(found.shape[m]) == int(scenes.shape[i, j]) and int(found.colour[m]) == int(scenes.colour[i, j])
        area = AREAS[int(scenes.shape[i, j])] * float(scenes.radius[i, j]) ** 2
        assert float(found.area[m]) == pytest.approx(area, rel=0.08)
        assert float(found.shape_quality[m].sum()) > 0.99 and float(found.colour_quality[m].sum()) > 0.99


def test_a_picture_does_not_depend_on_its_batch():
    captions = CAPTIONS[::25]
    images = render(scenes_for(captions, seeded(2)))
    images[::2] = images[::2].flip(0)
    whole = verify(images, captions)
    alone = [verify(images[i : i + 1], captions[i : i + 1]) for i in range(len(captions))]
    torch.testing.assert_close(whole.strict, torch.cat([v.strict for v in alone]))
    torch.testing.assert_close(whole.soft, torch.cat([v.soft for v in alone]), rtol=0, atol=1e-5)
    assert 0 < float(whole.strict.mean()) < 1


@pytest.mark.parametrize("deviation", (0.01, 0.03))
def test_a_little_noise_is_forgiven(deviation):
    images = render(scenes_for(CAPTIONS, seeded(3)))
    images += deviation * torch.randn(images.shape, generator=seeded(4))
    assert float(verify(images, CAPTIONS).strict.mean()) > 0.98


@pytest.mark.parametrize("ground", (0.8, 1.0))
def test_other_grounds_and_dtypes(ground):
    image = paint((disc(16, 16, 4.5), "red"), ground=ground)
    assert scores(image, "a red circle") == (1.0, 1.0)
    assert scores(image.bfloat16(), "a red circle")[0] == 1.0


# ----- wrong pictures


def extra_object(captions, generator):
    """Scenes with one more object, of the first one's shape and colour."""
    scenes = scenes_for(captions, generator)
    count = torch.tensor([c.count for c in captions])
    relation = torch.tensor([-1 if c.relation is None else c.relation for c in captions])
    scenes.centre, scenes.radius = place(count + 1, relation, generator)
    rows = torch.arange(len(captions))
    scenes.shape[rows, count], scenes.colour[rows, count] = scenes.shape[:, 0], scenes.colour[:, 0]
    scenes.present[rows, count] = True
    return scenes


def changed(captions, generator, change):
    scenes = scenes_for(captions, generator)
    for i, caption in enumerate(captions):
        change(scenes, i, caption)
    return scenes


def drop_last(scenes, i, caption):
    scenes.present[i, caption.count - 1] = False


def recolour_first(scenes, i, caption):
    scenes.colour[i, 0] = (scenes.colour[i, 0] + 1 + i % 5) % 6


def reshape_first(scenes, i, caption):
    scenes.shape[i, 0] = next(s for s in ((i + k) % 4 for k in range(4)) if s not in [o[0] for o in caption.objects])


def swap(field):
    def change(scenes, i, caption):
        values = getattr(scenes, field)
        values[i, :2] = values[i, :2].flip(0)

    return change


def turn_a_quarter(scenes, i, caption):
    scenes.centre[i] = scenes.centre[i].flip(-1)


@pytest.mark.parametrize(
    "wanted, change",
    (
        (lambda c: c.count > 1, drop_last),
        (lambda c: c.objects[0][1] is not None, recolour_first),
        (lambda c: True, reshape_first),
        (lambda c: c.category == "position", swap("centre")),
        (lambda c: c.category == "position", swap("shape")),
        (lambda c: c.category == "position", turn_a_quarter),
        (lambda c: c.category == "attributes", swap("colour")),
        (lambda c: c.category == "attributes", swap("shape")),
    ),
    ids=("fewer", "colour", "shape", "side", "shapes change sides", "axis", "colours swapped", "shapes swapped"),
)
def test_one_thing_wrong_fails_for_every_caption(wanted, change):
    captions = [c for c in CAPTIONS if wanted(c)]
    verdict = verify(render(changed(captions, seeded(5), change)), captions)
    assert [c.text for c, ok in zip(captions, verdict.strict, strict=True) if ok != 0] == []
    assert float(verdict.soft.min()) >= 0 and float(verdict.soft.max()) <= 0.5


def test_one_object_more_fails_for_every_caption():
    captions = [c for c in CAPTIONS if c.count < 4]
    verdict = verify(render(extra_object(captions, seeded(6))), captions)
    assert [c.text for c, ok in zip(captions, verdict.strict, strict=True) if ok != 0] == []
    assert 0 < float(verdict.soft.min()) and float(verdict.soft.max()) <= 0.5


def is_true(caption, objects):
    """Whether a caption holds of a list of (shape, colour, (x, y)); None where a relation is a close call."""
    if len(objects) != caption.count:
        return False
    asked = [(s, c) for s, c, n in caption.objects for _ in range(n)]
    for order in permutations(objects):
        if all(s == o[0] and c in (None, o[1]) for (s, c), o in zip(asked, order, strict=True)):
            if caption.relation is None:
                return True
            (x0, y0), (x1, y1) = order[0][2], order[1][2]
            along = (x1 - x0, x0 - x1, y1 - y0, y0 - y1)[caption.relation]
            margin = min(along - 3, along - abs(y1 - y0 if caption.relation < 2 else x1 - x0))
            return None if abs(margin) < 0.5 else margin > 0
    return False


def test_verdicts_are_the_truth_for_other_captions():
    scenes = scenes_for(CAPTIONS[::9], seeded(1))
    images, pairs, expected = render(scenes), [], []
    for i in range(len(images)):
        objects = [
            (int(scenes.shape[i, j]), int(scenes.colour[i, j]), tuple(scenes.centre[i, j].tolist()))
            for j in range(4)
            if scenes.present[i, j]
        ]
        truth = [is_true(c, objects) for c in CAPTIONS]
        same_count = [k for k, c in enumerate(CAPTIONS) if truth[k] is False and c.count == len(objects)]
        pick = torch.randperm(len(same_count), generator=seeded(i))[:12].tolist()
        chosen = [k for k, holds in enumerate(truth) if holds] + [same_count[p] for p in pick]
        pairs += [(i, k) for k in chosen]
        expected += [float(truth[k]) for k in chosen]
    verdict = verify(images[[i for i, _ in pairs]], [CAPTIONS[k] for _, k in pairs])
    assert verdict.strict.tolist() == expected
    assert sum(expected) > 1.5 * len(images) and bool((verdict.soft[verdict.strict == 0] <= 0.5).all())


CIRCLE = disc(16, 16, 4.5)


@pytest.mark.parametrize(
    "image, text",
    (
        (paint((disc(12, 16, 4), "red"), (disc(19.5, 16, 4), "red")), "two red circles"),
        (paint((disc(12, 16, 4), "red"), (disc(19.5, 16, 4), "blue")), "two circles"),
        (paint((disc(12, 16, 4), "red"), (disc(17, 16, 4), "red")), "two red circles"),
        (paint((edge(((X - 16) / 2).square().add((Y - 16).square()).sqrt() - 3), "red")), "a red circle"),
        (paint((torch.exp(-((X - 16).square() + (Y - 16).square()) / 18), "red")), "a red circle"),
        (paint((disc(16, 16, 5) - disc(16, 16, 3), "red")), "a red circle"),
        (paint((disc(16, 16, 12), "red")), "a red circle"),
        (paint((disc(0, 16, 4.5), "red")), "a red circle"),
        (paint((CIRCLE * (X < 16), "red"), (CIRCLE * (X >= 16), "blue")), "a red circle"),
        (paint((0.5 * CIRCLE, "red")), "a red circle"),
        (paint((edge((X - 16).abs() + (Y - 16).abs() - 5.5), "red")), "a red square"),
        (paint((CIRCLE, "red"), (disc(4, 4, 0.8), "red")), "a red circle"),
        (paint((CIRCLE, (0.9, 0.9, 0.5))), "a yellow circle"),
        (paint((torch.ones(32, 32), "red")), "a red square"),
        (paint((edge(7 - X), "red")), "a red square"),
    ),
    ids=(
        "touching", "touching in two colours", "overlapping", "ellipse", "gaussian blob", "ring", "huge", "cut off",
        "two-coloured", "pale", "diamond", "speck", "washed out", "all red", "half red",
    ),
)  # fmt: skip
def test_near_misses_fail(image, text):
    assert fails(image, text)


def test_triangles_upside_down_fail():
    captions = [c for c in CAPTIONS if any(o[0] == SHAPES.index("triangle") for o in c.objects) and c.relation is None]
    verdict = verify(render(scenes_for(captions, seeded(8))).flip(2), captions)
    assert float(verdict.strict.max()) == 0 and float(verdict.soft.max()) <= 0.5


def test_constant_images_score_0():
    colours = [(g, g, g) for g in (0.0, 0.5, 0.9, 1.0)] + list(PALETTE)
    images = torch.tensor(colours).view(-1, 3, 1, 1).expand(-1, 3, 32, 32)
    for text in ("a circle", "a black square", "a circle left of a cross", "four red circles"):
        verdict = verify(images, [parse(text)] * len(images))
        assert verdict.soft.tolist() == verdict.strict.tolist() == [0.0] * len(images)
    # Among others too.
    mixed = torch.cat([images[:1], paint((CIRCLE, "red")).unsqueeze(0), images[1:2]])
    assert verify(mixed, [parse("a circle")] * 3).strict.tolist() == [0.0, 1.0, 0.0]


def test_noise_scores_nearly_0():
    generator = seeded(9)
    images = torch.cat(
        [
            torch.rand(20, 3, 32, 32, generator=generator),
            0.9 + 0.3 * torch.randn(20, 3, 32, 32, generator=generator),
            torch.rand(20, 3, 4, 4, generator=generator).repeat_interleave(8, 2).repeat_interleave(8, 3),
        ]
    )
    for text in ("a circle", "four squares", "a red circle and a blue square"):
        verdict = verify(images, [parse(text)] * 60)
        assert float(verdict.strict.max()) == 0
        assert 0 <= float(verdict.soft.min()) and float(verdict.soft.max()) < 0.3


# ----- the soft score


@pytest.mark.parametrize(
    "objects, text, soft",
    (
        # partial^2 / 2, partial = mean match * min(1, asked / seen).
        (0, "three red circles", 0.0),
        (1, "three red circles", (1 / 3) ** 2 / 2),
        (2, "three red circles", (2 / 3) ** 2 / 2),
        (3, "three red circles", 1.0),
        (4, "three red circles", (3 / 4) ** 2 / 2),
        (1, "a red circle", 1.0),
        (2, "a red circle", (1 / 2) ** 2 / 2),
        (4, "a red circle", (1 / 4) ** 2 / 2),
        (3, "three blue circles", 0.0),
        (3, "three red squares", 0.0),
        (1, "a red circle and a blue square", (1 / 2) ** 2 / 2),
    ),
)
def test_soft_by_hand(objects, text, soft):
    image = paint(*((alpha, "red") for alpha in FOUR[:objects]))
    assert scores(image, text) == pytest.approx((float(soft == 1), soft), abs=1e-3)


def test_soft_of_relations_and_specks_by_hand():
    image = paint((disc(8, 16, 4), "red"), (square(24, 16, 4), "red"))
    assert scores(image, "a circle left of a square") == pytest.approx((1, 1), abs=1e-3)
    assert scores(image, "a square right of a circle") == pytest.approx((1, 1), abs=1e-3)
    assert scores(image, "a circle right of a square") == pytest.approx((0, (1 / 2) ** 2 / 2), abs=1e-3)
    assert scores(image, "a circle above a square") == pytest.approx((0, (1 / 2) ** 2 / 2), abs=1e-3)
    assert scores(paint((CIRCLE, "red")), "a circle left of a square") == pytest.approx((0, 1 / 32), abs=1e-3)
    assert scores(paint((CIRCLE, "red"), (disc(4, 4, 0.8), "red")), "a red circle") == pytest.approx((0, 0.5), abs=1e-3)


@pytest.mark.parametrize("dx, dy, true", ((4, 9, "above"), (9, 9.5, "above"), (9.5, 9, "left of"), (9, 0, "left of")))
def test_a_relation_goes_by_the_larger_offset(dx, dy, true):
    image = paint((disc(11, 11, 3.6), "red"), (square(11 + dx, 11 + dy, 3.6), "blue"))
    for words in ("left of", "right of", "above", "below"):
        assert scores(image, f"a circle {words} a square")[0] == float(words == true)


@pytest.mark.parametrize("text", ("four red circles", "four circles"))
def test_soft_rises_with_every_right_object_and_falls_with_every_further_one(text):
    rising = [scores(paint(*((alpha, "red") for alpha in FOUR[:n])), text)[1] for n in range(5)]
    assert all(a < b for a, b in zip(rising, rising[1:], strict=False)) and rising[0] == 0 and rising[4] == 1
    more = [disc(15.5, 7, 2.5), disc(15.5, 24, 2.5), disc(7, 15.5, 2.5)]
    falling = [scores(paint(*((a, "red") for a in FOUR + more[:n])), text)[1] for n in range(4)]
    assert all(a > b for a, b in zip(falling, falling[1:], strict=False))


def test_soft_rises_with_the_second_object_of_every_kind():
    for caption in CAPTIONS[::11]:
        if len(caption.objects) == 2:
            scenes = scenes_for([caption], seeded(10))
            both = render(scenes)
            scenes.present[0, 1] = False
            verdict = verify(torch.cat([render(scenes), both]), [caption] * 2)
            assert 0 < float(verdict.soft[0]) < 0.2 < float(verdict.soft[1])


@pytest.mark.parametrize("distance, quality", ((0.15, 1.0), (0.3, 0.6), (0.35, 0.4), (0.46, 0.0)))
def test_colour_ramp(distance, quality):
    # From black towards white, at this RGB distance; 1 up to 0.20 and 0 from 0.45.
    value = 0.08 + distance / math.sqrt(3)
    strict, soft = scores(paint((CIRCLE, (value,) * 3)), "a black circle")
    assert strict == float(quality >= 0.5)
    assert soft == pytest.approx(quality**2 * (1 if strict else 0.5), abs=0.03)


def test_rewards_follow_the_verdict():
    captions = CAPTIONS[::40]
    images = render(scenes_for(captions, seeded(11)))
    texts = [c.text for c in captions]
    texts[0], texts[1] = texts[1], texts[0]
    verdict = verify(images, [parse(t) for t in texts])
    for mode, expected in (("soft", verdict.soft), ("strict", verdict.strict)):
        reward = shapes_reward(images, texts, [{}] * len(texts), mode=mode)
        assert torch.equal(reward, expected) and reward.dtype == torch.float32 and reward.shape == (len(texts),)
    assert torch.equal(shapes_reward(images, texts), verdict.soft)
    assert verdict.strict.tolist() == [0.0, 0.0] + [1.0] * (len(texts) - 2)


def test_unknown_modes_and_prompts_are_rejected():
    image = paint((CIRCLE, "red")).unsqueeze(0)
    with pytest.raises(ValueError, match="mode must be 'soft' or 'strict', not 'hard'"):
        shapes_reward(image, ["a circle"], mode="hard")
    with pytest.raises(ValueError, match="'a cat' is not a caption that the shapes verifier can check"):
        shapes_reward(image, ["a cat"])
