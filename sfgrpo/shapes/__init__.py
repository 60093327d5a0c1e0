"""The embedded domain: pictures of coloured shapes, their captions, and the small model trained on them."""

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"
"""The shipped model, a diffusers folder that `StableDiffusion3Pipeline.from_pretrained` loads."""
