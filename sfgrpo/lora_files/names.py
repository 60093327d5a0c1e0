"""What the name of a linear layer stands for: a layer by diffusers' name, or by the model's own, as ComfyUI has it.

A native layer may hold several of diffusers' in its rows (qkv), and a modulation may have its halves (shift and scale)
in the other order. `Entry.rows` says how; the rows of the factor B are cut or swapped, A stays. Block numbers are `{}`.
The names themselves are in `families.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Entry:
    """One layer of diffusers and where it lies in the native model."""

    diffusers: str
    native: str
    rows: str = "all"
    """all; swap: halves swapped; swap_last: so where there are two; q, k, v of qkv; 1q, 1k, 1v, 1mlp of linear1."""


@dataclass(frozen=True)
class Place:
    """What a name stands for."""

    entries: tuple[Entry, ...]
    """One, or the parts of a fused native layer."""
    number: str
    """Of the block; empty without one."""
    native: bool
    """Written with the native name."""

    def name(self, template: str) -> str:
        return template.replace("{}", self.number)


@dataclass(frozen=True)
class Family:
    """The layers of a model family."""

    key: str
    title: str
    entries: tuple[Entry, ...]
    native_export: bool = False
    """Written with native names, `diffusion_model.`: where ComfyUI knows no others."""
    comfy_prefixes: tuple[str, ...] = ()
    """What may stand before diffusers' names in ComfyUI; a trailing underscore means dots are underscores."""
    comfy_lacks: tuple[str, ...] = ()
    """Beginnings of diffusers' names that ComfyUI does not know."""

    @cached_property
    def _names(self) -> dict[str, tuple[tuple[Entry, ...], bool]]:
        names: dict[str, tuple[tuple[Entry, ...], bool]] = {}
        for entry in self.entries:
            fused, _ = names.get(entry.native, ((), True))
            names[entry.native] = ((*fused, entry), True)
        for entry in self.entries:
            names.setdefault(entry.diffusers, ((entry,), False))
        return names | {name.replace(".", "_"): found for name, found in names.items()}

    def find(self, name: str) -> Place | None:
        """The place of a name without prefix, with dots or with underscores in the stead of all or some of them."""
        for template, number in (*_templates(name), *_templates(name.replace(".", "_"))):
            if template in self._names:
                entries, native = self._names[template]
                return Place(entries, number, native)
        return None

    def comfy_has(self, entry: Entry) -> bool:
        """Whether ComfyUI knows diffusers' name of the layer."""
        return not entry.diffusers.startswith(self.comfy_lacks) if self.comfy_lacks else True


def _templates(name: str) -> Iterator[tuple[str, str]]:
    """(name with its block number as {}, the number): as it is, and with the first number between separators."""
    yield name, ""
    found = re.search(r"(?<=[._])\d{1,4}(?=[._])", name)
    if found:
        yield f"{name[: found.start()]}{{}}{name[found.end() :]}", found.group()


def cut(entry: Entry, b: Tensor, width: int, *, mlp: bool = True) -> Tensor:
    """Rows of a native factor B (out, rank) that are diffusers' layer; width: the layer's inputs.

    mlp: whether linear1 has rows of the feed-forward; without, those are none. Raises ValueError where the rows do not
    divide so.
    """
    if entry.rows in ("swap", "swap_last"):
        return _swapped(b) if entry.rows == "swap" or len(b) == 2 * width else b
    if entry.rows == "all":
        return b
    part = entry.rows.removeprefix("1")
    rest = len(b) - width
    sizes = [width, width, width, len(b) - 3 * width] if entry.rows[0] == "1" else [width, rest // 2, rest // 2]
    good = min(sizes) > 0 if mlp or entry.rows[0] != "1" else sizes[3] == 0
    if not good or sum(sizes) != len(b):
        raise ValueError(f"{len(b)} rows of {entry.native} do not divide into q, k and v of width {width}")
    return b.split(sizes)[["q", "k", "v", "mlp"].index(part)]


def to_native(entry: Entry, b: Tensor, width: int) -> Tensor:
    """The rows of diffusers' factor in the native order (swapping twice changes nothing)."""
    return cut(entry, b, width) if entry.rows.startswith("swap") else b


def _swapped(b: Tensor) -> Tensor:
    first, second = b.chunk(2)
    return torch.cat([second, first])
