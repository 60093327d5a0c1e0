"""Rewards: `fn(images, prompts, metadata) -> scores`.

images (B, 3, H, W) float32 in [0, 1]; prompts B strings; metadata B mappings (whatever the prompt file gives beside
the prompt); scores (B,) float. One file each, heavy imports inside the function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from .jpeg import jpeg_size_reward
from .shapes import shapes_reward

Reward = Callable[[Tensor, Sequence[str], Sequence[Mapping]], Tensor]

REWARDS: dict[str, Reward] = {
    "shapes": shapes_reward,
    "shapes_strict": partial(shapes_reward, mode="strict"),
    "jpeg_size": jpeg_size_reward,
}


def get_reward(name: str) -> Reward:
    """The reward of this name. Raises ValueError with the names that exist."""
    if name not in REWARDS:
        raise ValueError(f"unknown reward {name!r}; choose one of {', '.join(REWARDS)}")
    return REWARDS[name]


@dataclass
class Scores:
    """Scores of B images."""

    total: Tensor
    """(B,) float32: the weighted sum, which credit sees."""
    parts: dict[str, Tensor]
    """Name -> (B,) float32: each reward by itself, without its weight."""


def mix(weights: Mapping[str, float]) -> Callable[[Tensor, Sequence[str], Sequence[Mapping]], Scores]:
    """A function (images, prompts, metadata) -> Scores over the named rewards.

    weights: name -> weight. Raises ValueError for an unknown name or an empty mapping.
    """
    if not weights:
        raise ValueError("no reward given; name at least one, with its weight")
    functions = {name: get_reward(name) for name in weights}

    def score(images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping]) -> Scores:
        parts = {name: fn(images, prompts, metadata).float().cpu() for name, fn in functions.items()}
        return Scores(sum(weight * parts[name] for name, weight in weights.items()), parts)

    return score
