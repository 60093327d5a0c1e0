"""JPEG size, against files written by Pillow."""

import numpy as np
import pytest
import torch
from PIL import Image

from sfgrpo.rewards.jpeg import jpeg_size_reward


@pytest.fixture
def images():
    noise = torch.rand(3, 24, 16, generator=torch.Generator().manual_seed(0))
    ramp = torch.linspace(0, 1, 16).expand(3, 24, 16)
    return torch.stack([noise, ramp, torch.full((3, 24, 16), 0.5)])


@pytest.mark.parametrize("quality", (95, 40))
def test_size_is_that_of_the_file(images, quality, tmp_path):
    sizes = jpeg_size_reward(images, ["a"] * 3, quality=quality)
    for i, image in enumerate(images):
        pixels = np.rint(image.numpy().transpose(1, 2, 0) * 255).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / "x.jpg", quality=quality)
        assert float(sizes[i]) == pytest.approx((tmp_path / "x.jpg").stat().st_size / 1000)
    assert sizes.shape == (3,) and sizes.dtype == torch.float32


def test_busy_images_are_larger(images):
    noise, ramp, flat = jpeg_size_reward(images, ["a"] * 3, [{}] * 3).tolist()
    assert noise > ramp > flat > 0.3


def test_default_quality_is_95_and_values_are_clamped(images):
    assert torch.equal(jpeg_size_reward(images, []), jpeg_size_reward(images, [], quality=95))
    loud = torch.where(images > 0.5, 3.0, -2.0)
    assert torch.equal(jpeg_size_reward(loud, []), jpeg_size_reward((images > 0.5).float(), []))
    assert torch.equal(jpeg_size_reward(images.requires_grad_(), []), jpeg_size_reward(images.detach(), []))
