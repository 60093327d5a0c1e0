"""Reading a LoRA file that somebody else made: checked before anything of it is used.

A safetensors file is eight bytes with the length of a JSON header, the header (name -> dtype, shape, place of data),
and the data. The header is judged before tensors are read: its length, the places, and whether there is a LoRA at all,
so that a damaged or huge file costs no memory. Pickles (.pt, .ckpt, .bin) can run code and are never opened.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

LONGEST_HEADER = 100_000_000
"""Bytes; what the format's own library takes."""

SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
SIZES |= {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1, "U16": 2, "U32": 4, "U64": 8}
"""dtype of a header -> bytes of an element."""

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


def read_header(path: Path) -> dict:
    """The header of a safetensors file, checked against the file's size. Raises ValueError."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start[:4] in (b"PK\x03\x04", b"PK\x05\x06") or (start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05"):
            raise ValueError(
                "cannot be read: it is a pickle, which can run code when it is opened; get it as .safetensors"
            )
        if size < 10:
            raise ValueError(f"cannot be read: it has {size} bytes, which is no safetensors file; get it again")
        length = int.from_bytes(start, "little")
        if not 2 <= length <= LONGEST_HEADER:
            raise ValueError(
                f"cannot be read: it is no safetensors file (a header of {length} bytes); get it as .safetensors"
            )
        if length > size - 8:
            raise ValueError(f"cannot be read: it is cut short or no safetensors file ({size} bytes); get it again")
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError):
        raise ValueError("cannot be read: its header is no JSON, so it is no safetensors file; get it again") from None
    if not isinstance(header, dict):
        raise ValueError("cannot be read: its header is no table of tensors; get it again")
    _check_metadata(header.get("__metadata__", {}))
    _check_places({k: v for k, v in header.items() if k != "__metadata__"}, size - 8 - length)
    return header


def _once(pairs: list[tuple[str, object]]) -> dict:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name twice")
    return table


def _check_metadata(metadata) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("cannot be read: its metadata is no table of texts; get it again")


def _check_places(entries: Mapping[str, object], size: int) -> None:
    """Each tensor's data has the bytes that its shape needs, in the file, and no byte belongs to two."""
    places = []
    for name, entry in entries.items():
        shown = name[:80]
        if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
            raise ValueError(f"cannot be read: its header does not describe {shown!r}; get it again")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in SIZES:
            raise ValueError(f"cannot be read: {shown!r} has the unknown dtype {str(dtype)[:20]!r}; save it as fp16")
        if not _counts(shape) or not _counts(offsets) or len(offsets) != 2 or len(shape) > 8:
            raise ValueError(f"cannot be read: its header does not describe {shown!r}; get it again")
        start, end = offsets
        if end > size:
            raise ValueError(f"cannot be read: it is cut short, {shown!r} ends after the file; get it again")
        if end - start != SIZES[dtype] * math.prod(shape):
            raise ValueError(f"cannot be read: the data of {shown!r} do not have the size of its shape; get it again")
        places.append((start, end, shown))
    at = 0
    for start, end, shown in sorted(places):
        if start != at:
            what = "overlap those of another tensor" if start < at else "leave a gap in the file"
            raise ValueError(f"cannot be read: the data of {shown!r} {what}; get it again")
        at = end
    if at != size:
        raise ValueError("cannot be read: it has bytes that belong to no tensor; get it again")


def _counts(values) -> bool:
    return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)


OTHER_KINDS = {
    "dora_scale": "is a DoRA: its magnitudes cannot be folded into A and B without the weights of the base model",
    "lora_magnitude_vector": "is a DoRA: its magnitudes cannot be folded into A and B without the weights of the base "
    "model",
    "hada_w": "is a LoHa (products of two low-rank matrices), which has no exact A and B of a useful rank",
    "lokr_w": "is a LoKr (Kronecker products), which has no exact A and B of a useful rank",
    "lora_mid": "is a LoCon with middle factors of convolutions, which these models do not have",
    "oft_blocks": "is an OFT (rotations of weights), which is no sum with the weights",
    "oft_diag": "is an OFT (rotations of weights), which is no sum with the weights",
}


def check_names(names: Mapping[str, object]) -> None:
    """Raise ValueError where the names of a file's tensors are those of something else than a LoRA."""
    names = [n for n in names if n != "__metadata__"]
    if not names:
        raise ValueError("holds no LoRA: it is empty")
    for part, what in OTHER_KINDS.items():
        if any(part in n for n in names):
            raise ValueError(f"{what}; use a plain LoRA")
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
