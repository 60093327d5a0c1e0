"""From finished latents to scores: decoded and scored in parts, so that only so many images lie in memory at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .policy import Policy
from .prompts import Prompt
from .rewards import ScoreFn, Scores
from .rollout import batches


def score_latents(
    policy: Policy, score: ScoreFn, latents: Tensor, prompts: Sequence[Prompt], batch: int | None
) -> Iterator[tuple[slice, Tensor, Scores]]:
    """For each part of at most `batch` of M latents (M, ...): (its rows, images (b, 3, H, W) in [0, 1], their scores).

    prompts: one for each latent.
    """
    for part in batches(len(latents), batch):
        rows = prompts[part]
        with torch.no_grad():
            images = policy.decode(latents[part]).float().clamp(0, 1)
            scores = score(images, [p.text for p in rows], [dict(p.metadata) for p in rows])
        yield part, images, scores


def join_scores(parts: Sequence[Scores]) -> Scores:
    """The scores of several batches as those of one."""
    names = parts[0].parts
    return Scores(torch.cat([s.total for s in parts]), {n: torch.cat([s.parts[n] for s in parts]) for n in names})
