"""Writers of LoRA files in the dialects of other trainers, from random factors whose effect is known."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import torch
from torch import Tensor

RANK, ALPHA = 4, 10.0
SCALE = ALPHA / RANK


@dataclass(frozen=True)
class Dialect:
    """How a trainer writes."""

    native: bool
    """Native names, as ComfyUI and the model's makers have them; else those of diffusers."""
    prefix: str
    down: str = ".lora_A.weight"
    up: str = ".lora_B.weight"
    alpha: bool = False
    """With a tensor `.alpha`; the scale is else 1, or that of the metadata."""
    underscores: bool = False
    """Dots of the name are underscores."""
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def scale(self) -> float:
        """What B A is multiplied by: other metadata than diffusers' own prove nothing."""
        return SCALE if self.alpha or "lora_adapter_metadata" in self.metadata else 1.0


DOWN_UP = {"down": ".lora_down.weight", "up": ".lora_up.weight"}
CONFIG = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["to_q"], "use_dora": False}
PEFT = json.dumps({f"transformer.{k}": v for k, v in CONFIG.items()})

DIALECTS = {
    "diffusers": Dialect(False, "transformer."),
    "diffusers with metadata": Dialect(False, "transformer.", metadata={"lora_adapter_metadata": PEFT}),
    "diffusers with alphas": Dialect(False, "transformer.", alpha=True),
    "diffusers, lora.down": Dialect(False, "transformer.", ".lora.down.weight", ".lora.up.weight"),
    "diffusers, lora_linear_layer": Dialect(
        False, "transformer.", ".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight"
    ),
    "diffusers, lora_down with alphas": Dialect(False, "transformer.", **DOWN_UP, alpha=True),
    "peft": Dialect(False, "base_model.model."),
    "peft, default": Dialect(False, "base_model.model.", ".lora_A.default.weight", ".lora_B.default.weight"),
    "peft of a pipeline": Dialect(False, "base_model.model.transformer."),
    "bare": Dialect(False, ""),
    "bare, default": Dialect(False, "", ".lora_A.default.weight", ".lora_B.default.weight"),
    "kohya": Dialect(True, "lora_unet_", **DOWN_UP, alpha=True, underscores=True),
    "kohya, alpha in metadata": Dialect(
        True,
        "lora_unet_",
        **DOWN_UP,
        underscores=True,
        metadata={"ss_network_alpha": str(ALPHA), "ss_network_dim": str(RANK)},
    ),
    "kohya, diffusers names": Dialect(False, "lora_unet_", **DOWN_UP, alpha=True, underscores=True),
    "onetrainer": Dialect(False, "lora_transformer_", **DOWN_UP, alpha=True, underscores=True),
    "lycoris": Dialect(False, "lycoris_", **DOWN_UP, alpha=True, underscores=True),
    "native": Dialect(True, "diffusion_model."),
    "native, lora_down with alphas": Dialect(True, "diffusion_model.", **DOWN_UP, alpha=True),
    "native with alphas": Dialect(True, "diffusion_model.", alpha=True),
    "native, diffusers names": Dialect(False, "diffusion_model."),
    "native, whole prefix": Dialect(True, "model.diffusion_model."),
    "native peft": Dialect(True, "base_model.model."),
    "native bare": Dialect(True, ""),
    "plain alpha": Dialect(False, "transformer.", metadata={"lora_alpha": str(ALPHA), "rank": str(RANK)}),
}


def write(
    dialect: Dialect, linears: dict[str, tuple[int, int]], seed: int = 0
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(tensors of the file, name -> change of the weight that its trainer meant), for layers name -> (in, out)."""
    generator = torch.Generator().manual_seed(seed)
    state, meant = {}, {}
    for name, (inside, outside) in linears.items():
        a, b = torch.randn(RANK, inside, generator=generator), torch.randn(outside, RANK, generator=generator)
        key = dialect.prefix + (name.replace(".", "_") if dialect.underscores else name)
        state |= {key + dialect.down: a, key + dialect.up: b}
        if dialect.alpha:
            state[f"{key}.alpha"] = torch.tensor(ALPHA)
        meant[name] = dialect.scale * (b @ a)
    return state, meant


def sd3_attention(config: dict) -> dict[str, tuple[int, int]]:
    """Native attention layers of an SD3 without a second attention -> (in, out); config: of its transformer."""
    width, last = config["attention_head_dim"] * config["num_attention_heads"], config["num_layers"] - 1
    sizes = {"qkv": (width, 3 * width), "proj": (width, width)}
    return {
        f"joint_blocks.{i}.{side}.attn.{part}": size
        for i in range(last + 1)
        for side in ("x_block", "context_block")
        for part, size in sizes.items()
        if (i, side, part) != (last, "context_block", "proj")
    }
