"""What models see, against the processors of transformers and torchvision on the same 8-bit pictures."""

import numpy as np
import pytest
import torch
from PIL import Image

from sfgrpo.rewards.pixels import MEAN, STD, cropped, padded
from tests.rewards.small import images

LEVEL = 1 / 255 / min(STD)
"""One of 256 levels, normalised."""
SIZES = [(28, 28), (64, 64), (20, 20), (50, 31), (33, 90), (28, 41), (224, 101)]


def pictures(batch):
    """The images as Pillow has them."""
    return [Image.fromarray((x * 255).round().byte().movedim(0, -1).numpy()) for x in batch]


@pytest.mark.parametrize("size", SIZES)
def test_cropped_is_the_clip_processor(size):
    from transformers import CLIPImageProcessor

    batch = images(*size)
    processor = CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    expected = torch.as_tensor(np.asarray(processor(pictures(batch), return_tensors="np")["pixel_values"]))
    ours = cropped(batch, 28)
    assert ours.shape == expected.shape == (5, 3, 28, 28)
    # Pillow computes with fewer bits: some pixels are off by a level.
    difference = (ours - expected).abs()
    assert float(difference.max()) <= 1.01 * LEVEL
    assert float((difference > LEVEL / 2).float().mean()) < 0.07
    assert float(expected.std()) > 20 * LEVEL


@pytest.mark.parametrize("size", SIZES)
def test_cropped_with_rounded_margins_is_torchvision(size):
    from torchvision import transforms as T

    batch = images(*size)
    steps = [T.Resize(28, T.InterpolationMode.BICUBIC), T.CenterCrop(28), T.ToTensor(), T.Normalize(MEAN, STD)]
    expected = torch.stack([T.Compose(steps)(picture) for picture in pictures(batch)])
    difference = (cropped(batch, 28, half=round) - expected).abs()
    assert float(difference.max()) <= 1.01 * LEVEL
    assert float((difference > LEVEL / 2).float().mean()) < 0.07


def test_the_two_roundings_of_a_margin_differ():
    batch = images(28, 31)
    assert not torch.equal(cropped(batch, 28), cropped(batch, 28, half=round))


@pytest.mark.parametrize("size", SIZES)
def test_padded_is_resize_pad_normalise(size):
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms import functional as F

    batch = images(*size)
    scale = 28 / max(size)
    height, width = (round(n * scale) for n in size)
    resized = F.resize(batch, [height, width], InterpolationMode.BICUBIC, antialias=True)
    rows, columns = 28 - height, 28 - width
    box = [columns // 2, rows // 2, columns - columns // 2, rows - rows // 2]
    expected = F.normalize(F.pad(resized, box, fill=0), MEAN, STD)
    torch.testing.assert_close(padded(batch, 28), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("prepare", [cropped, padded])
def test_a_float_image_is_seen_as_its_8_bit_file(prepare):
    exact = images(40, 52, steps=0)
    rounded = torch.from_numpy(np.stack([np.asarray(p) for p in pictures(exact)])).movedim(-1, 1).float() / 255
    assert not torch.equal(exact, rounded)
    assert torch.equal(prepare(exact, 28), prepare(rounded, 28))
    assert torch.equal(prepare(exact * 3 - 1, 28), prepare((exact * 3 - 1).clamp(0, 1), 28))


@pytest.mark.parametrize("prepare", [cropped, padded])
def test_nan_stays_in_its_image(prepare):
    batch = images(40, 40)
    batch[1, 0, 20, 20] = float("nan")
    seen = prepare(batch, 28)
    assert seen[1].isnan().any() and not seen[[0, 2, 3, 4]].isnan().any()
