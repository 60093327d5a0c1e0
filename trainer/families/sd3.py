"""Stable Diffusion 3 and 3.5: MMDiT with two CLIP encoders and an optional T5, true guidance, static shift."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .base import Family, check_sides
from .loading import LoadOptions


class SD3(Family):
    """A loaded StableDiffusion3Pipeline. max_sequence_length 0 is no T5, and no zero tokens in its place."""

    PIPELINE = "StableDiffusion3Pipeline"
    TRANSFORMER = "SD3Transformer2DModel"
    ENCODERS = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3")
    MAX_LENGTH = 256
    TEXTS_AT_ONCE = 64

    @classmethod
    def least_length(cls) -> int:
        return 0

    @classmethod
    def unused(cls, options: LoadOptions) -> list[str]:
        return ["text_encoder_3", "tokenizer_3"] if options.max_sequence_length == 0 else []

    @classmethod
    def without_transformer(cls, path: str) -> dict[str, Any]:
        # Without T5 the pipeline reads the width of its zeros from the transformer's config.
        from diffusers import SD3Transformer2DModel

        with torch.device("meta"):
            config = SD3Transformer2DModel.load_config(path, subfolder="transformer")
            return {"transformer": SD3Transformer2DModel.from_config(config), "vae": None}

    def encode_texts(self, texts: list[str]) -> dict[str, Tensor]:
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            texts, None, None, do_classifier_free_guidance=False, max_sequence_length=self.max_sequence_length
        )
        return {"encoder_hidden_states": embeds, "pooled_projections": pooled}

    def example_cond(self, rows: int) -> dict[str, Tensor]:
        config, meta = self.transformer.config, torch.device("meta")
        clip_tokens = 77
        return {
            "encoder_hidden_states": torch.empty(
                rows, clip_tokens + self.max_sequence_length, config.joint_attention_dim, dtype=self.dtype, device=meta
            ),
            "pooled_projections": torch.empty(rows, config.pooled_projection_dim, dtype=self.dtype, device=meta),
        }

    def sigmas(self, steps: int, height: int, width: int) -> Tensor:
        scheduler = type(self.pipeline.scheduler).from_config(self.pipeline.scheduler.config)
        scheduler.set_timesteps(steps)
        return scheduler.sigmas.float().cpu()

    @classmethod
    def size_for(cls, transformer: Mapping[str, Any], vae: Mapping[str, Any]) -> tuple[int, int]:
        side = transformer["sample_size"] * 2 ** (len(vae["block_out_channels"]) - 1)
        return side, side

    @classmethod
    def shape_for(
        cls, transformer: Mapping[str, Any], vae: Mapping[str, Any], height: int, width: int, frames: int = 1
    ) -> tuple[int, ...]:
        scale = 2 ** (len(vae["block_out_channels"]) - 1)
        unit = scale * transformer["patch_size"]
        check_sides(height, width, unit, unit * transformer["pos_embed_max_size"])
        return transformer["in_channels"], height // scale, width // scale

    def velocity(self, x: Tensor, sigma: Tensor, cond: dict[str, Tensor]) -> Tensor:
        return self.transformer(hidden_states=x.to(self.dtype), timestep=sigma * 1000, return_dict=False, **cond)[0]

    def decode_latents(self, latents: Tensor) -> Tensor:
        vae = self.pipeline.vae
        return vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor, return_dict=False)[0]
