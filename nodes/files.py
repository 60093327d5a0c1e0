"""Names and files that a workflow gives: kept inside ComfyUI's folders, with an error for anything else.

A workflow is untrusted: it comes from a website or a picture.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import folder_paths
from torch import Tensor

from ..sfgrpo.export import save_lora
from ..sfgrpo.lora_files.file import LoRAFile, read_lora
from ..sfgrpo.prompts import SUFFIXES as PROMPT_SUFFIXES
from ..sfgrpo.prompts import Prompt, read_prompts

NONE = "none"
"""Choice of a file list that stands for no file."""

_PORTS = "0123456789\u00b9\u00b2\u00b3"
_RESERVED = {"con", "prn", "aux", "nul", "conin$", "conout$", *(f"{p}{n}" for p in ("com", "lpt") for n in _PORTS)}
_FORBIDDEN = re.compile(r'[<>:"/\\|?*%]')
LONGEST = 100
LONGEST_BYTES = 200
"""Of a name in UTF-8: file systems take 255, of which some are for what is added to it."""


def safe_name(name: str) -> str:
    """A file name, without folder and extension. Raises ValueError for what could leave the folder or be no file."""
    name = name.strip()
    # Not printable are control characters, halves of characters and marks that turn the direction of writing.
    plain = bool(name) and name.isprintable() and not _FORBIDDEN.search(name) and "." not in (name[0], name[-1])
    if not plain or len(name) > LONGEST or len(name.encode("utf-8")) > LONGEST_BYTES:
        raise ValueError(
            f"the name {name[:LONGEST]!r} cannot be used: give a plain file name of at most {LONGEST} letters (fewer "
            'where they are not Latin), without folders, without a dot at its start or end and without any of < > : " '
            "/ \\ | ? * %"
        )
    if name.split(".")[0].strip().lower() in _RESERVED:
        raise ValueError(f"the name {name!r} is reserved by Windows; choose another")
    return name


def prompt_files() -> list[str]:
    """Prompt files at the top of ComfyUI's input folder."""
    folder = Path(folder_paths.get_input_directory())
    if not folder.is_dir():
        return []
    return sorted(p.name for p in folder.iterdir() if p.suffix.lower() in PROMPT_SUFFIXES and p.is_file())


def read_prompt_file(name: str) -> list[Prompt]:
    """Prompts of a file of the input folder. Raises ValueError where it is not in `prompt_files` or has no prompts."""
    if name not in prompt_files():
        raise ValueError(f"prompt file {name!r} is not in ComfyUI's input folder; choose one of the list")
    path = Path(folder_paths.get_input_directory()) / name
    try:
        return read_prompts(path)
    except ValueError as error:
        # The whole path of someone else's machine is of no use in a workflow's error.
        raise ValueError(str(error).replace(str(path), name)) from None


def prompts_of(text: str, file: str, negative: str) -> list[Prompt]:
    """Prompts of a text, one a line, or of a file where one is chosen; `negative` where a prompt has none of its own.

    Raises ValueError for no prompt, or for both a text and a file.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if file != NONE:
        if lines:
            raise ValueError("prompts come from the text or from prompt_file, not both; empty one of the two")
        prompts = read_prompt_file(file)
    else:
        prompts = [Prompt(line) for line in lines]
    if not prompts:
        raise ValueError("write at least one prompt, one a line, or choose a prompt_file")
    return [p if p.negative else Prompt(p.text, negative.strip(), p.metadata) for p in prompts]


def lora_files() -> list[str]:
    """LoRA files of ComfyUI's lora folders that are safetensors; a pickle can run code."""
    return [name for name in folder_paths.get_filename_list("loras") if name.lower().endswith(".safetensors")]


def read_lora_file(name: str) -> LoRAFile:
    """A file of the lora folders. Raises ValueError where it is not in the list, damaged or no LoRA."""
    if name not in lora_files():
        raise ValueError(f"LoRA file {name!r} is not in the loras folders; choose one of the list")
    return read_lora(folder_paths.get_full_path_or_raise("loras", name), name)


def stamps(prompt_file: str, lora_file: str) -> str:
    """Size and time of change of files of the two lists; empty for what is in neither."""
    paths = []
    if prompt_file in prompt_files():
        paths.append(Path(folder_paths.get_input_directory()) / prompt_file)
    if lora_file in lora_files():
        paths.append(Path(folder_paths.get_full_path_or_raise("loras", lora_file)))
    return " ".join(f"{s.st_size}/{s.st_mtime_ns}" for s in (path.stat() for path in paths))


class Checkpoints:
    """LoRA files of one training in output/loras/, which ComfyUI's LoRA loaders list after a refresh."""

    def __init__(self, name: str) -> None:
        """Take the next `<name>_<number>` that no file has. Raises ValueError for a name that cannot be used."""
        folder, stem, number, _, _ = folder_paths.get_save_image_path(
            f"loras/{safe_name(name)}", folder_paths.get_output_directory()
        )
        self.folder, self.stem = Path(folder), f"{stem}_{number:05}"

    def path(self, kind: str) -> Path:
        return self.folder / f"{self.stem}_{kind}.safetensors"

    def save(self, kind: str, state: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> str:
        """Write `<name>_<number>_<kind>.safetensors`, whole or not at all; returns its place as a user knows it."""
        text = {k: v if isinstance(v, str) else json.dumps(v) for k, v in metadata.items()}
        save_lora(state, self.path(kind), text)
        return f"output/loras/{self.path(kind).name}"
