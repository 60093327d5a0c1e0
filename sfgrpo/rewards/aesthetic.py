"""LAION's aesthetic predictor, version 2: how much people like an image, 1 to 10, whatever the prompt.

    score = MLP(e / |e|),   e the image embedding of OpenAI's CLIP ViT-L/14,   MLP 768-1024-128-64-16-1, all linear

The head's published file is `sac+logos+ava1-l14-linearMSE.pth` of github.com/christophschuhmann/
improved-aesthetic-predictor. Images seen are mostly at 4 to 7. Without activations the head is one linear map of the
embedding, so that it is easily driven beyond what it was trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.functional import normalize

from .models import RewardModel, fill, find_file, linear_head, open_config, open_pretrained, read_weights
from .pixels import cropped


@dataclass(frozen=True, kw_only=True)
class Aesthetic(RewardModel):
    """`[rewards] aesthetic`."""

    head: str
    """File of the head's weights, .safetensors or .pth, or `owner/name/file` on the hub."""
    model: str = "openai/clip-vit-large-patch14"
    """Folder or hub id of the CLIP model that the head was trained on; 1.7 GB, of which 1.2 GB are used."""

    def check(self) -> None:
        super().check()
        open_config("model", self.model, ["clip"])
        find_file("head", self.head)

    def load(self) -> nn.Module:
        from transformers import CLIPModel

        state = read_weights("head", self.head)
        open_config("model", self.model, ["clip"])
        scorer = _Scorer(open_pretrained(CLIPModel, "model", self.model))
        fill(scorer.head, {name.removeprefix("layers."): t for name, t in state.items()}, f"head {self.head}")
        return scorer

    def score(self, model: nn.Module, images: Tensor, prompts: Sequence[str]) -> Tensor:
        pixels = cropped(images, model.image_size).to(model.projection.weight.dtype)
        embedding = model.projection(model.vision(pixel_values=pixels).pooler_output)
        return model.head(normalize(embedding.float(), dim=-1)).squeeze(-1)


class _Scorer(nn.Module):
    """The image side of a CLIPModel and the head; the text side is let go."""

    def __init__(self, clip: nn.Module) -> None:
        super().__init__()
        self.vision, self.projection = clip.vision_model, clip.visual_projection
        self.image_size = clip.config.vision_config.image_size
        self.head = linear_head(clip.config.projection_dim)
