"""CLIP score: cosine of the embeddings of image and prompt in OpenAI's CLIP ViT-L/14.

Hessel et al. 2021, "CLIPScore", has 2.5 max(cos, 0) with ViT-B/32, torchmetrics 100 max(cos, 0). Here it is `scale` cos
with `scale` 1, not cut off at 0: about 0.15 for an image of something else and 0.2 to 0.35 for one of the prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from .clip import CLIPReward


@dataclass(frozen=True, kw_only=True)
class CLIPScore(CLIPReward):
    """`[rewards] clip_score`."""

    model: str = "openai/clip-vit-large-patch14"
    """Folder or hub id of any CLIP model with OpenAI's normalisation of pixels; 1.7 GB."""
    scale: float = 1.0
    """Factor on the cosine."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError("scale must be above 0")

    def score(self, model: nn.Module, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return self.scale * self.cosine(model, images, prompts)
