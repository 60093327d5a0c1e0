"""Reading a LoRA file that somebody else made: checked before anything of it is used.

The header (`header.py`) is judged before tensors are read, and so is whether there is a LoRA at all, so that a damaged
or huge file costs no memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from .header import read_header

CONFIG = "adapter_config.json"
FOLDER_FILES = ("adapter_model.safetensors", "pytorch_lora_weights.safetensors")
"""LoRA files of a folder that peft or diffusers wrote."""


@dataclass
class LoRAFile:
    """The contents of a LoRA file."""

    name: str
    """What messages call it."""
    tensors: dict[str, Tensor]
    metadata: dict[str, str] = field(default_factory=dict)
    config: dict = field(default_factory=dict)
    """peft's adapter_config.json, where one lies beside the file."""


def read_lora(path: str | Path, name: str | None = None) -> LoRAFile:
    """Read a LoRA file, or a folder of peft's.

    name: what messages call it; the path without one. Raises ValueError, in one sentence that says what is wrong and
    what to do, for a file that is missing, damaged, no safetensors file or holds no LoRA.
    """
    path = Path(path)
    name = str(path) if name is None else name
    try:
        if path.is_dir():
            path = next((path / f for f in FOLDER_FILES if (path / f).is_file()), path / FOLDER_FILES[0])
            if not path.is_file():
                raise ValueError(f"cannot be read: it is a folder without {' or '.join(FOLDER_FILES)}")
        if not path.exists():
            raise ValueError("does not exist")
        header = read_header(path)
        check_names(header)
        tensors = _load(path)
        config = _config(path)
    except ValueError as error:
        raise ValueError(f"LoRA file {name} {error}") from None
    except OSError as error:
        raise ValueError(f"LoRA file {name} cannot be read: {error.strerror or error}") from None
    metadata = header.get("__metadata__", {})
    return LoRAFile(name, tensors, metadata, config)


CONTROL = (
    "is a control LoRA: it widens a layer of the model for a second picture, which A and B do not say; load it as "
    "it is, with the model that it is for"
)
OTHER_KINDS = {
    "dora_scale": "is a DoRA: its magnitudes cannot be folded into A and B without the weights of the base model",
    "lora_magnitude_vector": "is a DoRA: its magnitudes cannot be folded into A and B without the weights of the base "
    "model",
    "hada_w": "is a LoHa (products of two low-rank matrices), which has no exact A and B of a useful rank",
    "lokr_w": "is a LoKr (Kronecker products), which has no exact A and B of a useful rank",
    "lora_mid": "is a LoCon with middle factors of convolutions, which these models do not have",
    "oft_blocks": "is an OFT (rotations of weights), which is no sum with the weights",
    "oft_diag": "is an OFT (rotations of weights), which is no sum with the weights",
    "reshape_weight": CONTROL,
    "norm.query_norm.scale": CONTROL,
}


def check_names(names: Mapping[str, object]) -> None:
    """Raise ValueError where the names of a file's tensors are those of something else than a LoRA."""
    names = [n for n in names if n != "__metadata__"]
    if not names:
        raise ValueError("holds no LoRA: it is empty")
    for part, what in OTHER_KINDS.items():
        if any(part in n for n in names):
            raise ValueError(what if what is CONTROL else f"{what}; use a plain LoRA")
    if any("lora" in n.lower() for n in names):
        return
    if any(n in ("emb_params", "string_to_param", "clip_l", "clip_g", "t5xxl") for n in names):
        raise ValueError("holds no LoRA: it is an embedding (textual inversion); choose a LoRA")
    whole = sum(n.endswith((".weight", ".bias")) for n in names)
    what = "a whole model or a part of one" if whole > len(names) // 2 else f"no tensor is a factor ({names[0][:60]!r})"
    raise ValueError(f"holds no LoRA: it is {what}; choose a LoRA".replace("it is no tensor", "no tensor"))


def _load(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, KeyError, RuntimeError, AttributeError) as error:
        raise ValueError(f"cannot be read: {str(error).splitlines()[0]}; get it again") from None


def _config(path: Path) -> dict:
    """adapter_config.json beside a file of peft's name, else nothing."""
    file = path.with_name(CONFIG)
    if path.name != FOLDER_FILES[0] or not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise ValueError(f"cannot be read: {CONFIG} beside it is no JSON table; get it again")
    return config


def common_dtype(file: LoRAFile) -> torch.dtype:
    """float32, float16 or bfloat16: that of most of the file's tensors, or the nearest that loaders take."""
    dtypes = [t.dtype for t in file.tensors.values() if t.is_floating_point() and t.ndim > 1]
    most = max(set(dtypes), key=lambda d: (dtypes.count(d), d.itemsize)) if dtypes else torch.float32
    if most.itemsize == 1:
        return torch.bfloat16
    return most if most in (torch.float16, torch.bfloat16) else torch.float32
