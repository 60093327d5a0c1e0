"""From finished latents to scores: decoded and scored in parts, so that only so many images lie in memory at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .background import Worker, wait
from .credit import STD_FLOOR
from .halving import halving
from .metrics import finite_std
from .policy import Policy
from .processes import Processes
from .prompts import Prompt
from .rewards import FailurePolicy, Mix, ScoreFn, Scores, Term
from .rewards.guard import own_copy
from .rollout import batches


def score_latents(
    policy: Policy, score: ScoreFn, latents: Tensor, prompts: Sequence[Prompt], batch: int | None
) -> Iterator[tuple[slice, Tensor, Scores]]:
    """For each part of at most `batch` of M latents (M, ...): (its rows, images (b, 3, H, W) in [0, 1], their scores).

    prompts: one for each latent.
    """
    for part in batches(len(latents), batch):
        images = decode(policy, latents[part])
        yield part, images, score_images(score, images, prompts[part])


@torch.no_grad()
def decode(policy: Policy, latents: Tensor) -> Tensor:
    """Images (B, 3, H, W) float32 in [0, 1]."""
    return policy.decode(latents).float().clamp(0, 1)


@torch.no_grad()
def score_images(score: ScoreFn, images: Tensor, prompts: Sequence[Prompt]) -> Scores:
    """Scores of (B, 3, H, W) images of B prompts, which a scoring function cannot change by writing into them."""
    asked = (images, [p.text for p in prompts], [p.metadata for p in prompts])
    # A Mix gives each of its rewards copies by itself.
    return score(*(asked if isinstance(score, Mix) else own_copy(*asked)))


def join_scores(parts: Sequence[Scores]) -> Scores:
    """The scores of several batches as those of one."""
    names = parts[0].parts
    return Scores(
        torch.cat([s.total for s in parts]),
        {n: torch.cat([s.parts[n] for s in parts]) for n in names},
        [problem for s in parts for problem in s.problems],
    )


def failure_policy(score: ScoreFn) -> FailurePolicy | None:
    """What is to be done about rewards that fail; None where their exceptions come through."""
    return score.guard.policy if isinstance(score, Mix) and score.guard is not None else None


def check_dropped(score: ScoreFn, dropped: int, total: int, problems: Sequence[str]) -> None:
    """Raise RewardError where more than the allowed share of `total` images is dropped."""
    policy = failure_policy(score)
    if policy is not None:
        policy.check_share(dropped, total, problems)


@dataclass
class Scorer:
    """Decodes and scores latents batch by batch; with `ahead`, on a thread beside what its user does next.

    Decoding stays on the user's thread, in order; the results are the same either way.
    """

    policy: Policy
    score: ScoreFn
    batch: int
    """Latents decoded and images scored at once; halved where memory runs out."""
    total: int = 0
    """Latents that will come."""
    ahead: int = 0
    """Images that may wait for their scores; 0 scores each batch at once."""
    on_progress: Callable[[int, int], None] = lambda done, total: None
    """on_progress(scored, total); also called while scores are awaited, and may raise to stop."""
    on_halved: Callable[[int], None] = lambda size: None
    check: bool = True
    """Whether too many dropped images end this at once; not where other processes score the rest."""
    done: int = 0
    """Images scored so far, and of these dropped."""
    dropped: int = 0

    _waiting: deque[tuple[int, Future]] = field(default_factory=deque, init=False)
    _scores: list[Scores] = field(default_factory=list, init=False)
    _worker: Worker | None = field(default=None, init=False)

    def add(self, latents: Tensor, prompts: Sequence[Prompt], kept: Tensor) -> Tensor:
        """Take (M, ...) latents in; returns the images on the CPU of those that are `kept` (M,) bool."""
        images, start = [], 0
        self.on_progress(self.done, self.total)
        while start < len(latents):
            part = slice(start, min(start + self.batch, len(latents)))
            decoded = self._decode(latents[part])
            images.append(decoded[kept[part].to(decoded.device)].cpu())
            start = part.stop
            if not self.ahead:
                self._take(self._score(decoded, prompts[part]))
                continue
            self._worker = self._worker or Worker()
            rows = len(decoded)
            while self._waiting and sum(n for n, _ in self._waiting) + rows > self.ahead:
                self._collect()
            self._waiting.append((rows, self._worker.submit(self._score, decoded, prompts[part])))
        return torch.cat(images)

    def finish(self) -> Scores:
        """The scores of all latents, in the order in which they came."""
        while self._waiting:
            self._collect()
        return join_scores(self._scores) if self._scores else Scores(torch.zeros(0), {})

    def close(self) -> None:
        """Ask for no more scores. Does not wait for those that are being computed."""
        if self._worker is not None:
            self._worker.close()

    def _decode(self, latents: Tensor) -> Tensor:
        def at(size: int) -> Tensor:
            return torch.cat([decode(self.policy, latents[part]) for part in batches(len(latents), size)])

        return halving(at, len(latents), self._halved)

    def _score(self, images: Tensor, prompts: Sequence[Prompt]) -> Scores:
        def at(size: int) -> Scores:
            parts = batches(len(images), size)
            return join_scores([score_images(self.score, images[part], prompts[part]) for part in parts])

        return halving(at, len(images), self._halved)

    def _halved(self, size: int) -> None:
        self.batch = size
        self.on_halved(size)

    def _collect(self) -> None:
        future = self._waiting[0][1]
        wait(future, on_wait=lambda: self.on_progress(self.done, self.total))
        self._waiting.popleft()
        self._take(future.result())

    def _take(self, scores: Scores) -> None:
        self._scores.append(scores)
        self.done += len(scores.total)
        self.dropped += int((~torch.isfinite(scores.total)).sum())
        self.on_progress(self.done, self.total)
        if self.check:
            problems = [p for s in self._scores for p in s.problems]
            check_dropped(self.score, self.dropped, max(self.total, self.done), problems)


@dataclass
class Scored:
    """Rewards of G groups of N members at T + 1 states, or at the last alone: (G, N, S)."""

    total: Tensor
    parts: dict[str, Tensor]

    def normalised(self, terms: Sequence[Term]) -> Tensor:
        """The weighted sum, (G, N, S), of rewards divided by the std of the finished images' where that is asked for.

        A reward that is equal for all finished images is left out.
        """
        total = torch.zeros_like(self.total)
        for term in terms:
            values, scale = self.parts[term.name], 1.0
            if term.normalise:
                std = finite_std(values[..., -1])
                floor = STD_FLOOR * max(1.0, float(values.nan_to_num(0, 0, 0).abs().max()))
                scale = 1 / std if std > floor else 0.0
            if term.weight and scale:
                total = total + term.weight * scale * values
        return total


def gather_scored(scores: Scores, index: Tensor | None, group_size: int, processes: Processes) -> Scored:
    """The rewards of all processes, from the scores of this one's distinct states.

    index: (rows, S), where each state of its rows stands among them; None where it has no rows.
    """
    mine = None if index is None else {n: v[index] for n, v in {"": scores.total, **scores.parts}.items()}
    every = [some for some in processes.gather(mine) if some is not None]
    joined = {name: torch.cat([some[name] for some in every]) for name in every[0]}
    joined = {name: values.view(-1, group_size, values.shape[-1]) for name, values in joined.items()}
    return Scored(joined.pop(""), joined)
