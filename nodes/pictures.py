"""What nodes show: PIL pictures as IMAGE tensors, and text on the node.

Grids and plots are drawn in `sfgrpo/pictures.py` and `sfgrpo/plot.py`.
"""

from __future__ import annotations

import torch
from comfy_api.latest import io
from PIL import Image
from torch import Tensor

from ..sfgrpo.pictures import arrange, before_after, tile, titled
from ..sfgrpo.plot import Series, plot

__all__ = ["Series", "arrange", "before_after", "from_image", "plot", "show_text", "tile", "titled", "to_image"]


def to_image(picture: Image.Image) -> Tensor:
    """A PIL picture as IMAGE, (1, H, W, 3) float32 in [0, 1]."""
    data = torch.frombuffer(bytearray(picture.convert("RGB").tobytes()), dtype=torch.uint8)
    return data.view(1, picture.height, picture.width, 3).float() / 255


def from_image(images: Tensor) -> Tensor:
    """IMAGE (B, H, W, C) as the core's images (B, 3, H, W) in [0, 1]; a fourth channel is left out.

    Raises ValueError for images without three colour channels.
    """
    if images.shape[-1] not in (3, 4):
        raise ValueError(f"the images must have 3 channels (RGB) or 4 (RGBA), and have {images.shape[-1]}")
    return images[..., :3].movedim(-1, 1).float().clamp(0, 1)


def show_text(node: type[io.ComfyNode], text: str) -> None:
    """Show text on a running node in the frontend. The node's schema must ask for the hidden `unique_id`."""
    from server import PromptServer

    server = getattr(PromptServer, "instance", None)
    if server is not None and node.hidden is not None and node.hidden.unique_id:
        server.send_progress_text(text, node.hidden.unique_id)
