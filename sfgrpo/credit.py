"""Credit: the advantage of every step of every trajectory, from the rewards of its clean estimates.

With r[g, i, k] the reward of group g, member i, at state k = 0..T, and gains g_k = r_{k+1} - r_k:

    uniform         A = (r_T - mean_i) / std_i, the same for each step                  (Flow-GRPO)
    gain            A_k = (g_k - mean_{i,k}) / std_{i,k}: one mean, one std a group     (Stepwise-Flow-GRPO)
    gain_centred    A_k = (g_k - mean_i g_k) / std_{i,k}: a mean for each step, one std a group (of the centred gains)
    gain_per_step   A_k = (g_k - mean_i g_k) / std_i g_k      (the paper's ablation: blows up the small late gains)
    gain_ema        g_k less a running mean of g_k over iterations, then as gain        (the paper's ablation)
    gain_gae        sum_{l >= 0} lambda^l g_{k+l}, then as gain; lambda = 1 is return-to-go (the paper's ablation)

All stds are population stds. The gains of a trajectory telescope: their sum is r_T - r_0. Values whose group has
std 0 get advantage 0. Rewards that are NaN or infinite are left out of every statistic, and the steps that they
touch get advantage 0.

So are steps without noise, whose gains no action of the policy's has earned: all means, stds and running means are
over the noisy steps, with which k ranges in the formulas above. With a window of 2 late steps of 10 the large gains
of the early ones would else make every advantage negative. The sums of `gain_gae` still go to the end of the
trajectory: what a noisy step did shows in the steps after it, noisy or not.

Of several rewards r_j with weights w_j, credit is taken of r = sum_j w_j r_j (`mix` = sum, as in the paper), or of
each, A = sum_j w_j A_j / sum_j |w_j| (`each`): then a reward counts by its weight and not by its spread, which is
another in every group.

Choice of ours: `gain_centred` is not in the paper. The mean gain of step k is the same whatever the policy did
there, so a joint mean pushes every step with a high mean gain up and every other down; see docs/method.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CREDITS = ("uniform", "gain", "gain_centred", "gain_per_step", "gain_ema", "gain_gae")

MIXES = ("sum", "each")

DIMENSIONS = {
    "gain": ((1, 2), (1, 2)),
    "gain_centred": ((1,), (1, 2)),
    "gain_per_step": ((1,), (1,)),
    "gain_ema": ((1, 2), (1, 2)),
    "gain_gae": ((1, 2), (1, 2)),
}
"""Credit -> what of (G, N, T) its mean and its std are taken over."""

STD_FLOOR = 1e-6
"""Rewards that spread by less than this share of their size (at least 1) are equal: the spread is rounding."""


@dataclass
class Credit:
    """Advantages of G groups of N members over T steps."""

    advantages: Tensor
    """(G, N, T) float32; finite, and 0 on steps without noise."""
    gains: Tensor
    """(G, N, T) float32; NaN where a reward was not finite, (G, N, 0) where only the last was computed."""
    valid: Tensor
    """(G, N, T) bool: False where a reward that the advantage needs was not finite."""
    alive: Tensor
    """(G,) bool: False for a group without signal, whose advantages are all 0."""
    dropped: int
    """Number of rewards that were NaN or infinite."""
    ema: Tensor | None = None
    """(T,) running mean of the gains after this iteration (`gain_ema`), to be passed to the next; NaN for steps that
    never had noise."""


def step_gains(rewards: Tensor) -> Tensor:
    """g_k = r_{k+1} - r_k: (..., T + 1) -> (..., T); NaN where either reward is not finite."""
    rewards = torch.where(torch.isfinite(rewards), rewards, torch.nan)
    return rewards[..., 1:] - rewards[..., :-1]


def normalise(
    values: Tensor, valid: Tensor, mean_dims: tuple[int, ...], std_dims: tuple[int, ...], floor: Tensor
) -> Tensor:
    """(values - mean over mean_dims) / std over std_dims, which include mean_dims; valid entries only.

    0 where invalid, or where the std does not exceed `floor` (G, 1, 1).
    """
    kept = torch.where(valid, values, 0.0)
    mean = kept.sum(mean_dims, keepdim=True) / valid.sum(mean_dims, keepdim=True).clamp(min=1)
    centred = torch.where(valid, values - mean, 0.0)
    std = (centred.square().sum(std_dims, keepdim=True) / valid.sum(std_dims, keepdim=True).clamp(min=1)).sqrt()
    return torch.where(std > floor, centred / std.clamp(min=1e-30), torch.zeros_like(centred))


def assign_credit(
    rewards: Tensor,
    method: str = "gain",
    *,
    steps: int | None = None,
    noisy: Tensor | None = None,
    gae_lambda: float = 0.9,
    ema: Tensor | None = None,
    ema_decay: float = 0.9,
) -> Credit:
    """Advantages from rewards (G, N, T + 1) of all states.

    `uniform` reads only the last, and takes (G, N, 1) and `steps` = T where no other was computed. noisy: (T,) bool,
    the steps that inject noise, which alone can be trained; None for all.
    gae_lambda in [0, 1] and ema_decay in [0, 1) belong to `gain_gae` and `gain_ema`; ema (T,) is the running mean
    that the iteration before returned. Raises ValueError for an unknown method or a group of one.
    """
    if method not in CREDITS:
        raise ValueError(f"unknown credit {method!r}; choose one of {', '.join(CREDITS)}")
    groups, members, _ = rewards.shape
    if members < 2:
        raise ValueError("a group needs at least 2 members, for an advantage compares them with each other")
    rewards = rewards.double()
    dropped = int((~torch.isfinite(rewards)).sum())
    gains = step_gains(rewards)
    finite = torch.isfinite(gains)
    length = gains.shape[-1] if method != "uniform" or steps is None else steps
    noisy = torch.ones(length, dtype=torch.bool) if noisy is None else noisy.cpu()
    size = torch.where(torch.isfinite(rewards), rewards, 0.0).abs().amax((1, 2), keepdim=True)
    floor = STD_FLOOR * size.clamp(min=1)
    if method == "uniform":
        final = rewards[..., -1:]
        ok = torch.isfinite(final)
        advantages, valid = normalise(final, ok, (1,), (1,), floor), ok.expand(groups, members, length)
    else:
        values, valid = gains, finite
        if method == "gain_ema":
            ema = running_mean(gains, finite & noisy, ema, ema_decay)
            values = gains - ema
        elif method == "gain_gae":
            values, valid = discounted_sums(gains, gae_lambda), _all_later(finite)
        means, stds = DIMENSIONS[method]
        advantages = normalise(values, valid & noisy, means, stds, floor)
    advantages = torch.where(noisy, advantages, 0.0)
    return Credit(
        advantages=advantages.float(),
        gains=gains.float(),
        valid=valid,
        alive=(advantages != 0).flatten(1).any(1),
        dropped=dropped,
        ema=ema if method == "gain_ema" else None,
    )


def running_mean(gains: Tensor, counted: Tensor, before: Tensor | None, decay: float) -> Tensor:
    """The mean gain of each step (T,) over iterations, from the entries of `counted` (G, N, T).

    before: of the iteration before; NaN for a step that was never counted, which starts at its first mean.
    """
    count = counted.sum((0, 1))
    mean = torch.where(counted, gains, 0.0).sum((0, 1)) / count.clamp(min=1)
    before = torch.full_like(mean, torch.nan) if before is None else before.double()
    moved = torch.where(before.isnan(), mean, decay * before + (1 - decay) * mean)
    return torch.where(count > 0, moved, before)


def mix_credits(credits: Sequence[Credit], weights: Sequence[float], total: Tensor) -> Credit:
    """A = sum_j w_j A_j / sum_j |w_j| from the credits of several rewards; 0 where one of them is not valid.

    total: (G, N, T + 1) the weighted sum of the rewards, whose gains are reported. Raises ValueError where all
    weights are 0.
    """
    size = sum(abs(w) for w in weights)
    if not size:
        raise ValueError("all weights are 0; give at least one reward a weight")
    valid = torch.stack([c.valid for c in credits]).all(0)
    advantages = sum(w / size * c.advantages for w, c in zip(weights, credits, strict=True))
    advantages = torch.where(valid, advantages, 0.0)
    return Credit(
        advantages=advantages,
        gains=step_gains(total.double()).float(),
        valid=valid,
        alive=(advantages != 0).flatten(1).any(1),
        dropped=int((~torch.isfinite(total)).sum()),
    )


def discounted_sums(gains: Tensor, gae_lambda: float) -> Tensor:
    """sum_{l >= 0} lambda^l g_{k+l} over the last dimension."""
    out = gains.clone()
    for k in range(gains.shape[-1] - 2, -1, -1):
        out[..., k] = gains[..., k] + gae_lambda * out[..., k + 1]
    return out


def _all_later(finite: Tensor) -> Tensor:
    """Whether this entry and all after it along the last dimension are True."""
    return finite.flip(-1).cummin(-1).values.flip(-1)
