"""Rewards: `fn(images, prompts, metadata) -> scores`.

images (B, 3, H, W) float32 in [0, 1]; prompts B strings; metadata B mappings (whatever the prompt file gives beside
the prompt); scores (B,) float. One file each, heavy imports inside the function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ..prompts import Prompt
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


ScoreFn = Callable[[Tensor, Sequence[str], Sequence[Mapping]], Scores]
"""score(images, prompts, metadata) -> Scores, as `combine` and `mix` make one."""


@dataclass(frozen=True)
class Term:
    """One reward of a weighted sum."""

    name: str
    """What its scores are called in `Scores.parts`."""
    fn: Reward
    weight: float = 1.0
    """Negative where less is better."""


def number_names(terms: Sequence[Term]) -> list[Term]:
    """The terms with names that differ: what comes again is named `name_2`, `name_3`, ..."""
    given = {term.name for term in terms}
    used: set[str] = set()
    out = []
    for term in terms:
        name, n = term.name, 1
        while name in used or (n > 1 and name in given):
            n += 1
            name = f"{term.name}_{n}"
        used.add(name)
        out.append(replace(term, name=name))
    return out


def combine(terms: Sequence[Term]) -> ScoreFn:
    """A function (images, prompts, metadata) -> Scores over any rewards; each keeps its own scores as a part.

    Raises ValueError for no term, or for two of one name (`number_names` tells them apart).
    """
    terms = tuple(terms)
    if not terms:
        raise ValueError("no reward given; name at least one, with its weight")
    names = [term.name for term in terms]
    if len(set(names)) < len(names):
        raise ValueError(f"two rewards have the same name: {', '.join(names)}")

    def score(images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping]) -> Scores:
        parts = {term.name: term.fn(images, prompts, metadata).float().cpu() for term in terms}
        return Scores(sum(term.weight * parts[term.name] for term in terms), parts)

    return score


def mix(weights: Mapping[str, float]) -> ScoreFn:
    """`combine` over the named rewards.

    weights: name -> weight. Raises ValueError for an unknown name or an empty mapping.
    """
    return combine([Term(name, get_reward(name), weight) for name, weight in weights.items()])


def check_prompts(
    score: ScoreFn,
    prompts: Sequence[Prompt],
    size: tuple[int, int],
    on_prompt: Callable[[], None] = lambda: None,
) -> None:
    """Raise ValueError for a prompt or a size (height, width) that a reward cannot score, by scoring grey images.

    on_prompt comes before each different prompt and may raise to stop.
    """
    for prompt in {p.text: p for p in prompts}.values():
        on_prompt()
        score(torch.full((1, 3, *size), 0.5), [prompt.text], [dict(prompt.metadata)])
