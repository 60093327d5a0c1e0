"""FLUX.1: dev, with guidance as an input of the transformer, and schnell, without; CLIP and T5, shift by image size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UserError
from .base import Family

LATENT_SIZE = 128
"""Side of the VAE's latents at the size that the pipeline draws by itself."""


class Flux1(Family):
    """A loaded FluxPipeline. Classifier-free guidance is the pipeline's true_cfg_scale, beside the embedded one."""

    PIPELINE = "FluxPipeline"
    TRANSFORMER = "FluxTransformer2DModel"
    ENCODERS = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    EMBEDDED_GUIDANCE = 3.5

    def encode_texts(self, texts: list[str]) -> dict[str, Tensor]:
        embeds, pooled, _ = self.pipeline.encode_prompt(texts, max_sequence_length=self.max_sequence_length)
        return {"encoder_hidden_states": embeds, "pooled_projections": pooled}

    def sigmas(self, steps: int, height: int, width: int) -> Tensor:
        from diffusers.pipelines.flux.pipeline_flux import calculate_shift

        scheduler = type(self.pipeline.scheduler).from_config(self.pipeline.scheduler.config)
        config, (_, h, w) = scheduler.config, self.latent_shape(height, width)
        mu = calculate_shift(
            h // 2 * (w // 2),
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", 1.15),
        )
        return set_even_times(scheduler, steps, mu)

    @classmethod
    def size_for(cls, transformer: Mapping[str, Any], vae: Mapping[str, Any]) -> tuple[int, int]:
        side = LATENT_SIZE * vae_scale(vae)
        return side, side

    @classmethod
    def shape_for(
        cls, transformer: Mapping[str, Any], vae: Mapping[str, Any], height: int, width: int, frames: int = 1
    ) -> tuple[int, ...]:
        check_size(vae, height, width)
        scale = vae_scale(vae)
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


def check_size(vae: Mapping[str, Any], height: int, width: int) -> None:
    """Raise UserError for a size that is not made of whole tokens, 2 x 2 latents each."""
    unit = 2 * vae_scale(vae)
    if height < 1 or width < 1 or height % unit or width % unit:
        raise UserError(f"height and width must be multiples of {unit} for this model; got {height} x {width}")


def set_even_times(scheduler: Any, steps: int, mu: float) -> Tensor:
    """The scheduler's grid of even times 1 .. 1/steps as FLUX's pipelines ask for it, (steps + 1,) float32.

    mu counts where the scheduler shifts dynamically (not FLUX.1-schnell's).
    """
    if scheduler.config.get("use_flow_sigmas"):
        scheduler.set_timesteps(steps, mu=mu)
    else:
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    return scheduler.sigmas.float().cpu()
