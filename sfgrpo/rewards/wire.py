"""How images, prompts and metadata travel to `sfgrpo reward serve`, and the scores back.

There: a safetensors file, which is exact and runs no code: one tensor `images` (B, 3, H, W), float32, little-endian; in
its `__metadata__` the JSON texts `prompts` (B strings) and `metadata` (B objects). Back: JSON,

    {"total": [B numbers], "rewards": {name: [B numbers]}}

where null stands for a score that is not finite. Numbers have all their digits: a float32 comes back as it was.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

CONTENT_TYPE = "application/octet-stream"
MOST_HEADER = 16_000_000
"""Bytes of prompts and metadata."""


def pack(images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping]) -> bytes:
    """The body of a request. images (B, 3, H, W). Raises ValueError for metadata that JSON cannot hold."""
    data = images.detach().to("cpu", torch.float32).contiguous().numpy().astype("<f4", copy=False).tobytes()
    try:
        texts = {"prompts": json.dumps(list(prompts)), "metadata": json.dumps([dict(m) for m in metadata])}
    except (TypeError, ValueError) as error:
        raise ValueError(f"the metadata of a prompt cannot be sent: {error}") from None
    tensor = {"dtype": "F32", "shape": list(images.shape), "data_offsets": [0, len(data)]}
    header = json.dumps({"__metadata__": texts, "images": tensor}).encode()
    header += b" " * (-len(header) % 8)
    return b"".join((len(header).to_bytes(8, "little"), header, data))


def unpack(body: bytearray) -> tuple[Tensor, list[str], list[dict]]:
    """Images, prompts and metadata of a request; the images share the body's memory.

    Raises ValueError, saying what is wrong, for anything that `pack` does not write.
    """
    size = int.from_bytes(body[:8], "little")
    if len(body) < 8 or size > min(len(body) - 8, MOST_HEADER):
        raise ValueError("the body is no safetensors file, or its header is too long")
    try:
        header = json.loads(bytes(body[8 : 8 + size]).decode())
        tensor, texts = header["images"], header["__metadata__"]
        shape, offsets = tensor["shape"], tensor["data_offsets"]
        prompts, metadata = json.loads(texts["prompts"]), json.loads(texts["metadata"])
        dtype = tensor["dtype"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"the header is not as it should be: {type(error).__name__} {error}") from None
    good = isinstance(shape, list) and all(type(n) is int and n > 0 for n in shape)
    if dtype != "F32" or not good or len(shape) != 4 or shape[1] != 3:
        raise ValueError(f"images must be F32 of shape [B, 3, H, W], not {dtype} {shape}")
    count = math.prod(shape)
    if len(header) != 2 or offsets != [0, 4 * count] or len(body) != 8 + size + 4 * count:
        raise ValueError(f"images of shape {shape} must be all that follows the header, {4 * count} bytes")
    n = shape[0]
    if not (isinstance(prompts, list) and len(prompts) == n and all(isinstance(p, str) for p in prompts)):
        raise ValueError(f"prompts must be {n} strings, one for each image")
    if not (isinstance(metadata, list) and len(metadata) == n and all(isinstance(m, dict) for m in metadata)):
        raise ValueError(f"metadata must be {n} objects, one for each image")
    if size % 4:
        body, size = bytearray(body[8 + size :]), -8
    return torch.frombuffer(body, dtype=torch.float32, count=count, offset=8 + size).view(shape), prompts, metadata


def numbers(scores: Tensor) -> list[float | None]:
    """Scores (B,) as JSON has them."""
    return [x if math.isfinite(x) else None for x in scores.float().tolist()]


def scores(values: Any, count: int) -> Tensor:
    """(count,) float32 of a list of JSON, NaN where it has null. Raises ValueError where it is no such list."""
    if not isinstance(values, list) or not all(x is None or type(x) in (int, float) for x in values):
        raise ValueError("the scores are no list of numbers")
    if len(values) != count:
        raise ValueError(f"{len(values)} scores for {count} images")
    return torch.tensor([math.nan if x is None else float(x) for x in values], dtype=torch.float32)
