"""The header of a safetensors file, and what a file is that is none.

A safetensors file is eight bytes with the length of a JSON header, the header (name -> dtype, shape, place of data),
and the data. Whether a file is one is decided by whether it parses: any two bytes may stand at its start, those of a
pickle too. Only what does not parse is looked at for what else it may be. Pickles (.pt, .ckpt, .bin) can run code and
are never opened.
"""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

LONGEST_HEADER = 100_000_000
"""Bytes; what the format's own library takes."""

BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "C64": 64}
BITS |= {"F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8}
BITS |= {"F6_E2M3": 6, "F6_E3M2": 6, "F4": 4}
BITS |= {"I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8}
"""dtype of a header -> bits of an element."""

PICKLE = "a pickle, which can run code when it is opened; get it as .safetensors"
PICKLES = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""How pickles of the protocols 2 to 5 begin."""
PAGE = "a web page, such as a login or an error page; download the file itself, logged in where its site asks for it"
KINDS = {
    b"GGUF": "a GGUF file (a quantised model), which holds no LoRA in safetensors form; get it as .safetensors",
    b"version https://git-lfs": "a git-lfs pointer, which only names it; run `git lfs pull`, or download the file",
    b"<!DOCTYPE": PAGE,
    b"<html": PAGE,
    b"<?xml": "an XML text, such as a server's error message; download the file again",
    b"{": "a JSON text, such as a server's error message; download the file again",
    b"\x93NUMPY": "a numpy array; get it as .safetensors",
    b"\x89HDF": "an HDF5 file; get it as .safetensors",
    b"\x89PNG": "a picture; choose the .safetensors file",
    b"\xff\xd8\xff": "a picture; choose the .safetensors file",
    b"\x1f\x8b": "a gzip archive; unpack it first",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive; unpack it first",
    b"Rar!": "a RAR archive; unpack it first",
}
"""Beginning of a file -> what it is, and what to do; white space and the case of letters do not count."""


def read_header(path: Path) -> dict:
    """The header of a safetensors file, checked against the file's size.

    Returns name -> {"dtype", "shape", "data_offsets"}, and `__metadata__` where there is any. Raises ValueError, the
    second half of a sentence, for a file that is damaged or no safetensors file: what it is, and what to do.
    """
    with path.open("rb") as file:
        return parse_header(file, path.stat().st_size)


def parse_header(file: BinaryIO, size: int) -> dict:
    """`read_header` of an open file of `size` bytes."""
    start = file.read(8)
    length = int.from_bytes(start, "little")
    text = file.read(length) if len(start) == 8 and 2 <= length <= min(LONGEST_HEADER, size - 8) else b""
    try:
        header = json.loads(text, object_pairs_hook=_once) if text[:1] in b"{[" and text else None
    except (ValueError, RecursionError):
        header = None
    if header is None:
        raise ValueError(f"cannot be read: {_what_it_is(file, size, length, bool(text))}")
    if not isinstance(header, dict):
        raise ValueError("cannot be read: its header is no table of tensors; get it again")
    _check_metadata(header.get("__metadata__") or {})
    _check_places({k: v for k, v in header.items() if k != "__metadata__"}, size - 8 - length)
    return header


def _what_it_is(file: BinaryIO, size: int, length: int, has_header: bool) -> str:
    """What a file is whose header is no JSON, and what to do."""
    file.seek(0)
    start = file.read(1024)
    if not start:
        return "it has 0 bytes; get it again"
    if start[:2] == b"PK":
        return f"it is {_archive(file)}"
    if start[:2] in PICKLES:
        return f"it is {PICKLE}"
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    for begin, what in KINDS.items():
        if start.startswith(begin) or text[: len(begin)].lower() == begin.lower():
            return f"it is {what}"
    if not start.strip(b"\0"):
        return "it begins with zeros alone, as a download does that did not finish; get it again"
    if size < 10:
        return f"it has {size} bytes, which is no safetensors file; get it again"
    if has_header:
        return "its header is no JSON, so it is no safetensors file; get it again"
    if length > LONGEST_HEADER or length < 2:
        return f"it is no safetensors file (a header of {length} bytes); get it as .safetensors"
    return f"it is cut short or no safetensors file ({size} bytes); get it again"


def _archive(file: BinaryIO) -> str:
    """What a zip file is: torch.save writes one too."""
    file.seek(0)
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return f"{PICKLE} (or another zip archive, which is damaged)"
    if any(name.endswith("data.pkl") for name in names):
        return PICKLE
    inside = next((name for name in names if name.endswith(".safetensors")), "")
    return f"a zip archive; unpack it first{f' and take {inside[:80]}' if inside else ''}"


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
        if not isinstance(dtype, str) or dtype not in BITS:
            raise ValueError(f"cannot be read: {shown!r} has the unknown dtype {str(dtype)[:20]!r}; save it as fp16")
        if not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
            raise ValueError(f"cannot be read: its header does not describe {shown!r}; get it again")
        start, end = offsets
        if end > size:
            raise ValueError(f"cannot be read: it is cut short, {shown!r} ends after the file; get it again")
        if 8 * (end - start) != BITS[dtype] * math.prod(shape):
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
