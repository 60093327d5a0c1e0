"""FLUX.2: dev, with a Mistral 3 encoder and guidance as an input, and klein, with Qwen 3 and true guidance.

Latents are ComfyUI's: (128, H/16, W/16), the VAE's in patches of 2 x 2, normalised by the statistics of its batch norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Family, check_sides
from .flux import LATENT_SIZE, set_even_times, vae_scale
from .tokens import count_before_end


class Flux2(Family):
    """A loaded Flux2Pipeline. It has no negative prompt: classifier-free guidance above 1 is ours, as in ComfyUI."""

    PIPELINE = "Flux2Pipeline"
    TRANSFORMER = "Flux2Transformer2DModel"
    EMBEDDED_GUIDANCE = 4.0
    UNTRAINED = ("double_stream_modulation", "single_stream_modulation", "time_guidance_embed")

    @classmethod
    def least_length(cls) -> int:
        # The system message, which stands before the prompt, takes about 40 tokens.
        return 64

    def count_tokens(self, tokenizer: str, text: str) -> int:
        from diffusers.pipelines.flux2.pipeline_flux2 import format_input

        processor = getattr(self.pipeline, tokenizer)
        chat = format_input([text], system_message=self.pipeline.system_message)
        (written,) = processor.apply_chat_template(chat, add_generation_prompt=False, tokenize=False)
        tokens = processor.apply_chat_template(chat, add_generation_prompt=False, tokenize=True, return_dict=True)
        inner = getattr(processor, "tokenizer", processor)
        return count_before_end(inner, written, text.replace("[IMG]", ""), len(tokens["input_ids"][0]))

    def encode_texts(self, texts: list[str]) -> dict[str, Tensor]:
        embeds, _ = self.pipeline.encode_prompt(texts, max_sequence_length=self.max_sequence_length)
        return {"encoder_hidden_states": embeds}

    def example_cond(self, rows: int) -> dict[str, Tensor]:
        shape = rows, self.max_sequence_length, self.transformer.config.joint_attention_dim
        return {"encoder_hidden_states": torch.empty(shape, dtype=self.dtype, device="meta")}

    def sigmas(self, steps: int, height: int, width: int) -> Tensor:
        from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

        scheduler = type(self.pipeline.scheduler).from_config(self.pipeline.scheduler.config)
        _, h, w = self.latent_shape(height, width)
        return set_even_times(scheduler, steps, compute_empirical_mu(h * w, steps))

    @classmethod
    def size_for(cls, transformer: Mapping[str, Any], vae: Mapping[str, Any]) -> tuple[int, int]:
        side = LATENT_SIZE * vae_scale(vae)
        return side, side

    @classmethod
    def shape_for(
        cls, transformer: Mapping[str, Any], vae: Mapping[str, Any], height: int, width: int, frames: int = 1
    ) -> tuple[int, ...]:
        unit = 2 * vae_scale(vae)
        check_sides(height, width, unit)
        return transformer["in_channels"], height // unit, width // unit

    def velocity(self, x: Tensor, sigma: Tensor, cond: dict[str, Tensor]) -> Tensor:
        size, length = x.shape[2:], cond["encoder_hidden_states"].shape[1]
        one, rows, columns, words = (torch.arange(n, device=x.device) for n in (1, *size, length))
        v = self.transformer(
            hidden_states=x.to(self.dtype).flatten(2).mT,
            timestep=sigma,
            guidance=self.embedded_guidance(x),
            img_ids=torch.cartesian_prod(one, rows, columns, one),
            txt_ids=torch.cartesian_prod(one, one, one, words),
            return_dict=False,
            **cond,
        )[0]
        return v.mT.unflatten(2, size)

    def decode_latents(self, latents: Tensor) -> Tensor:
        vae = self.pipeline.vae
        mean, variance = (s.view(-1, 1, 1) for s in (vae.bn.running_mean, vae.bn.running_var))
        latents = latents * (variance + vae.config.batch_norm_eps).sqrt() + mean
        return vae.decode(F.pixel_shuffle(latents, 2), return_dict=False)[0]


class Flux2Klein(Flux2):
    """A loaded Flux2KleinPipeline. Its pipeline's negative prompt is always the empty one; ours may be any."""

    PIPELINE = "Flux2KleinPipeline"
    EMBEDDED_GUIDANCE = None

    @classmethod
    def least_length(cls) -> int:
        return 1

    def count_tokens(self, tokenizer: str, text: str) -> int:
        inner, chat = getattr(self.pipeline, tokenizer), [{"role": "user", "content": text}]
        options = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
        return count_before_end(inner, inner.apply_chat_template(chat, **options), text)

    @property
    def is_distilled(self) -> bool:
        return bool(getattr(self.pipeline.config, "is_distilled", False))
