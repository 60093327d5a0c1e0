"""Images as CLIP and BLIP see them: rounded to 8 bits, resized by an antialiased bicubic, normalised.

The models were trained on files, so that pixels are first rounded to the 256 levels of one; a score is then that of the
picture as it would be saved. Done on tensors, on any device. Like Pillow, `cropped` resizes the rows first, rounds to 8
bits, resizes the columns and rounds again: of a hundred pixels, one or two differ from Pillow's, by a level.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

MEAN = (0.48145466, 0.4578275, 0.40821073)
"""Of OpenAI's CLIP, which all models here were trained with."""
STD = (0.26862954, 0.26130258, 0.27577711)


def cropped(images: Tensor, size: int, half: Callable[[float], Any] = int) -> Tensor:
    """(B, 3, H, W) in [0, 1] to (B, 3, size, size): the short side becomes `size`, the middle is cut out, normalised.

    half: how the half pixel of an odd margin is rounded: `int` as transformers does, `round` as torchvision does.
    """
    height, width = images.shape[-2:]
    short = min(height, width)
    images = _resize(_eight_bit(images), height, int(size * width / short)).clamp(0, 255).round()
    images = _resize(images, int(size * height / short), images.shape[-1]).clamp(0, 255).round()
    top, left = (half((n - size) / 2) for n in images.shape[-2:])
    return _normalise(images[..., top : top + size, left : left + size])


def padded(images: Tensor, size: int) -> Tensor:
    """(B, 3, H, W) in [0, 1] to (B, 3, size, size): the long side becomes `size`, the rest is black, normalised."""
    height, width = images.shape[-2:]
    long = max(height, width)
    images = _resize(_eight_bit(images), max(1, round(height * size / long)), max(1, round(width * size / long)))
    rows, columns = (size - n for n in images.shape[-2:])
    return _normalise(pad(images, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2)))


def _eight_bit(images: Tensor) -> Tensor:
    """0, 1, ..., 255 as float32; NaN stays."""
    return (images.float().clamp(0, 1) * 255).round()


def _resize(images: Tensor, height: int, width: int) -> Tensor:
    if images.shape[-2:] == (height, width):
        return images
    return interpolate(images, (height, width), mode="bicubic", antialias=True, align_corners=False)


def _normalise(images: Tensor) -> Tensor:
    mean, std = (torch.tensor(v, device=images.device).view(1, 3, 1, 1) for v in (MEAN, STD))
    return (images / 255 - mean) / std
