"""How strongly a LoRA file's trainer meant its factors: B A times alpha / rank.

Where alpha stands, in this order:

1. a tensor `<layer>.alpha` (kohya, OneTrainer, musubi);
2. the metadata's `lora_adapter_metadata`, JSON of a peft configuration (diffusers' own training scripts);
3. `adapter_config.json` beside the file (raw peft, Flow-GRPO), alpha / sqrt(rank) with use_rslora;
4. nowhere: the scale is 1.

Other metadata (ss_network_alpha and its kind) prove nothing. kohya's converters multiply alpha / rank into the factors,
drop the alpha tensors and keep the metadata, and no loader reads them. Such a file is taken as the loaders take it, at
scale 1; the other reading is told, and `alpha` decides where the user knows better.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .file import LoRAFile
from .keys import Layer

FOLDED = "folded into lora_B"
"""What our own files say of their alpha."""


def of_pattern(patterns: Iterable[tuple[str, Any]], name: str, default: Any) -> Any:
    """What a pattern of peft's (alpha_pattern, rank_pattern) gives a layer, by the first that matches its name."""
    return next((value for pattern, value in patterns if re.match(rf"(.*\.)?({pattern})$", name)), default)


@dataclass(frozen=True)
class Scale:
    """How a file scales its factors."""

    where: str
    """In words."""
    kind: str
    """given, tensors, diffusers, peft or none."""
    alpha: float | None = None
    """Of the whole file, where it has one."""
    patterns: tuple[tuple[str, float], ...] = ()
    """peft's alpha_pattern."""
    root: bool = False
    """alpha / sqrt(rank): use_rslora."""
    doubt: str = ""
    """The other reading, where metadata tell an alpha that no loader reads; a sentence."""

    def of(self, layer: Layer) -> float:
        """The number that B A is multiplied by."""
        if self.kind == "tensors":
            return 1.0 if layer.alpha is None else layer.alpha / layer.rank
        alpha = of_pattern(self.patterns, layer.name, self.alpha)
        return 1.0 if alpha is None else alpha / (math.sqrt(layer.rank) if self.root else layer.rank)


def scale_of(file: LoRAFile, layers: list[Layer], alpha: float | None = None) -> Scale:
    """Where a file's scale stands; alpha: what the user says it is, before all that the file says.

    Raises ValueError for a peft configuration with DoRA or a damaged one, and for an alpha that is not above 0.
    """
    if alpha is not None:
        if not 0 < alpha < math.inf:
            raise ValueError(f"alpha must be above 0 and finite, got {alpha:g}")
        return Scale(f"{alpha:g}, as it was given", "given", alpha)
    if any(layer.alpha is not None for layer in layers):
        return Scale("alpha tensors in the file", "tensors")
    if peft_table(file):
        return diffusers_scale(file)
    if file.config:
        return _peft_scale(file, file.config, "lora_alpha in adapter_config.json beside the file", "peft")
    if file.metadata.get("alpha") == FOLDED:
        return Scale("folded into lora_B", "none")
    return Scale("nowhere, so it is taken as the rank", "none", doubt=_other_reading(file, layers))


def _other_reading(file: LoRAFile, layers: list[Layer]) -> str:
    """What metadata tell of an alpha, where it is another than the rank."""
    ranks = {layer.rank for layer in layers}
    for key, rank_key in (
        ("ss_network_alpha", "ss_network_dim"),
        ("lora_alpha", "rank"),
        ("network_alpha", "rank"),
        ("alpha", "rank"),
    ):
        alpha, rank = _number(file.metadata.get(key)), _number(file.metadata.get(rank_key))
        # A file that was merged or cut to another rank still tells the alpha of the one that it came from.
        if alpha and alpha > 0 and (rank is None or ranks == {rank}) and ranks != {alpha}:
            return (
                f"its metadata tell an alpha of {alpha:g} ({key}), but it has no alpha tensors: converters that "
                "multiply alpha / rank into the factors leave a file so, and no loader reads it; if the factors are as "
                f"they were trained, an alpha of {alpha:g} is right (--alpha {alpha:g}; `alpha` of the node)"
            )
    return ""


def _number(value) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def peft_table(file: LoRAFile) -> dict:
    """`lora_adapter_metadata` of a file's metadata, {} where there is none. Raises ValueError where it is damaged."""
    text = file.metadata.get("lora_adapter_metadata")
    if not text:
        return {}
    try:
        table = json.loads(text)
    except (ValueError, RecursionError):
        table = None
    if not isinstance(table, dict):
        raise ValueError(f"LoRA file {file.name}: lora_adapter_metadata in its metadata is no JSON table; get it again")
    return table


def diffusers_scale(file: LoRAFile) -> Scale:
    """The scale of `lora_adapter_metadata`, which diffusers reads. Raises ValueError where it is damaged or a DoRA."""
    table = peft_table(file)
    config = {k.removeprefix("transformer."): v for k, v in table.items() if not k.startswith("text_encoder")}
    return _peft_scale(file, config, "lora_alpha in the file's metadata (lora_adapter_metadata)", "diffusers")


def _peft_scale(file: LoRAFile, config: dict, where: str, kind: str) -> Scale:
    if config.get("use_dora"):
        raise ValueError(
            f"LoRA file {file.name} is a DoRA: its magnitudes cannot be folded into A and B without the weights of the "
            "base model; use a plain LoRA"
        )
    alpha, patterns = _number(config.get("lora_alpha")), config.get("alpha_pattern") or {}
    numbers = {p: _number(a) for p, a in patterns.items()} if isinstance(patterns, dict) else {"": None}
    if alpha is None or None in numbers.values():
        raise ValueError(f"LoRA file {file.name}: the alpha of its peft configuration is no number; get it again")
    for pattern in numbers:
        try:
            re.compile(pattern)
        except re.error:
            raise ValueError(f"LoRA file {file.name}: alpha_pattern {pattern[:60]!r} is no pattern") from None
    return Scale(where, kind, alpha, tuple(numbers.items()), bool(config.get("use_rslora")))
