"""The linear layers of each model family: diffusers' names -> the model's own, a function for each family.

A further family is a function here and a place in FAMILIES, its sizes in `recognise.py`, and in `loaders.py` what
diffusers' loader does, where it has a path of its own.
"""

from __future__ import annotations

from .names import Entry, Family

Prefix = tuple[str, str]
"""What stands before diffusers' names and before the native ones."""

TOP = ("", "")
"""Layers outside the blocks."""
ATTENTION = ("attn.to_q", "attn.to_k", "attn.to_v")
ADDED = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")
FINAL_MODULATION = Entry("norm_out.linear", "final_layer.adaLN_modulation.1", "swap")
"""Of SD3, FLUX.1 and FLUX.2: scale before shift in diffusers."""


def _entries(prefix: Prefix, pairs: dict[str, str], rows: str = "all") -> list[Entry]:
    """Entries of diffusers' names -> native names, both behind a prefix."""
    return [Entry(prefix[0] + d, prefix[1] + n, rows) for d, n in pairs.items()]


def _fused(prefix: Prefix, names: tuple[str, ...], native: str, first: str = "") -> list[Entry]:
    """Entries of q, k, v (and mlp) that lie in one native layer, in this order."""
    parts = ("q", "k", "v", "mlp")[: len(names)]
    return [Entry(prefix[0] + d, prefix[1] + native, first + part) for d, part in zip(names, parts, strict=True)]


def sd3() -> Family:
    """Stable Diffusion 3 and 3.5; the second attention is that of SD3.5-Medium."""
    block = ("transformer_blocks.{}.", "joint_blocks.{}.")
    pairs = {
        "attn.to_out.0": "x_block.attn.proj",
        "attn2.to_out.0": "x_block.attn2.proj",
        "attn.to_add_out": "context_block.attn.proj",
        "norm1.linear": "x_block.adaLN_modulation.1",
        "ff.net.0.proj": "x_block.mlp.fc1",
        "ff.net.2": "x_block.mlp.fc2",
        "ff_context.net.0.proj": "context_block.mlp.fc1",
        "ff_context.net.2": "context_block.mlp.fc2",
    }
    top = {"context_embedder": "context_embedder", "proj_out": "final_layer.linear"}
    for d, n in (("timestep", "t"), ("text", "y")):
        top |= {f"time_text_embed.{d}_embedder.linear_{i}": f"{n}_embedder.mlp.{j}" for i, j in ((1, 0), (2, 2))}
    return Family(
        "sd3",
        "Stable Diffusion 3 / 3.5",
        (
            *_fused(block, ATTENTION, "x_block.attn.qkv"),
            *_fused(block, ("attn2.to_q", "attn2.to_k", "attn2.to_v"), "x_block.attn2.qkv"),
            *_fused(block, ADDED, "context_block.attn.qkv"),
            *_entries(block, pairs),
            *_entries(block, {"norm1_context.linear": "context_block.adaLN_modulation.1"}, "swap_last"),
            *_entries(TOP, top),
            FINAL_MODULATION,
        ),
        comfy_prefixes=("transformer.", "base_model.model.", "lora_transformer_", "lycoris_"),
    )


DOUBLE = ("transformer_blocks.{}.", "double_blocks.{}.")
SINGLE = ("single_transformer_blocks.{}.", "single_blocks.{}.")
EMBEDDER = ((1, "in_layer"), (2, "out_layer"))
FLUX_PREFIXES = ("transformer.", "", "lora_transformer_", "lycoris_")


def _flux_attention() -> list[Entry]:
    """What FLUX.1, FLUX.2 and Chroma share."""
    return [
        *_fused(DOUBLE, ATTENTION, "img_attn.qkv"),
        *_fused(DOUBLE, ADDED, "txt_attn.qkv"),
        *_entries(DOUBLE, {"attn.to_out.0": "img_attn.proj", "attn.to_add_out": "txt_attn.proj"}),
        *_entries(TOP, {"x_embedder": "img_in", "context_embedder": "txt_in", "proj_out": "final_layer.linear"}),
    ]


def _flux_feed_forward(first: str, second: str) -> list[Entry]:
    pairs = {f"ff.{first}": "img_mlp.0", f"ff.{second}": "img_mlp.2"}
    pairs |= {f"ff_context.{first}": "txt_mlp.0", f"ff_context.{second}": "txt_mlp.2"}
    return _entries(DOUBLE, pairs)


def _flux_blocks() -> list[Entry]:
    """What FLUX.1 and Chroma share."""
    return [
        *_flux_attention(),
        *_flux_feed_forward("net.0.proj", "net.2"),
        *_fused(SINGLE, (*ATTENTION, "proj_mlp"), "linear1", "1"),
        *_entries(SINGLE, {"proj_out": "linear2"}),
    ]


def _embedders(pairs: dict[str, str]) -> list[Entry]:
    """The two layers of each embedder: diffusers' name -> the native one."""
    return _entries(TOP, {f"{d}.linear_{i}": f"{n}.{layer}" for d, n in pairs.items() for i, layer in EMBEDDER})


def flux1() -> Family:
    """FLUX.1."""
    embedders = {"timestep": "time", "text": "vector", "guidance": "guidance"}
    return Family(
        "flux1",
        "FLUX.1",
        (
            *_flux_blocks(),
            *_entries(DOUBLE, {"norm1.linear": "img_mod.lin", "norm1_context.linear": "txt_mod.lin"}),
            *_entries(SINGLE, {"norm.linear": "modulation.lin"}),
            *_embedders({f"time_text_embed.{d}_embedder": f"{n}_in" for d, n in embedders.items()}),
            FINAL_MODULATION,
        ),
        comfy_prefixes=FLUX_PREFIXES,
    )


def chroma() -> Family:
    """Chroma: FLUX.1 with a guidance network in the place of all modulations."""
    guidance = ("distilled_guidance_layer.", "distilled_guidance_layer.")
    return Family(
        "chroma",
        "Chroma",
        (
            *_flux_blocks(),
            *_entries(guidance, {"in_proj": "in_proj", "out_proj": "out_proj"}),
            *_entries(guidance, {f"layers.{{}}.linear_{i}": f"layers.{{}}.{layer}" for i, layer in EMBEDDER}),
        ),
        comfy_prefixes=FLUX_PREFIXES,
        comfy_lacks=("distilled_guidance_layer.",),
    )


def flux2() -> Family:
    """FLUX.2: attention and feed-forward of a single block are one layer in diffusers too; shared modulations."""
    embedders = {"timestep_embedder": "time_in", "guidance_embedder": "guidance_in"}
    modulations = ("double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation")
    return Family(
        "flux2",
        "FLUX.2",
        (
            *_flux_attention(),
            *_flux_feed_forward("linear_in", "linear_out"),
            *_entries(SINGLE, {"attn.to_qkv_mlp_proj": "linear1", "attn.to_out": "linear2"}),
            *_embedders({f"time_guidance_embed.{d}": n for d, n in embedders.items()}),
            *_entries(TOP, {f"{name}.linear": f"{name}.lin" for name in modulations}),
            FINAL_MODULATION,
        ),
        comfy_prefixes=FLUX_PREFIXES,
        comfy_lacks=("time_guidance_embed.", "double_stream_modulation", "single_stream_modulation"),
    )


def qwen_image() -> Family:
    """Qwen-Image: the names of both are the same."""
    inner = (*ATTENTION, *ADDED, "attn.to_out.0", "attn.to_add_out", "img_mod.1", "txt_mod.1")
    mlp = tuple(f"{side}_mlp.net.{layer}" for side in ("img", "txt") for layer in ("0.proj", "2"))
    top = ("img_in", "txt_in", "proj_out", "norm_out.linear")
    time = tuple(f"time_text_embed.timestep_embedder.linear_{i}" for i in (1, 2))
    names = (*(f"transformer_blocks.{{}}.{n}" for n in inner + mlp), *top, *time)
    return Family(
        "qwen_image",
        "Qwen-Image",
        tuple(Entry(name, name) for name in names),
        comfy_prefixes=("transformer.", "", "lycoris_"),
    )


STACKS = ("layers.{}.", "noise_refiner.{}.", "context_refiner.{}.")
"""Of blocks, in Z-Image and Lumina 2."""


def z_image() -> Family:
    """Z-Image."""
    same = ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3", "adaLN_modulation.0")
    entries = []
    for stack in STACKS:
        block = (stack, stack)
        entries += _fused(block, ("attention.to_q", "attention.to_k", "attention.to_v"), "attention.qkv")
        entries += _entries(block, {"attention.to_out.0": "attention.out"} | {name: name for name in same})
    top = {
        "all_final_layer.2-1.linear": "final_layer.linear",
        "all_final_layer.2-1.adaLN_modulation.1": "final_layer.adaLN_modulation.1",
        "all_x_embedder.2-1": "x_embedder",
    } | {name: name for name in ("cap_embedder.1", "t_embedder.mlp.0", "t_embedder.mlp.2")}
    return Family(
        "z_image",
        "Z-Image",
        (*entries, *_entries(TOP, top)),
        comfy_prefixes=("diffusion_model.", "transformer.", "", "lycoris_"),
    )


def lumina2() -> Family:
    """Lumina-Image 2: k and v are narrower than q."""
    entries = []
    pairs = {
        "attn.to_out.0": "attention.out",
        "norm1.linear": "adaLN_modulation.1",
    }
    pairs |= {f"feed_forward.linear_{i}": f"feed_forward.w{i}" for i in (1, 2, 3)}
    for stack in STACKS:
        entries += [*_fused((stack, stack), ATTENTION, "attention.qkv"), *_entries((stack, stack), pairs)]
    top = {
        "x_embedder": "x_embedder",
        "norm_out.linear_1": "final_layer.adaLN_modulation.1",
        "norm_out.linear_2": "final_layer.linear",
        "time_caption_embed.caption_embedder.1": "cap_embedder.1",
        "time_caption_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
        "time_caption_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
    }
    entries += _entries(TOP, top)
    return Family("lumina2", "Lumina-Image 2", tuple(entries), native_export=True)


def wan() -> Family:
    """Wan 2.1 and 2.2, with the image inputs of 2.1."""
    block = ("blocks.{}.", "blocks.{}.")
    pairs = {
        f"{d}.{dp}": f"{n}.{np}"
        for d, n in (("attn1", "self_attn"), ("attn2", "cross_attn"))
        for dp, np in (("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "o"))
    }
    pairs |= {"attn2.add_k_proj": "cross_attn.k_img", "attn2.add_v_proj": "cross_attn.v_img"}
    pairs |= {"ffn.net.0.proj": "ffn.0", "ffn.net.2": "ffn.2"}
    top = {
        "time_embedder.linear_1": "time_embedding.0",
        "time_embedder.linear_2": "time_embedding.2",
        "text_embedder.linear_1": "text_embedding.0",
        "text_embedder.linear_2": "text_embedding.2",
        "time_proj": "time_projection.1",
        "image_embedder.ff.net.0.proj": "img_emb.proj.1",
        "image_embedder.ff.net.2": "img_emb.proj.3",
    }
    entries = (*_entries(block, pairs), *_entries(("condition_embedder.", ""), top), Entry("proj_out", "head.head"))
    return Family("wan", "Wan 2.1 / 2.2", entries, native_export=True)


FAMILIES = {
    family.key: family for family in (sd3(), flux1(), flux2(), qwen_image(), z_image(), wan(), chroma(), lumina2())
}
