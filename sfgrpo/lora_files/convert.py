"""Any LoRA file as the one form that ComfyUI and diffusers both load at strength 1.0.

The canonical form: `transformer.<name in diffusers>.lora_A.weight` and `.lora_B.weight`, the scale folded into B in
float32, no alpha anywhere. Wan and Lumina 2 go by native names, `diffusion_model.<native name>`, which is all that
ComfyUI knows of them. A fused native layer is cut: the same A, and the rows of B that belong to q, k and v. (The other
way, q, k and v onto a fused weight, ComfyUI goes by itself when it loads.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..export import fold
from .file import LoRAFile, common_dtype
from .keys import Layer, parse
from .names import Entry, Family, Place, cut, to_native
from .recognise import UnknownModel, recognise
from .scale import FOLDED, Scale, scale_of

Pair = tuple[Tensor, Tensor]


@dataclass
class Read:
    """A file in terms of its model family."""

    file: LoRAFile
    family: Family
    also: list[Family]
    """Families that have all these layers too; their file would be the same."""
    layers: list[tuple[Layer, Place]]
    scale: Scale
    factors: dict[str, Pair]
    """Canonical name -> A and B, float32, the scale in B."""
    left_out: dict[str, str]
    """Key -> why it is not among the factors."""
    lacking: list[str] = field(default_factory=list)
    """Canonical names that ComfyUI does not know."""


def factors(file: LoRAFile) -> dict[str, Pair]:
    """Canonical layer name -> (A (rank, in), B (out, rank)), float32: W + B A is what the file's trainer meant."""
    return understand(file).factors


def factors_named(file: LoRAFile, wanted: Iterable[str]) -> dict[str, Pair]:
    """`factors`, for a model whose layers are known: names that the file has as they are wanted need no family.

    Raises ValueError where `parse` does.
    """
    parsed = parse(file)
    scale = scale_of(file, parsed.layers)
    written = {layer.key: (layer.a.float(), layer.b.float() * scale.of(layer)) for layer in parsed.layers}
    if written.keys() == set(wanted):
        return written
    try:
        return understand(file).factors
    except UnknownModel:
        return written


def understand(file: LoRAFile) -> Read:
    """Read the keys of a file. Raises ValueError where `parse` does, and for layers of no family that is known."""
    parsed = parse(file)
    scale = scale_of(file, parsed.layers)
    family, also = recognise(file, parsed.layers)
    read = Read(file, family, also, [], scale, {}, dict(parsed.left_out))
    parts: dict[str, tuple[Entry, str, Pair]] = {}
    for layer in parsed.layers:
        place = family.find(layer.name)
        if place is None:
            read.left_out |= dict.fromkeys(layer.keys, f"part of no layer of {family.title}")
            continue
        read.layers.append((layer, place))
        a, b = layer.a.float(), layer.b.float() * scale.of(layer)
        for entry in place.entries:
            name = place.name(entry.diffusers)
            if name in parts:
                raise ValueError(f"LoRA file {file.name} has the layer {name} twice, in two dialects; choose another")
            try:
                rows = cut(entry, b, a.shape[1]) if place.native else b
            except ValueError as error:
                raise ValueError(f"LoRA file {file.name} is of another model: {error}") from None
            parts[name] = (entry, place.number, (a, rows))
    for name, (entry, _, pair) in parts.items():
        if not family.native_export:
            read.factors[f"transformer.{name}"] = pair
            if not family.comfy_has(entry):
                read.lacking.append(f"transformer.{name}")
    if family.native_export:
        read.factors, missing = _native(family, parts)
        read.left_out |= missing
    return read


def _native(family: Family, parts: dict[str, tuple[Entry, str, Pair]]) -> tuple[dict[str, Pair], dict[str, str]]:
    """Factors by native names; q, k and v of a fused layer put together."""
    groups: dict[tuple[str, str], dict[str, Pair]] = {}
    for entry, number, (a, b) in parts.values():
        groups.setdefault((entry.native, number), {})[entry.rows] = (a, to_native(entry, b, a.shape[1]))
    found, missing = {}, {}
    for (native, number), pairs in groups.items():
        name = f"diffusion_model.{native.replace('{}', number)}"
        if pairs.keys() <= {"all", "swap", "swap_last"}:
            found[name] = next(iter(pairs.values()))
        elif pairs.keys() == {"q"}:
            missing[name] = "a to_q without to_k or to_v, whose number of rows is not known"
        else:
            found[name] = _fused(pairs)
    return found, missing


def _fused(pairs: dict[str, Pair]) -> Pair:
    """One A and B for the rows of q, k and v. Exact: a common A is kept, different ones are stacked."""
    width = next(iter(pairs.values()))[0].shape[1]
    side = next(len(b) for part, (_, b) in pairs.items() if part != "q")
    first = next(iter(pairs.values()))[0]
    common = all(a.shape == first.shape and torch.equal(a, first) for a, _ in pairs.values())
    blocks, at, rank = [], 0, len(first) if common else sum(len(a) for a, _ in pairs.values())
    for part in "qkv":
        rows = first.new_zeros(width if part == "q" else side, rank)
        if part in pairs:
            a, b = pairs[part]
            rows[:, 0 if common else at : (0 if common else at) + len(a)] = b
            at += len(a)
        blocks.append(rows)
    a = first if common else torch.cat([pairs[part][0] for part in "qkv" if part in pairs])
    return a, torch.cat(blocks)


ALPHA_KEYS = ("lora_adapter_metadata", "alpha", "lora_alpha", "network_alpha", "rank", "format")


def describe(file: LoRAFile, state: Mapping[str, Tensor], family: Family, what: str) -> dict[str, str]:
    """Metadata of a canonical file: the old ones, less those that tell another alpha or rank."""
    from .. import __version__

    kept = {k: v for k, v in file.metadata.items() if k not in ALPHA_KEYS and not k.startswith("ss_network_")}
    return kept | {
        "format": "pt",
        "software": f"stepwise-grpo {__version__} ({what})",
        "base_model_family": family.key,
        "rank": ranks_of(state),
        "alpha": FOLDED,
    }


def ranks_of(state: Mapping[str, Tensor]) -> str:
    """The rank of a canonical state dict, or the least and the largest."""
    ranks = sorted({len(v) for k, v in state.items() if k.endswith(".lora_A.weight")})
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def convert(file: LoRAFile, dtype: torch.dtype | None = None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(state dict, metadata) of the canonical file; `warnings` names what is not in it.

    dtype: that of most of the file's tensors without one. Raises ValueError where nothing is left, or where the dtype
    has no room for a number.
    """
    read = understand(file)
    state = fold(loadable(read), 1.0, dtype or common_dtype(file))
    check_finite(state, file.name)
    return state, describe(file, state, read.family, "LoRA doctor")


def loadable(read: Read) -> dict[str, Pair]:
    found = {name: pair for name, pair in read.factors.items() if name not in read.lacking}
    if not found:
        raise ValueError(f"LoRA file {read.file.name} has only layers that ComfyUI cannot load ({read.lacking[0]} ...)")
    return found


def check_finite(state: Mapping[str, Tensor], name: str) -> None:
    for key, value in state.items():
        if not torch.isfinite(value).all():
            raise ValueError(f"{key} of LoRA file {name} is too large for {value.dtype}; choose bf16 or fp32")


def warnings(read: Read) -> list[str]:
    """What a conversion leaves out, a sentence each."""
    reasons: dict[str, list[str]] = {}
    for key, why in read.left_out.items():
        reasons.setdefault(why, []).append(key)
    lines = [f"a conversion leaves out what is {why}: {_some(keys)}" for why, keys in reasons.items()]
    if read.lacking:
        lines.append(f"a conversion leaves out what ComfyUI has no name for: {_some(read.lacking)}")
    return lines


def _some(keys: Sequence[str], most: int = 3) -> str:
    shown = ", ".join(keys[:most])
    return shown if len(keys) <= most else f"{shown} and {len(keys) - most} more"
