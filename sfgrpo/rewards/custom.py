"""Rewards of the user's own: `module:name` or `file.py:name`, as a run file's `kind` gives them.

This runs the user's code, so it is for what the owner of the machine wrote: run files of the headless trainer, and the
folder that only the owner can write to in ComfyUI. No workflow and no LoRA file gets here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import sys
import traceback
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

DEFAULT_NAME = "reward"


def is_custom(kind: str) -> bool:
    """Whether a kind names code of the user's."""
    return ":" in kind or kind.endswith(".py")


def split(kind: str) -> tuple[str, str]:
    """Module or file, and the name in it (`reward` where a file alone is named)."""
    if kind.endswith(".py"):
        return kind, DEFAULT_NAME
    place, _, name = kind.rpartition(":")
    return place, name


def locate(kind: str, folder: Path) -> str:
    """The kind with the absolute path of its file where that lies in `folder` (that of the run file)."""
    place, name = split(kind)
    file = folder / Path(place if place.endswith(".py") else place.replace(".", "/") + ".py").expanduser()
    return f"{file.resolve()}:{name}" if place.endswith(".py") or file.is_file() else kind


def load_custom(kind: str) -> Any:
    """The function or class that `module:name` or `file.py:name` names, or `name` of an object made in that module.

    Raises ValueError, naming it, where it is not there, fails on import, or cannot be called with (images, prompts,
    metadata).
    """
    place, name = split(kind)
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and (place == error.name or place.startswith(f"{error.name}.")):
            raise ValueError(
                f"there is no module {place!r} (of {kind!r}); put {place.split('.')[0]}.py beside the run file, or "
                "install it"
            ) from None
        raise ValueError(f"{place} (of {kind!r}) cannot be imported: {error}") from None
    except ValueError:
        raise
    except Exception as error:
        line = _line(error, place)
        raise ValueError(f"{place}{line} (of {kind!r}) cannot be imported: {type(error).__name__}: {error}") from None
    if not hasattr(module, name):
        names = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise ValueError(f"{place} has no {name!r}; it has {', '.join(names) or 'nothing that can be called'}")
    target = getattr(module, name)
    function = target.__call__ if inspect.isclass(target) else target
    if not callable(target) or (inspect.isclass(target) and not dataclasses.is_dataclass(target)):
        raise ValueError(f"{kind} is neither a function nor a dataclass that can be called")
    try:
        signature = inspect.signature(function)
        signature.bind(*([None] * (4 if inspect.isclass(target) else 3)), **_required(signature))
    except TypeError:
        raise ValueError(f"{kind} must take (images, prompts, metadata), settings by keyword only") from None
    return target


def _required(signature: inspect.Signature) -> dict[str, None]:
    """The keyword-only parameters, which are settings."""
    return {p.name: None for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY}


def _line(error: BaseException, place: str) -> str:
    """In which line of the user's own file an import failed, in words; empty where it is not known."""
    if isinstance(error, SyntaxError):
        return ""  # its message has the line
    here = Path(place).expanduser().resolve()
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == here]
    return f", line {lines[-1]}" if lines else ""


def _from_file(path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"file {path} of a custom reward does not exist")
    # A file that has changed is another module.
    version = f"{path} {path.stat().st_mtime_ns}"
    name = f"sfgrpo_custom_{path.stem}_{hashlib.sha256(version.encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, path)
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
