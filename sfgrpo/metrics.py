"""Plain measurements of a batch of images, watched beside the reward: a policy that hacks its reward shows here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .credit import Credit
from .processes import Processes

LUMA = (0.299, 0.587, 0.114)


def luma(images: Tensor) -> Tensor:
    """Rec. 601 luma (B, H, W) of images (B, 3, H, W) in [0, 1]."""
    return (images * torch.tensor(LUMA, device=images.device).view(1, 3, 1, 1)).sum(1)


def brightness(images: Tensor) -> Tensor:
    """Mean luma of each image, (B,) in [0, 1]."""
    return luma(images).flatten(1).mean(1)


def sharpness(images: Tensor) -> Tensor:
    """Mean absolute difference of neighbouring pixels' luma, horizontally and vertically, (B,) in [0, 1]."""
    y = luma(images)
    return ((y[:, 1:] - y[:, :-1]).abs().flatten(1).mean(1) + (y[..., 1:] - y[..., :-1]).abs().flatten(1).mean(1)) / 2


def diversity(images: Tensor, group_size: int) -> Tensor:
    """Mean over pixels of the std over the members of a group, (G,); 0 where all images of a group are equal.

    images: (G * N, 3, H, W), group by group.
    """
    grouped = images.reshape(-1, group_size, *images.shape[1:])
    return grouped.std(dim=1, unbiased=False).flatten(1).mean(1)


def rollout_metrics(rewards: Tensor, parts: Mapping[str, Tensor], credit: Credit) -> dict:
    """What a log says of the rewards (G, N, S) of rollouts, each reward by itself, and of their gains."""
    metrics: dict = {
        **_mean_and_std("reward", rewards[..., -1]),
        "dead_groups": int((~credit.alive).sum()),
        "dropped_rewards": credit.dropped,
    }
    for name, values in parts.items():
        metrics |= _mean_and_std(f"reward/{name}", values[..., -1])
    if credit.gains.shape[-1]:
        metrics["gain"] = credit.gains.nanmean((0, 1)).tolist()
        metrics["gain_abs"] = credit.gains.abs().nanmean((0, 1)).tolist()
    return metrics


def image_metrics(images: Tensor, rows: slice, group_size: int, processes: Processes) -> dict[str, float]:
    """Brightness, sharpness and diversity of all finished images, of which `images` (M, 3, H, W) are this process's.

    rows: which they are of all, group by group. A group that lies in several processes needs its sums over them.
    """
    looks = torch.stack([brightness(images), sharpness(images)], 1) if len(images) else torch.zeros(0, 2)
    means = processes.gather_rows(looks).mean(0)
    whole, sums = [], {}
    for group in range(rows.start // group_size, -(-rows.stop // group_size)):
        first = group * group_size - rows.start
        mine = images[max(first, 0) : first + group_size]
        if len(mine) == group_size:
            whole.append(diversity(mine, group_size))
        elif len(mine):
            sums[group] = torch.stack([mine.double().sum(0), mine.double().square().sum(0)]) / group_size
    joined: dict[int, Tensor] = {}
    for some in processes.gather(sums):
        for group, value in some.items():
            joined[group] = joined.get(group, 0) + value
    spreads = [value for some in processes.gather(whole) for value in some]
    spreads += [(square - mean.square()).clamp(min=0).sqrt().mean().float().view(1) for mean, square in joined.values()]
    return {
        "brightness": float(means[0]),
        "sharpness": float(means[1]),
        "diversity": float(torch.cat(spreads).mean()),
    }


def finite_std(values: Tensor) -> float:
    """Population std of the finite values; NaN where there is none."""
    finite = values[torch.isfinite(values)]
    return float(finite.std(unbiased=False)) if len(finite) else math.nan


def _mean_and_std(name: str, values: Tensor) -> dict[str, float]:
    finite = values[torch.isfinite(values)]
    return {name: float(finite.mean()) if len(finite) else math.nan, f"{name}_std": finite_std(values)}


def plain(value: Any) -> Any:
    """Nested dicts, lists and tensors of numbers as JSON has them: None in the place of NaN and infinity."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, Tensor):
        return plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value
