"""Wan 2.1's layout in small: UMT5, a transformer of two blocks that ComfyUI detects, a VAE of 8 x 8 pixels."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from tests.small_models import SmallModel
from tests.small_models.parts import word_tokenizer

LENGTH = 16
"""Text tokens."""
TEXT_DIM = 4096
"""Width of the text encoder, which ComfyUI takes for granted."""


def build(path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        parts = text_parts(TEXT_DIM) | {"transformer": transformer(text_dim=TEXT_DIM), "vae": video_vae(z_dim=16)}
    save(path, **parts)


def text_parts(width: int) -> dict[str, Any]:
    from transformers import UMT5Config, UMT5EncoderModel

    tokenizer = word_tokenizer("<pad>")
    encoder = UMT5EncoderModel(
        UMT5Config(
            vocab_size=len(tokenizer),
            d_model=width,
            d_kv=16,
            d_ff=16,
            num_layers=1,
            num_heads=1,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    return {"text_encoder": encoder.eval(), "tokenizer": tokenizer}


def transformer(text_dim: int, channels: int = 16):
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        num_attention_heads=1,
        attention_head_dim=128,
        in_channels=channels,
        out_channels=channels,
        text_dim=text_dim,
        ffn_dim=64,
        num_layers=2,
    ).eval()


def video_vae(**options):
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(base_dim=8, dim_mult=[1, 1, 1, 1], num_res_blocks=1, **options).eval()


def save(path: Path, flow_shift: float = 3.0, **parts: Any) -> None:
    """Write the pipeline with the scheduler that the published ones have."""
    from diffusers import UniPCMultistepScheduler, WanPipeline

    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=flow_shift, num_train_timesteps=1000
    )
    WanPipeline(scheduler=scheduler, **parts).save_pretrained(path)


class Euler(FlowMatchEulerDiscreteScheduler):
    """Euler steps on the times of UniPC, from 1 on, with the transformer told sigma * 1000 as it is."""

    def __init__(self, own: Any) -> None:
        super().__init__(shift=1.0)
        self.own = own

    def set_timesteps(self, steps: int, device: Any = None) -> None:
        self.own.set_timesteps(steps)
        super().set_timesteps(sigmas=[1.0, *self.own.sigmas[1:-1].tolist()], device=device)


def draw(output_type: str, scale: int = 8):
    """`stock` and `stock_images`."""

    def run(pipeline, prompts: list[str], negatives: list[str], noise: Tensor, steps: int, guidance: float) -> Tensor:
        own = pipeline.scheduler
        pipeline.scheduler = Euler(own)
        try:
            frames = pipeline(
                prompts,
                negative_prompt=negatives,
                num_inference_steps=steps,
                guidance_scale=guidance,
                max_sequence_length=LENGTH,
                num_frames=4 * (noise.shape[2] - 1) + 1,
                height=scale * noise.shape[3],
                width=scale * noise.shape[4],
                latents=noise,
                output_type=output_type,
            ).frames
        finally:
            pipeline.scheduler = own
        return frames if output_type == "latent" else frames[:, frames.shape[1] // 2]

    return run


def native(state: dict[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """A pure rename; the second and the third norm of a block change names."""
    inner = {
        "attn1": "self_attn",
        "attn2": "cross_attn",
        "to_q": "q",
        "to_k": "k",
        "to_v": "v",
        "to_out.0": "o",
        "norm2": "norm3",
        "ffn.net.0.proj": "ffn.0",
        "ffn.net.2": "ffn.2",
        "scale_shift_table": "modulation",
    }
    outer = {
        "condition_embedder.time_embedder.linear_1": "time_embedding.0",
        "condition_embedder.time_embedder.linear_2": "time_embedding.2",
        "condition_embedder.text_embedder.linear_1": "text_embedding.0",
        "condition_embedder.text_embedder.linear_2": "text_embedding.2",
        "condition_embedder.time_proj": "time_projection.1",
        "scale_shift_table": "head.modulation",
        "proj_out": "head.head",
    }
    out = {}
    for name, value in state.items():
        for old, new in (inner if name.startswith("blocks.") else outer).items():
            name = name.replace(old, new)
        out[name] = value
    return out


def comfy_inputs(cond: dict[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """ComfyUI's text encoder too gives zeros after the text."""
    text = cond["encoder_hidden_states"]
    return {"c_crossattn": torch.nn.functional.pad(text, (0, 0, 0, LENGTH - text.shape[1]))}


def comfy_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of the sizes that ComfyUI does not detect."""
    return {
        "image_model": "wan2.1",
        "model_type": "t2v",
        "dim": config["num_attention_heads"] * config["attention_head_dim"],
        "in_dim": config["in_channels"],
        "out_dim": config["out_channels"],
        "num_heads": config["num_attention_heads"],
        "ffn_dim": config["ffn_dim"],
        "num_layers": config["num_layers"],
        "text_dim": config["text_dim"],
    }


MODEL = SmallModel(
    build=build,
    stock=draw("latent"),
    stock_images=draw("pt"),
    native=native,
    comfy_inputs=comfy_inputs,
    comfy_dims=5,
    size=(32, 48),
    frames=5,
    guidance=(1.0, 4.0),
    options={"max_sequence_length": LENGTH},
)
