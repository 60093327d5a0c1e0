"""Which layers of a LoRA file ComfyUI loads as it stands, and how strongly, at strength 1.0.

Seen in ComfyUI 0.33.0 (its table of keys), and compared with it by the tests; what diffusers does is in
`diffusers_loader.py`. ComfyUI reads `.alpha` tensors and no metadata, and passes over keys that it does not know.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .keys import Layer
from .names import Place
from .understand import Read

USO = ("single_blocks.37.processor.qkv_lora.up.weight", "double_blocks.18.processor.qkv_lora2.up.weight")
"""Keys by which ComfyUI knows a file in XLabs' names for one of USO's, the only ones in these names that it reads."""
WAN_FUN = "lora_unet__blocks_0_cross_attn_k.lora_down.weight"
"""The key by which ComfyUI knows a file of Wan-Fun's."""


@dataclass
class Verdict:
    """What one loader makes of a file."""

    loads: list[str] = field(default_factory=list)
    """Layers, as the file writes them."""
    fails: dict[str, str] = field(default_factory=dict)
    """Layer -> why it is not loaded."""
    ratios: list[float] = field(default_factory=list)
    """For each that is: its effect over the effect that its trainer meant."""

    def add(self, read: Read, layer: Layer, scale: float) -> None:
        """Note that a layer is loaded, as B A times `scale`."""
        meant = read.scale.of(layer)
        self.loads.append(layer.key)
        self.ratios.append(scale / meant if meant else 1.0)


def in_comfyui(read: Read) -> Verdict:
    """What ComfyUI's LoRA loaders do."""
    verdict = Verdict()
    uso = all(key in read.file.tensors for key in USO)
    for layer, place in read.layers:
        if uso and layer.style == "xlabs" and not layer.prefix:
            verdict.add(read, layer, 1.0)
        elif layer.key not in comfyui_names(read, place) or layer.style in ("lora_A.adapter", "xlabs"):
            verdict.fails[layer.key] = "it has no such name for this model"
        else:
            verdict.add(read, layer, 1.0 if layer.alpha is None else layer.alpha / layer.rank)
    return verdict


def comfyui_names(read: Read, place: Place) -> set[str]:
    """All names by which ComfyUI knows a layer."""
    family, native = read.family, place.name(place.entries[0].native)
    names = {f"diffusion_model.{native}", f"lora_unet_{native.replace('.', '_')}"}
    if family.key == "wan" and WAN_FUN in read.file.tensors:
        names.add(f"lora_unet__{native.replace('.', '_')}")
    for entry in place.entries:
        if family.comfy_has(entry):
            name = place.name(entry.diffusers)
            names |= {p + (name.replace(".", "_") if p.endswith("_") else name) for p in family.comfy_prefixes}
    return names
