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
from .credit import Credit, assign_credit, mix_credits
from .metrics import brightness, diversity, sharpness
from .policy import Policy
from .prompts import Prompt
from .rewards import Mix, ScoreFn
from .rollout import Trajectory, batches, join_trajectories, rollout
from .schedule import check_sigmas
from .scoring import Scored, Scorer, finite_std
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
    problems: list[str]
    """What went wrong with rewards, in words; their images were dropped."""


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
        self.ema: dict[str, Tensor] = {}
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
        config, count = self.config, len(index)
        self._seconds.clear()
        scorer = Scorer(
            self.policy,
            self.score,
            config.decode_batch,
            0,
            config.score_ahead,
            lambda done, total: self.on_progress("score", done, total),
        )
        chunks = batches(count, -(-config.rollout_batch // config.group_size) if config.score_ahead else None)
        rolled, images, places, states = [], [], [], 0
        try:
            for chunk in chunks:
                with self._phase("sample"):
                    trajectory, cond = self.sample(iteration, index, chunk)
                with self._phase("estimate"):
                    latents, found = self._estimate(trajectory, cond)
                with self._phase("score"):
                    scorer.total = len(latents) * count // (chunk.stop - chunk.start)
                    asked = [prompts[index[chunk.start + r // config.group_size]] for r in found.row.tolist()]
                    images.append(scorer.add(latents, asked, found.state == trajectory.steps))
                rolled.append((trajectory, cond))
                places.append(found.index + states)
                states += len(latents)
            with self._phase("score"):
                scores = scorer.finish()
        finally:
            scorer.close()
        trajectory, cond = join_trajectories([t for t, _ in rolled]), torch.cat([c for _, c in rolled])
        del rolled
        scored = Scored.of(scores, torch.cat(places), config.group_size)
        credit = self._credit(scored, trajectory)
        with self._phase("update"):
            order = torch.randperm(count, generator=noise.generator_for(self.seed, iteration, "updates"))
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
        images = torch.cat(images)
        metrics = self._metrics(scored, credit, images) | updated
        metrics |= {f"seconds/{name}": seconds for name, seconds in self._seconds.items()}
        return Iteration(trajectory, scored.total, credit, images, metrics, scores.problems)

    def sample(self, iteration: int, index: Sequence[int], part: slice = noise.ALL) -> tuple[Trajectory, Tensor]:
        """Roll out one group for each prompt index; returns the G * N trajectories and their `cond`.

        part: only these of the groups, which then are what they are among all.
        A grid that starts below 1 starts from noise scaled by sigmas[0], as in ComfyUI.
        """
        size = self.config.group_size
        cond = torch.tensor(list(index)[part], device=self.device).repeat_interleave(size)
        steps = len(self.sigmas) - 1
        start, stop, _ = part.indices(len(index))
        trajectory = rollout(
            self.policy.velocity,
            (noise.initial_noise(self.seed, iteration, index, size, self.latent_shape, part) * self.sigmas[0]).to(
                self.device
            ),
            self.sigmas,
            cond,
            kernel=self.config.kernel,
            generators=noise.member_generators(self.seed, iteration, index, size, part),
            stochastic=self.window(iteration),
            group_size=size,
            micro_batch=self.config.rollout_batch,
            on_step=lambda k: self.on_progress("sample", steps * start + k * (stop - start), steps * len(index)),
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

    def _credit(self, scored: Scored, trajectory: Trajectory) -> Credit:
        """Credit for the weighted sum of the rewards, or for each of them, then mixed."""
        config, noisy = self.config, trajectory.stds > 0

        def credit_of(name: str, rewards: Tensor) -> Credit:
            credit = assign_credit(
                rewards,
                config.credit,
                steps=trajectory.steps,
                noisy=noisy,
                gae_lambda=config.gae_lambda,
                ema=self.ema.get(name),
                ema_decay=config.ema_decay,
            )
            if credit.ema is not None:
                self.ema[name] = credit.ema
            return credit

        terms = self.score.terms if isinstance(self.score, Mix) else ()
        if config.mix == "each":
            weights = {t.name: t.weight for t in terms if t.weight} or dict.fromkeys(scored.parts, 1.0)
            credits = [credit_of(name, scored.parts[name]) for name in weights]
            return mix_credits(credits, list(weights.values()), scored.total, noisy)
        if any(t.normalise for t in terms):
            return credit_of("total", scored.normalised(terms))
        return credit_of("total", scored.total)

    def _metrics(self, scored: Scored, credit: Credit, images: Tensor) -> dict:
        """Metrics of the rollout: rewards, gains and how the images look."""
        metrics: dict = {
            **_mean_and_std("reward", scored.total[..., -1]),
            "dead_groups": int((~credit.alive).sum()),
            "dropped_rewards": credit.dropped,
            "brightness": float(brightness(images).mean()),
            "sharpness": float(sharpness(images).mean()),
            "diversity": float(diversity(images, self.config.group_size).mean()),
        }
        for name, values in scored.parts.items():
            metrics |= _mean_and_std(f"reward/{name}", values[..., -1])
        if credit.gains.shape[-1]:
            metrics["gain"] = credit.gains.nanmean((0, 1)).tolist()
            metrics["gain_abs"] = credit.gains.abs().nanmean((0, 1)).tolist()
        return metrics


def _mean_and_std(name: str, values: Tensor) -> dict[str, float]:
    finite = values[torch.isfinite(values)]
    return {name: float(finite.mean()) if len(finite) else math.nan, f"{name}_std": finite_std(values)}
