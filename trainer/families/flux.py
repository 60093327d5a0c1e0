"""FLUX.1: dev, with guidance as an input of the transformer, and schnell, without; CLIP and T5, shift by image size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sfgrpo.schedule import mu_for_tokens

from .base import Family, check_sides

LATENT_SIZE = 128
"""Side of the VAE's latents at the size that the pipeline draws by itself."""


class Flux1(Family):
    """A loaded FluxPipeline. Classifier-free guidance is the pipeline's true_cfg_scale, beside the embedded one."""

    PIPELINE = "FluxPipeline"
    TRANSFORMER = "FluxTransformer2DModel"
    ENCODERS = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    EMBEDDED_GUIDANCE = 3.5

    @classmethod
    def native_weights(cls, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """diffusers looks for norms as `.scale`, as they are in the original file and not in one that ComfyUI saved."""
        norms = (".query_norm.weight", ".key_norm.weight")
        return {f"{n.removesuffix('weight')}scale" if n.endswith(norms) else n: w for n, w in weights.items()}

    def encode_texts(self, texts: list[str]) -> dict[str, Tensor]:
        embeds, pooled, _ = self.pipeline.encode_prompt(texts, max_sequence_length=self.max_sequence_length)
        return {"encoder_hidden_states": embeds, "pooled_projections": pooled}

    def example_cond(self, rows: int) -> dict[str, Tensor]:
        config, meta = self.transformer.config, {"dtype": self.dtype, "device": "meta"}
        return {
            "encoder_hidden_states": torch.empty(rows, self.max_sequence_length, config.joint_attention_dim, **meta),
            "pooled_projections": torch.empty(rows, config.pooled_projection_dim, **meta),
        }

    def sigmas(self, steps: int, height: int, width: int) -> Tensor:
        scheduler = type(self.pipeline.scheduler).from_config(self.pipeline.scheduler.config)
        _, h, w = self.latent_shape(height, width)
        return set_even_times(scheduler, steps, mu_of(scheduler.config, h // 2 * (w // 2)))

    @classmethod
    def size_for(cls, transformer: Mapping[str, Any], vae: Mapping[str, Any]) -> tuple[int, int]:
        side = LATENT_SIZE * vae_scale(vae)
        return side, side

    @classmethod
    def shape_for(
        cls, transformer: Mapping[str, Any], vae: Mapping[str, Any], height: int, width: int, frames: int = 1
    ) -> tuple[int, ...]:
        scale = vae_scale(vae)
        check_sides(height, width, 2 * scale)
        return transformer["in_channels"] // 4, height // scale, width // scale

    def velocity(self, x: Tensor, sigma: Tensor, cond: dict[str, Tensor]) -> Tensor:
        tokens = F.pixel_unshuffle(x.to(self.dtype), 2)
        size = tokens.shape[2:]
        one, *rows_columns = (torch.arange(n, device=x.device) for n in (1, *size))
        v = self.transformer(
            hidden_states=tokens.flatten(2).mT,
            timestep=sigma,
            guidance=self.embedded_guidance(x),
            img_ids=torch.cartesian_prod(one, *rows_columns),
            txt_ids=x.new_zeros(cond["encoder_hidden_states"].shape[1], 3),
            return_dict=False,
            **cond,
        )[0]
        return F.pixel_shuffle(v.mT.unflatten(2, size), 2)

    def decode_latents(self, latents: Tensor) -> Tensor:
        vae = self.pipeline.vae
        return vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor, return_dict=False)[0]


def vae_scale(vae: Mapping[str, Any]) -> int:
    """Pixels to a side of a latent."""
    return 2 ** (len(vae["block_out_channels"]) - 1)


def mu_of(config: Mapping[str, Any], tokens: int) -> float:
    """mu of a scheduler's config for an image of so many tokens, as the pipelines compute it."""
    return mu_for_tokens(
        tokens,
        config.get("base_image_seq_len", 256),
        config.get("max_image_seq_len", 4096),
        config.get("base_shift", 0.5),
        config.get("max_shift", 1.15),
    )


def set_even_times(scheduler: Any, steps: int, mu: float) -> Tensor:
    """The scheduler's grid of even times 1 .. 1/steps as FLUX's pipelines ask for it, (steps + 1,) float32.

    mu counts where the scheduler shifts dynamically (not FLUX.1-schnell's).
    """
    if scheduler.config.get("use_flow_sigmas"):
        scheduler.set_timesteps(steps, mu=mu)
    else:
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    return scheduler.sigmas.float().cpu()
