"""ImageReward 1.0: BLIP with a head, trained on 137,000 comparisons by experts.

Xu et al. 2023, "ImageReward". score = (MLP(h) - MEAN) / STD, h the text encoder's first output while it attends to the
image: about -2 to 2, mean 0 over the authors' images. `weights` is the published `ImageReward.pt`; the names of its
image encoder are mapped to those of transformers' BLIP, those of the text encoder are the same. All sizes are read from
the weights; heads have 64 channels, as in every published BLIP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from .models import RewardModel, Tokens, fill, find_file, linear_head, open_tokenizer, read_weights
from .pixels import cropped

MEAN, STD = 0.16717362830052426, 1.0333394966054072
TEXT_TOKENS = 35
HEAD_WIDTH = 64

VISION, TEXT, HEAD = "blip.visual_encoder.", "blip.text_encoder.", "mlp.layers."
NAMES = {
    "cls_token": "embeddings.class_embedding",
    "pos_embed": "embeddings.position_embedding",
    "patch_embed.proj.": "embeddings.patch_embedding.",
    "norm.": "post_layernorm.",
}
BLOCK = {
    "norm1.": "layer_norm1.",
    "norm2.": "layer_norm2.",
    "attn.qkv.": "self_attn.qkv.",
    "attn.proj.": "self_attn.projection.",
    "mlp.": "mlp.",
}


@dataclass(frozen=True, kw_only=True)
class ImageReward(RewardModel):
    """`[rewards] image_reward`."""

    weights: str = "THUDM/ImageReward/ImageReward.pt"
    """File with the published names, here or as `owner/name/file` on the hub; 1.8 GB."""
    tokenizer: str = "google-bert/bert-base-uncased"
    """Folder or hub id of the tokenizer."""
    truncate: bool = False
    """Cut off the end of a prompt of more than 35 tokens, as the authors do; else it is an error."""

    def check(self) -> None:
        super().check()
        find_file("weights", self.weights)

    def open_tokenizer(self) -> Tokens:
        return open_tokenizer("tokenizer", self.tokenizer, TEXT_TOKENS)

    def load(self) -> nn.Module:
        source = f"weights {self.weights}"
        state = read_weights("weights", self.weights)
        for needed in (f"{VISION}pos_embed", f"{TEXT}embeddings.word_embeddings.weight", f"{HEAD}0.weight"):
            if needed not in state:
                raise ValueError(f"{source} lacks {needed}; the file of ImageReward 1.0 is needed")
        vision, text = (_strip(state, prefix) for prefix in (VISION, TEXT))
        scorer = _Scorer(vision, text)
        fill(scorer.vision, {vision_name(name): value for name, value in vision.items()}, source)
        fill(scorer.text, text, source)
        fill(scorer.head, _strip(state, HEAD), source)
        return scorer

    def score(self, model: nn.Module, images: Tensor, prompts: Sequence[str]) -> Tensor:
        pixels = cropped(images, model.vision.config.image_size, half=round).to(model.vision.dtype)
        seen = model.vision(pixel_values=pixels).last_hidden_state
        read = model.text(**self.tokenize(prompts, images.device), encoder_hidden_states=seen).last_hidden_state
        return (model.head(read[:, 0].float()).squeeze(-1) - MEAN) / STD


def vision_name(name: str) -> str:
    """The name in transformers of a weight of BLIP's own image encoder."""
    start, table = "", NAMES
    if name.startswith("blocks."):
        _, number, name = name.split(".", 2)
        start, table = f"encoder.layers.{number}.", BLOCK
    for old, new in table.items():
        if name.startswith(old):
            return start + new + name.removeprefix(old)
    return name


def _strip(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _blocks(state: Mapping[str, Tensor], prefix: str) -> int:
    """Number of blocks whose names begin with `prefix` and a number."""
    return len({name.removeprefix(prefix).split(".")[0] for name in state if name.startswith(prefix)})


class _Scorer(nn.Module):
    """BLIP's two encoders and the head, of the sizes that the weights have."""

    def __init__(self, vision: Mapping[str, Tensor], text: Mapping[str, Tensor]) -> None:
        from transformers import BlipTextConfig, BlipVisionConfig
        from transformers.models.blip.modeling_blip import BlipVisionModel
        from transformers.models.blip.modeling_blip_text import BlipTextModel

        super().__init__()
        _, patches, width = vision["pos_embed"].shape
        patch = vision["patch_embed.proj.weight"].shape[-1]
        words, text_width = text["embeddings.word_embeddings.weight"].shape
        self.vision = BlipVisionModel(
            BlipVisionConfig(
                hidden_size=width,
                intermediate_size=vision["blocks.0.mlp.fc1.weight"].shape[0],
                num_hidden_layers=_blocks(vision, "blocks."),
                num_attention_heads=width // HEAD_WIDTH,
                image_size=patch * round((patches - 1) ** 0.5),
                patch_size=patch,
                hidden_act="gelu",
                layer_norm_eps=1e-6,
            )
        )
        self.text = BlipTextModel(
            BlipTextConfig(
                vocab_size=words,
                hidden_size=text_width,
                encoder_hidden_size=width,
                intermediate_size=text["encoder.layer.0.intermediate.dense.weight"].shape[0],
                num_hidden_layers=_blocks(text, "encoder.layer."),
                num_attention_heads=text_width // HEAD_WIDTH,
                max_position_embeddings=text["embeddings.position_embeddings.weight"].shape[0],
                hidden_act="gelu",
                layer_norm_eps=1e-12,
            ),
            add_pooling_layer=False,
        )
        self.head = linear_head(text_width)
