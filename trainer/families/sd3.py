"""Stable Diffusion 3 and 3.5: MMDiT with two CLIP encoders and an optional T5, true guidance, static shift."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sfgrpo.lora import choose_targets

from ..errors import UserError
from . import Encoded, room_for

if TYPE_CHECKING:
    from diffusers import StableDiffusion3Pipeline


@dataclass
class SD3:
    """A loaded StableDiffusion3Pipeline."""

    pipeline: StableDiffusion3Pipeline
    max_sequence_length: int
    """T5 tokens; 0 is no T5, and no zero tokens in its place."""

    @classmethod
    def load(
        cls,
        path: str,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_sequence_length: int = 256,
        encoders: bool = True,
    ) -> SD3:
        """Load a diffusers folder or hub id, frozen; max_sequence_length 0 leaves T5 out, encoders=False all three.

        Weights are read from safetensors only, never from a pickle.
        """
        from diffusers import StableDiffusion3Pipeline

        parts = () if encoders and max_sequence_length else ("_3",) if encoders else ("", "_2", "_3")
        without = {f"{kind}{part}": None for part in parts for kind in ("text_encoder", "tokenizer")}
        pipeline = StableDiffusion3Pipeline.from_pretrained(path, torch_dtype=dtype, use_safetensors=True, **without)
        for module in pipeline.components.values():
            if isinstance(module, nn.Module):
                module.requires_grad_(False).eval()
        pipeline.to(device)
        return cls(pipeline, max_sequence_length)

    @property
    def transformer(self) -> nn.Module:
        return self.pipeline.transformer

    @property
    def native_size(self) -> tuple[int, int]:
        side = self.pipeline.default_sample_size * self.pipeline.vae_scale_factor
        return side, side

    @torch.no_grad()
    def encode(self, texts: list[str]) -> Encoded:
        tensors: dict[str, Tensor] = {}
        for start in range(0, len(texts), 64):
            embeds, _, pooled, _ = self.pipeline.encode_prompt(
                texts[start : start + 64],
                None,
                None,
                do_classifier_free_guidance=False,
                max_sequence_length=self.max_sequence_length,
            )
            for name, part in (("encoder_hidden_states", embeds), ("pooled_projections", pooled)):
                if start == 0:
                    tensors[name] = room_for(len(texts), part)
                tensors[name][start : start + len(part)] = part.cpu()
        return Encoded(tensors)

    def free_encoders(self) -> None:
        for name in ("text_encoder", "text_encoder_2", "text_encoder_3"):
            setattr(self.pipeline, name, None)

    def sigmas(self, steps: int, height: int, width: int) -> Tensor:
        scheduler = type(self.pipeline.scheduler).from_config(self.pipeline.scheduler.config)
        scheduler.set_timesteps(steps)
        return scheduler.sigmas.float().cpu()

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        return self.shape_for(self.transformer.config, self.pipeline.vae.config, height, width)

    @staticmethod
    def shape_for(
        transformer: Mapping[str, Any], vae: Mapping[str, Any], height: int | None, width: int | None
    ) -> tuple[int, ...]:
        """Latent shape by the configs of transformer and VAE. Raises UserError for a size that cannot be made."""
        scale = 2 ** (len(vae["block_out_channels"]) - 1)
        own = transformer["sample_size"] * scale
        height, width = (own if side is None else side for side in (height, width))
        unit, most = (
            scale * transformer["patch_size"],
            transformer["pos_embed_max_size"] * scale * transformer["patch_size"],
        )
        if height % unit or width % unit or not 0 < height <= most or not 0 < width <= most:
            raise UserError(
                f"height and width must be multiples of {unit}, at most {most}, for this model; got {height} x {width}"
            )
        return transformer["in_channels"], height // scale, width // scale

    def velocity(self, x: Tensor, sigma: Tensor, cond: dict[str, Tensor]) -> Tensor:
        x = x.to(self.transformer.dtype)
        return self.transformer(hidden_states=x, timestep=sigma * 1000, return_dict=False, **cond)[0]

    def decode(self, latents: Tensor) -> Tensor:
        vae = self.pipeline.vae
        latents = latents.to(vae.dtype) / vae.config.scaling_factor + vae.config.shift_factor
        return (vae.decode(latents, return_dict=False)[0].float() / 2 + 0.5).clamp(0, 1)

    def targets(self, choice: str) -> list[str]:
        return choose_targets((n for n, m in self.transformer.named_modules() if isinstance(m, nn.Linear)), choice)

    def export_name(self, module: str) -> str:
        return f"transformer.{module}"
