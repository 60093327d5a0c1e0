"""Optional words of the V3 node schema that older versions of ComfyUI do not know."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from comfy_api.latest import io

LATER = ("advanced", "search_aliases")
"""Keywords that came after ComfyUI 0.3.64. They change how a node is shown and found, not what it does."""


def make(kind: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """`kind(*args, **keywords)`, without those of LATER that the running ComfyUI does not know."""
    known = inspect.signature(kind).parameters
    return kind(*args, **{k: v for k, v in keywords.items() if k in known or k not in LATER})


def advanced(kind: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """An input that is folded away with the advanced ones, where the running ComfyUI does that."""
    return make(kind, *args, advanced=True, **keywords)


def fixed() -> Any:
    """`control_after_generate` of a seed that stays as it is from run to run; older versions know on and off alone."""
    kind = getattr(io, "ControlAfterGenerate", None)
    return True if kind is None else kind.fixed
