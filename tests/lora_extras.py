"""What LoRA files of other trainers hold beside the factors of the transformer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.lora_dialects import ALPHA, RANK, Dialect

CLIP_LAYERS = tuple(
    f"text_model.encoder.layers.0.{layer}"
    for layer in (*(f"self_attn.{x}_proj" for x in ("q", "k", "v", "out")), "mlp.fc1", "mlp.fc2")
)
T5_LAYER = "encoder.block.0.layer.0.SelfAttention.q"
WIDTH = 16
"""Of the small text encoders."""

Linears = dict[str, tuple[int, int]]
Extra = Callable[[Dialect, Linears], dict[str, Tensor]]


def _pair(base: str, down: str, up: str, inside: int = WIDTH, outside: int = WIDTH) -> dict[str, Tensor]:
    return {base + down: torch.ones(RANK, inside), base + up: torch.ones(outside, RANK)}


def _kohya(base: str) -> dict[str, Tensor]:
    pair = _pair(base, ".lora_down.weight", ".lora_up.weight")
    return pair | {f"{base}.alpha": torch.tensor(ALPHA)}


def _peft(base: str) -> dict[str, Tensor]:
    return _pair(base, ".lora_A.weight", ".lora_B.weight")


def _clip(prefix: str, write: Callable, underscores: bool = False) -> dict[str, Tensor]:
    """A layer of CLIP."""
    names = (layer.replace(".", "_") if underscores else layer for layer in CLIP_LAYERS)
    return {key: value for name in names for key, value in write(prefix + name).items()}


def _first(dialect: Dialect, linears: Linears) -> tuple[str, tuple[int, int]]:
    """Key of the first attention layer, and its (in, out)."""
    name = next(n for n in linears if "attn" in n or "attention" in n)
    return dialect.prefix + (name.replace(".", "_") if dialect.underscores else name), linears[name]


def _unknown_layer(dialect: Dialect, linears: Linears) -> dict[str, Tensor]:
    name = "blocks_9_strange" if dialect.underscores else "blocks.9.strange"
    state = _pair(dialect.prefix + name, dialect.down, dialect.up)
    return state | ({f"{dialect.prefix}{name}.alpha": torch.tensor(ALPHA)} if dialect.alpha else {})


def _beside(suffix: str) -> Extra:
    """A tensor beside the factors of a layer, one number for each of its outputs."""

    def make(dialect: Dialect, linears: Linears) -> dict[str, Tensor]:
        key, (_, outside) = _first(dialect, linears)
        return {f"{key}{suffix}": torch.ones(outside)}

    return make


EXTRAS: dict[str, Extra] = {
    "kohya's CLIP": lambda *_: _clip("lora_te1_", _kohya, True),
    "kohya's T5": lambda *_: _kohya("lora_te3_" + T5_LAYER.replace(".", "_")),
    "OneTrainer's T5": lambda *_: _kohya("lora_te2_" + T5_LAYER.replace(".", "_")),
    "one text encoder of kohya's": lambda *_: _clip("lora_te_", _kohya, True),
    "diffusers' CLIP": lambda *_: _clip("text_encoder.", _peft),
    "diffusers' second encoder": lambda *_: _clip("text_encoder_2.", _peft),
    "ComfyUI's CLIP": lambda *_: _clip("text_encoders.clip_l.transformer.", _kohya),
    "ComfyUI's T5": lambda *_: _kohya(f"text_encoders.t5xxl.transformer.{T5_LAYER}"),
    "a query alone of CLIP's": lambda *_: _kohya("lora_te1_" + CLIP_LAYERS[0].replace(".", "_")),
    "an embedding": lambda *_: {"bundle_emb.word.clip_l": torch.ones(2, WIDTH), "bundle_emb.word.t5": torch.ones(2, 8)},
    "a bias": _beside(".diff_b"),
    "a bias of B": _beside(".lora_B.bias"),
    "a norm": lambda d, _: {f"{d.prefix}{'blocks_0_norm' if d.underscores else 'blocks.0.norm'}.diff": torch.ones(8)},
    "an unknown layer": _unknown_layer,
    "an unknown tensor": lambda d, _: {f"{d.prefix}position": torch.ones(4)},
    "a number of the trainer": lambda *_: {"step": torch.tensor(100)},
    "an alpha without factors": lambda d, _: {f"{d.prefix}blocks_9_gone.alpha": torch.tensor(ALPHA)},
}
"""Name -> tensors for a file of a dialect with these layers (name -> (in, out))."""
