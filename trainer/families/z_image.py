"""Z-Image and Z-Image-Turbo: single-stream transformer with a Qwen3 encoder, captions of any length, true guidance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .base import Family, check_sides, pad
from .flux import mu_of, set_even_times, vae_scale
from .tokens import count_before_end


class ZImage(Family):
    """A loaded ZImagePipeline.

    Guidance g here, and in ComfyUI, is the pipeline's guidance_scale g - 1: Turbo's 0 is 1 here. The pipeline's
    cfg_normalization and cfg_truncation, which are off by default, are not there.
    """

    PIPELINE = "ZImagePipeline"
    TRANSFORMER = "ZImageTransformer2DModel"
    # The rotary table has 1536 places along the text, and the image takes the one after it; both in steps of 32.
    LONGEST = 1504

    def count_tokens(self, tokenizer: str, text: str) -> int:
        inner, chat = getattr(self.pipeline, tokenizer), [{"role": "user", "content": text}]
        options = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": True}
        return count_before_end(inner, inner.apply_chat_template(chat, **options), text)

    def encode_texts(self, texts: list[str]) -> dict[str, Tensor]:
        # The pipeline writes its chat template into the list it is given.
        embeds, _ = self.pipeline.encode_prompt(
            list(texts), do_classifier_free_guidance=False, max_sequence_length=self.max_sequence_length
        )
        return {"captions": torch.cat(pad([e[None] for e in embeds])), "lengths": torch.tensor([*map(len, embeds)])}

    def example_cond(self, rows: int) -> dict[str, Tensor]:
        length, width = self.max_sequence_length, self.transformer.config.cap_feat_dim
        captions = torch.empty(rows, length, width, dtype=self.dtype, device="meta")
        return {"captions": captions, "lengths": torch.full((rows,), length)}

    def sigmas(self, steps: int, height: int, width: int) -> Tensor:
        scheduler = type(self.pipeline.scheduler).from_config(self.pipeline.scheduler.config)
        _, h, w = self.latent_shape(height, width)
        return set_even_times(scheduler, steps, mu_of(scheduler.config, h // 2 * (w // 2)))

    @classmethod
    def size_for(cls, transformer: Mapping[str, Any], vae: Mapping[str, Any]) -> tuple[int, int]:
        return 1024, 1024

    @classmethod
    def shape_for(
        cls, transformer: Mapping[str, Any], vae: Mapping[str, Any], height: int, width: int, frames: int = 1
    ) -> tuple[int, ...]:
        scale = vae_scale(vae)
        unit = 2 * scale
        check_sides(height, width, unit, unit * min(transformer["axes_lens"][1:]))
        return transformer["in_channels"], height // scale, width // scale

    def velocity(self, x: Tensor, sigma: Tensor, cond: dict[str, Tensor]) -> Tensor:
        captions = [c[:n] for c, n in zip(cond["captions"], cond["lengths"].tolist(), strict=True)]
        # The transformer's time runs from noise to image, and so does its velocity.
        v = self.transformer(list(x.to(self.dtype).unsqueeze(2)), 1 - sigma, captions, return_dict=False)[0]
        return -torch.stack(v).squeeze(2)

    def decode_latents(self, latents: Tensor) -> Tensor:
        vae = self.pipeline.vae
        return vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor, return_dict=False)[0]
