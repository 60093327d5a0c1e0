"""Which layers of a LoRA file the pipelines of FLUX.1, Chroma and FLUX.2 load; see `diffusers_loader`."""

from __future__ import annotations

from .diffusers_keys import (
    DOWN,
    LINEAR_LAYER,
    NO_PREFIX,
    Refused,
    any_key,
    begins,
    behind_transformer,
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
from .scale import peft_table
from .understand import Read

CLIP = ("lora_te_", "lora_te1_", "text_encoders.clip_l.transformer.")


def flux1(read: Read) -> Verdict:
    """FLUX.1 and Chroma."""
    if any_key(read, DOWN):
        if begins(read, "transformer."):
            if "lora_linear_layer" in styles(read):
                raise Refused(LINEAR_LAYER)
            return some_loaded(
                read, lambda la, p: la.prefix == "transformer." and is_own(la, p), NO_PREFIX, alphas=False
            )
        if read.family.key == "chroma" and begins(read, *CLIP):
            raise Refused("it refuses a file with a LoRA of a text encoder that the model does not have")
        return _onetrainer(read) if begins(read, "lora_transformer_") else _kohya(read)
    if any_key(read, "processor"):
        return some_loaded(
            read,
            lambda la, p: (
                (la.style == "xlabs" and la.prefix in ("", "diffusion_model."))
                or (la.style == "lora_A" and la.prefix == "transformer." and is_own(la, p))
            ),
            "it takes the file for one of XLabs', and does not know this name",
            alphas=False,
        )
    if any_key(read, "base_model"):
        raise Refused("it takes a file of raw peft for another dialect, and refuses it")
    if read.family.key == "chroma":
        if begins(read, "text_encoder.") and not peft_table(read.file):
            raise Refused("it refuses a file with a LoRA of the T5 text encoder")
        return behind_transformer(read, (), alphas=True)
    return behind_transformer(read, ("text_encoder.",), alphas=True)


def _onetrainer(read: Read) -> Verdict:
    good = ("lora_unet_", "lora_te1_text_model_encoder_layers_")
    refuse_keys(key for key in read.left_out if not key.startswith(good))
    outside = ("x_embedder", "context_embedder", "time_text_embed.", "norm_out.", "proj_out")
    names = [(layer, p.entries[0].diffusers) for layer, p in read.layers]
    if any(la.prefix != "lora_transformer_" or not (".attn." in n or n.startswith(outside)) for la, n in names):
        raise Refused("its conversion of OneTrainer's names knows no feed-forward layers and no modulations")
    if any(layer.alpha is None for layer, _ in read.layers):
        raise Refused("it takes OneTrainer's names only with alpha tensors")
    return some_loaded(read, lambda *_: True, "", alphas=True)


def _kohya(read: Read) -> Verdict:
    """kohya's names, and native ones with `lora_down`; all other keys are passed over."""
    norms = any(".norm" in key and ".diff" in key for key in read.file.tensors)
    passed = [".diff_b", "position_embedding", "text_projection", *([".norm", ".diff"] if norms else [])]
    refuse_keys(
        key
        for key in read.left_out
        if key.startswith(("lora_unet_", "diffusion_model.")) and not any(part in key for part in passed)
    )
    if any(
        not _native_form(la, p) or la.style != "lora_down" or p.entries[0].diffusers.startswith("distilled")
        for la, p in read.layers
    ):
        raise Refused("it refuses a file with names that it does not know")
    if begins(read, *CLIP) and not any(key.startswith(CLIP) and "out_proj" in key for key in read.file.tensors):
        raise Refused("it refuses a file with an unusual part of the text encoder (without its out_proj)")
    return some_loaded(read, lambda _, p: in_block(p), "its conversion drops layers outside the blocks", alphas=True)


def _native_form(layer: Layer, place: Place) -> bool:
    if layer.prefix == "lora_unet_":
        return is_underscored(layer, place)
    return layer.prefix == "diffusion_model." and is_native(layer, place)


KOHYA_FLUX2 = ("x_embedder", "context_embedder", "time_guidance_embed.timestep_embedder", "proj_out")


def flux2(read: Read) -> Verdict:
    if any_key(read, DOWN):
        return some_loaded(
            read,
            lambda la, p: (
                la.style == "lora_down"
                and la.prefix == "lora_unet_"
                and is_underscored(la, p)
                and (in_block(p) or p.entries[0].diffusers.startswith(KOHYA_FLUX2))
            ),
            "a key with lora_down makes it read the file as one of kohya's, and its conversion leaves this out",
            alphas=True,
        )
    if not begins(read, "diffusion_model.", "base_model.model."):
        return plain(read, ())
    # It cuts so many letters off every key, whatever they are.
    cut = {
        key: key.replace("base_model.model.", "diffusion_model.")[len("diffusion_model.") :] for key in read.left_out
    }
    blocks = ("single_transformer_blocks.", "transformer_blocks.", "sformer_blocks.")
    refuse_keys((key for key, name in cut.items() if not name.startswith(blocks) or "lora" not in name))
    for layer, place in read.layers:
        known = is_native(layer, place) or (is_own(layer, place) and in_block(place))
        if layer.style != "lora_A" or layer.alpha is not None or not known:
            raise Refused("it refuses a file with names or alpha tensors that it does not know")
    wrong = "it would load shift and scale of the final modulation in the wrong order"
    return some_loaded(read, lambda _, p: p.entries[0].rows != "swap", wrong, alphas=False)
