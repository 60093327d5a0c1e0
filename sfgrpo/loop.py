"""One iteration of Stepwise-Flow-GRPO: sample -> estimate -> score -> credit -> update.

Written once, for the headless trainer and the ComfyUI node alike; both hand it a `Policy`, a scoring function and an
optimizer. With credit `uniform` and the kernel `flow_grpo` it is Flow-GRPO.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from . import noise
from .config import GRPOConfig
from .credit import Credit, assign_credit
from .metrics import brightness, diversity, sharpness
from .policy import Policy
from .prompts import Prompt
from .rewards import ScoreFn, Scores
from .rollout import Trajectory, rollout
from .schedule import check_sigmas
from .scoring import join_scores, score_latents
from .tweedie import estimates
from .update import update

PHASES = ("sample", "estimate", "score", "update")

OnProgress = Callable[[str, int, int], None]
"""on_progress(phase, done, total) within each phase; may raise to stop."""


@dataclass
class Iteration:
    """What one iteration did."""

    trajectory: Trajectory
    rewards: Tensor
    """(G, N, T + 1) of all states, or (G, N, 1) of the finished images with credit `uniform`."""
    credit: Credit
    images: Tensor
    """(G * N, 3, H, W): the finished images, with the sampler's noise in them."""
    metrics: dict[str, float | list[float]]
    """Plain numbers for a log; see docs/metrics.md."""


class StepwiseGRPO:
    """Runs iterations of one training. Holds no state but the optimizer's and the EMA of credit `gain_ema`."""

    def __init__(
        self,
        policy: Policy,
        score: ScoreFn,
        optimizer: torch.optim.Optimizer,
        *,
        sigmas: Tensor,
        latent_shape: tuple[int, ...],
        config: GRPOConfig,
        seed: int = 0,
        device: torch.device | str = "cpu",
        on_progress: OnProgress = lambda phase, done, total: None,
        after_update: Callable[[], None] = lambda: None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        """sigmas: (T + 1,) time grid; latent_shape: of one latent, without the batch; seed: of all noise.

        after_update is called after each optimizer step; scaler scales the loss of a policy that computes in fp16.

        Raises ValueError for sigmas that are no time grid, and for a window outside it or without noise.
        """
        self.policy, self.score, self.optimizer, self.config = policy, score, optimizer, config
        self.sigmas, self.latent_shape = check_sigmas(sigmas), tuple(latent_shape)
        self.seed, self.device = seed, torch.device(device)
        self.on_progress, self.after_update = on_progress, after_update
        self.scaler = scaler or torch.amp.GradScaler(enabled=False)
        self.windows = config.check_windows(self.sigmas)
        self.ema: Tensor | None = None
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def _phase(self, name: str):
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._seconds[name] += time.perf_counter() - start

    def iterate(self, iteration: int, prompts: Sequence[Prompt], index: Sequence[int]) -> Iteration:
        """Run one iteration over `prompts[i] for i in index`, one group each.

        The policy's `cond` is the LongTensor of these indices, one a row.
        """
        config = self.config
        self._seconds.clear()
        with self._phase("sample"):
            trajectory, cond = self.sample(iteration, index)
        with self._phase("estimate"):
            latents, states = self._estimate(trajectory, cond)
        with self._phase("score"):
            asked = [prompts[index[r // config.group_size]] for r in states.row.tolist()]
            images, scores = self._score(latents, states.state == trajectory.steps, asked)
        shape = (len(index), config.group_size, -1)
        rewards = scores.total[states.index].view(shape)
        credit = assign_credit(
            rewards,
            config.credit,
            steps=trajectory.steps,
            noisy=trajectory.stds > 0,
            gae_lambda=config.gae_lambda,
            ema=self.ema,
            ema_decay=config.ema_decay,
        )
        self.ema = credit.ema
        with self._phase("update"):
            order = torch.randperm(len(index), generator=noise.generator_for(self.seed, iteration, "updates"))
            updated = update(
                self.policy,
                self.optimizer,
                trajectory,
                cond,
                credit,
                config,
                order=order,
                scaler=self.scaler,
                on_batch=lambda done, total: self.on_progress("update", done, total),
                after_update=self.after_update,
            )
        metrics = self._metrics(rewards, scores, states, credit, images) | updated
        metrics |= {f"seconds/{name}": seconds for name, seconds in self._seconds.items()}
        return Iteration(trajectory, rewards, credit, images, metrics)

    def sample(self, iteration: int, index: Sequence[int]) -> tuple[Trajectory, Tensor]:
        """Roll out one group for each prompt index; returns the G * N trajectories and their `cond`.

        A grid that starts below 1 starts from noise scaled by sigmas[0], as in ComfyUI.
        """
        size = self.config.group_size
        cond = torch.tensor(list(index), device=self.device).repeat_interleave(size)
        steps = len(self.sigmas) - 1
        trajectory = rollout(
            self.policy.velocity,
            (noise.initial_noise(self.seed, iteration, index, size, self.latent_shape) * self.sigmas[0]).to(
                self.device
            ),
            self.sigmas,
            cond,
            kernel=self.config.kernel,
            generators=noise.member_generators(self.seed, iteration, index, size),
            stochastic=self.window(iteration),
            group_size=size,
            micro_batch=self.config.rollout_batch,
            on_step=lambda k: self.on_progress("sample", k, steps),
        )
        return trajectory, cond

    def window(self, iteration: int) -> Tensor:
        """The stochastic steps (T,) of an iteration."""
        draw = torch.randint(len(self.windows), (1,), generator=noise.generator_for(self.seed, iteration, "window"))
        return self.windows[int(draw)]

    def _estimate(self, trajectory: Trajectory, cond: Tensor):
        """Clean estimates of all states that the credit reads: only the finished latents for `uniform`."""
        if self.config.credit == "uniform":
            return trajectory.final, trajectory.final_states()
        total, done = len(trajectory.latents) * trajectory.steps * (self.config.substeps - 1), 0

        def on_batch(rows: int) -> None:
            nonlocal done
            done += rows
            self.on_progress("estimate", min(done, total), total)

        return estimates(
            self.policy.velocity,
            trajectory,
            cond,
            substeps=self.config.substeps,
            micro_batch=self.config.estimate_batch,
            on_batch=on_batch,
        )

    def _score(self, latents: Tensor, finished: Tensor, prompts: Sequence[Prompt]) -> tuple[Tensor, Scores]:
        """Returns the images of the `finished` (M,) latents, and the scores of all."""
        images, scores = [], []
        self.on_progress("score", 0, len(latents))
        for part, image, score in score_latents(self.policy, self.score, latents, prompts, self.config.decode_batch):
            scores.append(score)
            images.append(image[finished[part].to(image.device)].cpu())
            self.on_progress("score", part.stop, len(latents))
        return torch.cat(images), join_scores(scores)

    def _metrics(self, rewards: Tensor, scores: Scores, states, credit: Credit, images: Tensor) -> dict:
        """Metrics of the rollout: rewards, gains and how the images look."""
        final = rewards[..., -1]
        finite = final[torch.isfinite(final)]
        metrics: dict = {
            "reward": float(finite.mean()) if len(finite) else math.nan,
            "reward_std": float(finite.std(unbiased=False)) if len(finite) else math.nan,
            "dead_groups": int((~credit.alive).sum()),
            "dropped_rewards": credit.dropped,
            "brightness": float(brightness(images).mean()),
            "sharpness": float(sharpness(images).mean()),
            "diversity": float(diversity(images, self.config.group_size).mean()),
        }
        for name, values in scores.parts.items():
            values = values[states.index[:, -1]]
            values = values[torch.isfinite(values)]
            metrics[f"reward/{name}"] = float(values.mean()) if len(values) else math.nan
            metrics[f"reward/{name}_std"] = float(values.std(unbiased=False)) if len(values) else math.nan
        if credit.gains.shape[-1]:
            metrics["gain"] = credit.gains.nanmean((0, 1)).tolist()
            metrics["gain_abs"] = credit.gains.abs().nanmean((0, 1)).tolist()
        return metrics
