"""Names of the linear layers of each model family: those of diffusers and the model's own, which ComfyUI uses.

A native layer may hold several of diffusers' in its rows (qkv), and a modulation may have its halves (shift and scale)
in the other order. `Entry.rows` says how; the rows of the factor B are cut or swapped, A stays. Block numbers are `{}`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
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
    words: tuple[str, ...] = field(default=(), compare=False)
    """What a file's metadata calls it, in small letters."""

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
        """The place of a name without prefix, with dots or with underscores in their stead."""
        for template, number in _templates(name):
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


def cut(entry: Entry, b: Tensor, width: int) -> Tensor:
    """Rows of a native factor B (out, rank) that are diffusers' layer; width: the layer's inputs.

    Raises ValueError where the rows do not divide so.
    """
    if entry.rows in ("swap", "swap_last"):
        return _swapped(b) if entry.rows == "swap" or len(b) == 2 * width else b
    if entry.rows == "all":
        return b
    part = entry.rows.removeprefix("1")
    rest = len(b) - width
    sizes = [width, width, width, len(b) - 3 * width] if entry.rows[0] == "1" else [width, rest // 2, rest // 2]
    if min(sizes) <= 0 or sum(sizes) != len(b):
        raise ValueError(f"{len(b)} rows of {entry.native} do not divide into q, k and v of width {width}")
    return b.split(sizes)[["q", "k", "v", "mlp"].index(part)]


def to_native(entry: Entry, b: Tensor, width: int) -> Tensor:
    """The rows of diffusers' factor in the native order (swapping twice changes nothing)."""
    return cut(entry, b, width) if entry.rows.startswith("swap") else b


def _swapped(b: Tensor) -> Tensor:
    first, second = b.chunk(2)
    return torch.cat([second, first])


def _entries(prefix: tuple[str, str], pairs: dict[str, str], rows: str = "all") -> list[Entry]:
    """Entries of diffusers' names -> native names, both behind a prefix."""
    return [Entry(prefix[0] + d, prefix[1] + n, rows) for d, n in pairs.items()]


def _qkv(prefix: tuple[str, str], names: tuple[str, ...], native: str, first: str = "") -> list[Entry]:
    parts = ("q", "k", "v", "mlp")[: len(names)]
    return [Entry(prefix[0] + d, prefix[1] + native, first + part) for d, part in zip(names, parts, strict=True)]


ATTENTION = ("attn.to_q", "attn.to_k", "attn.to_v")
ADDED = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")


def _sd3() -> list[Entry]:
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
    top = {
        "context_embedder": "context_embedder",
        "time_text_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
        "time_text_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
        "time_text_embed.text_embedder.linear_1": "y_embedder.mlp.0",
        "time_text_embed.text_embedder.linear_2": "y_embedder.mlp.2",
        "proj_out": "final_layer.linear",
    }
    return [
        *_qkv(block, ATTENTION, "x_block.attn.qkv"),
        *_qkv(block, ("attn2.to_q", "attn2.to_k", "attn2.to_v"), "x_block.attn2.qkv"),
        *_qkv(block, ADDED, "context_block.attn.qkv"),
        *_entries(block, pairs),
        *_entries(block, {"norm1_context.linear": "context_block.adaLN_modulation.1"}, "swap_last"),
        *_entries(("", ""), top),
        Entry("norm_out.linear", "final_layer.adaLN_modulation.1", "swap"),
    ]


FLUX_DOUBLE, FLUX_SINGLE = (
    ("transformer_blocks.{}.", "double_blocks.{}."),
    ("single_transformer_blocks.{}.", "single_blocks.{}."),
)


def _flux_attention() -> list[Entry]:
    pairs = {"attn.to_out.0": "img_attn.proj", "attn.to_add_out": "txt_attn.proj"}
    return [
        *_qkv(FLUX_DOUBLE, ATTENTION, "img_attn.qkv"),
        *_qkv(FLUX_DOUBLE, ADDED, "txt_attn.qkv"),
        *_entries(FLUX_DOUBLE, pairs),
        *_entries(("", ""), {"x_embedder": "img_in", "context_embedder": "txt_in", "proj_out": "final_layer.linear"}),
    ]


def _flux_blocks() -> list[Entry]:
    """What FLUX.1 and Chroma share."""
    feed_forward = {
        "ff.net.0.proj": "img_mlp.0",
        "ff.net.2": "img_mlp.2",
        "ff_context.net.0.proj": "txt_mlp.0",
        "ff_context.net.2": "txt_mlp.2",
    }
    return [
        *_flux_attention(),
        *_entries(FLUX_DOUBLE, feed_forward),
        *_qkv(FLUX_SINGLE, (*ATTENTION, "proj_mlp"), "linear1", "1"),
        *_entries(FLUX_SINGLE, {"proj_out": "linear2"}),
    ]


def _flux1() -> list[Entry]:
    top = {
        f"time_text_embed.{d}_embedder.linear_{i}": f"{n}_in.{layer}"
        for d, n in (("timestep", "time"), ("text", "vector"), ("guidance", "guidance"))
        for i, layer in ((1, "in_layer"), (2, "out_layer"))
    }
    return [
        *_flux_blocks(),
        *_entries(FLUX_DOUBLE, {"norm1.linear": "img_mod.lin", "norm1_context.linear": "txt_mod.lin"}),
        *_entries(FLUX_SINGLE, {"norm.linear": "modulation.lin"}),
        *_entries(("", ""), top),
        Entry("norm_out.linear", "final_layer.adaLN_modulation.1", "swap"),
    ]


def _chroma() -> list[Entry]:
    guidance = ("distilled_guidance_layer.", "distilled_guidance_layer.")
    return [
        *_flux_blocks(),
        *_entries(guidance, {"in_proj": "in_proj", "out_proj": "out_proj"}),
        *_entries(guidance, {"layers.{}.linear_1": "layers.{}.in_layer", "layers.{}.linear_2": "layers.{}.out_layer"}),
    ]


def _flux2() -> list[Entry]:
    feed_forward = {
        "ff.linear_in": "img_mlp.0",
        "ff.linear_out": "img_mlp.2",
        "ff_context.linear_in": "txt_mlp.0",
        "ff_context.linear_out": "txt_mlp.2",
    }
    top = {
        f"time_guidance_embed.{d}.linear_{i}": f"{n}.{layer}"
        for d, n in (("timestep_embedder", "time_in"), ("guidance_embedder", "guidance_in"))
        for i, layer in ((1, "in_layer"), (2, "out_layer"))
    }
    modulations = ("double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation")
    return [
        *_flux_attention(),
        *_entries(FLUX_DOUBLE, feed_forward),
        *_entries(FLUX_SINGLE, {"attn.to_qkv_mlp_proj": "linear1", "attn.to_out": "linear2"}),
        *_entries(("", ""), top | {f"{name}.linear": f"{name}.lin" for name in modulations}),
        Entry("norm_out.linear", "final_layer.adaLN_modulation.1", "swap"),
    ]


def _qwen() -> list[Entry]:
    inner = (*ATTENTION, *ADDED, "attn.to_out.0", "attn.to_add_out", "img_mod.1", "txt_mod.1")
    mlp = tuple(f"{side}_mlp.net.{layer}" for side in ("img", "txt") for layer in ("0.proj", "2"))
    top = ("img_in", "txt_in", "proj_out", "norm_out.linear")
    time = tuple(f"time_text_embed.timestep_embedder.linear_{i}" for i in (1, 2))
    return [Entry(name, name) for name in (*(f"transformer_blocks.{{}}.{n}" for n in inner + mlp), *top, *time)]


STACKS = ("layers.{}.", "noise_refiner.{}.", "context_refiner.{}.")


def _z_image() -> list[Entry]:
    entries = []
    for stack in STACKS:
        block, same = (stack, stack), ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3", "adaLN_modulation.0")
        entries += _qkv(block, ("attention.to_q", "attention.to_k", "attention.to_v"), "attention.qkv")
        entries += _entries(block, {"attention.to_out.0": "attention.out"} | {name: name for name in same})
    top = {
        "all_final_layer.2-1.linear": "final_layer.linear",
        "all_final_layer.2-1.adaLN_modulation.1": "final_layer.adaLN_modulation.1",
        "all_x_embedder.2-1": "x_embedder",
        "cap_embedder.1": "cap_embedder.1",
        "t_embedder.mlp.0": "t_embedder.mlp.0",
        "t_embedder.mlp.2": "t_embedder.mlp.2",
    }
    return [*entries, *_entries(("", ""), top)]


def _lumina2() -> list[Entry]:
    entries = []
    pairs = {
        "attn.to_out.0": "attention.out",
        "feed_forward.linear_1": "feed_forward.w1",
        "feed_forward.linear_2": "feed_forward.w2",
        "feed_forward.linear_3": "feed_forward.w3",
        "norm1.linear": "adaLN_modulation.1",
    }
    for stack in STACKS:
        entries += [*_qkv((stack, stack), ATTENTION, "attention.qkv"), *_entries((stack, stack), pairs)]
    top = {
        "x_embedder": "x_embedder",
        "norm_out.linear_1": "final_layer.adaLN_modulation.1",
        "norm_out.linear_2": "final_layer.linear",
        "time_caption_embed.caption_embedder.1": "cap_embedder.1",
        "time_caption_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
        "time_caption_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
    }
    return [*entries, *_entries(("", ""), top)]


def _wan() -> list[Entry]:
    block = ("blocks.{}.", "blocks.{}.")
    pairs = {
        f"{d}.{dp}": f"{n}.{np}"
        for d, n in (("attn1", "self_attn"), ("attn2", "cross_attn"))
        for dp, np in (("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "o"))
    }
    pairs |= {"attn2.add_k_proj": "cross_attn.k_img", "attn2.add_v_proj": "cross_attn.v_img"}
    top = {
        "time_embedder.linear_1": "time_embedding.0",
        "time_embedder.linear_2": "time_embedding.2",
        "text_embedder.linear_1": "text_embedding.0",
        "text_embedder.linear_2": "text_embedding.2",
        "time_proj": "time_projection.1",
        "image_embedder.ff.net.0.proj": "img_emb.proj.1",
        "image_embedder.ff.net.2": "img_emb.proj.3",
    }
    return [
        *_entries(block, pairs | {"ffn.net.0.proj": "ffn.0", "ffn.net.2": "ffn.2"}),
        *_entries(("condition_embedder.", ""), top),
        Entry("proj_out", "head.head"),
    ]


FLUX_PREFIXES = ("transformer.", "", "lora_transformer_", "lycoris_")

FAMILIES = {
    family.key: family
    for family in (
        Family(
            "sd3",
            "Stable Diffusion 3 / 3.5",
            tuple(_sd3()),
            comfy_prefixes=("transformer.", "base_model.model.", "lora_transformer_", "lycoris_"),
            words=("sd3", "stable-diffusion-3", "stable diffusion 3"),
        ),
        Family(
            "flux1",
            "FLUX.1",
            tuple(_flux1()),
            comfy_prefixes=FLUX_PREFIXES,
            words=("flux1", "flux-1", "flux.1", "flux"),
        ),
        Family(
            "flux2",
            "FLUX.2",
            tuple(_flux2()),
            comfy_prefixes=FLUX_PREFIXES,
            comfy_lacks=("time_guidance_embed.", "double_stream_modulation", "single_stream_modulation"),
            words=("flux2", "flux-2", "flux.2", "klein"),
        ),
        Family(
            "qwen_image",
            "Qwen-Image",
            tuple(_qwen()),
            comfy_prefixes=("transformer.", "", "lycoris_"),
            words=("qwen",),
        ),
        Family(
            "z_image",
            "Z-Image",
            tuple(_z_image()),
            comfy_prefixes=("diffusion_model.", "transformer.", "", "lycoris_"),
            words=("z-image", "z_image", "zimage"),
        ),
        Family("wan", "Wan 2.1 / 2.2", tuple(_wan()), native_export=True, words=("wan",)),
        Family(
            "chroma",
            "Chroma",
            tuple(_chroma()),
            comfy_prefixes=FLUX_PREFIXES,
            comfy_lacks=("distilled_guidance_layer.",),
            words=("chroma",),
        ),
        Family("lumina2", "Lumina-Image 2", tuple(_lumina2()), native_export=True, words=("lumina",)),
    )
}
