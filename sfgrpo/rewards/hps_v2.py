"""HPSv2.1: a CLIP ViT-H/14 trained on 800,000 human choices between images of one prompt.

Wu et al. 2023, "Human Preference Score v2". score = cos(image, text), about 0.2 to 0.35. The published weights
(`HPS_v2.1_compressed.pt`) have open_clip's names and come without sizes and tokenizer, which `model` gives: the CLIP
that they were trained from. An image that is not square is padded with black, as the authors' package does; its
resizing is antialiased only with newer versions of torchvision, ours always.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from .clip import CLIPReward
from .models import fill, find_file, open_config, read_weights
from .open_clip import to_transformers
from .pixels import padded


@dataclass(frozen=True, kw_only=True)
class HPSv2(CLIPReward):
    """`[rewards] hps_v2`."""

    model: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    """Folder or hub id of a CLIP in the format of transformers: the tokenizer and the sizes are taken from it."""
    weights: str = "xswu/HPSv2/HPS_v2.1_compressed.pt"
    """File with open_clip's names, here or as `owner/name/file` on the hub; 3.9 GB. Empty takes the weights of `model`,
    for a folder that holds HPSv2.1 in the format of transformers."""

    def check(self) -> None:
        super().check()
        if self.weights:
            find_file("weights", self.weights)

    def load(self) -> nn.Module:
        if not self.weights:
            return super().load()
        from transformers import CLIPModel

        config = open_config("model", self.model, ["clip"])
        state = to_transformers(read_weights("weights", self.weights))
        model = CLIPModel(config)
        fill(model, state, f"weights {self.weights}")
        return model

    def pixels(self, images: Tensor, size: int) -> Tensor:
        return padded(images, size)

    def score(self, model: nn.Module, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return self.cosine(model, images, prompts)
