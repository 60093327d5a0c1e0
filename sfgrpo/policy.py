"""What the loop needs of a model: the only seam between the core and diffusers or ComfyUI."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor


class Policy(Protocol):
    """A flow-matching model with a trainable adapter.

    `cond` is what the loop was given for these rows: a (B,) LongTensor of prompt indices.
    """

    def velocity(self, x: Tensor, sigma: Tensor, cond: Any) -> Tensor:
        """Velocity (B, ...) of latents x (B, ...) at sigma (B,) float32, adapter on, guidance included.

        Rollout and update call the same method with the same inputs, so that the ratio is 1 before the first update.
        """
        ...

    def reference_velocity(self, x: Tensor, sigma: Tensor, cond: Any) -> Tensor:
        """As `velocity`, of the model with the adapter off."""
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Images (B, 3, H, W) float32 in [0, 1] of finished latents (B, ...)."""
        ...

    def trainable_parameters(self) -> Iterable[Tensor]:
        """The adapter's parameters, and nothing of the base model."""
        ...
