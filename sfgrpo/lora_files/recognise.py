"""Of which model family the layers of a LoRA file are.

By the names; then, where families share them, by the shapes, what the metadata say, and the sizes of the published
models. Attention layers in diffusers' names alone are the same in four families, and so are the files made of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from .families import FAMILIES
from .file import LoRAFile
from .keys import Layer
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

DEPTHS = {"sd3": 38, "flux1": 19, "flux2": 8, "qwen_image": 60, "chroma": 19}
"""Most `transformer_blocks` of the published models."""

HINTS = ("ss_base_model_version", "modelspec.architecture", "base_model", "base_model_family")
"""Metadata that name the model."""


class UnknownModel(ValueError):
    """The layers are those of no model family that is known here."""


def recognise(file: LoRAFile, layers: Sequence[Layer]) -> tuple[Family, list[Family]]:
    """The family of a file's layers, and others that fit as well.

    By the names; then, where families share them, by the shapes, what the metadata say, and the sizes of the published
    models. Raises UnknownModel where no family has any of the layers.
    """
    hint = " ".join(file.metadata.get(key, "") for key in HINTS).lower()
    said = {k: max((len(w) for w in f.words if w in hint), default=0) for k, f in FAMILIES.items()}
    said = {k: n > 0 and n == max(said.values()) for k, n in said.items()}
    scores = {}
    for key, family in FAMILIES.items():
        places = [(layer, family.find(layer.name)) for layer in layers]
        known = [(layer, place) for layer, place in places if place is not None]
        if known:
            fits = all(_ratio_fits(key, layer, place) for layer, place in known)
            scores[key] = (len(known), fits, said[key], _size_fits(key, known))
    if not scores:
        raise UnknownModel(
            f"LoRA file {file.name} has layers of no model that is known here (the first is {layers[0].key}); "
            f"known are {', '.join(f.title for f in FAMILIES.values())}"
        )
    best = max(scores.values())
    fitting = [FAMILIES[k] for k, score in scores.items() if score == best]
    # Without a word in the metadata, a family whose published sizes differ is still one that the names allow.
    also = [FAMILIES[k] for k, s in scores.items() if s[:2] == best[:2] and not best[2] and (s == best or not best[3])]
    return fitting[0], [f for f in also if f is not fitting[0]]


def _ratio_fits(key: str, layer: Layer, place: Place) -> bool:
    native = place.entries[0].native
    for end, ratios in RATIOS.items():
        if key in ratios and native.endswith(end) and place.native:
            ratio = layer.b.shape[0] / layer.a.shape[1]
            # Small models of other proportions are decided by what is nearest.
            return ratios[key] == min(ratios.values(), key=lambda r: abs(r - ratio))
    return True


def _size_fits(key: str, known: list[tuple[Layer, Place]]) -> bool:
    widths = {layer.a.shape[1] for layer, place in known if place.entries[0].rows.removeprefix("1") in "qkv"}
    widths |= {layer.a.shape[1] for layer, place in known if place.entries[0].diffusers.endswith((".to_q", ".to_k"))}
    blocks = [int(p.number) for _, p in known if p.entries[0].diffusers.startswith("transformer_blocks.")]
    return widths <= WIDTHS[key] and max(blocks, default=0) < DEPTHS.get(key, 1000)
