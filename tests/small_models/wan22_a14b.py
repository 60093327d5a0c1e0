"""Wan 2.2 A14B's layout in small: two transformers, of which the tests of every family train the high-noise one.

Its boundary is so low that the sigmas of those tests are the high-noise transformer's; the grid is shifted down, so
that in four steps the last one is the other's. tests/parity/test_wan.py has the published boundary.
"""

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

TEXT_DIM = 64


def build(path: Path, boundary_ratio: float = 0.04, flow_shift: float = 0.1) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        parts = text_parts(TEXT_DIM) | {"transformer": transformer(TEXT_DIM), "vae": video_vae(z_dim=16)}
        parts["transformer_2"] = transformer(TEXT_DIM)
    save(path, flow_shift=flow_shift, boundary_ratio=boundary_ratio, **parts)


MODEL = SmallModel(
    build=build,
    stock=draw("latent"),
    stock_images=draw("pt"),
    native=native,
    comfy_inputs=comfy_inputs,
    comfy_class="WAN21_T2V",
    comfy_config=comfy_config,
    comfy_dims=5,
    guidance=(1.0, 4.0),
    options={"max_sequence_length": LENGTH},
)
