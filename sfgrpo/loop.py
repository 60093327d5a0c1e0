"""One iteration of Stepwise-Flow-GRPO: sample -> estimate -> score -> credit -> update.

Written once, for the headless trainer and the ComfyUI node alike; both hand it a `Policy`, a scoring function and an
optimizer. With credit `uniform` and the kernel `flow_grpo` it is Flow-GRPO.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import noise
from .config import GRPOConfig
from .credit import Credit, assign_credit, mix_credits
from .halving import halving
from .metrics import image_metrics, rollout_metrics
from .policy import Policy
from .processes import ALONE, Processes, Segment, segments
from .prompts import Prompt
from .rewards import Mix, ScoreFn
from .rollout import Trajectory, empty_trajectory, join_trajectories, rollout
from .schedule import check_sigmas
from .scoring import Scored, Scorer, check_dropped, gather_scored
from .tweedie import estimates
from .update import update

PHASES = ("sample", "estimate", "score", "update")

OnProgress = Callable[[str, int, int], None]
"""on_progress(phase, done, total) within each phase; may raise to stop."""


@dataclass
class Iteration:
    """What one iteration did."""

    trajectory: Trajectory
    """Of this process."""
    rewards: Tensor
    """(G, N, T + 1) of all states, or (G, N, 1) of the finished images with credit `uniform`."""
    credit: Credit
    images: Tensor
    """(G * N, 3, H, W): the finished images, with the sampler's noise in them; of this process alone."""
    metrics: dict[str, float | list[float]]
    """Plain numbers for a log; see docs/metrics.md."""
    problems: list[str]
    """What went wrong with rewards, in words; their images were dropped."""
    notes: list[str]
    """What else happened, in words: memory that ran out."""


@dataclass
class Rollouts:
    """What an iteration learns from: this process's trajectories and images, and the rewards of all."""

    trajectory: Trajectory
    cond: Tensor
    scored: Scored
    images: Tensor
    looks: dict[str, float]
    problems: list[str]


class GradientError(RuntimeError):
    """The training cannot go on, for its gradients are not finite."""


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
        processes: Processes = ALONE,
    ) -> None:
        """sigmas: (T + 1,) time grid; latent_shape: of one latent, without the batch; seed: of all noise.

        after_update is called after each optimizer step; scaler scales the loss of a policy that computes in fp16.
        processes: all that train this LoRA, each with its own copy of the policy.

        Raises ValueError for sigmas that are no time grid, and for a window outside it or without noise.
        """
        self.policy, self.score, self.optimizer, self.config = policy, score, optimizer, config
        self.sigmas, self.latent_shape = check_sigmas(sigmas), tuple(latent_shape)
        self.seed, self.device = seed, torch.device(device)
        self.on_progress, self.after_update = on_progress, after_update
        self.scaler = scaler or torch.amp.GradScaler(enabled=False)
        self.windows = config.check_windows(self.sigmas)
        self.processes, self.notes = processes, []
        self.ema: dict[str, Tensor] = {}
        self._skipped = 0
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
        self._seconds.clear()
        self.notes.clear()
        rolled = self._collect(iteration, prompts, index)
        rewards, trajectory = rolled.scored, rolled.trajectory
        credit = self._credit(rewards, trajectory)
        with self._phase("update"):
            updated = update(
                self.policy,
                self.optimizer,
                trajectory,
                rolled.cond,
                credit,
                self.config,
                order=torch.randperm(len(index), generator=noise.generator_for(self.seed, iteration, "updates")),
                scaler=self.scaler,
                processes=self.processes,
                on_batch=lambda done, total: self.on_progress("update", done, total),
                after_update=self.after_update,
                on_halved=self._halved("update_batch"),
            )
        self._check_gradients(updated)
        metrics = rollout_metrics(rewards.total, rewards.parts, credit) | rolled.looks | updated
        metrics |= {f"seconds/{name}": seconds for name, seconds in self._seconds.items()}
        return Iteration(trajectory, rewards.total, credit, rolled.images, metrics, rolled.problems, list(self.notes))

    def _collect(self, iteration: int, prompts: Sequence[Prompt], index: Sequence[int]) -> Rollouts:
        """Sample, estimate and score this process's share of the trajectories; rewards come from all processes."""
        config, size = self.config, self.config.group_size
        total = len(index) * size
        rows = self.processes.share(total)
        at_once = -(-config.rollout_batch // size) if config.score_ahead else None
        parts = segments(rows, size, at_once)
        scorer = Scorer(
            self.policy,
            self.score,
            config.decode_batch,
            ahead=config.score_ahead,
            on_progress=lambda done, total: self.on_progress("score", done, total),
            on_halved=self._halved("decode_batch"),
            check=self.processes.size == 1,
        )
        sampled, images, places, states = [], [], [], 0
        try:
            for part in parts:
                with self._phase("sample"):
                    trajectory, cond = self.sample(iteration, index, part)
                with self._phase("estimate"):
                    latents, found = self._estimate(trajectory, cond)
                with self._phase("score"):
                    scorer.total = max(scorer.total, len(latents) * (rows.stop - rows.start) // len(trajectory.latents))
                    asked = [prompts[index[part.groups.start + r // part.size]] for r in found.row.tolist()]
                    images.append(scorer.add(latents, asked, found.state == trajectory.steps))
                sampled.append((trajectory, cond))
                places.append(found.index + states)
                states += len(latents)
            with self._phase("score"):
                scores = scorer.finish()
        finally:
            scorer.close()
        with self._phase("score"):
            scored = gather_scored(scores, torch.cat(places) if places else None, size, self.processes)
            problems = [words for some in self.processes.gather(scores.problems) for words in some]
            dropped = self.processes.gather((scorer.dropped, scorer.done))
            check_dropped(self.score, sum(d for d, _ in dropped), sum(n for _, n in dropped), problems)
            images = torch.cat(images) if images else torch.zeros(0, 3, 1, 1)
            looks = image_metrics(images, rows, size, self.processes)
        if not sampled:
            stds = self._stds(iteration)
            sampled.append((empty_trajectory(self.sigmas, stds, self.latent_shape), torch.zeros(0, dtype=torch.long)))
        trajectory, cond = join_trajectories([t for t, _ in sampled]), torch.cat([c for _, c in sampled])
        return Rollouts(trajectory, cond, scored, images, looks, problems)

    def sample(self, iteration: int, index: Sequence[int], part: Segment | None = None) -> tuple[Trajectory, Tensor]:
        """Roll out one group for each prompt index; returns the G * N trajectories and their `cond`.

        part: only these rows, which then are what they are among all. A grid that starts below 1 starts from noise
        scaled by sigmas[0], as in ComfyUI.
        """
        size, steps, count = self.config.group_size, len(self.sigmas) - 1, len(index)
        part = part or Segment(slice(0, count), slice(0, size))
        groups, start, width = part.groups, part.groups.start, part.groups.stop - part.groups.start
        cond = torch.tensor(list(index)[groups], device=self.device).repeat_interleave(part.size)
        x = noise.initial_noise(self.seed, iteration, index, part.size, self.latent_shape, groups) * self.sigmas[0]

        def at(micro_batch: int) -> Trajectory:
            return rollout(
                self.policy.velocity,
                x.to(self.device),
                self.sigmas,
                cond,
                kernel=self.config.kernel,
                generators=noise.member_generators(self.seed, iteration, index, size, groups, part.members),
                stochastic=self.window(iteration),
                group_size=part.size,
                micro_batch=micro_batch,
                on_step=lambda k: self.on_progress("sample", steps * start + k * width, steps * count),
            )

        return halving(at, self.config.rollout_batch, self._halved("rollout_batch")), cond

    def _halved(self, setting: str) -> Callable[[int], None]:
        """What is told that memory ran out: the setting is lower from now on, and a note says so."""

        def tell(size: int) -> None:
            self.config = replace(self.config, **{setting: size})
            self.notes.append(f"memory ran out: {setting} is {size} from here on")

        return tell

    def _check_gradients(self, updated: dict[str, float]) -> None:
        """Raise GradientError where too many updates in a row had no finite gradient."""
        if updated["updates"]:
            self._skipped = 0
        self._skipped += updated["updates_skipped"]
        if self._skipped >= self.config.max_skipped:
            raise GradientError(
                f"the gradients of {self._skipped} updates in a row were NaN or infinite, so that nothing was learned "
                "from them; lower the learning rate, or compute in bf16 or fp32 in place of fp16"
            )

    def window(self, iteration: int) -> Tensor:
        """The stochastic steps (T,) of an iteration."""
        draw = torch.randint(len(self.windows), (1,), generator=noise.generator_for(self.seed, iteration, "window"))
        return self.windows[int(draw)]

    def _stds(self, iteration: int) -> Tensor:
        """The noise of each step (T,) of an iteration."""
        return torch.where(self.window(iteration), self.config.kernel.std(self.sigmas[:-1], self.sigmas[1:]), 0.0)

    def _estimate(self, trajectory: Trajectory, cond: Tensor):
        """Clean estimates of all states that the credit reads: only the finished latents for `uniform`."""
        if self.config.credit == "uniform":
            return trajectory.final, trajectory.final_states()
        total, done = len(trajectory.latents) * trajectory.steps * (self.config.substeps - 1), 0

        def on_batch(rows: int) -> None:
            nonlocal done
            done += rows
            self.on_progress("estimate", min(done, total), total)

        def at(micro_batch: int):
            return estimates(
                self.policy.velocity,
                trajectory,
                cond,
                substeps=self.config.substeps,
                micro_batch=micro_batch,
                on_batch=on_batch,
            )

        return halving(at, self.config.estimate_batch, self._halved("estimate_batch"))

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
            return mix_credits(credits, list(weights.values()), scored.total)
        if any(t.normalise for t in terms):
            return credit_of("total", scored.normalised(terms))
        return credit_of("total", scored.total)
