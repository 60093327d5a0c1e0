"""Weighted sums of rewards."""

import pytest
import torch

from sfgrpo.rewards import REWARDS, get_reward, mix
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
