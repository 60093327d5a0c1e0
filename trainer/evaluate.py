"""Evaluation: deterministic ODE samples of fixed prompts and seeds, scored and tiled."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from sfgrpo.kernels import Kernel
from sfgrpo.noise import generator_for
from sfgrpo.prompts import Prompt
from sfgrpo.rewards import Scores
from sfgrpo.rollout import rollout

from .policy import LoRAPolicy

TILE = 128
"""Least side of an image in a grid, pixels; smaller ones are enlarged by a whole factor."""


@dataclass
class Evaluation:
    """Scores and samples of one evaluation."""

    scores: dict[str, float]
    """`total` and each reward -> mean over all images; `<reward>/<tag>` -> mean over the prompts of a tag.
    Scores that are not finite are left out; NaN where none is left."""
    counts: dict[str, int]
    """As `scores` -> number of images."""
    images: Tensor
    """(grid, 3, H, W): the first image of the first prompts."""
    captions: list[str]
    """The prompts of `images`."""


def eval_noise(text: str, seed: int, shape: tuple[int, ...]) -> Tensor:
    """x_1 of image `seed` of a prompt: a function of the prompt's text and the seed alone."""
    return torch.randn(shape, generator=generator_for("eval", seed, text))


def sample_images(
    policy: LoRAPolicy,
    prompts: Sequence[Prompt],
    index: Sequence[int],
    seeds: Sequence[int],
    *,
    sigmas: Tensor,
    latent_shape: tuple[int, ...],
    device: torch.device,
    on_step: Callable[[int], None] | None = None,
) -> Tensor:
    """One ODE sample (B, 3, H, W) of prompts[index[i]] with seed seeds[i], for each i."""
    x = torch.stack([eval_noise(prompts[i].text, j, latent_shape) for i, j in zip(index, seeds, strict=True)])
    trajectory = rollout(
        policy.velocity,
        x.to(device),
        sigmas,
        torch.tensor(list(index), device=device),
        kernel=Kernel(name="ode"),
        generators=[],
        on_step=on_step,
    )
    return policy.decode(trajectory.final).float().cpu()


def evaluate(
    policy: LoRAPolicy,
    prompts: Sequence[Prompt],
    index: Sequence[int],
    score: Callable[[Tensor, Sequence[str], Sequence[dict]], Scores],
    *,
    sigmas: Tensor,
    latent_shape: tuple[int, ...],
    images_per_prompt: int,
    grid: int,
    batch: int,
    device: torch.device,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Score `images_per_prompt` samples of prompts[i] for i in index; image j of a prompt has seed j.

    The samples of a prompt come batch by batch, all first images before all second ones.
    """
    jobs = [(i, j) for j in range(images_per_prompt) for i in index]
    sums: dict[str, list[float]] = defaultdict(list)
    shown: list[Tensor] = []
    for start in range(0, len(jobs), batch):
        on_progress(start, len(jobs))
        part = jobs[start : start + batch]
        images = sample_images(
            policy,
            prompts,
            [i for i, _ in part],
            [j for _, j in part],
            sigmas=sigmas,
            latent_shape=latent_shape,
            device=device,
        )
        rows = [prompts[i] for i, _ in part]
        scores = score(images, [p.text for p in rows], [dict(p.metadata) for p in rows])
        for name, values in {"total": scores.total, **scores.parts}.items():
            for prompt, value in zip(rows, values.tolist(), strict=True):
                tag = [f"{name}/{prompt.metadata['tag']}"] if "tag" in prompt.metadata else []
                for key in (name, *tag):
                    sums[key] += [value] if math.isfinite(value) else []
        shown.extend(images[: max(0, grid - len(shown))])
    return Evaluation(
        scores={name: sum(v) / len(v) if v else math.nan for name, v in sums.items()},
        counts={name: len(v) for name, v in sums.items()},
        images=torch.stack(shown[:grid]),
        captions=[prompts[i].text for i, _ in jobs[:grid]],
    )


def tile(images: Tensor, captions: Sequence[str] | None = None, columns: int = 4) -> Image.Image:
    """A grid of images (B, 3, H, W) in [0, 1], small ones enlarged, each with its caption below."""
    height, width = images.shape[-2:]
    factor = max(1, math.ceil(TILE / max(height, width)))
    h, w, gap, text = height * factor, width * factor, 6, 18 if captions else 0
    columns = min(columns, len(images))
    rows = math.ceil(len(images) / columns)
    sheet = Image.new("RGB", (columns * (w + gap) + gap, rows * (h + text + gap) + gap), "white")
    draw = ImageDraw.Draw(sheet)
    draw.font = ImageFont.load_default(size=12)
    for n, image in enumerate((images.clamp(0, 1) * 255).round().byte().movedim(1, -1).cpu().numpy()):
        x, y = gap + n % columns * (w + gap), gap + n // columns * (h + text + gap)
        sheet.paste(Image.fromarray(image).resize((w, h), Image.Resampling.NEAREST), (x, y))
        if captions:
            draw.text((x + 2, y + h + 2), _fit(draw, captions[n], w), fill="black")
    return sheet


def _fit(draw: ImageDraw.ImageDraw, text: str, width: int) -> str:
    """The text cut so that it fits `width` pixels."""
    if draw.textlength(text) <= width:
        return text
    while text and draw.textlength(text + "...") > width:
        text = text[:-1]
    return text + "..."
