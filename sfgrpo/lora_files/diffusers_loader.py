"""Which layers of a LoRA file diffusers loads as it stands, and how strongly: `load_lora_weights` of each pipeline.

Seen in diffusers 0.42, and compared with it by the tests, file by file. It looks at all keys of a file: one of another
dialect, of a text encoder or of an embedding may turn it to another conversion, or make it refuse the file whole. It
reads the alpha of `lora_adapter_metadata`, and alpha tensors only in the dialects that it converts.
"""

from __future__ import annotations

from collections.abc import Mapping

from .diffusers_flux import flux1, flux2
from .diffusers_keys import (
    DOWN,
    Refused,
    any_key,
    begins,
    in_block,
    is_native,
    is_own,
    is_underscored,
    plain,
    refuse_keys,
    some_loaded,
    styles,
)
from .keys import Layer
from .loaders import Verdict
from .names import Place
from .scale import of_pattern, peft_table
from .understand import Read

UP = ".lora_up.weight"


def in_diffusers(read: Read) -> Verdict:
    """What `load_lora_weights` of the model's pipeline in diffusers does with a file."""
    rules = {"flux1": flux1, "chroma": flux1, "flux2": flux2, "qwen_image": _qwen, "z_image": _z_image, "wan": _wan}
    rule = (rules | {"lumina2": _lumina2}).get(read.family.key, plain)
    table = peft_table(read.file)
    try:
        if table and not any(key.startswith("transformer.") for key in table):
            raise Refused("its metadata (lora_adapter_metadata) lack the part of the transformer")
        verdict = rule(read)
        loaded = [(layer, place) for layer, place in read.layers if layer.key in verdict.loads]
        if table and not all(_rank_fits(table, layer, place) for layer, place in loaded):
            raise Refused("it refuses a file whose tensors have another rank than its metadata (lora_adapter_metadata)")
    except Refused as why:
        return Verdict(fails={layer.key: str(why) for layer, _ in read.layers})
    return verdict


def _rank_fits(table: Mapping, layer: Layer, place: Place) -> bool:
    """Whether a layer has the rank that lora_adapter_metadata give it; 8 is peft's default."""
    patterns = (table.get("transformer.rank_pattern") or {}).items()
    ranks = (
        of_pattern(patterns, place.name(entry.diffusers), table.get("transformer.r", 8)) for entry in place.entries
    )
    return all(rank == layer.rank for rank in ranks)


QWEN_START = "transformer_blocks_"
QWEN_TOP = ("img_in.", "txt_in.", "proj_out.", "norm_out_linear.", "time_text_embed_timestep_embedder_linear_")


def _qwen(read: Read) -> Verdict:
    if begins(read, "lora_unet_"):
        # It cuts so many letters off every key but those of the layers outside the blocks, whatever they are.
        names = {key: key.removeprefix("lora_unet_") for key in read.file.tensors}
        names = {k: n for k, n in names.items() if not (n.startswith(QWEN_TOP) or n.endswith(".alpha"))}
        refuse_keys((k for k, n in names.items() if n.rfind(".lora_") < len(QWEN_START)))
    return _converted(read, (".alpha",), ())


def _z_image(read: Read) -> Verdict:
    # It renames the alpha of these, and not the factors.
    tensors = read.file.tensors
    lost = (key for key in tensors if key.endswith(".out.alpha") and f"{key[:-6]}.lora_A.weight" in tensors)
    refuse_keys(lost)
    return _converted(read, (), (".lora.down.weight", ".lora.up.weight"))


def _converted(read: Read, passed: tuple[str, ...], also: tuple[str, ...]) -> Verdict:
    """Qwen-Image and Z-Image; passed: parts of keys that are dropped, also: ends of keys that are read besides."""
    tensors = read.file.tensors
    alphas = any(key.endswith(".alpha") for key in tensors)
    if not (alphas or begins(read, "lora_unet_", "diffusion_model.") or any_key(read, "default.")):
        return plain(read, ())
    prefixes = {layer.prefix for layer, _ in read.layers}
    if not prefixes <= {"lora_unet_", "diffusion_model.", ""}:
        raise Refused("its conversion does not know this prefix")
    ends = (DOWN, UP) if any_key(read, DOWN) or any_key(read, UP) else (".lora_A.weight", ".lora_B.weight")
    factors = {key.replace(".default.", ".") for key in tensors if not key.endswith(".alpha")}
    paired = {key.removesuffix(end) for key in factors for end in (*ends, *also) if key.endswith(end)}
    refuse_keys(
        key
        for key in tensors
        if not key.replace(".default.", ".").endswith((*ends, *also))
        and not any(part in key for part in passed)
        and not (key.endswith(".alpha") and key.removesuffix(".alpha") in paired)
    )
    return some_loaded(read, _converted_name, "it knows no such name", alphas=True)


def _converted_name(layer: Layer, place: Place) -> bool:
    if is_own(layer, place):
        return True
    native = place.entries[0].native
    if layer.prefix != "lora_unet_":  # fused qkv is known in kohya's spelling alone
        return layer.style == "lora_down" and native.endswith("attention.out")
    own = place.name(place.entries[0].diffusers).replace(".", "_")
    return layer.name == own or (is_underscored(layer, place) and in_block(place))


WAN_BLOCK = {f"{attention}.{x}" for attention in ("self_attn", "cross_attn") for x in "qkvo"} | {"ffn.0", "ffn.2"}
"""Linear layers of a block of a text-to-video model."""


def _wan(read: Read) -> Verdict:
    prefixes = {layer.prefix for layer, _ in read.layers}
    if begins(read, "diffusion_model.", "lora_unet_") and any_key(read, "k_img") != any_key(read, "v_img"):
        raise Refused("it takes the layers of the image inputs only in pairs (k_img, v_img)")
    if begins(read, "diffusion_model."):
        # Changes of norms and biases are dropped, or read as biases.
        refuse_keys(key for key in read.left_out if not key.endswith((".diff", ".diff_b")))
        found = styles(read)
        good = prefixes == {"diffusion_model."} and len(found) == 1 and found <= {"lora_A", "lora_down"}
        outside = any(layer.alpha is not None and not in_block(place) for layer, place in read.layers)
        inside = any(in_block(place) for _, place in read.layers)
        if not inside or not good or outside or not all(is_native(layer, place) for layer, place in read.layers):
            raise Refused("it refuses a file with names or alpha tensors that it does not know")
        return some_loaded(read, lambda *_: True, "", alphas=True)
    if begins(read, "lora_unet_"):
        refuse_keys(read.left_out)
        blocks: dict[str, set[str]] = {}
        for _, place in read.layers:
            blocks.setdefault(place.number, set()).add(place.entries[0].native.removeprefix("blocks.{}."))
        whole = "" not in blocks and all(found >= WAN_BLOCK for found in blocks.values())
        alphas = all(layer.alpha is not None for layer, _ in read.layers)
        if not whole or not alphas or not all(is_underscored(layer, place) for layer, place in read.layers):
            raise Refused("it takes kohya's names only with alpha tensors and with every layer of the blocks alone")
        return some_loaded(read, lambda *_: True, "", alphas=True)
    return plain(read, ())


def _lumina2(read: Read) -> Verdict:
    if not begins(read, "diffusion_model."):
        return plain(read, ())
    refuse_keys(read.left_out)
    count = {}
    for layer, place in read.layers:
        if not is_native(layer, place) or not in_block(place) or layer.style != "lora_A" or layer.alpha is not None:
            raise Refused("it takes native names only without alpha tensors and with blocks alone")
        stack = f"{place.entries[0].native.split('.')[0]}.{place.number}"
        count[stack] = count.get(stack, 0) + 1
    if any(n < (5 if stack.startswith("context") else 6) for stack, n in count.items()):
        raise Refused("it takes native names only with every layer of a block")
    return some_loaded(read, lambda *_: True, "", alphas=False)
