"""Names of open_clip's CLIP (`visual.transformer.resblocks.0.attn.in_proj_weight`) as those of transformers."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

PLAIN = {
    "logit_scale": "logit_scale",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",
    "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "visual.ln_post.weight": "vision_model.post_layernorm.weight",
    "visual.ln_post.bias": "vision_model.post_layernorm.bias",
}
TRANSPOSED = {"text_projection": "text_projection.weight", "visual.proj": "visual_projection.weight"}
"""open_clip multiplies by these from the right."""
TOWERS = {
    "transformer.resblocks.": "text_model.encoder.layers.",
    "visual.transformer.resblocks.": "vision_model.encoder.layers.",
}
PARTS = {
    "ln_1.": "layer_norm1.",
    "ln_2.": "layer_norm2.",
    "attn.out_proj.": "self_attn.out_proj.",
    "mlp.c_fc.": "mlp.fc1.",
    "mlp.c_proj.": "mlp.fc2.",
}


def to_transformers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of open_clip's CLIP with the names of transformers' CLIPModel.

    The joint projection of queries, keys and values is cut into three; names that are not open_clip's are left out.
    """
    out: dict[str, Tensor] = {}
    for name, value in state.items():
        if name in PLAIN:
            out[PLAIN[name]] = value
        elif name in TRANSPOSED:
            out[TRANSPOSED[name]] = value.T.contiguous()
        else:
            out |= _of_block(name, value)
    return out


def _of_block(name: str, value: Tensor) -> dict[str, Tensor]:
    for prefix, tower in TOWERS.items():
        if name.startswith(prefix):
            number, rest = name.removeprefix(prefix).split(".", 1)
            block = f"{tower}{number}."
            if rest.startswith("attn.in_proj_"):
                kind = rest.removeprefix("attn.in_proj_")
                return {f"{block}self_attn.{p}_proj.{kind}": v for p, v in zip("qkv", value.chunk(3), strict=True)}
            return {block + new + rest.removeprefix(old): value for old, new in PARTS.items() if rest.startswith(old)}
    return {}
