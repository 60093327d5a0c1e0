"""Rewards that need no model: brightness, sharpness, saturation. For trying things out, and for watching beside others.

All see the images' gamma-encoded values; none reads the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ..metrics import brightness, sharpness


def brightness_reward(images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping] | None = None) -> Tensor:
    """Mean Rec. 601 luma of (B, 3, H, W) images in [0, 1]: (B,) in [0, 1], 0 black, 1 white."""
    return brightness(images.float().clamp(0, 1))


def sharpness_reward(images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping] | None = None) -> Tensor:
    """Mean absolute difference of neighbouring pixels' luma of (B, 3, H, W) images in [0, 1]: (B,) in [0, 1].

    0 is one flat colour, photographs have about 0.01 to 0.1, and 1 a chequerboard of black and white pixels.
    """
    return sharpness(images.float().clamp(0, 1))


def saturation_reward(images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping] | None = None) -> Tensor:
    """Mean chroma, max(R, G, B) - min(R, G, B), of (B, 3, H, W) images in [0, 1]: (B,) in [0, 1], 0 for greys.

    Chroma and not HSV's saturation, which is as high for a nearly black pixel as for a vivid one.
    """
    images = images.float().clamp(0, 1)
    return (images.amax(1) - images.amin(1)).flatten(1).mean(1)
