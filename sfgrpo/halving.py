"""Work in batches that become smaller where memory runs out; results do not depend on their size."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def memory_ran_out(error: BaseException) -> bool:
    """Whether an error says that the device, or the CPU, has no memory left for a tensor."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def halving(work: Callable[[int], T], size: int, on_halved: Callable[[int], None] = lambda size: None) -> T:
    """work(size); where memory runs out from the start with half the size, and so on down to 1.

    on_halved(size) is told each new size before it is tried. At 1 the error comes through.
    """
    while True:
        try:
            return work(size)
        except (RuntimeError, MemoryError) as error:
            if size <= 1 or not memory_ran_out(error):
                raise
        # Only here, past the except clause, the error and the tensors of its frames are gone.
        size //= 2
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        on_halved(size)
