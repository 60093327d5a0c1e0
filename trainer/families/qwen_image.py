"""Qwen-Image: dual-stream transformer with a Qwen2.5-VL encoder, true guidance with a limited norm, shift by size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UserError
from .base import Family, check_sides
from .flux import LATENT_SIZE, mu_of, set_even_times
from .tokens import count_before_end


class QwenImage(Family):
    """A loaded QwenImagePipeline. Classifier-free guidance is the pipeline's true_cfg_scale, which limits the norm.

    Along a side with an odd number of tokens (1328 pixels are 83) ComfyUI 0.33 counts the image's places from one
    higher than diffusers does, so that its velocity differs a little.
    """

    PIPELINE = "QwenImagePipeline"
    TRANSFORMER = "QwenImageTransformer2DModel"
    LONGEST = 1024

    def count_tokens(self, tokenizer: str, text: str) -> int:
        # The template's beginning is dropped after encoding, and the limit is on what remains.
        written = self.pipeline.prompt_template_encode.format(text)
        dropped = self.pipeline.prompt_template_encode_start_idx
        return count_before_end(getattr(self.pipeline, tokenizer), written, text) - dropped

    def encode_texts(self, texts: list[str]) -> dict[str, Tensor]:
        embeds, mask = self.pipeline.encode_prompt(texts, max_sequence_length=self.max_sequence_length)
        if mask is None:  # texts of one length
            mask = torch.ones(embeds.shape[:2], dtype=torch.long)
        return {"encoder_hidden_states": embeds, "encoder_hidden_states_mask": mask.long()}

    def example_cond(self, rows: int) -> dict[str, Tensor]:
        shape, meta = (rows, self.max_sequence_length), torch.device("meta")
        embeds = torch.empty(*shape, self.transformer.config.joint_attention_dim, dtype=self.dtype, device=meta)
        return {
            "encoder_hidden_states": embeds,
            "encoder_hidden_states_mask": torch.empty(shape, dtype=torch.long, device=meta),
        }

    def sigmas(self, steps: int, height: int, width: int) -> Tensor:
        scheduler = type(self.pipeline.scheduler).from_config(self.pipeline.scheduler.config)
        if scheduler.config.get("shift_terminal") and steps < 2:
            raise UserError("this model needs 2 steps or more: its scheduler ends them at a time above 0, its terminal")
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
        v = self.transformer(
            hidden_states=tokens.flatten(2).mT,
            timestep=sigma,
            img_shapes=[[(1, *size)]] * len(x),
            return_dict=False,
            **cond,
        )[0]
        return F.pixel_shuffle(v.mT.unflatten(2, size), 2)

    def guide(self, negative: Tensor, positive: Tensor, guidance: float) -> Tensor:
        """The guided velocity, each token (2 x 2 latents) scaled to the norm that it has for the positive prompt."""
        guided, positive = (F.pixel_unshuffle(v, 2) for v in (super().guide(negative, positive, guidance), positive))
        return F.pixel_shuffle(guided * (positive.norm(dim=1, keepdim=True) / guided.norm(dim=1, keepdim=True)), 2)

    def decode_latents(self, latents: Tensor) -> Tensor:
        vae = self.pipeline.vae
        mean, std = (latents.new_tensor(v).view(-1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std))
        return vae.decode((latents * std + mean).unsqueeze(2), return_dict=False)[0]


def vae_scale(vae: Mapping[str, Any]) -> int:
    """Pixels to a side of a latent."""
    return 2 ** len(vae["temperal_downsample"])
