"""Rollouts: latents carried from noise to image by a kernel, with all that credit and update need of them.

The core sees a model only as `velocity_fn(x, sigma, cond) -> v`: x (B, ...) latents, sigma (B,) float32, cond
anything that a slice or a LongTensor indexes along the batch (the trainer passes prompt indices), v like x.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import noise
from .kernels import Kernel

VelocityFn = Callable[[Tensor, Tensor, Any], Tensor]
"""velocity_fn(x (B, ...), sigma (B,), cond) -> velocity (B, ...)."""


@dataclass
class Trajectory:
    """B trajectories of T steps; everything float32, for a latent rounded to bf16 spoils the ratio."""

    latents: Tensor
    """(B, T + 1, ...): x at every time, from noise to the finished latent."""
    velocities: Tensor
    """(B, T, ...): the policy's velocity at each of the first T latents."""
    log_probs: Tensor
    """(B, T): log-density of each step, averaged over elements; 0 where the step is deterministic."""
    sigmas: Tensor
    """(T + 1,): the times."""
    stds: Tensor
    """(T,): standard deviation of each step; 0 marks a deterministic step, which is never trained on."""
    group_size: int = 1
    """Rows come in runs of this length that start from one noise."""

    @property
    def steps(self) -> int:
        """T."""
        return len(self.sigmas) - 1

    @property
    def final(self) -> Tensor:
        """(B, ...): the finished latents."""
        return self.latents[:, -1]

    @property
    def shared_states(self) -> int:
        """How many of the T + 1 states are one point for the whole group: all up to the first noise injected."""
        return shared_states(self.stds) if self.group_size > 1 else 0

    def distinct_states(self) -> DistinctStates:
        """The states without the copies that a group shares."""
        total = len(self.latents)
        leaders, everyone = torch.arange(0, total, self.group_size), torch.arange(total)
        rows = [leaders if k < self.shared_states else everyone for k in range(self.steps + 1)]
        index, start = [], 0
        for k, row in enumerate(rows):
            index.append(start + (everyone // self.group_size if k < self.shared_states else everyone))
            start += len(row)
        state = torch.arange(self.steps + 1).repeat_interleave(torch.tensor([len(r) for r in rows]))
        return DistinctStates(torch.cat(rows), state, torch.stack(index, 1))

    def final_states(self) -> DistinctStates:
        """The finished latents alone, as distinct states with an index of shape (B, 1)."""
        row = torch.arange(len(self.latents))
        return DistinctStates(row, torch.full_like(row, self.steps), row.unsqueeze(1))


@dataclass
class DistinctStates:
    """The M different states among B x (T + 1), state by state."""

    row: Tensor
    """(M,) int64: the trajectory."""
    state: Tensor
    """(M,) int64: which of its T + 1 states, ascending."""
    index: Tensor
    """(B, T + 1) int64: where each state stands among the M."""


def empty_trajectory(sigmas: Tensor, stds: Tensor, latent_shape: tuple[int, ...]) -> Trajectory:
    """No rows of trajectories on these times and stds."""
    steps = len(stds)
    latents = torch.zeros(0, steps + 1, *latent_shape)
    return Trajectory(latents, latents[:, 1:], torch.zeros(0, steps), sigmas, stds)


def join_trajectories(parts: Sequence[Trajectory]) -> Trajectory:
    """Trajectories of the same steps as one; its group_size is that of the first."""
    if len(parts) == 1:
        return parts[0]
    return replace(
        parts[0],
        **{name: torch.cat([getattr(p, name) for p in parts]) for name in ("latents", "velocities", "log_probs")},
    )


def shared_states(stds: Tensor) -> int:
    """How many states of a group that starts from one noise are equal, from the stds (T,) of its steps."""
    noisy = (stds > 0).nonzero()
    return int(noisy[0]) + 1 if len(noisy) else len(stds) + 1


def batches(count: int, size: int | None) -> list[slice]:
    """Slices that cut `count` rows into micro-batches of at most `size`; None takes them all at once."""
    size = size or max(count, 1)
    return [slice(i, min(i + size, count)) for i in range(0, count, size)]


def in_batches(velocity_fn: VelocityFn, x: Tensor, sigma: Tensor, cond: Any, size: int | None) -> Tensor:
    """velocity_fn over micro-batches of `size` rows; x (B, ...) and sigma (B,) -> velocity (B, ...) float32."""
    parts = [velocity_fn(x[s], sigma[s], cond[s]).float() for s in batches(len(x), size)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@torch.no_grad()
def rollout(
    velocity_fn: VelocityFn,
    x: Tensor,
    sigmas: Tensor,
    cond: Any,
    *,
    kernel: Kernel,
    generators: Sequence[torch.Generator],
    stochastic: Tensor | None = None,
    group_size: int = 1,
    micro_batch: int | None = None,
    on_step: Callable[[int], None] | None = None,
) -> Trajectory:
    """Carry x (B, ...) from sigmas[0] to sigmas[-1] = 0.

    stochastic: (T,) bool, the steps that use `kernel`; the others are Euler steps (`schedule.window_mask`).
    generators: one a trajectory; each draws once a stochastic step. group_size: rows come in runs of this length
    that are equal in x and cond; until the first noise they are computed once. on_step(k) is called before step k.
    """
    steps = len(sigmas) - 1
    stochastic = torch.ones(steps, dtype=torch.bool) if stochastic is None else stochastic
    stds = torch.where(stochastic, kernel.std(sigmas[:-1], sigmas[1:]), 0.0)
    shared = shared_states(stds) if group_size > 1 else 0
    ode = Kernel(name="ode")
    latents, velocities = [x.float()], []
    log_probs = torch.zeros(len(x), steps)
    for k in range(steps):
        if on_step:
            on_step(k)
        x, t, s = latents[-1], sigmas[k], sigmas[k + 1]
        every = group_size if k < shared else 1
        v = in_batches(velocity_fn, x[::every], t.to(x.device).expand(len(x) // every), cond[::every], micro_batch)
        v = v.repeat_interleave(every, dim=0)
        step = (kernel if stochastic[k] else ode).transition(x, v, t, s)
        if stds[k] > 0:
            x_next = step.sample(noise.draw(generators, x.shape[1:], x.device))
            log_probs[:, k] = step.log_prob(x_next).cpu()
        else:
            x_next = step.mean
        latents.append(x_next)
        velocities.append(v)
    return Trajectory(torch.stack(latents, 1), torch.stack(velocities, 1), log_probs, sigmas, stds, group_size)
