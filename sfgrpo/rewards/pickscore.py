"""PickScore: a CLIP ViT-H/14 trained on half a million choices of users between two images of their prompt.

Kirstain et al. 2023, "Pick-a-Pic". The published score is exp(logit_scale) cos(image, text), about 17 to 24. Here it is
multiplied by `scale`, 1/26 as in Flow-GRPO's code, so that it lies at about 0.65 to 0.95 and mixes with other rewards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from .clip import CLIPReward


@dataclass(frozen=True, kw_only=True)
class PickScore(CLIPReward):
    """`[rewards] pickscore`."""

    model: str = "yuvalkirstain/PickScore_v1"
    """Folder or hub id; 3.9 GB."""
    scale: float = 1 / 26
    """Factor on the published score; 1 gives that."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError("scale must be above 0")

    def score(self, model: nn.Module, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return self.scale * model.logit_scale.float().exp() * self.cosine(model, images, prompts)
