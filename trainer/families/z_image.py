"""Z-Image and Z-Image-Turbo: single-stream transformer with a Qwen3 encoder, whose output points to the image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sfgrpo.schedule import mu_for_tokens

from ..errors import UserError
from .base import Family


class ZImage(Family):
    """A loaded ZImagePipeline.

    Its guidance_scale counts from 0: guidance g here, and in ComfyUI, is guidance_scale g - 1 there, so that Turbo's 0
    is 1 here. Its optional cfg_normalization and cfg_truncation, both off by default, are not applied.
    """

    PIPELINE = "ZImagePipeline"
    TRANSFORMER = "ZImageTransformer2DModel"
    LONGEST = 1504
    """The image's position is after the text's, of a multiple of 32, and must be below 1536."""

    def encode_texts(self, texts: list[str]) -> dict[str, Tensor]:
        # The pipeline writes its chat template into the list that it is given.
        embeds, _ = self.pipeline.encode_prompt(
            list(texts), do_classifier_free_guidance=False, max_sequence_length=self.max_sequence_length
        )
        lengths = torch.tensor([len(e) for e in embeds])
        return {"cap_feats": torch.nn.utils.rnn.pad_sequence(embeds, batch_first=True), "lengths": lengths}

    def sigmas(self, steps: int, height: int, width: int) -> Tensor:
        config = self.pipeline.scheduler.config
        _, rows, columns = self.latent_shape(height, width)
        mu = mu_for_tokens(
            (rows // 2) * (columns // 2),
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", 1.15),
        )
        scheduler = type(self.pipeline.scheduler).from_config(config)
        scheduler.set_timesteps(sigmas=torch.linspace(1.0, 1 / steps, steps).tolist(), mu=mu)
        return scheduler.sigmas.float().cpu()

    @classmethod
    def size_for(cls, transformer: Mapping[str, Any], vae: Mapping[str, Any]) -> tuple[int, int]:
        return 1024, 1024

    @classmethod
    def shape_for(
        cls, transformer: Mapping[str, Any], vae: Mapping[str, Any], height: int, width: int, frames: int = 1
    ) -> tuple[int, ...]:
        scale = 2 ** (len(vae["block_out_channels"]) - 1)
        unit = 2 * scale
        most = unit * min(transformer["axes_lens"][1:])
        if height % unit or width % unit or not 0 < height <= most or not 0 < width <= most:
            raise UserError(
                f"height and width must be multiples of {unit}, at most {most}, for this model; got {height} x {width}"
            )
        return transformer["in_channels"], height // scale, width // scale

    def velocity(self, x: Tensor, sigma: Tensor, cond: dict[str, Tensor]) -> Tensor:
        captions = [e[:n] for e, n in zip(cond["cap_feats"], cond["lengths"].tolist(), strict=True)]
        images = list(x.to(self.dtype).unsqueeze(2).unbind())
        return -torch.stack(self.transformer(images, 1 - sigma, captions, return_dict=False)[0]).squeeze(2)

    def decode_latents(self, latents: Tensor) -> Tensor:
        vae = self.pipeline.vae
        return vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor, return_dict=False)[0]
