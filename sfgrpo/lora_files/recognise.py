"""Of which model family the layers of a LoRA file are.

By the names; then, where families share them, by the shapes, what the metadata say, and the sizes of the published
models. Attention layers in diffusers' names alone are the same in four families, and so are the files made of them.
Other models share some names with ours. Where metadata, layers or sizes tell of another model, the family is in doubt.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from .families import FAMILIES
from .file import LoRAFile
from .keys import Layer
from .metadata import Named, model_of
from .names import Family, Place

RATIOS = {
    "img_mlp.0": {"flux1": 4, "chroma": 4, "flux2": 6},
    "txt_mlp.0": {"flux1": 4, "chroma": 4, "flux2": 6},
    "img_mlp.2": {"flux1": 1 / 4, "chroma": 1 / 4, "flux2": 1 / 3},
    "txt_mlp.2": {"flux1": 1 / 4, "chroma": 1 / 4, "flux2": 1 / 3},
    "linear1": {"flux1": 7, "chroma": 7, "flux2": 9},
    "linear2": {"flux1": 1 / 5, "chroma": 1 / 5, "flux2": 1 / 4},
    "attention.qkv": {"z_image": 3, "lumina2": 5 / 3},
}
"""End of a native name -> family -> outputs / inputs, where families share the name."""

WIDTHS = {
    "sd3": {1536, 2432},
    "flux1": {3072},
    "flux2": {3072, 4096, 6144},
    "qwen_image": {3072},
    "z_image": {3840},
    "wan": {1536, 3072, 5120},
    "chroma": {3072},
    "lumina2": {2304},
}
"""Widths of the published models."""

REAL_WIDTH = 1024
"""A model of this width or more is no small one of a test, and has one of the published widths."""

DEPTHS = {
    "sd3": {"transformer_blocks": 38},
    "flux1": {"transformer_blocks": 19, "single_transformer_blocks": 38},
    "flux2": {"transformer_blocks": 8, "single_transformer_blocks": 48},
    "qwen_image": {"transformer_blocks": 60},
    "z_image": {"layers": 30},
    "wan": {"blocks": 40},
    "chroma": {"transformer_blocks": 19, "single_transformer_blocks": 38},
    "lumina2": {"layers": 26},
}
"""Most blocks of the published models."""

MARKS = {
    "HunyuanVideo": r"token_refiner|img_mlp[._]fc[12]|(img_mod|txt_mod|blocks[._]\d+[._]modulation)[._]linear",
    "HunyuanImage": r"(img|txt)_attn_[qkv](?![a-z])",
    "AuraFlow": r"joint_transformer_blocks",
    "HiDream": r"double_stream_blocks|single_stream_blocks",
    "Stable Diffusion 1, 2 or XL": r"(down|up|input|output|mid|middle)_blocks?[._]",
    "LTX-Video, CogVideoX, CogView4, Mochi or PixArt": r"transformer_blocks[._]\d+[._]attn1[._]",
    "Sana": r"conv_inverted|conv_point",
    "OmniGen2": r"ref_image_refiner",
}
"""Title of a model that is none of ours -> names of layers that ours do not have."""

MOST_UNKNOWN = 1 / 3
"""Share of a file's layers that may be of no layer of its family."""


class UnknownModel(ValueError):
    """The layers are those of no model family that is known here."""


@dataclass
class Recognised:
    """Whose layers they are."""

    family: Family
    also: list[Family] = field(default_factory=list)
    """Families that fit as well."""
    doubt: str = ""
    """Why they may be those of another model; a clause, empty where nothing says so."""


def recognise(file: LoRAFile, layers: Sequence[Layer]) -> Recognised:
    """The family of a file's layers. Raises UnknownModel where no family has any of them."""
    named = model_of(file.metadata)
    scores, places = {}, {}
    for key, family in FAMILIES.items():
        if key != "flux1" and any(layer.style == "xlabs" for layer in layers):
            continue
        known = [(layer, place) for layer in layers if (place := family.find(layer.name)) is not None]
        if known:
            places[key] = known
            fits = all(_ratio_fits(key, layer, place) for layer, place in known)
            scores[key] = (len(known), fits, key in named.families, not _size_doubt(key, known))
    if not scores:
        other = named.other or _marked(layers)
        raise UnknownModel(
            f"LoRA file {file.name} has layers of no model that is known here (the first is {layers[0].key}"
            f"{f'; they are those of {other}' if other else ''}); "
            f"known are {', '.join(f.title for f in FAMILIES.values())}"
        )
    best = max(scores.values())
    fitting = [FAMILIES[k] for k, score in scores.items() if score == best]
    # Without a word in the metadata, a family whose published sizes differ is still one that the names allow.
    also = [FAMILIES[k] for k, s in scores.items() if s[:2] == best[:2] and not best[2] and (s == best or not best[3])]
    family = fitting[0]
    found = Recognised(family, [f for f in also if f is not family])
    found.doubt = _doubt(file, found, named, layers, places[family.key])
    return found


def _doubt(
    file: LoRAFile, found: Recognised, named: Named, layers: Sequence[Layer], known: list[tuple[Layer, Place]]
) -> str:
    """Why the layers may be those of another model than the family whose names fit best."""
    if named.other:
        return f"its metadata name {named.other} ({named.where})"
    fitting = {found.family.key, *(f.key for f in found.also)}
    if named.families and named.where and not named.families & fitting:
        titles = " or ".join(FAMILIES[key].title for key in sorted(named.families))
        return f"its metadata name {titles} ({named.where}), but its layers are those of {found.family.title}"
    # Who names the family, as our own conversion does, is believed before what looks like another model.
    said = bool(named.where and named.families & fitting)
    other = "" if said else _marked(layers)
    if other:
        return f"it has layers of {other}"
    unknown = len(layers) - len(known)
    if unknown > MOST_UNKNOWN * len(layers):
        return f"{unknown} of its {len(layers)} layers are none of {found.family.title}"
    if said or file.metadata.get("software", "").startswith("stepwise-grpo"):
        return ""
    if found.family.key == "sd3" and all(p.entries[0].diffusers.split(".")[2:3] == ["attn2"] for _, p in known):
        return "it has only second attentions, which Sana and PixArt have too"
    return _size_doubt(found.family.key, known, least=REAL_WIDTH)


def _marked(layers: Sequence[Layer]) -> str:
    """Title of another model whose own layers a file has."""
    names = "\n".join(layer.name for layer in layers)
    return next((title for title, words in MARKS.items() if re.search(rf"(?<![a-z]){words}", names)), "")


def _ratio_fits(key: str, layer: Layer, place: Place) -> bool:
    native = place.entries[0].native
    for end, ratios in RATIOS.items():
        if key in ratios and native.endswith(end) and place.native:
            ratio = layer.b.shape[0] / layer.a.shape[1]
            # Small models of other proportions are decided by what is nearest.
            return ratios[key] == min(ratios.values(), key=lambda r: abs(r - ratio))
    return True


def _size_doubt(key: str, known: list[tuple[Layer, Place]], least: int = 0) -> str:
    """In what a file differs from the published models of a family; empty where it fits one.

    Widths below `least` do not count: those of small models in tests.
    """
    widths = {layer.a.shape[1] for layer, place in known if place.entries[0].rows.removeprefix("1") in "qkv"}
    widths |= {layer.a.shape[1] for layer, place in known if place.entries[0].diffusers.endswith((".to_q", ".to_k"))}
    other = sorted(w for w in widths - WIDTHS[key] if w >= least)
    title = FAMILIES[key].title
    if other:
        return f"no published {title} has the width {other[0]}"
    for stack, depth in DEPTHS[key].items():
        start = f"{stack}.{{}}."
        blocks = [int(p.number) for _, p in known if p.entries[0].diffusers.startswith(start)]
        if max(blocks, default=0) >= depth:
            return f"no published {title} has {max(blocks) + 1} {stack}"
    return ""
