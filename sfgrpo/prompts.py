"""Prompts: what is read from a prompt file, and which of them an iteration takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .noise import generator_for

SUFFIXES = (".txt", ".jsonl")
"""Of prompt files, in small or capital letters."""


@dataclass(frozen=True)
class Prompt:
    """One prompt."""

    text: str
    negative: str = ""
    """Negative prompt, used where the guidance is above 1."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else the line of a .jsonl file holds, handed to the reward."""


def read_prompts(path: str | Path) -> list[Prompt]:
    """Prompts of a .txt file (one a line) or a .jsonl file (objects with `prompt`, optionally `negative_prompt`).

    Empty lines are skipped. Raises ValueError, naming the file and line, where it is no such file or holds no prompt.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"prompt file {path} must end in .txt (one prompt a line) or .jsonl (one object a line)")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError:
        raise ValueError(f"prompt file {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"prompt file {path} cannot be read as UTF-8 text: {error}") from None
    prompts = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            prompts.append(Prompt(line.strip()) if suffix == ".txt" else _from_json(line, f"{path}, line {number}"))
    if not prompts:
        raise ValueError(f"prompt file {path} is empty; write at least one prompt")
    return prompts


def _from_json(line: str, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error})") from None
    text = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f'{where}: needs an object with a non-empty string "prompt"')
    negative = row.pop("negative_prompt", "")
    if not isinstance(negative, str):
        raise ValueError(f'{where}: "negative_prompt" must be a string')
    row.pop("prompt")
    return Prompt(text.strip(), negative, row)


def pick_prompts(count: int, per_iteration: int, iteration: int, seed: int) -> list[int]:
    """Indices of the prompts of one iteration, a pure function of its arguments.

    An epoch is a random order of all `count` prompts, cut into iterations; what does not fill one is left to the next
    epoch's order. Prompts repeat within an iteration only where `per_iteration` exceeds `count`.
    """
    if per_iteration >= count:
        whole, rest = divmod(per_iteration, count)
        order = torch.randperm(count, generator=generator_for(seed, "prompts", iteration)).tolist()
        return list(range(count)) * whole + order[:rest]
    per_epoch = count // per_iteration
    epoch, place = divmod(iteration, per_epoch)
    order = torch.randperm(count, generator=generator_for(seed, "prompts", epoch)).tolist()
    return order[place * per_iteration : (place + 1) * per_iteration]
