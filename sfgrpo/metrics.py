"""Plain measurements of a batch of images, watched beside the reward: a policy that hacks its reward shows here."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

LUMA = (0.299, 0.587, 0.114)


def luma(images: Tensor) -> Tensor:
    """Rec. 601 luma (B, H, W) of images (B, 3, H, W) in [0, 1]."""
    return (images * torch.tensor(LUMA, device=images.device).view(1, 3, 1, 1)).sum(1)


def brightness(images: Tensor) -> Tensor:
    """Mean luma of each image, (B,) in [0, 1]."""
    return luma(images).flatten(1).mean(1)


def sharpness(images: Tensor) -> Tensor:
    """Mean absolute difference of neighbouring pixels' luma, horizontally and vertically, (B,) in [0, 1]."""
    y = luma(images)
    return ((y[:, 1:] - y[:, :-1]).abs().flatten(1).mean(1) + (y[..., 1:] - y[..., :-1]).abs().flatten(1).mean(1)) / 2


def diversity(images: Tensor, group_size: int) -> Tensor:
    """Mean over pixels of the std over the members of a group, (G,); 0 where all images of a group are equal.

    images: (G * N, 3, H, W), group by group.
    """
    grouped = images.reshape(-1, group_size, *images.shape[1:])
    return grouped.std(dim=1, unbiased=False).flatten(1).mean(1)


def plain(value: Any) -> Any:
    """Nested dicts, lists and tensors of numbers as JSON has them: None in the place of NaN and infinity."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, Tensor):
        return plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value
