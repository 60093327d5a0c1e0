"""A table of rewards, as a file has it, with the places of files and of the user's own code made absolute."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .custom import is_custom, locate
from .registry import PATH_SETTINGS


def with_own_code(rewards: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Rewards with the absolute path of the user's own code where that lies in `folder`, that of the file."""
    out = {}
    for name, value in rewards.items():
        kind = value.get("kind", name) if isinstance(value, Mapping) else name
        if isinstance(kind, str) and is_custom(kind):
            table = dict(value) if isinstance(value, Mapping) else {"weight": value}
            value = table | {"kind": locate(kind, folder)}
        out[name] = value
    return out


def with_paths(value: Any, folder: Path, name: str = "") -> Any:
    """A setting of a reward, or a table of them, with files and folders that lie in `folder` as absolute paths."""
    if isinstance(value, Mapping):
        # The model of a judge is a name at its server.
        judge = value.get("kind", name) == "vlm_judge"
        return value if judge else {k: with_paths(v, folder, k) for k, v in value.items()}
    is_path = (
        name in PATH_SETTINGS and isinstance(value, str) and value and (folder / Path(value).expanduser()).exists()
    )
    return os.path.abspath(folder / Path(value).expanduser()) if is_path else value
