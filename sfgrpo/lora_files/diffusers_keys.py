"""What diffusers' loaders of LoRAs share: its own names behind `transformer.`, and what a key more does to a file."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .keys import Layer
from .loaders import Verdict
from .names import Place
from .scale import diffusers_scale, peft_table
from .understand import Read

NO_PREFIX = "it reads only keys that begin with `transformer.` and the dialects that it converts"
LINEAR_LAYER = "it cannot read `lora_linear_layer` any more"

DOWN = ".lora_down.weight"

Known = Callable[[Layer, Place], bool]


class Refused(Exception):
    """diffusers loads nothing of a file; the message says why."""


def refuse_keys(keys: Iterable[str]) -> None:
    """Raise Refused for the first of keys that diffusers does not know."""
    key = next(iter(keys), None)
    if key is not None:
        raise Refused(f"it refuses a file with a key that it does not know ({key[:80]})")


def metadata_scale(read: Read) -> Callable[[Layer], float]:
    """What `lora_adapter_metadata` multiply a layer's effect by, also after a conversion; 1 without them."""
    return diffusers_scale(read.file).of if peft_table(read.file) else lambda layer: 1.0


def some_loaded(read: Read, known: Known, why: str, *, alphas: bool) -> Verdict:
    """Layers for which known(layer, place) are loaded; alphas: with their alpha tensors, else at scale 1."""
    verdict, said = Verdict(), metadata_scale(read)
    for layer, place in read.layers:
        if known(layer, place):
            verdict.add(
                read, layer, said(layer) * (layer.alpha / layer.rank if alphas and layer.alpha is not None else 1)
            )
        else:
            verdict.fails[layer.key] = why
    return verdict


def is_own(layer: Layer, place: Place) -> bool:
    """Written with diffusers' name, with dots."""
    return len(place.entries) == 1 and layer.name == place.name(place.entries[0].diffusers)


def is_native(layer: Layer, place: Place) -> bool:
    """Written with the native name, with dots."""
    return layer.name == place.name(place.entries[0].native)


def is_underscored(layer: Layer, place: Place) -> bool:
    return layer.name == place.name(place.entries[0].native).replace(".", "_")


def in_block(place: Place) -> bool:
    return bool(place.number)


def any_key(read: Read, part: str) -> bool:
    """Whether a key of the file holds `part`."""
    return any(part in key for key in read.file.tensors)


def begins(read: Read, *starts: str) -> bool:
    """Whether a key of the file begins with one of `starts`."""
    return any(key.startswith(starts) for key in read.file.tensors)


def styles(read: Read) -> set[str]:
    return {layer.style for layer, _ in read.layers}


def plain(read: Read, encoders: tuple[str, ...] = ("text_encoder.", "text_encoder_2.")) -> Verdict:
    """The path that all pipelines share, SD3's: diffusers' names behind `transformer.`, and `lora` in every key."""
    refuse_keys(key for key in read.file.tensors if "lora" not in key)
    return behind_transformer(read, encoders)


def behind_transformer(read: Read, encoders: tuple[str, ...], alphas: bool = False) -> Verdict:
    """What is written with diffusers' names behind `transformer.`; alphas: alpha tensors are read."""
    if any(layer.style == "lora_linear_layer" and layer.prefix == "transformer." for layer, _ in read.layers):
        raise Refused(LINEAR_LAYER)
    table = peft_table(read.file)
    for start in encoders:
        if table and begins(read, start) and not any(key.startswith(start) for key in table):
            raise Refused(f"its metadata (lora_adapter_metadata) lack the part of {start.removesuffix('.')}")
    if table and alphas and any_key(read, "alpha"):
        raise Refused("it refuses a file with both alpha tensors and lora_adapter_metadata")
    # Where there are alpha tensors, a layer without one gets the first of them.
    told = [v for k, v in read.file.tensors.items() if k.startswith("transformer.") and "alpha" in k] if alphas else []
    verdict, said = Verdict(), metadata_scale(read)
    for layer, place in read.layers:
        if layer.prefix != "transformer." or not is_own(layer, place) or layer.style not in ("lora_A", "lora.down"):
            verdict.fails[layer.key] = NO_PREFIX
        elif told:
            verdict.add(read, layer, (float(told[0]) if layer.alpha is None else layer.alpha) / layer.rank)
        else:
            verdict.add(read, layer, said(layer))
    return verdict
