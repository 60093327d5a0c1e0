"""The objective of one update: clipped surrogate and KL to the reference, over steps of trajectories.

    J = mean over all (i, k) of  w_k min(rho A, clip(rho, 1 - eps, 1 + eps) A) - beta KL
    rho = exp(logp_new - logp_old),   KL = |mu - mu_ref|^2 / 2 a^2,   both averaged over a latent's elements

(PPO's surrogate as Flow-GRPO uses it; a = std / sqrt(t - s) is the noise per root of time, Flow-GRPO's std_dev_t, so
that its beta and ours are the same.) The log-ratio is clamped before exp, so that one bad step cannot become inf or
NaN. Step weights `std`: w_k = std_k / mean std over the trained steps; d log p / d theta grows as 1 / std, so without
them the late, quiet steps dominate (TempFlow-GRPO's noise weighting). A group without signal contributes nothing, the
KL term included; it still counts in the mean, so that the other groups weigh the same whatever became of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .credit import Credit

STEP_WEIGHTS = ("none", "std")
MAX_LOG_RATIO = 20.0


def step_weights(stds: Tensor, method: str = "none") -> Tensor:
    """Weight of each step (T,), with mean 1 over the steps whose std (T,) is above 0 and 0 for the others.

    Raises ValueError for a method that is not in STEP_WEIGHTS.
    """
    if method not in STEP_WEIGHTS:
        raise ValueError(f"unknown step weight {method!r}; choose one of {', '.join(STEP_WEIGHTS)}")
    trained = stds > 0
    weights = stds if method == "std" else trained.float()
    return weights / weights[trained].mean() if bool(trained.any()) else torch.zeros_like(stds)


def trained_entries(credit: Credit, stds: Tensor, kl_weight: float) -> Tensor:
    """(G, N, T) bool: the entries that can have a gradient.

    Left out are deterministic steps, groups without signal, entries without a finite reward and, where there is
    no KL term, entries whose advantage is exactly 0.
    """
    kept = credit.valid & credit.alive.view(-1, 1, 1) & (stds > 0)
    return kept if kl_weight > 0 else kept & (credit.advantages != 0)


@dataclass
class Loss:
    """Loss of M entries."""

    loss: Tensor
    """(M,) what is to be minimised, for each entry: -J before the mean."""
    ratio: Tensor
    """(M,) rho, detached."""
    clipped: Tensor
    """(M,) bool: the clip is active, so that the entry has no surrogate gradient."""


def surrogate_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    *,
    clip_range: float,
    weight: Tensor | float = 1.0,
    kl: Tensor | None = None,
    kl_weight: float = 0.0,
) -> Loss:
    """Loss of each of M steps; every tensor is (M,). clip_range is eps > 0, kl_weight is beta >= 0."""
    log_ratio = (log_prob - old_log_prob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    free = ratio * advantage
    bounded = ratio.clamp(1 - clip_range, 1 + clip_range) * advantage
    loss = -weight * torch.minimum(free, bounded)
    if kl is not None and kl_weight > 0:
        loss = loss + kl_weight * kl
    return Loss(loss, ratio.detach(), (bounded < free).detach())
