"""Tweedie estimates: what the finished image would be, seen from every state of a trajectory.

One step: x0_hat = x_t - t v, free because the rollout knows v. With T' > 1 sub-steps the flow ODE is followed from
t to 0 by Euler steps (Stepwise-Flow-GRPO; the paper takes T' = 5). The sub-steps' times are taken from the
steps that are left of the rollout's own grid, evenly by index, so that there are never more sub-steps than steps
left, and with as many the estimate is the rest of the deterministic trajectory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .kernels import expand
from .rollout import DistinctStates, Trajectory, VelocityFn, batches


def clean_estimate(x: Tensor, velocity: Tensor, t: Tensor | float) -> Tensor:
    """x0_hat = x - t v for x, velocity (B, ...) and t () or (B,), float32."""
    return x.float() - expand(t, x) * velocity.float()


def substep_grid(sigmas: Tensor, k: int, substeps: int) -> Tensor:
    """Times of min(substeps, T - k) Euler sub-steps from sigmas[k] to 0, a subset of the grid, (n + 1,)."""
    left = len(sigmas) - 1 - k
    n = min(substeps, left)
    return sigmas[[k + round(j * left / n) for j in range(n + 1)]]


@torch.no_grad()
def estimates(
    velocity_fn: VelocityFn,
    trajectory: Trajectory,
    cond: Any,
    *,
    substeps: int = 1,
    micro_batch: int | None = None,
    on_batch: Callable[[int], None] | None = None,
) -> tuple[Tensor, DistinctStates]:
    """Clean estimates (M, ...) float32 of the M distinct states; that of a finished latent is the latent itself.

    substeps: T' >= 1. The first sub-step takes the rollout's velocity, and a state that a group shares is estimated
    once. States of different steps are refined together, `micro_batch` rows at a time; on_batch(rows) after each.
    Raises ValueError for fewer than one sub-step.
    """
    if substeps < 1:
        raise ValueError(f"tweedie sub-steps must be 1 or more, got {substeps}")
    states = trajectory.distinct_states()
    x = trajectory.latents[states.row, states.state]
    unfinished = states.state < trajectory.steps
    row, state = states.row[unfinished], states.state[unfinished]
    grids = [substep_grid(trajectory.sigmas, k, substeps) for k in range(trajectory.steps)]
    # times[k, j]: time of state k after j sub-steps; 0 once it has arrived.
    times = torch.zeros(trajectory.steps, substeps + 1)
    for k, grid in enumerate(grids):
        times[k, : len(grid)] = grid
    refined = x[unfinished]
    refined += expand(times[state, 1] - times[state, 0], refined) * trajectory.velocities[row, state]
    for j in range(1, substeps):
        todo = (times[state, j] > 0).nonzero().flatten()
        for part in batches(len(todo), micro_batch):
            at = todo[part]
            t, s = times[state[at], j], times[state[at], j + 1]
            v = velocity_fn(refined[at], t.to(x.device), cond[row[at]]).float()
            refined[at] += expand(s - t, v) * v
            if on_batch:
                on_batch(len(at))
    x[unfinished] = refined
    return x, states
