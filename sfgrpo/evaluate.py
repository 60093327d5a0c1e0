"""Evaluation: deterministic ODE samples of fixed prompts and seeds, scored."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .halving import halving
from .kernels import Kernel
from .metrics import brightness, sharpness
from .noise import generator_for
from .policy import Policy
from .processes import ALONE, Processes
from .prompts import Prompt
from .rewards import ScoreFn
from .rollout import batches, rollout
from .scoring import Scorer, check_dropped


@dataclass
class Evaluation:
    """Scores and samples of one evaluation."""

    scores: dict[str, float]
    """`total` and each reward -> mean over all images; `<reward>/<tag>` -> mean over the prompts of a tag.
    Scores that are not finite are left out; NaN where none is left."""
    counts: dict[str, int]
    """As `scores` -> number of images."""
    spreads: dict[str, float]
    """As `scores` -> population std over the images."""
    looks: dict[str, float]
    """`brightness` and `sharpness` -> mean over all images (`metrics`); `diversity` -> std over all images, averaged
    over pixels."""
    images: Tensor
    """(grid, 3, H, W): the first image of the first prompts."""
    captions: list[str]
    """The prompts of `images`."""
    rewards: list[float]
    """The total reward of each of `images`."""
    problems: list[str]
    """What went wrong with rewards, in words; their images were left out."""


def eval_noise(text: str, seed: int, shape: tuple[int, ...]) -> Tensor:
    """x_1 of image `seed` of a prompt: a function of the prompt's text and the seed alone."""
    return torch.randn(shape, generator=generator_for("eval", seed, text))


def sample_latents(
    policy: Policy,
    prompts: Sequence[Prompt],
    index: Sequence[int],
    seeds: Sequence[int],
    *,
    sigmas: Tensor,
    latent_shape: tuple[int, ...],
    device: torch.device,
) -> Tensor:
    """One finished ODE latent (B, ...) of prompts[index[i]] with seed seeds[i], for each i.

    A grid that starts below 1 starts from noise scaled by sigmas[0], as in ComfyUI.
    """
    x = torch.stack([eval_noise(prompts[i].text, j, latent_shape) for i, j in zip(index, seeds, strict=True)])
    return rollout(
        policy.velocity,
        (x * sigmas[0]).to(device),
        sigmas,
        torch.tensor(list(index), device=device),
        kernel=Kernel(name="ode"),
        generators=[],
    ).final


def evaluate(
    policy: Policy,
    prompts: Sequence[Prompt],
    index: Sequence[int],
    score: ScoreFn,
    *,
    sigmas: Tensor,
    latent_shape: tuple[int, ...],
    images_per_prompt: int,
    grid: int,
    batch: int,
    device: torch.device,
    decode_batch: int | None = None,
    processes: Processes = ALONE,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Score `images_per_prompt` samples of prompts[i] for i in index; image j of a prompt has seed j.

    The samples come batch by batch, all first images before all second ones; decode_batch of them (None: the whole
    batch) are decoded and scored at once. Where memory runs out batches are halved. Each process makes its share, and
    all return the whole.
    """
    jobs = [(i, j) for j in range(images_per_prompt) for i in index]
    mine = processes.share(len(jobs))
    sums: dict[str, list[float]] = defaultdict(list)
    shown: list[Tensor] = []
    totals: list[float] = []
    looks, problems = Looks(), []
    start = mine.start
    while start < mine.stop:
        on_progress(start, len(jobs))
        part = jobs[start : min(start + batch, mine.stop)]

        def sample(size: int, part=part) -> Tensor:
            return torch.cat(
                [
                    sample_latents(
                        policy,
                        prompts,
                        [i for i, _ in part[some]],
                        [j for _, j in part[some]],
                        sigmas=sigmas,
                        latent_shape=latent_shape,
                        device=device,
                    )
                    for some in batches(len(part), size)
                ]
            )

        latents = halving(sample, batch)
        rows = [prompts[i] for i, _ in part]
        scorer = Scorer(policy, score, decode_batch or len(part), check=False)
        images = scorer.add(latents, rows, torch.ones(len(part), dtype=torch.bool))
        scores = scorer.finish()
        for name, values in {"total": scores.total, **scores.parts}.items():
            for prompt, value in zip(rows, values.tolist(), strict=True):
                tag = [f"{name}/{prompt.metadata['tag']}"] if "tag" in prompt.metadata else []
                for key in (name, *tag):
                    sums[key] += [value] if math.isfinite(value) else []
        shown.extend(images[: max(0, grid - start)])
        totals.extend(scores.total.tolist())
        looks.add(images)
        problems += scores.problems
        if processes.size == 1:
            check_dropped(score, sum(not math.isfinite(t) for t in totals), len(jobs), problems)
        start += len(part)
    every = processes.gather((dict(sums), shown, totals, looks, problems))
    joined = {name: [v for some in every for v in some[0].get(name, ())] for name in _names(every)}
    totals = [t for some in every for t in some[2]]
    problems = [p for some in every for p in some[4]]
    check_dropped(score, sum(not math.isfinite(t) for t in totals), len(jobs), problems)
    return Evaluation(
        scores={name: sum(v) / len(v) if v else math.nan for name, v in joined.items()},
        counts={name: len(v) for name, v in joined.items()},
        spreads={name: statistics.pstdev(v) if v else math.nan for name, v in joined.items()},
        looks=sum((some[3] for some in every[1:]), every[0][3]).means(),
        images=torch.stack([image for some in every for image in some[1]][:grid]),
        captions=[prompts[i].text for i, _ in jobs[:grid]],
        rewards=totals[:grid],
        problems=problems,
    )


def _names(every: list[tuple]) -> list[str]:
    """Names of the scores of all processes, each once, in the order in which they first come."""
    return list(dict.fromkeys(name for some in every for name in some[0]))


class Looks:
    """Brightness, sharpness and diversity of images that come batch by batch."""

    def __init__(self) -> None:
        self.count, self.brightness, self.sharpness = 0, 0.0, 0.0
        self.sum = self.squares = torch.zeros(())

    def add(self, images: Tensor) -> None:
        """Take in images (B, 3, H, W) in [0, 1]."""
        images = images.double().cpu()
        self.count += len(images)
        self.brightness += float(brightness(images).sum())
        self.sharpness += float(sharpness(images).sum())
        self.sum, self.squares = self.sum + images.sum(0), self.squares + images.square().sum(0)

    def __add__(self, other: Looks) -> Looks:
        out = Looks()
        for name in vars(out):
            setattr(out, name, getattr(self, name) + getattr(other, name))
        return out

    def means(self) -> dict[str, float]:
        """As `Evaluation.looks`."""
        mean = self.sum / self.count
        variance = (self.squares / self.count - mean.square()).clamp(min=0)
        return {
            "brightness": self.brightness / self.count,
            "sharpness": self.sharpness / self.count,
            "diversity": float(variance.sqrt().mean()),
        }
