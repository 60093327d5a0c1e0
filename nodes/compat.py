"""The one place that knows what older ComfyUI versions lack."""

from __future__ import annotations

import inspect
from typing import Any

OPTIONAL = ("advanced", "search_aliases")
"""Keywords that only change how a node is shown; ComfyUI 0.3.64 has neither."""


def make(kind: type, *args: Any, **options: Any) -> Any:
    """kind(*args, **options), without those OPTIONAL keywords that the running ComfyUI's `kind` does not take.

    `make(io.Schema, ..., search_aliases=[...])`, `make(io.Int.Input, "steps", advanced=True)`.
    """
    taken = inspect.signature(kind).parameters
    return kind(*args, **{k: v for k, v in options.items() if k in taken or k not in OPTIONAL})
