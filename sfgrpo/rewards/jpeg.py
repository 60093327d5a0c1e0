"""JPEG size: the toy reward of DDPO (Black et al. 2023). Small files are plain images, large ones are busy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO

import torch
from torch import Tensor


def jpeg_size_reward(
    images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping] | None = None, *, quality: int = 95
) -> Tensor:
    """Size of each (3, H, W) image in [0, 1] as JPEG, (B,) kilobytes of 1000 bytes; a negative weight shrinks it."""
    from PIL import Image

    sizes = []
    for image in (images.detach().float().clamp(0, 1) * 255).round().byte().cpu().movedim(1, -1).numpy():
        buffer = BytesIO()
        Image.fromarray(image).save(buffer, format="JPEG", quality=quality)
        sizes.append(len(buffer.getvalue()) / 1000)
    return torch.tensor(sizes)
