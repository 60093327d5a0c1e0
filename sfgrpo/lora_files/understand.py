"""A LoRA file in terms of its model family: which layers it has, and what it adds to each.

A fused native layer is cut: the same A, and the rows of B that belong to q, k and v. (The other way, q, k and v onto a
fused weight, ComfyUI goes by itself when it loads.) A fused layer and its parts in one file are added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .families import FAMILIES
from .file import LoRAFile
from .keys import Layer, Parsed, parse
from .names import Entry, Family, Place, cut, to_native
from .recognise import Recognised, recognise
from .scale import Scale, scale_of

Pair = tuple[Tensor, Tensor]


@dataclass
class Read:
    """A file in terms of its model family."""

    file: LoRAFile
    parsed: Parsed
    family: Family
    also: list[Family]
    """Families that have all these layers too; their file would be the same."""
    doubt: str
    """Why the file may be of another model than `family`; a clause, empty where nothing says so."""
    scale: Scale
    layers: list[tuple[Layer, Place]] = field(default_factory=list)
    """Those of `parsed` that are the family's."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Key -> why it is not among the factors."""
    factors: dict[str, Pair] = field(default_factory=dict)
    """Canonical name -> A and B, float32, the scale in B."""
    lacking: list[str] = field(default_factory=list)
    """Canonical names that ComfyUI does not know."""


def understand(file: LoRAFile, *, alpha: float | None = None, model: str | None = None) -> Read:
    """Read the keys of a file.

    alpha: what the user says that it was trained with, before all that the file says (`scale_of`); model: key of the
    family (`FAMILIES`), where the user knows it. Raises ValueError where `parse` does, and for layers of no family that
    is known.
    """
    parsed = parse(file)
    scale = scale_of(file, parsed.layers, alpha)
    found = recognise(file, parsed.layers) if model is None else Recognised(_family(model))
    read = place_layers(Read(file, parsed, found.family, found.also, found.doubt, scale))
    family = read.family
    if not read.layers:
        raise ValueError(f"LoRA file {file.name} has no layer of {family.title}; the first is {parsed.layers[0].key}")
    parts: dict[str, _Part] = {}
    for layer, place in read.layers:
        _add_parts(parts, layer, place, layer.b.float() * scale.of(layer), file)
    if family.native_export:
        read.factors, missing = _native(family, parts)
        read.left_out |= missing
        return read
    read.factors = {f"transformer.{name}": part.stacked() for name, part in parts.items()}
    read.lacking = [f"transformer.{name}" for name, part in parts.items() if not family.comfy_has(part.entry)]
    return read


def place_layers(read: Read) -> Read:
    """Fill in which layers of the file are its family's, and which keys are left out for it; no factors."""
    read.left_out = dict(read.parsed.left_out)
    for layer in read.parsed.layers:
        place = read.family.find(layer.name)
        if place is None:
            read.left_out |= dict.fromkeys(layer.keys, f"part of no layer of {read.family.title}")
        else:
            read.layers.append((layer, place))
    return read


def as_family(read: Read, family: Family) -> Read:
    """The same file in terms of another family that it fits, as loaders see it: without factors."""
    return place_layers(Read(read.file, read.parsed, family, [], "", read.scale))


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
