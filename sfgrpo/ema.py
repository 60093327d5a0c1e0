"""Exponential moving average of the adapter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class EMA:
    """Average of parameters over updates; after n updates the decay is at most (1 + n) / (10 + n)."""

    def __init__(self, parameters: Sequence[Tensor], decay: float) -> None:
        """decay in [0, 1); 0 follows the parameters exactly."""
        self.parameters, self.decay, self.updates = list(parameters), decay, 0
        self.average = [p.detach().clone() for p in self.parameters]

    @torch.no_grad()
    def update(self) -> None:
        """Take in the parameters as they are now."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(self.average, [p.detach() for p in self.parameters], 1 - decay)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The parameters hold the average inside the block."""
        saved = [p.detach().clone() for p in self.parameters]
        self._copy(self.average)
        try:
            yield
        finally:
            self._copy(saved)

    @torch.no_grad()
    def _copy(self, values: Sequence[Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.copy_(value)
