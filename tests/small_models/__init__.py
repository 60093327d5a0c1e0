"""A small random model of each family, in the stock format: one file each here, and a row in SMALL_MODELS."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

WORDS = ("a circle", "two red circles", "a blue square", "a circle and a square", "a green cross", "")
"""What the tests write in prompts; the tokenizers need to know no other words."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SmallModel:
    """How a family's small model is made, and how others run it."""

    build: Callable[[Path], None]
    """Write it as a folder of `save_pretrained`; the same weights each time, float32, at most a few MB."""
    stock: Callable[[Any, list[str], list[str], Tensor, int, float], Tensor]
    """stock(pipeline, prompts, negatives, noise (B, *latent shape), steps, guidance) -> the finished latents, in our
    latent shape, that the stock diffusers pipeline gives when it starts from that noise. guidance: classifier-free,
    in our convention (1 is off)."""
    stock_images: Callable[[Any, list[str], list[str], Tensor, int, float], Tensor]
    """As `stock`, the images (B, 3, H, W) in [0, 1]; of a video the middle frame."""
    native: Callable[[dict[str, Tensor], Mapping[str, Any]], dict[str, Tensor]]
    """native(state, config) -> the transformer's weights by the names that ComfyUI's own files have."""
    comfy_inputs: Callable[[dict[str, Tensor], Mapping[str, Any]], dict[str, Tensor]]
    """comfy_inputs(cond, config): the conditioning of `Family.encode` as keyword arguments of ComfyUI's apply_model."""
    comfy_class: str | None = None
    """Class in comfy.supported_models, where ComfyUI does not detect a model that small by its weights."""
    comfy_config: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    """comfy_config(transformer config) -> unet_config of that class."""
    comfy_dims: int = 4
    """Dimensions of ComfyUI's latents: 5 where it has a frame axis."""
    size: tuple[int, int] = (32, 32)
    """Height and width in pixels of the tests."""
    frames: int = 1
    guidance: tuple[float, ...] = (1.0,)
    """Classifier-free guidance to test."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further LoadOptions."""
    single_file: bool = True
    """Whether diffusers loads native names of so small a model by from_single_file."""
    load_lora_weights: bool = True
    """Whether the pipeline has load_lora_weights for our names."""


SMALL_MODELS = ("sd3", "flux", "flux2", "flux2_klein", "qwen_image", "z_image", "wan", "wan22_5b", "wan22_a14b")
FURTHER = ("flux2", "wan22_5b", "wan22_a14b")
"""Of them those whose tests are marked slow: the layout of another row with a difference or two."""
ROWS = [pytest.param(name, marks=pytest.mark.slow if name in FURTHER else ()) for name in SMALL_MODELS]


def small_model(name: str) -> SmallModel:
    """The row of a family."""
    return import_module(f"tests.small_models.{name}").MODEL
