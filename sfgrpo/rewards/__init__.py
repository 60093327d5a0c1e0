"""Rewards: `fn(images, prompts, metadata) -> scores`.

images (B, 3, H, W) float32 in [0, 1]; prompts B strings; metadata B mappings (whatever the prompt file gives beside
the prompt); scores (B,) float. One file each, heavy imports inside the function; names and settings are in `registry`,
and what happens where a reward fails is in `guard`.

A reward may have methods beside, all optional: `check()` raises ValueError where its files or packages are not there;
`check_prompt(prompt, metadata, size)` raises ValueError for what it cannot score, and is asked in place of scoring a
grey image; `free()` lets its model go.

Each call gets images, prompts and metadata of its own, so that a reward that writes into them spoils nothing for those
after it, for a second try, or for the samples that are shown.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..prompts import Prompt
from .guard import FailurePolicy, Guard, RewardError, WrongScores, as_scores, own_copy
from .registry import PATH_SETTINGS, REWARDS, Reward, get_reward, read_term

__all__ = [
    "PATH_SETTINGS",
    "REWARDS",
    "FailurePolicy",
    "Guard",
    "Mix",
    "Reward",
    "RewardError",
    "ScoreFn",
    "Scores",
    "Term",
    "check_prompts",
    "check_rewards",
    "combine",
    "get_reward",
    "mix",
    "number_names",
    "read_term",
]


@dataclass
class Scores:
    """Scores of B images."""

    total: Tensor
    """(B,) float32: the weighted sum, which credit sees."""
    parts: dict[str, Tensor]
    """Name -> (B,) float32: each reward by itself, without its weight."""
    problems: list[str] = field(default_factory=list)
    """What went wrong, in words, where images were dropped: their scores are NaN."""


ScoreFn = Callable[[Tensor, Sequence[str], Sequence[Mapping]], Scores]
"""score(images, prompts, metadata) -> Scores, as `combine` and `mix` make one."""


@dataclass(frozen=True)
class Term:
    """One reward of a weighted sum."""

    name: str
    """What its scores are called in `Scores.parts`."""
    fn: Reward
    weight: float = 1.0
    """Negative where less is better; 0 only watches."""
    normalise: bool = False
    """Credit sees the score divided by its std over the iteration's finished images, so that weights compare."""


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


@dataclass(frozen=True)
class Mix:
    """A weighted sum of rewards; each keeps its own scores as a part."""

    terms: tuple[Term, ...]
    guard: Guard | None = None
    """Asks the rewards; None lets what they raise through."""

    def __post_init__(self) -> None:
        if not self.terms:
            raise ValueError("no reward given; name at least one, with its weight")
        names = [term.name for term in self.terms]
        if len(set(names)) < len(names):
            raise ValueError(f"two rewards have the same name: {', '.join(names)}")

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping]) -> Scores:
        """Raises RewardError where the guard's policy is to stop, and ValueError for scores of the wrong number."""
        parts, problems = {}, []
        for term in self.terms:
            if self.guard is not None:
                parts[term.name], words = self.guard.ask(term.name, term.fn, images, prompts, metadata)
                problems += words
                continue
            try:
                parts[term.name] = as_scores(term.fn(*own_copy(images, prompts, metadata)), len(images))
            except WrongScores as error:
                raise WrongScores(f"reward {term.name} {error}") from None
        return Scores(self.total(parts), parts, problems)

    def total(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The weighted sum; what is only watched does not enter it, not even as NaN."""
        values = [term.weight * parts[term.name] for term in self.terms if term.weight]
        return sum(values) if values else torch.zeros_like(parts[self.terms[0].name])

    def check(self) -> None:
        """Raise ValueError, naming the reward, where its files or packages are not there."""
        for term in self.terms:
            if hasattr(term.fn, "check"):
                try:
                    term.fn.check()
                except ValueError as error:
                    raise ValueError(f"reward {term.name}: {error}") from None

    def check_prompt(self, prompt: str, metadata: Mapping, size: tuple[int, int]) -> None:
        """Raise ValueError for a prompt or a size (height, width) that a reward cannot score."""
        for term in self.terms:
            if hasattr(term.fn, "check_prompt"):
                term.fn.check_prompt(prompt, copy.deepcopy(metadata), size)
                continue
            try:
                as_scores(term.fn(torch.full((1, 3, *size), 0.5), [prompt], [copy.deepcopy(metadata)]), 1)
            except WrongScores as error:
                raise ValueError(f"reward {term.name} {error}, asked with a grey image") from None
            except ValueError:
                raise
            except Exception as error:
                words = f"{type(error).__name__}: {error}".splitlines()[0]
                raise ValueError(
                    f"reward {term.name} failed on a grey image of the prompt {prompt!r}: {words}; mend it, or give it "
                    "a method check_prompt(prompt, metadata, size) that is asked instead"
                ) from error

    def free(self) -> None:
        """Let all models of the rewards go."""
        for term in self.terms:
            if hasattr(term.fn, "free"):
                term.fn.free()


def combine(terms: Sequence[Term]) -> Mix:
    """A function (images, prompts, metadata) -> Scores over any rewards.

    Raises ValueError for no term, or for two of one name (`number_names` tells them apart).
    """
    return Mix(tuple(terms))


def mix(rewards: Mapping[str, float | Mapping], failures: FailurePolicy | None = None) -> Mix:
    """`combine` over rewards as a run file names them.

    rewards: name -> weight, or name -> table of settings (`read_term`). failures: what is done about a reward that
    fails; None lets its exceptions through. Raises ValueError for an unknown name or setting, or an empty mapping.
    """
    terms = []
    for name, value in rewards.items():
        terms.append(Term(name, *read_term(name, value)))
    return Mix(tuple(terms), None if failures is None else Guard(failures))


def check_rewards(score: ScoreFn) -> None:
    """Raise ValueError, naming the reward, where files or packages of a `Mix` are not there; loads no weights."""
    if isinstance(score, Mix):
        score.check()


def check_prompts(
    score: ScoreFn,
    prompts: Sequence[Prompt],
    size: tuple[int, int],
    on_prompt: Callable[[], None] = lambda: None,
) -> None:
    """Raise ValueError for a prompt or a size (height, width) that a reward cannot score.

    Rewards that have no `check_prompt` are asked with grey images. on_prompt comes before each different prompt and may
    raise to stop.
    """
    check_rewards(score)
    for prompt in {(p.text, repr(p.metadata)): p for p in prompts}.values():
        on_prompt()
        if isinstance(score, Mix):
            score.check_prompt(prompt.text, dict(prompt.metadata), size)
        else:
            score(torch.full((1, 3, *size), 0.5), [prompt.text], [dict(prompt.metadata)])
