"""Qwen-Image: dual-stream transformer with a Qwen2.5-VL encoder, true guidance with a limited norm, mu by tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sfgrpo.schedule import mu_for_tokens

from ..errors import UserError
from .base import Family


class QwenImage(Family):
    """A loaded QwenImagePipeline."""

    PIPELINE = "QwenImagePipeline"
    TRANSFORMER = "QwenImageTransformer2DModel"
    LONGEST = 1024

    def encode_texts(self, texts: list[str]) -> dict[str, Tensor]:
        embeds, mask = self.pipeline.encode_prompt(list(texts), max_sequence_length=self.max_sequence_length)
        if mask is None:  # of texts of one length
            mask = embeds.new_ones(embeds.shape[:2], dtype=torch.long)
        return {"encoder_hidden_states": embeds, "encoder_hidden_states_mask": mask.long()}

    def sigmas(self, steps: int, height: int, width: int) -> Tensor:
        config = self.pipeline.scheduler.config
        if config.get("shift_terminal") and steps < 2:
            raise UserError("this model needs 2 or more steps: its scheduler stretches the times to a last one above 0")
        _, rows, columns = self.latent_shape(height, width)
        mu = mu_for_tokens(
            (rows // 2) * (columns // 2),
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", 1.15),
        )
        scheduler = type(self.pipeline.scheduler).from_config(config)
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
        return scheduler.sigmas.float().cpu()

    @classmethod
    def size_for(cls, transformer: Mapping[str, Any], vae: Mapping[str, Any]) -> tuple[int, int]:
        side = 128 * 2 ** len(vae["temperal_downsample"])
        return side, side

    @classmethod
    def shape_for(
        cls, transformer: Mapping[str, Any], vae: Mapping[str, Any], height: int, width: int, frames: int = 1
    ) -> tuple[int, ...]:
        scale = 2 ** len(vae["temperal_downsample"])
        unit = scale * transformer["patch_size"]
        if height % unit or width % unit or height <= 0 or width <= 0:
            raise UserError(f"height and width must be multiples of {unit} for this model; got {height} x {width}")
        return transformer["in_channels"] // 4, height // scale, width // scale

    def velocity(self, x: Tensor, sigma: Tensor, cond: dict[str, Tensor]) -> Tensor:
        rows, columns = (side // 2 for side in x.shape[-2:])
        out = self.transformer(
            hidden_states=pack(x.to(self.dtype)),
            timestep=sigma,
            img_shapes=[[(1, rows, columns)]] * len(x),
            return_dict=False,
            **cond,
        )[0]
        return unpack(out, rows, columns)

    def guide(self, negative: Tensor, positive: Tensor, guidance: float) -> Tensor:
        """The guided velocity, each token of it as long as that of the positive prompt."""
        guided = super().guide(negative, positive, guidance)
        rows, columns = (side // 2 for side in positive.shape[-2:])
        tokens = pack(guided)
        length = torch.linalg.vector_norm(pack(positive), dim=-1, keepdim=True)
        tokens = tokens * (length / torch.linalg.vector_norm(tokens, dim=-1, keepdim=True))
        return unpack(tokens, rows, columns)

    def decode_latents(self, latents: Tensor) -> Tensor:
        vae = self.pipeline.vae
        mean, std = (
            latents.new_tensor(values).view(1, -1, 1, 1) for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        return vae.decode((latents * std + mean).unsqueeze(2), return_dict=False)[0][:, :, 0]


def pack(x: Tensor) -> Tensor:
    """(B, C, H, W) -> tokens of 2 x 2 patches, (B, H / 2 * W / 2, 4 C)."""
    batch, channels, height, width = x.shape
    x = x.view(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return x.reshape(batch, (height // 2) * (width // 2), channels * 4)


def unpack(tokens: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse of `pack`, for rows x columns patches."""
    batch, _, channels = tokens.shape
    x = tokens.view(batch, rows, columns, channels // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return x.reshape(batch, channels // 4, 2 * rows, 2 * columns)
