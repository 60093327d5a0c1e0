"""Wan 2.2 5B's layout in small: 48 channels, a VAE of 16 x 16 pixels, one timestep for each token."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.small_models import SmallModel
from tests.small_models.wan import (
    LENGTH,
    comfy_config,
    comfy_inputs,
    draw,
    native,
    save,
    text_parts,
    transformer,
    video_vae,
)

CHANNELS, TEXT_DIM = 48, 64


def build(path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        vae = video_vae(
            z_dim=CHANNELS,
            is_residual=True,
            decoder_base_dim=8,
            in_channels=12,
            out_channels=12,
            patch_size=2,
            scale_factor_spatial=16,
            latents_mean=torch.empty(CHANNELS).normal_(0, 0.5).tolist(),
            latents_std=torch.empty(CHANNELS).uniform_(0.5, 2).tolist(),
        )
        parts = text_parts(TEXT_DIM) | {"transformer": transformer(TEXT_DIM, CHANNELS), "vae": vae}
    save(path, flow_shift=5.0, expand_timesteps=True, **parts)


MODEL = SmallModel(
    build=build,
    stock=draw("latent", 16),
    stock_images=draw("pt", 16),
    native=native,
    comfy_inputs=comfy_inputs,
    comfy_class="WAN22_T2V",
    comfy_config=comfy_config,
    comfy_dims=5,
    size=(64, 32),
    guidance=(1.0, 3.0),
    options={"max_sequence_length": LENGTH},
)
