"""Measurements of images whose numbers are known."""

import json
import math

import torch

from sfgrpo.metrics import brightness, diversity, luma, plain, sharpness


def grey(values) -> torch.Tensor:
    """(B, 3, H, W) from grey levels (B, H, W)."""
    return torch.tensor(values).float().unsqueeze(1).expand(-1, 3, -1, -1)


def close(values, expected):
    torch.testing.assert_close(values, torch.tensor(expected), rtol=0, atol=1e-6)


def test_luma_of_the_primaries():
    images = torch.eye(3).view(3, 3, 1, 1)
    close(luma(images).flatten(), [0.299, 0.587, 0.114])
    close(luma(torch.ones(1, 3, 2, 2)), [[[1.0, 1.0], [1.0, 1.0]]])


def test_brightness_is_the_mean_of_each_image():
    close(brightness(grey([[[0.0, 1.0], [0.0, 1.0]], [[0.2, 0.2], [0.2, 0.6]]])), [0.5, 0.3])
    close(brightness(torch.tensor([1.0, 0.0, 0.0]).view(1, 3, 1, 1).expand(1, 3, 4, 4)), [0.299])


def test_sharpness_by_hand():
    board = [[0.0, 1.0, 0.0], [1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]
    stripes = [[0.0, 1.0, 0.0]] * 3
    ramp = [[0.0, 0.2, 0.4]] * 3
    close(sharpness(grey([board, stripes, ramp, [[0.7] * 3] * 3])), [1.0, 0.5, 0.1, 0.0])
    # Rows and columns have equal shares whatever their number.
    close(sharpness(grey([[[0.0, 1.0, 0.0, 1.0], [0.0, 1.0, 0.0, 1.0]]])), [0.5])
    tall = grey([stripes]).transpose(2, 3)
    close(sharpness(tall), [0.5])


def test_diversity_is_the_std_within_a_group():
    # Group 0: pixels 0 and 1 (population std 1/2), the second pixel equal. Group 1: two equal images.
    images = grey([[[0.0, 0.3]], [[1.0, 0.3]], [[0.9, 0.1]], [[0.9, 0.1]]])
    close(diversity(images, 2), [0.25, 0.0])
    # All four as one group: mean 0.7, deviations -0.7 0.3 0.2 0.2; and 0.3 0.3 0.1 0.1.
    close(diversity(images, 4), [(0.165**0.5 + 0.1) / 2])
    close(diversity(images, 1), [0.0] * 4)


def test_plain_numbers_are_json_without_nan():
    value = {"a": [1.0, math.nan, (math.inf, 2)], "b": torch.tensor([[0.5, -math.inf]]), "c": "NaN", "d": 3}
    assert plain(value) == {"a": [1.0, None, [None, 2]], "b": [[0.5, None]], "c": "NaN", "d": 3}
    assert json.loads(json.dumps(plain(value), allow_nan=False)) == plain(value)
