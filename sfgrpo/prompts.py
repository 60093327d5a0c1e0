"""Prompts: what is read from a prompt file, and which of them an iteration takes."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .noise import generator_for

SUFFIXES = (".txt", ".jsonl")
"""Of prompt files, in small or capital letters."""

MOST_NESTED = 64
"""Levels of lists and objects in a line of a .jsonl file."""

ARRAY = 'is a JSON array; a .jsonl file needs an object with "prompt" a line, without brackets or commas between lines'

_KNOWN = r"--(?:(?:[whdsflg]|fs|ar)[\s=]+[-+]?\.?\d\S*|n\s+\S.*?|(?:i|ci|cn)\s+\S+\.\w{2,4})"
OPTION = re.compile(rf"(?<=\s){_KNOWN}(?:\s+(?:{_KNOWN}|--\w+[\s=]+\S+))*\s*$")
"""At the end of a line: options of sample prompts as kohya's and musubi's trainers, or Midjourney, read them."""

COMMENT = re.compile(r"#+(?:\s|$)")
"""At the start of a line. "#1 fan" is a prompt."""


@dataclass(frozen=True)
class Prompt:
    """One prompt."""

    text: str
    negative: str = ""
    """Negative prompt, used where the guidance is above 1."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else the line of a .jsonl file holds, handed to the reward."""
    where: str = field(default="", compare=False)
    """File and line, for messages; empty for one that was not read from a file."""


def read_prompts(path: str | Path) -> list[Prompt]:
    """Prompts of a .txt file (one a line) or a .jsonl file (objects with `prompt`, optionally `negative_prompt`).

    Lines with nothing to see are skipped; a `negative_prompt` of null is none. Raises ValueError, naming the file and
    line, where it is no such file, holds no prompt, or has what no tokenizer or reward can be given: control characters
    (but tabs and breaks of line or page), halves of surrogate pairs, numbers that are not finite, keys that come twice,
    more than MOST_NESTED levels. So it does for lines of a .txt file that are no prompts: comments (`# ...`) and those
    with the options of a sample prompt (`--w 512`), for left out silently they would hide what is trained on.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if path.is_dir():
        raise ValueError(f"prompt file {path} is a folder; {_file_in(path)}")
    if suffix not in SUFFIXES:
        raise ValueError(f"prompt file {path} must end in .txt (one prompt a line) or .jsonl (one object a line)")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError:
        raise ValueError(f"prompt file {path} does not exist") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"prompt file {path} cannot be read as UTF-8 text: {error}; save it as UTF-8") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"prompt file {path} cannot be read: {error}") from None
    prompts = []
    for number, line in enumerate(lines, start=1):
        if is_blank(line):
            continue
        where = f"{path}, line {number}"
        prompt = _from_text(line.strip(), where) if suffix == ".txt" else _from_json(line, where)
        for text in (prompt.text, prompt.negative):
            odd = next((c for c in text if unicodedata.category(c) == "Cc" and c not in "\t\n\v\f\r\x85"), None)
            if odd is not None:
                raise ValueError(f"{where}: has the control character U+{ord(odd):04X}; remove it, and save as UTF-8")
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f"prompt file {path} is empty; write at least one prompt")
    return prompts


def is_blank(text: str) -> bool:
    """Whether a text has nothing to see: spaces, zero-width ones included."""
    return all(c.isspace() or unicodedata.category(c) == "Cf" for c in text)


def _file_in(folder: Path) -> str:
    """What to name in place of a folder."""
    files = sorted(f.name for f in folder.iterdir() if f.suffix.lower() in SUFFIXES)
    best = next((name for name in ("train.txt", "train.jsonl") if name in files), files[0] if files else None)
    return f"name a file in it, e.g. its {best}" if best else "name a .txt or .jsonl file"


def _from_text(line: str, where: str) -> Prompt:
    if COMMENT.match(line):
        raise ValueError(
            f"{where}: is a comment, which would be trained on as text; remove it, or write it as a prompt in a .jsonl "
            "file"
        )
    option = OPTION.search(line)
    if option is not None:
        raise ValueError(
            f"{where}: ends in {option[0].strip()[:40]!r}, options of sample prompts, which would be trained on as "
            "text; remove the options, set size, steps and guidance in [sampling], and give negative prompts in a "
            ".jsonl file"
        )
    return Prompt(line, where=where)


def _from_json(line: str, where: str) -> Prompt:
    try:
        row = json.loads(line, object_pairs_hook=_once, parse_constant=_refuse_constant)
        _check_value(row)
    except RecursionError:
        raise ValueError(f"{where}: is nested deeper than {MOST_NESTED} levels; make it flatter") from None
    except json.JSONDecodeError as error:
        if line.lstrip().startswith("["):
            raise ValueError(f"{where}: {ARRAY}") from None
        raise ValueError(f"{where}: not JSON ({error})") from None
    except ValueError as error:
        raise ValueError(f"{where}: {str(error).split(';')[0]}") from None
    if isinstance(row, list):
        raise ValueError(f"{where}: {ARRAY}")
    if isinstance(row, dict) and row and "prompt" not in row:
        keys = ", ".join(ascii(key)[1:-1][:40] for key in list(row)[:5])
        more = f" and {len(row) - 5} more" if len(row) > 5 else ""
        raise ValueError(f'{where}: has {keys}{more}; needs "prompt", a non-empty string')
    text = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(text, str) or is_blank(text):
        raise ValueError(f'{where}: needs an object with a non-empty string "prompt"')
    negative = row.pop("negative_prompt", None)
    if not isinstance(negative, str | None):
        raise ValueError(f'{where}: "negative_prompt" must be a string, or null for none')
    row.pop("prompt")
    return Prompt(text.strip(), negative or "", row, where)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"has the key {ascii(twice)} twice")
    return row


def _refuse_constant(name: str) -> None:
    raise ValueError(f"has {name}, which is no JSON number")


def _check_value(value: Any, level: int = 0) -> None:
    """Raise ValueError for what JSON can spell but neither UTF-8 nor a score can hold, RecursionError for its depth."""
    if level > MOST_NESTED:
        raise RecursionError
    if isinstance(value, str):
        odd = next((c for c in value if 0xD800 <= ord(c) <= 0xDFFF), None)
        if odd is not None:
            raise ValueError(f"has half of a surrogate pair (\\u{ord(odd):04x}), which is no character")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError("has a number too large for 64 bits")
    elif isinstance(value, dict):
        for key, inner in value.items():
            _check_value(key, level)
            _check_value(inner, level + 1)
    elif isinstance(value, list):
        for inner in value:
            _check_value(inner, level + 1)


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
