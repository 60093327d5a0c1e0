"""The dialects of LoRA files: what a key says.

A layer has a factor A (rank, in), also called down, and B (out, rank), or up. Trainers spell the two in several ways,
and put a prefix before the layer's name (kohya's sd-scripts write the name itself with underscores). How strongly a
file's trainer meant its factors is in `scale.py`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .file import LoRAFile, check_names

STYLES = {
    "lora_A": (r"\.lora_A\.weight", r"\.lora_B\.weight"),
    "lora_A.default": (r"\.lora_A\.default\.weight", r"\.lora_B\.default\.weight"),
    "lora_A.adapter": (r"\.lora_A\.\w+\.weight", r"\.lora_B\.\w+\.weight"),
    "lora_A without weight": (r"\.lora_A", r"\.lora_B"),
    "lora_down": (r"\.lora_down\.weight", r"\.lora_up\.weight"),
    "lora.down": (r"\.lora\.down\.weight", r"\.lora\.up\.weight"),
    "lora_linear_layer": (r"\.lora_linear_layer\.down\.weight", r"\.lora_linear_layer\.up\.weight"),
    "_lora.down": (r"_lora\.down\.weight", r"_lora\.up\.weight"),
}
"""Spelling -> patterns of the ends of the keys of A and B."""

XLABS = {
    "qkv_lora1": "img_attn.qkv",
    "qkv_lora2": "txt_attn.qkv",
    "proj_lora1": "img_attn.proj",
    "proj_lora2": "txt_attn.proj",
    "qkv_lora": "linear1",
    "proj_lora": "linear2",
}
"""XLabs' names of FLUX.1's layers, behind `<block>.processor.` -> native names; their linear1 lacks the MLP's rows."""

PREFIXES = (
    "pipe.dit.",
    "base_model.model.transformer.",
    "base_model.model.diffusion_model.",
    "base_model.model.",
    "model.diffusion_model.",
    "diffusion_model.",
    "transformer.",
    "transformer_2.",
    "module.",
    "dit.",
    "lora_unet__",
    "lora_unet_",
    "lora_transformer_",
    "lycoris_",
    "",
)
"""What may stand before a layer's name; the longer ones first."""

TEXT = ("text_encoder", "lora_te", "base_model.model.text_model.", "base_model.model.text_encoder", "conditioner.")
"""Beginnings of the keys of a text encoder."""


@dataclass
class Layer:
    """One layer of a file, as it is written there."""

    key: str
    """Prefix and name."""
    prefix: str
    name: str
    style: str
    """Of STYLES, or xlabs."""
    a: Tensor
    """(rank, in)."""
    b: Tensor
    """(out, rank)."""
    alpha: float | None
    """Of its alpha tensor, if it has one."""
    keys: list[str]
    """All its keys in the file."""

    @property
    def rank(self) -> int:
        return len(self.a)


@dataclass
class Parsed:
    """The keys of a file, sorted."""

    layers: list[Layer] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    """Key -> why it is no factor of the transformer."""


def parse(file: LoRAFile) -> Parsed:
    """The layers of a file.

    Raises ValueError for a kind of adapter that is no LoRA, a factor that stands alone, ranks that differ, numbers that
    are not finite, or a file without a layer.
    """
    try:
        check_names(file.tensors)
    except ValueError as error:
        raise ValueError(f"LoRA file {file.name} {error}") from None
    halves: dict[str, dict[str, tuple[str, str]]] = {}
    alphas, parsed = {}, Parsed()
    two = any(key.startswith("transformer.") for key in file.tensors)
    for key in file.tensors:
        if key.startswith(TEXT):
            parsed.left_out[key] = "part of a text encoder"
        elif two and key.startswith("transformer_2."):
            parsed.left_out[key] = "part of the second transformer (of low noise), a LoRA of its own"
        elif key.endswith(".alpha"):
            alphas[key.removesuffix(".alpha")] = key
        else:
            base, style, part = _split(key)
            if part:
                if part in halves.setdefault(base, {}):
                    raise ValueError(f"LoRA file {file.name} has two factors {part} for {base}; choose another")
                halves[base][part] = (key, style)
            else:
                parsed.left_out[key] = _other(key)
    for base, parts in halves.items():
        if parts.keys() != {"A", "B"} or parts["A"][1] != parts["B"][1]:
            raise ValueError(f"LoRA file {file.name} lacks one of the two factors of {base}; get it again")
        keys = [parts["A"][0], parts["B"][0]]
        a, b = (file.tensors[k] for k in keys)
        if base in alphas:
            keys.append(alphas.pop(base))
        if (a.ndim > 2 and math.prod(a.shape[2:]) > 1) or (b.ndim > 2 and math.prod(b.shape[2:]) > 1):
            parsed.left_out |= dict.fromkeys(keys, "part of a convolution")
            continue
        a, b = _matrix(a, keys[0], file), _matrix(b, keys[1], file)
        if a.shape[0] != b.shape[1] or not a.shape[0]:
            raise ValueError(
                f"LoRA file {file.name} has factors of ranks {a.shape[0]} and {b.shape[1]} for {base}; get it again"
            )
        alpha = _alpha(file.tensors[keys[2]], keys[2], file) if len(keys) == 3 else None
        prefix = next(p for p in PREFIXES if base.startswith(p))
        name, style = base[len(prefix) :].replace("_orig_mod.", ""), parts["A"][1]
        if style == "xlabs":
            block, part = name.split("processor.")
            name = block + XLABS[part]
        parsed.layers.append(Layer(base, prefix, name, style, a, b, alpha, keys))
    parsed.left_out |= dict.fromkeys(alphas.values(), "an alpha without factors")
    if not parsed.layers:
        key, why = next(iter(parsed.left_out.items()))
        raise ValueError(f"LoRA file {file.name} holds no LoRA of a transformer: {key} is {why}; choose another")
    return parsed


def _split(key: str) -> tuple[str, str, str]:
    """(layer, style, A or B) of a key; part is empty where it is no factor."""
    found = re.search(rf"processor\.({'|'.join(XLABS)})\.(down|up)\.weight$", key)
    if found:
        return key[: found.end(1)], "xlabs", "A" if found[2] == "down" else "B"
    for style, patterns in STYLES.items():
        for part, pattern in zip("AB", patterns, strict=True):
            found = re.search(pattern + "$", key)
            if found:
                return key[: found.start()], style, part
    return key, "", ""


def _other(key: str) -> str:
    if key.endswith((".diff", ".diff_b", ".set_weight")):
        return "a change of a whole weight, a bias or a norm, which is no LoRA factor"
    if key.endswith(".lora_B.bias"):
        return "a bias beside B, which diffusers loads and ComfyUI does not"
    if key.endswith(".bias"):
        return "a bias, which is no LoRA factor"
    return "no LoRA factor"


def _matrix(tensor: Tensor, key: str, file: LoRAFile) -> Tensor:
    if not tensor.is_floating_point() or tensor.ndim < 2:
        raise ValueError(f"LoRA file {file.name}: {key} is no matrix of real numbers; get it again")
    if not torch.isfinite(tensor.float()).all():
        raise ValueError(f"LoRA file {file.name} is broken: {key} has numbers that are not finite; use an earlier save")
    return tensor.flatten(1)


def _alpha(tensor: Tensor, key: str, file: LoRAFile) -> float:
    alpha = float(tensor) if tensor.numel() == 1 else math.nan
    if not math.isfinite(alpha):
        raise ValueError(f"LoRA file {file.name}: {key} is no number; get it again")
    return alpha
