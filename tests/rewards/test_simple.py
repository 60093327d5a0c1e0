"""Brightness, sharpness and saturation, by hand."""

import pytest
import torch

from sfgrpo.rewards import get_reward


def flat(*colour):
    return torch.tensor(colour).view(1, 3, 1, 1).expand(1, 3, 6, 8)


COLOURS = torch.cat([flat(0.0, 0.0, 0.0), flat(1.0, 1.0, 1.0), flat(0.2, 0.5, 0.9), flat(0.5, 0.5, 0.5)])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("brightness", [0.0, 1.0, 0.299 * 0.2 + 0.587 * 0.5 + 0.114 * 0.9, 0.5]),
        ("saturation", [0.0, 0.0, 0.7, 0.0]),
        ("sharpness", [0.0, 0.0, 0.0, 0.0]),
    ],
)
def test_flat_colours(name, expected):
    scores = get_reward(name)(COLOURS, ["x"] * 4, [{}] * 4)
    assert scores.shape == (4,) and scores.dtype == torch.float32
    torch.testing.assert_close(scores, torch.tensor(expected), rtol=0, atol=1e-6)


def test_sharpness_of_a_chequerboard_is_1_and_of_a_ramp_its_slope():
    board = ((torch.arange(6).view(-1, 1) + torch.arange(8)) % 2).float().expand(1, 3, 6, 8)
    ramp = (torch.arange(8) / 10).expand(1, 3, 6, 8)
    scores = get_reward("sharpness")(torch.cat([board, ramp]), ["x"] * 2)
    torch.testing.assert_close(scores, torch.tensor([1.0, 0.05]))


@pytest.mark.parametrize("name", ["brightness", "saturation", "sharpness"])
def test_values_outside_0_to_1_are_cut_off(name):
    images = torch.randn(3, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    reward = get_reward(name)
    assert torch.equal(reward(images, ["x"] * 3), reward(images.clamp(0, 1), ["x"] * 3))
    assert float(reward(images, ["x"] * 3).std()) > 0
