"""Stable Diffusion 3 and 3.5: MMDiT with two CLIP encoders and an optional T5, true guidance, static shift."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from diffusers import StableDiffusion3Pipeline
from torch import Tensor, nn

from ..errors import UserError
from . import Encoded

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
MLP = (".ff.net.0.proj", ".ff.net.2", ".ff_context.net.0.proj", ".ff_context.net.2")


@dataclass
class SD3:
    """A loaded StableDiffusion3Pipeline."""

    pipeline: StableDiffusion3Pipeline
    max_sequence_length: int
    """T5 tokens; 0 is no T5, and no zero tokens in its place."""

    @classmethod
    def load(cls, path: str, dtype: torch.dtype, device: torch.device, *, max_sequence_length: int = 256) -> SD3:
        """Load a diffusers folder or hub id, frozen; max_sequence_length 0 leaves T5 out altogether."""
        without = {} if max_sequence_length else {"text_encoder_3": None, "tokenizer_3": None}
        pipeline = StableDiffusion3Pipeline.from_pretrained(path, torch_dtype=dtype, **without)
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
        parts = []
        for start in range(0, len(texts), 64):
            embeds, _, pooled, _ = self.pipeline.encode_prompt(
                texts[start : start + 64],
                None,
                None,
                do_classifier_free_guidance=False,
                max_sequence_length=self.max_sequence_length,
            )
            parts.append((embeds.cpu(), pooled.cpu()))
        embeds, pooled = (torch.cat(p) for p in zip(*parts, strict=True))
        return Encoded({"encoder_hidden_states": embeds, "pooled_projections": pooled})

    def free_encoders(self) -> None:
        for name in ("text_encoder", "text_encoder_2", "text_encoder_3"):
            setattr(self.pipeline, name, None)

    def sigmas(self, steps: int, height: int, width: int) -> Tensor:
        scheduler = type(self.pipeline.scheduler).from_config(self.pipeline.scheduler.config)
        scheduler.set_timesteps(steps)
        return scheduler.sigmas.float().cpu()

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        config = self.transformer.config
        scale = self.pipeline.vae_scale_factor
        unit = scale * config.patch_size
        if height % unit or width % unit or height <= 0 or width <= 0:
            raise UserError(f"sampling.height and sampling.width must be multiples of {unit} for this model")
        most = config.pos_embed_max_size * unit
        if height > most or width > most:
            raise UserError(f"sampling.height and sampling.width must be at most {most} for this model")
        return config.in_channels, height // scale, width // scale

    def velocity(self, x: Tensor, sigma: Tensor, cond: dict[str, Tensor]) -> Tensor:
        x = x.to(self.transformer.dtype)
        return self.transformer(hidden_states=x, timestep=sigma * 1000, return_dict=False, **cond)[0]

    def decode(self, latents: Tensor) -> Tensor:
        vae = self.pipeline.vae
        latents = latents.to(vae.dtype) / vae.config.scaling_factor + vae.config.shift_factor
        return (vae.decode(latents, return_dict=False)[0].float() / 2 + 0.5).clamp(0, 1)

    def targets(self, choice: str) -> list[str]:
        names = [n for n, m in self.transformer.named_modules() if isinstance(m, nn.Linear)]
        if choice == "all":
            return names
        blocks = [n for n in names if n.startswith("transformer_blocks.")]
        ends = ATTENTION if choice == "attention" else ATTENTION + MLP
        return [n for n in blocks if n.endswith(ends)]

    def export_name(self, module: str) -> str:
        return f"transformer.{module}"
