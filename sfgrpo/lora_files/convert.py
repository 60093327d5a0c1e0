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
from .families import FAMILIES
from .file import LoRAFile, common_dtype
from .keys import Layer, parse
from .names import Entry, Family, Place, cut, to_native
from .recognise import Recognised, UnknownModel, recognise
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
    total: int = 0
    """Layers of the file, those that are none of the family's among them."""
    doubt: str = ""
    """Why the file may be of another model than `family`; a clause, empty where nothing says so."""


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


def understand(file: LoRAFile, *, alpha: float | None = None, model: str | None = None) -> Read:
    """Read the keys of a file.

    alpha: what the user says that it was trained with, before all that the file says (`scale_of`); model: key of the
    family (`FAMILIES`), where the user knows it. Raises ValueError where `parse` does, and for layers of no family that
    is known.
    """
    parsed = parse(file)
    scale = scale_of(file, parsed.layers, alpha)
    found = recognise(file, parsed.layers) if model is None else Recognised(_family(model))
    family = found.family
    read = Read(file, family, found.also, [], scale, {}, dict(parsed.left_out))
    read.total, read.doubt = len(parsed.layers), found.doubt
    parts: dict[str, _Part] = {}
    for layer in parsed.layers:
        place = family.find(layer.name)
        if place is None:
            read.left_out |= dict.fromkeys(layer.keys, f"part of no layer of {family.title}")
            continue
        read.layers.append((layer, place))
        _add_parts(parts, layer, place, layer.b.float() * scale.of(layer), file)
    if not read.layers:
        raise ValueError(f"LoRA file {file.name} has no layer of {family.title}; the first is {parsed.layers[0].key}")
    for name, part in parts.items():
        if not family.native_export:
            read.factors[f"transformer.{name}"] = part.stacked()
            if not family.comfy_has(part.entry):
                read.lacking.append(f"transformer.{name}")
    if family.native_export:
        read.factors, missing = _native(family, parts)
        read.left_out |= missing
    return read


def _family(key: str) -> Family:
    if key not in FAMILIES:
        raise ValueError(f"unknown model {key!r}; choose one of {', '.join(FAMILIES)}")
    return FAMILIES[key]


@dataclass
class _Part:
    """A layer of diffusers and what a file adds to it."""

    entry: Entry
    number: str
    pairs: dict[str, Pair] = field(default_factory=dict)
    """fused (rows of a native layer) or alone -> factors."""

    def stacked(self) -> Pair:
        """The sum, exactly: ranks add."""
        pairs = list(self.pairs.values())
        return pairs[0] if len(pairs) == 1 else (torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs], 1))


def _add_parts(parts: dict[str, _Part], layer: Layer, place: Place, b: Tensor, file: LoRAFile) -> None:
    """Note a layer's factors with each layer of diffusers that it changes; b: with its scale.

    A fused layer and one of its parts are added, as ComfyUI does. The same layer in two spellings is refused: ComfyUI
    loads one of them.
    """
    a = layer.a.float()
    for entry in place.entries:
        try:
            rows = cut(entry, b, a.shape[1], mlp=layer.style != "xlabs") if place.native else b
        except ValueError as error:
            raise ValueError(f"LoRA file {file.name} is of another model: {error}") from None
        if not len(rows):
            continue
        name = place.name(entry.diffusers)
        part = parts.setdefault(name, _Part(entry, place.number))
        kind = "fused" if len(place.entries) > 1 else "alone"
        if kind in part.pairs:
            raise ValueError(f"LoRA file {file.name} has the layer {name} twice, in two dialects; choose another")
        part.pairs[kind] = (a, rows)
        if len({(x.shape[1], len(y)) for x, y in part.pairs.values()}) > 1:
            raise ValueError(
                f"LoRA file {file.name} has two sizes of the layer {place.name(entry.diffusers)}; choose another"
            )


def _native(family: Family, parts: Mapping[str, _Part]) -> tuple[dict[str, Pair], dict[str, str]]:
    """Factors by native names; q, k and v of a fused layer put together."""
    groups: dict[tuple[str, str], dict[str, Pair]] = {}
    for part in parts.values():
        a, b = part.stacked()
        pair = (a, to_native(part.entry, b, a.shape[1]))
        groups.setdefault((part.entry.native, part.number), {})[part.entry.rows] = pair
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


def convert(
    file: LoRAFile, dtype: torch.dtype | None = None, *, alpha: float | None = None, model: str | None = None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(state dict, metadata) of the canonical file; `warnings` names what is not in it.

    dtype: that of most of the file's tensors without one; alpha, model: see `understand`. Raises ValueError where the
    model is in doubt, where nothing is left, or where the dtype has no room for a number.
    """
    return written(understand(file, alpha=alpha, model=model), dtype)


def written(read: Read, dtype: torch.dtype | None = None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """`convert` of a file that was read."""
    check_sure(read)
    state = fold(loadable(read), 1.0, dtype or common_dtype(read.file))
    check_finite(state, read.file.name)
    return state, describe(read.file, state, read.family, "LoRA doctor")


def doubts(file: LoRAFile) -> list[str]:
    """What is not proven of a file that is used as it stands, a sentence each: its model, and its scale."""
    try:
        read = understand(file)
    except UnknownModel:
        return []
    model = [f"LoRA file {file.name} may be of another model: {read.doubt}"] if read.doubt else []
    scale = f"LoRA file {file.name} is taken at scale 1: {read.scale.doubt}; `sfgrpo lora convert` writes it with it"
    return model + ([scale] if read.scale.doubt else [])


def check_sure(read: Read) -> None:
    """Raise ValueError where the file may be of another model than its names say."""
    if read.doubt:
        raise ValueError(
            f"LoRA file {read.file.name} may be of another model: {read.doubt}; if you know that it is of "
            f"{read.family.title}, say so (--model {read.family.key}; `model` of the node)"
        )


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
