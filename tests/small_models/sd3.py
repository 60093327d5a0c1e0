"""SD3.5's layout in small: two CLIPs of different widths, a T5, one dual-attention block."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.small_models import SmallModel
from tests.small_models.parts import clip, kl_vae, renamer, t5, word_tokenizer

LENGTH = 24
"""T5 tokens."""


def build(path: Path) -> None:
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )
    from transformers import CLIPTextModelWithProjection

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tokenizers = [word_tokenizer("<end>"), word_tokenizer("<end>"), word_tokenizer("<pad>")]
        clips = [
            clip(CLIPTextModelWithProjection, tokenizer, width, projection_dim=projection)
            for tokenizer, width, projection in zip(tokenizers, (32, 48), (24, 40), strict=False)
        ]
        text_encoder_3 = t5(tokenizers[2], 96)
        transformer = SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=16,
            num_layers=2,
            attention_head_dim=64,
            num_attention_heads=2,
            joint_attention_dim=96,
            caption_projection_dim=128,
            pooled_projection_dim=64,
            out_channels=16,
            pos_embed_max_size=16,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
        )
        vae = kl_vae(1.5305, 0.0609)
    StableDiffusion3Pipeline(
        transformer=transformer.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae.eval(),
        text_encoder=clips[0].eval(),
        tokenizer=tokenizers[0],
        text_encoder_2=clips[1].eval(),
        tokenizer_2=tokenizers[1],
        text_encoder_3=text_encoder_3.eval(),
        tokenizer_3=tokenizers[2],
    ).save_pretrained(path)


def draw(output_type: str):
    """`stock` and `stock_images` of the rows."""

    def run(pipeline, prompts: list[str], negatives: list[str], noise: Tensor, steps: int, guidance: float) -> Tensor:
        return pipeline(
            prompts,
            negative_prompt=negatives,
            num_inference_steps=steps,
            guidance_scale=guidance,
            max_sequence_length=LENGTH,
            height=32,
            width=32,
            latents=noise,
            output_type=output_type,
        ).images

    return run


def native(state: dict[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The names of Stability's own file: fused qkv, and scale before shift in the last norms."""
    out: dict[str, Tensor] = {"pos_embed": state["pos_embed.pos_embed"]}
    put = renamer(state, out)
    for new, old in (
        ("x_embedder.proj", "pos_embed.proj"),
        ("context_embedder", "context_embedder"),
        ("t_embedder.mlp.0", "time_text_embed.timestep_embedder.linear_1"),
        ("t_embedder.mlp.2", "time_text_embed.timestep_embedder.linear_2"),
        ("y_embedder.mlp.0", "time_text_embed.text_embedder.linear_1"),
        ("y_embedder.mlp.2", "time_text_embed.text_embedder.linear_2"),
        ("final_layer.linear", "proj_out"),
    ):
        put(new, old)
    put("final_layer.adaLN_modulation.1", "norm_out.linear", swap=True)
    for i in range(config["num_layers"]):
        old, last = f"transformer_blocks.{i}", i + 1 == config["num_layers"]
        x, context = f"joint_blocks.{i}.x_block", f"joint_blocks.{i}.context_block"
        put(f"{x}.adaLN_modulation.1", f"{old}.norm1.linear")
        put(f"{context}.adaLN_modulation.1", f"{old}.norm1_context.linear", swap=last)
        put(f"{x}.attn.qkv", *(f"{old}.attn.to_{p}" for p in "qkv"))
        put(f"{context}.attn.qkv", *(f"{old}.attn.add_{p}_proj" for p in "qkv"))
        for new, part in (
            (f"{x}.attn.proj", "attn.to_out.0"),
            (f"{x}.attn.ln_q", "attn.norm_q"),
            (f"{x}.attn.ln_k", "attn.norm_k"),
            (f"{context}.attn.ln_q", "attn.norm_added_q"),
            (f"{context}.attn.ln_k", "attn.norm_added_k"),
            (f"{context}.attn.proj", "attn.to_add_out"),
            (f"{x}.mlp.fc1", "ff.net.0.proj"),
            (f"{x}.mlp.fc2", "ff.net.2"),
            (f"{context}.mlp.fc1", "ff_context.net.0.proj"),
            (f"{context}.mlp.fc2", "ff_context.net.2"),
            (f"{x}.attn2.proj", "attn2.to_out.0"),
            (f"{x}.attn2.ln_q", "attn2.norm_q"),
            (f"{x}.attn2.ln_k", "attn2.norm_k"),
        ):
            put(new, f"{old}.{part}")
        if i in config["dual_attention_layers"]:
            put(f"{x}.attn2.qkv", *(f"{old}.attn2.to_{p}" for p in "qkv"))
    return out


def comfy_inputs(cond: dict[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    return {"c_crossattn": cond["encoder_hidden_states"], "y": cond["pooled_projections"]}


MODEL = SmallModel(
    build=build,
    stock=draw("latent"),
    stock_images=draw("pt"),
    native=native,
    comfy_inputs=comfy_inputs,
    guidance=(1.0, 4.5),
    options={"max_sequence_length": LENGTH},
)
