"""LoRA files: one safetensors that diffusers and ComfyUI both load at strength 1.0.

A module's weight is changed by scale * B A. Loaders disagree on where the scale stands: ComfyUI reads `.alpha`
tensors and no metadata, diffusers' SD3 loader reads no `.alpha` tensors. So the scale alpha / rank is folded into
B here, the file has no alpha keys, and both take the factors as they are.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor


def fold(factors: Mapping[str, tuple[Tensor, Tensor]], scale: float, dtype: torch.dtype) -> dict[str, Tensor]:
    """State dict with keys `<module>.lora_A.weight` and `<module>.lora_B.weight`.

    factors: module name -> (A (rank, in), B (out, rank)); scale: alpha / rank, multiplied into B in float32. The
    tensors are copies.
    """
    state = {}
    for name, (a, b) in factors.items():
        state[f"{name}.lora_A.weight"] = a.detach().to("cpu", dtype, copy=True).contiguous()
        state[f"{name}.lora_B.weight"] = (b.detach().float() * scale).to("cpu", dtype).contiguous()
    return state


def file_hash(path: str | Path) -> str:
    """SHA-256 of a file, hex."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def save_lora(state: Mapping[str, Tensor], path: str | Path, metadata: Mapping[str, str]) -> None:
    """Write a LoRA file whole or not at all. Raises OSError where the folder cannot be written."""
    from safetensors.torch import save

    path = Path(path)
    part = path.with_name(path.name + ".part")
    data = save(dict(state), metadata={k: str(v) for k, v in metadata.items()})
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def replace(part: Path, path: Path, tries: int = 5) -> None:
    """Rename; on Windows a virus scanner or an indexer may hold the file that is there for a moment."""
    for n in range(tries):
        try:
            part.replace(path)
            return
        except PermissionError:
            if n + 1 == tries:
                raise
            time.sleep(0.2)
