"""Which layers of a LoRA file diffusers loads as it stands, and how strongly: `load_lora_weights` of each pipeline.

Seen in diffusers 0.42, and compared with it by the tests, file by file. It looks at all keys of a file: one of another
dialect, of a text encoder or of an embedding may turn it to another conversion, or make it refuse the file whole. It
reads the alpha of `lora_adapter_metadata`, and alpha tensors only in the dialects that it converts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .convert import Read
from .keys import Layer
from .loaders import Verdict
from .names import Place
from .scale import diffusers_scale, peft_table

NO_PREFIX = "it reads only keys that begin with `transformer.` and the dialects that it converts"
LINEAR_LAYER = "it cannot read `lora_linear_layer` any more"
DOWN, UP = ".lora_down.weight", ".lora_up.weight"

CLIP = ("lora_te_", "lora_te1_", "text_encoders.clip_l.transformer.")

Known = Callable[[Layer, Place], bool]


def in_diffusers(read: Read) -> Verdict:
    """What `load_lora_weights` of the model's pipeline in diffusers does with a file."""
    table = peft_table(read.file)
    if table and not any(key.startswith("transformer.") for key in table):
        return _all(read, "its metadata (lora_adapter_metadata) lack the part of the transformer")
    rules = {"flux1": _flux1, "chroma": _flux1, "flux2": _flux2, "qwen_image": _qwen, "z_image": _z_image, "wan": _wan}
    return (rules | {"lumina2": _lumina2}).get(read.family.key, _plain)(read)


def _all(read: Read, why: str) -> Verdict:
    """No layer is loaded."""
    return Verdict(fails={layer.key: why for layer, _ in read.layers})


def _some(read: Read, known: Known, why: str, *, alphas: bool) -> Verdict:
    """Layers for which known(layer, place) are loaded; alphas: with their alpha tensors, else at scale 1.

    The alpha of lora_adapter_metadata comes on top, also after a conversion.
    """
    verdict = Verdict()
    table = peft_table(read.file)
    for layer, place in read.layers:
        if known(layer, place):
            scale = layer.alpha / layer.rank if alphas and layer.alpha is not None else 1.0
            verdict.add(read, layer, scale * diffusers_scale(read.file).of(layer) if table else scale)
        else:
            verdict.fails[layer.key] = why
    return verdict


def _refused(read: Read, keys: Iterable[str]) -> Verdict | None:
    """No layer is loaded where there are keys for which diffusers refuses a file."""
    key = next(iter(keys), None)
    return None if key is None else _all(read, f"it refuses a file with a key that it does not know ({key[:80]})")


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


def _any(read: Read, part: str) -> bool:
    """Whether a key of the file holds `part`."""
    return any(part in key for key in read.file.tensors)


def _begins(read: Read, *starts: str) -> bool:
    """Whether a key of the file begins with one of `starts`."""
    return any(key.startswith(starts) for key in read.file.tensors)


def _styles(read: Read) -> set[str]:
    return {layer.style for layer, _ in read.layers}


def _plain(read: Read, encoders: tuple[str, ...] = ("text_encoder.", "text_encoder_2.")) -> Verdict:
    """The path that all pipelines share, SD3's: diffusers' names behind `transformer.`, and `lora` in every key."""
    without = [key for key in read.file.tensors if "lora" not in key]
    return _refused(read, without) or _behind_transformer(read, encoders)


def _behind_transformer(read: Read, encoders: tuple[str, ...], alphas: bool = False) -> Verdict:
    """What is written with diffusers' names behind `transformer.`; alphas: alpha tensors are read."""
    if any(layer.style == "lora_linear_layer" and layer.prefix == "transformer." for layer, _ in read.layers):
        return _all(read, LINEAR_LAYER)
    table = peft_table(read.file)
    for start in encoders:
        if table and _begins(read, start) and not any(key.startswith(start) for key in table):
            return _all(read, f"its metadata (lora_adapter_metadata) lack the part of {start.removesuffix('.')}")
    if table and alphas and _any(read, "alpha"):
        return _all(read, "it refuses a file with both alpha tensors and lora_adapter_metadata")
    # Where there are alpha tensors, a layer without one gets the first of them.
    told = [v for k, v in read.file.tensors.items() if k.startswith("transformer.") and "alpha" in k] if alphas else []
    verdict = Verdict()
    for layer, place in read.layers:
        if layer.prefix != "transformer." or not _own(layer, place) or layer.style not in ("lora_A", "lora.down"):
            verdict.fails[layer.key] = NO_PREFIX
        elif told:
            verdict.add(read, layer, (float(told[0]) if layer.alpha is None else layer.alpha) / layer.rank)
        else:
            verdict.add(read, layer, diffusers_scale(read.file).of(layer) if table else 1.0)
    return verdict


def _flux1(read: Read) -> Verdict:
    """FLUX.1 and Chroma."""
    if _any(read, DOWN):
        if _begins(read, "transformer."):
            if "lora_linear_layer" in _styles(read):
                return _all(read, LINEAR_LAYER)
            return _some(read, lambda la, p: la.prefix == "transformer." and _own(la, p), NO_PREFIX, alphas=False)
        if read.family.key == "chroma" and _begins(read, *CLIP):
            return _all(read, "it refuses a file with a LoRA of a text encoder that the model does not have")
        return _flux1_onetrainer(read) if _begins(read, "lora_transformer_") else _flux1_kohya(read)
    if _any(read, "processor"):
        return _some(
            read,
            lambda la, p: (
                (la.style == "xlabs" and la.prefix in ("", "diffusion_model."))
                or (la.style == "lora_A" and la.prefix == "transformer." and _own(la, p))
            ),
            "it takes the file for one of XLabs', and does not know this name",
            alphas=False,
        )
    if _any(read, "base_model"):
        return _all(read, "it takes a file of raw peft for another dialect, and refuses it")
    if read.family.key == "chroma":
        if _begins(read, "text_encoder.") and not peft_table(read.file):
            return _all(read, "it refuses a file with a LoRA of the T5 text encoder")
        return _behind_transformer(read, (), alphas=True)
    return _behind_transformer(read, ("text_encoder.",), alphas=True)


def _flux1_onetrainer(read: Read) -> Verdict:
    good = ("lora_unet_", "lora_te1_text_model_encoder_layers_")
    refused = _refused(read, (key for key in read.left_out if not key.startswith(good)))
    if refused:
        return refused
    if any(layer.prefix != "lora_transformer_" or ".attn." not in p.entries[0].diffusers for layer, p in read.layers):
        return _all(read, "its conversion of OneTrainer's names knows no feed-forward layers and no modulations")
    if any(layer.alpha is None for layer, _ in read.layers):
        return _all(read, "it takes OneTrainer's names only with alpha tensors")
    return _some(read, lambda *_: True, "", alphas=True)


def _flux1_kohya(read: Read) -> Verdict:
    """kohya's names, and native ones with `lora_down`; all other keys are passed over."""
    norms = any(".norm" in key and ".diff" in key for key in read.file.tensors)
    passed = [".diff_b", "position_embedding", "text_projection", *([".norm", ".diff"] if norms else [])]
    refused = _refused(
        read,
        (
            key
            for key in read.left_out
            if key.startswith(("lora_unet_", "diffusion_model.")) and not any(part in key for part in passed)
        ),
    )
    if refused:
        return refused
    if any(
        not _native_form(la, p) or la.style != "lora_down" or p.entries[0].diffusers.startswith("distilled")
        for la, p in read.layers
    ):
        return _all(read, "it refuses a file with names that it does not know")
    if _begins(read, *CLIP) and not any(key.startswith(CLIP) and "out_proj" in key for key in read.file.tensors):
        return _all(read, "it refuses a file with an unusual part of the text encoder (without its out_proj)")
    return _some(read, lambda _, p: _in_block(p), "its conversion drops layers outside the blocks", alphas=True)


def _native_form(layer: Layer, place: Place) -> bool:
    if layer.prefix == "lora_unet_":
        return _underscored(layer, place)
    return layer.prefix == "diffusion_model." and _native(layer, place)


KOHYA_FLUX2 = ("x_embedder", "context_embedder", "time_guidance_embed.timestep_embedder", "proj_out")


def _flux2(read: Read) -> Verdict:
    if _any(read, DOWN):
        return _some(
            read,
            lambda la, p: (
                la.style == "lora_down"
                and la.prefix == "lora_unet_"
                and _underscored(la, p)
                and (_in_block(p) or p.entries[0].diffusers.startswith(KOHYA_FLUX2))
            ),
            "a key with lora_down makes it read the file as one of kohya's, and its conversion leaves this out",
            alphas=True,
        )
    if not _begins(read, "diffusion_model.", "base_model.model."):
        return _plain(read, ())
    # It cuts so many letters off every key, whatever they are.
    cut = {
        key: key.replace("base_model.model.", "diffusion_model.")[len("diffusion_model.") :] for key in read.left_out
    }
    blocks = ("single_transformer_blocks.", "transformer_blocks.", "sformer_blocks.")
    refused = _refused(read, (key for key, name in cut.items() if not name.startswith(blocks) or "lora" not in name))
    if refused:
        return refused
    for layer, place in read.layers:
        known = _native(layer, place) or (_own(layer, place) and _in_block(place))
        if layer.style != "lora_A" or layer.alpha is not None or not known:
            return _all(read, "it refuses a file with names or alpha tensors that it does not know")
    wrong = "it would load shift and scale of the final modulation in the wrong order"
    return _some(read, lambda _, p: p.entries[0].rows != "swap", wrong, alphas=False)


QWEN_START = "transformer_blocks_"
QWEN_TOP = ("img_in.", "txt_in.", "proj_out.", "norm_out_linear.", "time_text_embed_timestep_embedder_linear_")


def _qwen(read: Read) -> Verdict:
    if _begins(read, "lora_unet_"):
        # It cuts so many letters off every key but those of the layers outside the blocks, whatever they are.
        names = {key: key.removeprefix("lora_unet_") for key in read.file.tensors}
        names = {k: n for k, n in names.items() if not (n.startswith(QWEN_TOP) or n.endswith(".alpha"))}
        refused = _refused(read, (k for k, n in names.items() if n.rfind(".lora_") < len(QWEN_START)))
        if refused:
            return refused
    return _converted(read, (".alpha",), ())


def _z_image(read: Read) -> Verdict:
    # It renames the alpha of these, and not the factors.
    tensors = read.file.tensors
    lost = (key for key in tensors if key.endswith(".out.alpha") and f"{key[:-6]}.lora_A.weight" in tensors)
    return _refused(read, lost) or _converted(read, (), (".lora.down.weight", ".lora.up.weight"))


def _converted(read: Read, passed: tuple[str, ...], also: tuple[str, ...]) -> Verdict:
    """Qwen-Image and Z-Image; passed: parts of keys that are dropped, also: ends of keys that are read besides."""
    tensors = read.file.tensors
    alphas = any(key.endswith(".alpha") for key in tensors)
    if not (alphas or _begins(read, "lora_unet_", "diffusion_model.") or _any(read, "default.")):
        return _plain(read, ())
    prefixes = {layer.prefix for layer, _ in read.layers}
    if not prefixes <= {"lora_unet_", "diffusion_model.", ""}:
        return _all(read, "its conversion does not know this prefix")
    ends = (DOWN, UP) if _any(read, DOWN) or _any(read, UP) else (".lora_A.weight", ".lora_B.weight")
    factors = {key.replace(".default.", ".") for key in tensors if not key.endswith(".alpha")}
    paired = {key.removesuffix(end) for key in factors for end in (*ends, *also) if key.endswith(end)}
    refused = _refused(
        read,
        (
            key
            for key in tensors
            if not key.replace(".default.", ".").endswith((*ends, *also))
            and not any(part in key for part in passed)
            and not (key.endswith(".alpha") and key.removesuffix(".alpha") in paired)
        ),
    )
    return refused or _some(read, _converted_name, "it knows no such name", alphas=True)


def _converted_name(layer: Layer, place: Place) -> bool:
    if _own(layer, place):
        return True
    native = place.entries[0].native
    if layer.prefix != "lora_unet_":  # fused qkv is known in kohya's spelling alone
        return layer.style == "lora_down" and native.endswith("attention.out")
    own = place.name(place.entries[0].diffusers).replace(".", "_")
    return layer.name == own or (_underscored(layer, place) and _in_block(place))


WAN_BLOCK = {f"{attention}.{x}" for attention in ("self_attn", "cross_attn") for x in "qkvo"} | {"ffn.0", "ffn.2"}
"""Linear layers of a block of a text-to-video model."""


def _wan(read: Read) -> Verdict:
    prefixes = {layer.prefix for layer, _ in read.layers}
    if _begins(read, "diffusion_model."):
        refused = _refused(read, (key for key in read.left_out if not _wan_passes(read, key)))
        if refused:
            return refused
        styles = _styles(read)
        good = prefixes == {"diffusion_model."} and len(styles) == 1 and styles <= {"lora_A", "lora_down"}
        outside = any(layer.alpha is not None and not _in_block(place) for layer, place in read.layers)
        inside = any(_in_block(place) for _, place in read.layers)
        if not inside or not good or outside or not all(_native(layer, place) for layer, place in read.layers):
            return _all(read, "it refuses a file with names or alpha tensors that it does not know")
        return _some(read, lambda *_: True, "", alphas=True)
    if _begins(read, "lora_unet_"):
        refused = _refused(read, read.left_out)
        if refused:
            return refused
        blocks: dict[str, set[str]] = {}
        for _, place in read.layers:
            blocks.setdefault(place.number, set()).add(place.entries[0].native.removeprefix("blocks.{}."))
        whole = "" not in blocks and all(found >= WAN_BLOCK for found in blocks.values())
        alphas = all(layer.alpha is not None for layer, _ in read.layers)
        if not whole or not alphas or not all(_underscored(layer, place) for layer, place in read.layers):
            return _all(read, "it takes kohya's names only with alpha tensors and with every layer of the blocks alone")
        return _some(read, lambda *_: True, "", alphas=True)
    return _plain(read, ())


def _wan_passes(read: Read, key: str) -> bool:
    """Changes of norms and biases are dropped, or read as biases."""
    return key.endswith((".diff", ".diff_b"))


def _lumina2(read: Read) -> Verdict:
    if not _begins(read, "diffusion_model."):
        return _plain(read, ())
    refused = _refused(read, read.left_out)
    if refused:
        return refused
    count = {}
    for layer, place in read.layers:
        if not _native(layer, place) or not _in_block(place) or layer.style != "lora_A" or layer.alpha is not None:
            return _all(read, "it takes native names only without alpha tensors and with blocks alone")
        stack = f"{place.entries[0].native.split('.')[0]}.{place.number}"
        count[stack] = count.get(stack, 0) + 1
    if any(n < (5 if stack.startswith("context") else 6) for stack, n in count.items()):
        return _all(read, "it takes native names only with every layer of a block")
    return _some(read, lambda *_: True, "", alphas=False)
