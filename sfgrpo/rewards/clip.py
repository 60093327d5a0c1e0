"""CLIP from transformers as a reward: how well image and prompt agree, as the cosine of their embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.functional import normalize

from .models import RewardModel, Tokens, open_config, open_pretrained, open_tokenizer
from .pixels import cropped


@dataclass(frozen=True, kw_only=True)
class CLIPReward(RewardModel):
    """Base of the rewards that are CLIP models."""

    model: str
    """Folder or hub id of a CLIP model in the format of transformers, with its tokenizer."""
    truncate: bool = False
    """Cut off the end of a prompt that has more tokens than the model reads (77); else it is an error."""

    def load(self) -> nn.Module:
        from transformers import CLIPModel

        open_config("model", self.model, ["clip"])
        return open_pretrained(CLIPModel, "model", self.model)

    def open_tokenizer(self) -> Tokens:
        config = open_config("model", self.model, ["clip"])
        return open_tokenizer("model", self.model, config.text_config.max_position_embeddings)

    def pixels(self, images: Tensor, size: int) -> Tensor:
        """What the model sees of (b, 3, H, W) images in [0, 1]."""
        return cropped(images, size)

    def cosine(self, model: nn.Module, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Cosine (b,) of each image's embedding with its prompt's, in float32. A prompt is encoded once a batch."""
        pixels = self.pixels(images, model.config.vision_config.image_size).to(model.dtype)
        image = normalize(pooled(model.get_image_features(pixel_values=pixels)).float(), dim=-1)
        different = list(dict.fromkeys(prompts))
        text = pooled(model.get_text_features(**self.tokenize(different, images.device)))
        text = normalize(text.float(), dim=-1)
        return (image * text[[different.index(prompt) for prompt in prompts]]).sum(-1)


def pooled(features) -> Tensor:
    """The embeddings (B, D): transformers 4 returns them, 5 an output that holds them."""
    return features if isinstance(features, Tensor) else features.pooler_output
