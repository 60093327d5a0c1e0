"""Which layers of a LoRA file ComfyUI and diffusers load as it stands, and how strongly, at strength 1.0.

Seen in ComfyUI 0.33.0 (its table of keys) and diffusers 0.42 (its `lora_state_dict` of each pipeline); the tests
compare these rules with both. What neither says aloud: ComfyUI reads `.alpha` tensors and no metadata; diffusers reads
`lora_adapter_metadata` alone, and alpha tensors only in the dialects that it converts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .convert import Read
from .keys import Layer
from .names import Place

ALPHA_REFUSED = "it refuses a file with alpha tensors for this model"
NO_PREFIX = "it reads only keys that begin with `transformer.` and the dialects that it converts"


@dataclass
class Verdict:
    """What one loader makes of a file."""

    loads: list[str] = field(default_factory=list)
    """Layers, as the file writes them."""
    fails: dict[str, str] = field(default_factory=dict)
    """Layer -> why it is not loaded."""
    ratios: list[float] = field(default_factory=list)
    """For each that is: its effect over the effect that its trainer meant."""


def in_comfyui(read: Read) -> Verdict:
    """What ComfyUI's LoRA loaders do."""
    verdict = Verdict()
    for layer, place in read.layers:
        if layer.key not in comfyui_names(read, place) or layer.style == "lora_A.adapter":
            verdict.fails[layer.key] = "it has no such name for this model"
        else:
            _add(verdict, read, layer, 1.0 if layer.alpha is None else layer.alpha / layer.rank)
    return verdict


def comfyui_names(read: Read, place: Place) -> set[str]:
    """All names by which ComfyUI knows a layer."""
    family, native = read.family, place.name(place.entries[0].native)
    names = {f"diffusion_model.{native}", f"lora_unet_{native.replace('.', '_')}"}
    if family.key == "wan":
        names.add(f"lora_unet__{native.replace('.', '_')}")
    for entry in place.entries:
        if family.comfy_has(entry):
            name = place.name(entry.diffusers)
            names |= {p + (name.replace(".", "_") if p.endswith("_") else name) for p in family.comfy_prefixes}
    return names


def in_diffusers(read: Read) -> Verdict:
    """What `load_lora_weights` of the model's pipeline in diffusers does."""
    rules = {"flux1": _flux1, "chroma": _flux1, "flux2": _flux2, "qwen_image": _qwen, "z_image": _qwen, "wan": _wan}
    return (rules | {"lumina2": _lumina2}).get(read.family.key, _plain)(read)


def _add(verdict: Verdict, read: Read, layer: Layer, scale: float) -> None:
    meant = read.scale.of(layer)
    verdict.loads.append(layer.key)
    verdict.ratios.append(scale / meant if meant else 1.0)


def _own(layer: Layer, place: Place) -> bool:
    """Written with diffusers' name, with dots."""
    return len(place.entries) == 1 and layer.name == place.name(place.entries[0].diffusers)


def _native(layer: Layer, place: Place) -> bool:
    """Written with the native name, with dots."""
    return layer.name == place.name(place.entries[0].native)


def _underscored(layer: Layer, place: Place) -> bool:
    return layer.name == place.name(place.entries[0].native).replace(".", "_")


def _in_block(place: Place) -> bool:
    return bool(place.number)


def _has_alphas(read: Read) -> bool:
    return any(layer.alpha is not None for layer, _ in read.layers)


def _all(read: Read, why: str) -> Verdict:
    """No layer is loaded."""
    return Verdict(fails={layer.key: why for layer, _ in read.layers})


def _some(read: Read, known, why: str, *, alphas: bool) -> Verdict:
    """Layers for which known(layer, place) are loaded; alphas: with their alpha tensors, else at scale 1."""
    verdict = Verdict()
    for layer, place in read.layers:
        if known(layer, place):
            _add(verdict, read, layer, layer.alpha / layer.rank if alphas and layer.alpha is not None else 1.0)
        else:
            verdict.fails[layer.key] = why
    return verdict


def _plain(read: Read, alphas: bool = False) -> Verdict:
    """The path that all pipelines share: diffusers' names behind `transformer.`."""
    if _has_alphas(read) and not alphas:
        return _all(read, ALPHA_REFUSED)
    if any(layer.style == "lora_linear_layer" and layer.prefix == "transformer." for layer, _ in read.layers):
        return _all(read, "it cannot read `lora_linear_layer` any more")
    verdict = Verdict()
    for layer, place in read.layers:
        if layer.prefix != "transformer." or not _own(layer, place) or layer.style not in ("lora_A", "lora.down"):
            verdict.fails[layer.key] = NO_PREFIX
        elif read.scale.kind in ("diffusers", "tensors"):
            _add(verdict, read, layer, read.scale.of(layer))
        else:
            _add(verdict, read, layer, 1.0)
    return verdict


def _prefixes(read: Read) -> set[str]:
    return {layer.prefix for layer, _ in read.layers}


def _styles(read: Read) -> set[str]:
    return {layer.style for layer, _ in read.layers}


def _flux1(read: Read) -> Verdict:
    prefixes = _prefixes(read)
    if "lora_down" in _styles(read):
        if "transformer." in prefixes:
            return _some(read, lambda la, p: la.prefix == "transformer." and _own(la, p), NO_PREFIX, alphas=False)
        if prefixes == {"lora_transformer_"} and all(".attn." in p.entries[0].diffusers for _, p in read.layers):
            return _some(read, lambda *_: True, "", alphas=True)
        if "lora_transformer_" in prefixes:
            return _all(read, "its conversion of OneTrainer's names knows no feed-forward layers and no modulations")
        if any(not _native_form(la, p) or p.entries[0].diffusers.startswith("distilled") for la, p in read.layers):
            return _all(read, "it refuses a file with names that it does not know")
        return _some(read, lambda _, p: _in_block(p), "its conversion drops layers outside the blocks", alphas=True)
    if any(prefix.startswith("base_model.") for prefix in prefixes):
        return _all(read, "it takes a file of raw peft for another dialect, and refuses it")
    return _plain(read, alphas=True)


def _native_form(layer: Layer, place: Place) -> bool:
    if layer.prefix == "lora_unet_":
        return _underscored(layer, place)
    return layer.prefix == "diffusion_model." and _native(layer, place)


KOHYA_FLUX2 = ("x_embedder", "context_embedder", "time_guidance_embed.timestep_embedder", "proj_out")


def _flux2(read: Read) -> Verdict:
    prefixes = _prefixes(read)
    if "lora_down" in _styles(read):
        return _some(
            read,
            lambda la, p: (
                la.prefix == "lora_unet_"
                and _underscored(la, p)
                and (_in_block(p) or p.entries[0].diffusers.startswith(KOHYA_FLUX2))
            ),
            "its conversion of kohya's names leaves it out",
            alphas=True,
        )
    if prefixes & {"diffusion_model.", "base_model.model."}:
        for layer, place in read.layers:
            known = _native(layer, place) or (_own(layer, place) and _in_block(place))
            if layer.style != "lora_A" or layer.alpha is not None or not known:
                return _all(read, "it refuses a file with names or alpha tensors that it does not know")
        wrong = "it would load shift and scale of the final modulation in the wrong order"
        return _some(read, lambda _, p: p.entries[0].rows != "swap", wrong, alphas=False)
    return _plain(read)


def _qwen(read: Read) -> Verdict:
    """Qwen-Image and Z-Image."""
    prefixes, styles = _prefixes(read), _styles(read)
    converts = _has_alphas(read) or prefixes & {"lora_unet_", "diffusion_model."} or "lora_A.default" in styles
    if not converts:
        return _plain(read)
    if not prefixes <= {"lora_unet_", "diffusion_model.", ""}:
        return _all(read, "its conversion does not know this prefix")
    if not styles <= {"lora_A", "lora_A.default", "lora_down"}:
        return _all(read, "its conversion does not know these suffixes")

    def known(layer: Layer, place: Place) -> bool:
        if _own(layer, place):
            return True
        native = place.entries[0].native
        if layer.prefix != "lora_unet_":  # fused qkv is known in kohya's spelling alone
            return layer.style == "lora_down" and native.endswith("attention.out")
        own = place.name(place.entries[0].diffusers).replace(".", "_")
        return layer.name == own or (_underscored(layer, place) and _in_block(place))

    unknown = [layer for layer, place in read.layers if not known(layer, place)]
    if any(layer.style == "lora_A" and layer.alpha is not None for layer in unknown):
        return _all(read, "it refuses a file with names that it does not know")
    return _some(read, known, "it knows no such name", alphas=True)


WAN_BLOCK = {f"{attention}.{x}" for attention in ("self_attn", "cross_attn") for x in "qkvo"} | {"ffn.0", "ffn.2"}
"""Linear layers of a block of a text-to-video model."""


def _wan(read: Read) -> Verdict:
    prefixes = _prefixes(read)
    if "diffusion_model." in prefixes:
        styles = _styles(read)
        good = prefixes == {"diffusion_model."} and len(styles) == 1 and styles <= {"lora_A", "lora_down"}
        outside = any(layer.alpha is not None and not _in_block(place) for layer, place in read.layers)
        inside = any(_in_block(place) for _, place in read.layers)
        if not inside or not good or outside or not all(_native(layer, place) for layer, place in read.layers):
            return _all(read, "it refuses a file with names or alpha tensors that it does not know")
        return _some(read, lambda *_: True, "", alphas=True)
    if "lora_unet_" in prefixes:
        blocks: dict[str, set[str]] = {}
        for _, place in read.layers:
            blocks.setdefault(place.number, set()).add(place.entries[0].native.removeprefix("blocks.{}."))
        whole = "" not in blocks and all(found >= WAN_BLOCK for found in blocks.values())
        alphas = all(layer.alpha is not None for layer, _ in read.layers)
        if not whole or not alphas or not all(_underscored(layer, place) for layer, place in read.layers):
            return _all(read, "it takes kohya's names only with alpha tensors and with every layer of the blocks alone")
        return _some(read, lambda *_: True, "", alphas=True)
    return _plain(read)


def _lumina2(read: Read) -> Verdict:
    if "diffusion_model." not in _prefixes(read):
        return _plain(read)
    count = {}
    for layer, place in read.layers:
        if not _native(layer, place) or not _in_block(place) or layer.style != "lora_A" or layer.alpha is not None:
            return _all(read, "it takes native names only without alpha tensors and with blocks alone")
        stack = f"{place.entries[0].native.split('.')[0]}.{place.number}"
        count[stack] = count.get(stack, 0) + 1
    if any(n < (5 if stack.startswith("context") else 6) for stack, n in count.items()):
        return _all(read, "it takes native names only with every layer of a block")
    return _some(read, lambda *_: True, "", alphas=False)
