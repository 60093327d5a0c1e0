"""FLUX.1's layout in small: a CLIP and a T5, one double block and two single ones; as dev, or as schnell."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.small_models import SmallModel
from tests.small_models.parts import clip, kl_vae, renamer, t5, word_tokenizer

LENGTH = 16
"""T5 tokens."""
EMBEDDED_GUIDANCE = 2.5
DYNAMIC = {"base_image_seq_len": 256, "max_image_seq_len": 4096, "base_shift": 0.5, "max_shift": 1.15}


def build(path: Path, schnell: bool = False) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from transformers import CLIPTextModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        tokenizers = [word_tokenizer("<end>"), word_tokenizer("<pad>")]
        text_encoder = clip(CLIPTextModel, tokenizers[0], 32)
        text_encoder_2 = t5(tokenizers[1], 64)
        transformer = FluxTransformer2DModel(
            in_channels=64,
            num_layers=1,
            num_single_layers=2,
            num_attention_heads=1,
            joint_attention_dim=64,
            pooled_projection_dim=32,
            guidance_embeds=not schnell,
        )
        vae = kl_vae(0.3611, 0.1159)
    scheduler = FlowMatchEulerDiscreteScheduler(
        shift=1.0 if schnell else 3.0, use_dynamic_shifting=not schnell, **DYNAMIC
    )
    FluxPipeline(
        transformer=transformer.eval(),
        scheduler=scheduler,
        vae=vae.eval(),
        text_encoder=text_encoder.eval(),
        tokenizer=tokenizers[0],
        text_encoder_2=text_encoder_2.eval(),
        tokenizer_2=tokenizers[1],
    ).save_pretrained(path)


def draw(output_type: str):
    """`stock` and `stock_images`; the pipeline takes and gives tokens of 2 x 2 latents."""

    def run(pipeline, prompts: list[str], negatives: list[str], noise: Tensor, steps: int, guidance: float) -> Tensor:
        height, width = noise.shape[2:]
        images = pipeline(
            prompts,
            negative_prompt=negatives,
            num_inference_steps=steps,
            guidance_scale=EMBEDDED_GUIDANCE,
            true_cfg_scale=guidance,
            max_sequence_length=LENGTH,
            height=4 * height,
            width=4 * width,
            latents=F.pixel_unshuffle(noise, 2).flatten(2).mT,
            output_type=output_type,
        ).images
        if output_type == "latent":
            images = F.pixel_shuffle(images.mT.unflatten(2, (height // 2, width // 2)), 2)
        return images

    return run


def native(state: dict[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The names of ComfyUI's model: fused qkv, in single blocks with the feed-forward too; shift before scale."""
    out: dict[str, Tensor] = {}
    put = renamer(state, out)
    embedders = [("time_in", "timestep"), ("vector_in", "text")]
    if config["guidance_embeds"]:
        embedders.append(("guidance_in", "guidance"))
    for new, old in embedders:
        for layer, number in (("in_layer", 1), ("out_layer", 2)):
            put(f"{new}.{layer}", f"time_text_embed.{old}_embedder.linear_{number}")
    put("img_in", "x_embedder")
    put("txt_in", "context_embedder")
    put("final_layer.linear", "proj_out")
    put("final_layer.adaLN_modulation.1", "norm_out.linear", swap=True)
    for i in range(config["num_layers"]):
        old, new = f"transformer_blocks.{i}", f"double_blocks.{i}"
        put(f"{new}.img_attn.qkv", *(f"{old}.attn.to_{p}" for p in "qkv"))
        put(f"{new}.txt_attn.qkv", *(f"{old}.attn.add_{p}_proj" for p in "qkv"))
        for name, part in (
            ("img_mod.lin", "norm1.linear"),
            ("txt_mod.lin", "norm1_context.linear"),
            ("img_attn.norm.query_norm", "attn.norm_q"),
            ("img_attn.norm.key_norm", "attn.norm_k"),
            ("txt_attn.norm.query_norm", "attn.norm_added_q"),
            ("txt_attn.norm.key_norm", "attn.norm_added_k"),
            ("img_attn.proj", "attn.to_out.0"),
            ("txt_attn.proj", "attn.to_add_out"),
            ("img_mlp.0", "ff.net.0.proj"),
            ("img_mlp.2", "ff.net.2"),
            ("txt_mlp.0", "ff_context.net.0.proj"),
            ("txt_mlp.2", "ff_context.net.2"),
        ):
            put(f"{new}.{name}", f"{old}.{part}")
    for i in range(config["num_single_layers"]):
        old, new = f"single_transformer_blocks.{i}", f"single_blocks.{i}"
        put(f"{new}.linear1", *(f"{old}.attn.to_{p}" for p in "qkv"), f"{old}.proj_mlp")
        put(f"{new}.linear2", f"{old}.proj_out")
        put(f"{new}.modulation.lin", f"{old}.norm.linear")
        put(f"{new}.norm.query_norm", f"{old}.attn.norm_q")
        put(f"{new}.norm.key_norm", f"{old}.attn.norm_k")
    return out


def comfy_inputs(cond: dict[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    inputs = {"c_crossattn": cond["encoder_hidden_states"], "y": cond["pooled_projections"]}
    return inputs | {"guidance": torch.tensor([EMBEDDED_GUIDANCE])}


MODEL = SmallModel(
    build=build,
    stock=draw("latent"),
    stock_images=draw("pt"),
    native=native,
    comfy_inputs=comfy_inputs,
    guidance=(1.0, 3.0),
    size=(32, 48),
    options={"max_sequence_length": LENGTH, "embedded_guidance": EMBEDDED_GUIDANCE},
    single_file=False,  # diffusers splits linear1 at the real model's width
)
