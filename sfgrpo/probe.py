"""Where along its steps a model wins or loses a reward, without training: rollouts, clean estimates and their rewards.

The same sampling, estimates and gains as one iteration of training (`loop.py`), from the same seed; here one member a
group is enough and the kernel may be the ODE.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import noise
from .credit import step_gains
from .kernels import Kernel
from .policy import Policy
from .prompts import Prompt
from .rewards import ScoreFn
from .rollout import DistinctStates, Trajectory, rollout, shared_states
from .schedule import check_sigmas
from .scoring import join_scores, score_latents
from .tweedie import estimates


@dataclass
class Probe:
    """Rewards of G prompts, N trajectories each, at all T + 1 states."""

    trajectory: Trajectory
    """G * N rows, prompt by prompt."""
    states: DistinctStates
    """The M states that differ, in the order in which they were decoded."""
    rewards: Tensor
    """(G, N, T + 1) float32."""
    parts: dict[str, Tensor]
    """Reward name -> (G, N, T + 1)."""
    gains: Tensor
    """(G, N, T): `credit.step_gains`."""


def probe(
    policy: Policy,
    score: ScoreFn,
    prompts: Sequence[Prompt],
    *,
    sigmas: Tensor,
    latent_shape: tuple[int, ...],
    kernel: Kernel,
    members: int,
    substeps: int = 1,
    seed: int = 0,
    batch: int = 8,
    device: torch.device | str = "cpu",
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_images: Callable[[DistinctStates, slice, Tensor, Tensor], None] = lambda states, part, images, scores: None,
) -> Probe:
    """Roll out `members` trajectories of each prompt from one noise a prompt, and score the estimate at every state.

    latent_shape: of one latent, without the batch; batch: rows in one forward pass, and latents decoded and scored at
    once. on_progress counts rows of work and may raise to stop. on_images(states, part, images, scores) is given the
    decoded estimates (b, 3, H, W) and scores (b,) of states[part]. Grids that start below 1 start from noise scaled by
    sigmas[0], as ComfyUI does. Raises ValueError for sigmas that are no time grid.
    """
    sigmas = check_sigmas(sigmas)
    index, steps = range(len(prompts)), len(sigmas) - 1
    cond = torch.arange(len(prompts), device=device).repeat_interleave(members)
    shared = shared_states(kernel.std(sigmas[:-1], sigmas[1:])) if members > 1 else 0
    rows = [len(prompts) * (1 if k < shared else members) for k in range(steps + 1)]
    refined = sum(r * (min(substeps, steps - k) - 1) for k, r in enumerate(rows[:-1]))
    total, done = sum(rows[:-1]) + refined + sum(rows), 0

    def count(more: int) -> None:
        nonlocal done
        on_progress(done, total)
        done += more

    trajectory = rollout(
        policy.velocity,
        (noise.initial_noise(seed, 0, index, members, latent_shape) * sigmas[0]).to(device),
        sigmas,
        cond,
        kernel=kernel,
        generators=noise.member_generators(seed, 0, index, members),
        group_size=members,
        micro_batch=batch,
        on_step=lambda k: count(rows[k]),
    )
    latents, states = estimates(
        policy.velocity, trajectory, cond, substeps=substeps, micro_batch=batch, on_batch=lambda n: count(n)
    )
    asked = [prompts[r // members] for r in states.row.tolist()]
    scored = []
    for part, images, scores in score_latents(policy, score, latents, asked, batch):
        count(part.stop - part.start)
        scored.append(scores)
        on_images(states, part, images, scores.total)
    on_progress(total, total)

    def by_state(values: Tensor) -> Tensor:
        return values[states.index].view(len(prompts), members, -1)

    joined = join_scores(scored)
    rewards = by_state(joined.total)
    parts = {name: by_state(values) for name, values in joined.parts.items()}
    return Probe(trajectory, states, rewards, parts, step_gains(rewards))
