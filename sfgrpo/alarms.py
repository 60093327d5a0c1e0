"""Alarms for reward hacking: what may not change much while the trained reward rises.

Compared with the evaluation at the start are how the images look (sharpness, brightness, diversity) and the rewards
that are reported but not what the policy is rewarded for. A reward has no natural zero, so its fall is counted in stds
of its scores over the images of the start.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .evaluate import Evaluation
from .rewards import Term, number_names


@dataclass(frozen=True, kw_only=True)
class AlarmConfig:
    """When an alarm is given, `[alarms]`. Raises ValueError for a value outside its range, naming it."""

    __pydantic_config__ = {"extra": "forbid"}

    drop: float = 0.3
    """Share of the start by which sharpness, brightness or diversity of the images may fall."""
    rise: float = 1.0
    """Share of the start by which sharpness or brightness may rise: grids, halos and glare raise them."""
    reward_drop: float = 0.5
    """Stds, over the images of the start, by which a reward that is watched may fall."""
    stop: bool = False
    """An alarm ends the run; `best` is then the best before it."""

    def __post_init__(self) -> None:
        for name in ("drop", "rise", "reward_drop"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")


@dataclass(frozen=True)
class Alarm:
    """One thing that changed more than it may."""

    name: str
    """sharpness, brightness, diversity, or a reward."""
    start: float
    now: float
    words: str
    """What happened, in a line."""


def with_watched(terms: Sequence[Term], watched: Sequence[Term]) -> tuple[list[Term], dict[str, float]]:
    """The rewards of an evaluation, and which of them are `directions` of `find_alarms`.

    Those are all that are reported, but the ones that the policy is rewarded for making small. Of a watched reward's
    weight only the sign matters: negative where less is better.
    """
    signs = [math.copysign(1.0, t.weight) for t in watched]
    named = number_names([*terms, *(replace(t, weight=0.0) for t in watched)])
    directions = {t.name: 1.0 for t in named[: len(terms)] if t.weight > 0}
    directions |= {t.name: sign for t, sign in zip(named[len(terms) :], signs, strict=True)}
    return named, directions


def find_alarms(
    start: Evaluation, now: Evaluation, directions: Mapping[str, float], config: AlarmConfig, *, rising: bool
) -> list[Alarm]:
    """What changed too much between two evaluations of the same prompts and seeds, where the trained reward rose.

    directions: rewards that are watched -> a positive number where more is better, a negative one where less is.
    rising: whether the trained reward rose; nothing is an alarm where it did not.
    """
    if not rising:
        return []
    found = []
    for name in ("sharpness", "brightness", "diversity"):
        before, after = start.looks[name], now.looks[name]
        share = after / before - 1 if before > 0 else 0.0
        if share < -config.drop or (name != "diversity" and share > config.rise):
            found.append(_alarm(name, before, after, f"{share:+.0%}"))
    for name, direction in directions.items():
        before, after, spread = start.scores[name], now.scores[name], start.spreads[name]
        change = (after - before) * math.copysign(1.0, direction)
        if change < 0 and -change > config.reward_drop * spread:
            size = f"{(after - before) / spread:+.1f} std of the images at the start" if spread else "all were equal"
            found.append(_alarm(name, before, after, size))
    return found


def _alarm(name: str, before: float, after: float, size: str) -> Alarm:
    verb = "fell" if after < before else "rose"
    words = f"{name} {verb} from {before:.4g} to {after:.4g} ({size}) while the trained reward rose"
    return Alarm(name, before, after, words)


def rises(values: list[float], window: int = 5) -> bool:
    """Whether the mean of the last finite values is above that of the first ones; False for fewer than two."""
    finite = [v for v in values if math.isfinite(v)]
    n = min(window, len(finite) // 2)
    return n > 0 and sum(finite[-n:]) > sum(finite[:n])
