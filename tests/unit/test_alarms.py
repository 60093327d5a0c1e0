"""Alarms, against changes made by hand."""

import pytest
import torch

from sfgrpo.alarms import AlarmConfig, find_alarms, rises
from sfgrpo.evaluate import Evaluation, Looks
from sfgrpo.metrics import brightness, diversity, sharpness

LOOKS = {"brightness": 0.4, "sharpness": 0.1, "diversity": 0.2}
SCORES = {"total": 1.0, "held_out": 20.0, "size": 5.0}
SPREADS = {"total": 0.5, "held_out": 2.0, "size": 0.0}


def evaluation(looks=(), scores=()):
    return Evaluation(
        scores=SCORES | dict(scores),
        counts={},
        spreads=SPREADS,
        looks=LOOKS | dict(looks),
        images=torch.zeros(1, 3, 2, 2),
        captions=[""],
        rewards=[0.0],
        problems=[],
    )


def names(looks=(), scores=(), directions=None, rising=True, **settings):
    directions = {"held_out": 1.0} if directions is None else directions
    now = evaluation(looks, scores)
    return [a.name for a in find_alarms(evaluation(), now, directions, AlarmConfig(**settings), rising=rising)]


@pytest.mark.parametrize(
    ("name", "start", "falls", "holds"),
    [("sharpness", 0.1, 0.069, 0.071), ("brightness", 0.4, 0.279, 0.281), ("diversity", 0.2, 0.139, 0.141)],
)
def test_a_fall_past_the_share(name, start, falls, holds):
    assert names({name: falls}) == [name] and names({name: holds}) == []
    assert names({name: falls}, drop=0.35) == [] and names({name: start * 0.94}, drop=0.05) == [name]
    assert names({name: falls}, rising=False) == []


@pytest.mark.parametrize(("name", "expected"), [("sharpness", True), ("brightness", True), ("diversity", False)])
def test_a_rise_past_the_share(name, expected):
    assert names({name: LOOKS[name] * 2.01}) == ([name] if expected else [])
    assert names({name: LOOKS[name] * 1.99}) == []
    assert names({name: LOOKS[name] * 1.3}, rise=0.25) == ([name] if expected else [])


def test_a_watched_reward_falls_by_stds_of_the_start():
    assert names(scores={"held_out": 18.9}) == ["held_out"] and names(scores={"held_out": 19.1}) == []
    assert names(scores={"held_out": 19.1}, reward_drop=0.4) == ["held_out"]
    assert names(scores={"held_out": 100.0}) == []
    # Where less is better, a rise is what is bad.
    assert names(scores={"held_out": 21.1}, directions={"held_out": -1.0}) == ["held_out"]
    assert names(scores={"held_out": 18.0}, directions={"held_out": -1.0}) == []


def test_a_reward_without_spread_and_one_without_scores():
    assert names(scores={"size": 4.99}, directions={"size": 1.0}) == ["size"]
    assert names(scores={"size": 5.0}, directions={"size": 1.0}) == []
    assert names(scores={"held_out": float("nan")}) == []


def test_words():
    now = evaluation({"sharpness": 0.05}, {"held_out": 15.0})
    alarms = find_alarms(evaluation(), now, {"held_out": 1.0}, AlarmConfig(), rising=True)
    assert [a.words for a in alarms] == [
        "sharpness fell from 0.1 to 0.05 (-50%) while the trained reward rose",
        "held_out fell from 20 to 15 (-2.5 std of the images at the start) while the trained reward rose",
    ]


def test_pictures_that_were_black_at_the_start():
    start, now = evaluation({"brightness": 0.0}), evaluation({"brightness": 0.5})
    assert find_alarms(start, now, {}, AlarmConfig(), rising=True) == []


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], False),
        ([1.0], False),
        ([1.0, 2.0], True),
        ([2.0, 1.0], False),
        ([1.0, float("nan"), 2.0], True),
        ([0.0] * 5 + [9.0] * 3 + [1.0] * 5, True),
        ([1.0] * 5 + [9.0] * 3 + [0.0] * 5, False),
    ],
)
def test_whether_the_trained_reward_rose(values, expected):
    assert rises(values) is expected


@pytest.mark.parametrize("name", ("drop", "rise", "reward_drop"))
@pytest.mark.parametrize("value", (0.0, -1.0, float("nan")))
def test_settings_outside_their_range(name, value):
    with pytest.raises(ValueError, match=f"{name} must be above 0"):
        AlarmConfig(**{name: value})


def test_looks_do_not_depend_on_the_batches():
    images = torch.rand(7, 3, 5, 6, generator=torch.Generator().manual_seed(0))
    looks = Looks()
    for part in images.split(3):
        looks.add(part)
    means = looks.means()
    assert means["brightness"] == pytest.approx(float(brightness(images).mean()), abs=1e-6)
    assert means["sharpness"] == pytest.approx(float(sharpness(images).mean()), abs=1e-6)
    assert means["diversity"] == pytest.approx(float(diversity(images, 7)), abs=1e-6)
