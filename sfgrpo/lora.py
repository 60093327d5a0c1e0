"""LoRA: which linear layers carry one, and how its factors start. The headless trainer and the ComfyUI node share it.

A layer's output is raised by scale * B A x, with A (rank, in), B (out, rank) and scale = alpha / rank. A starts
uniform in +-1/sqrt(in) (Kaiming's with a = sqrt 5, as peft has it) and B at zero: the adapter starts as nothing.
Layers go by the names of a diffusers transformer, or by a model's native ones where the file format uses those (Wan).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .noise import generator_for

TARGETS = ("attention", "attention_mlp", "all")

ATTENTION = {"attn", "attn1", "attn2", "attention", "self_attn", "cross_attn"}
PROJECTIONS = {"to_q", "to_k", "to_v", "to_out", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", *"qkvo"}
PROJECTIONS |= {"to_qkv_mlp_proj"}  # FLUX.2's single blocks, attention and feed-forward in one
MLP = {"ff", "ff_context", "img_mlp", "txt_mlp", "feed_forward", "ffn"}
SINGLE_BLOCK_MLP = {"proj_mlp", "proj_out"}


def choose_targets(names: Iterable[str], choice: str) -> list[str]:
    """Those of the linear layers `names` that carry a LoRA, in their order.

    choice: `attention` takes the projections of the attention in the transformer blocks, `attention_mlp` their
    feed-forward layers too, `all` every layer. Raises ValueError for another choice, or where nothing is left.
    """
    if choice not in TARGETS:
        raise ValueError(f"unknown choice of layers {choice!r}; choose one of {', '.join(TARGETS)}")
    names = list(names)
    if choice != "all":
        kinds = {"attention"} if choice == "attention" else {"attention", "mlp"}
        names = [n for n in names if _kind(n) in kinds]
    if not names:
        raise ValueError(f"this model has no layer of the kind {choice!r}; choose 'all'")
    return names


def _kind(name: str) -> str:
    """attention or mlp for such a layer of a transformer block, else other. A block is a number in the name."""
    parts = name.split(".")
    block = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    if block is None:
        return "other"
    inner = [part for part in parts[block + 1 :] if not part.isdigit()]
    if inner and inner[0] in ATTENTION and inner[-1] in PROJECTIONS:
        return "attention"
    return "mlp" if inner and (inner[0] in MLP or inner[0] in SINGLE_BLOCK_MLP) else "other"


@dataclass
class Factors:
    """The two matrices of one layer, float32."""

    a: Tensor
    """(rank, in)."""
    b: Tensor
    """(out, rank)."""


def init_factors(name: str, rank: int, in_features: int, out_features: int, seed: int) -> Factors:
    """Fresh factors of the layer `name`: a function of the arguments alone, whatever other layers there are."""
    bound = in_features**-0.5
    a = torch.empty(rank, in_features).uniform_(-bound, bound, generator=generator_for(seed, "lora", name))
    return Factors(a, torch.zeros(out_features, rank))
