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
from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import noise
from .credit import CREDITS, Credit, assign_credit
from .kernels import Kernel
from .metrics import brightness, diversity, sharpness
from .objective import STEP_WEIGHTS, step_weights, surrogate_loss, trained_entries
from .policy import Policy
from .prompts import Prompt
from .rewards import Scores
from .rollout import Trajectory, batches, rollout
from .schedule import window_mask
from .tweedie import estimates

PHASES = ("sample", "estimate", "score", "update")


@dataclass(frozen=True, kw_only=True)
class GRPOConfig:
    """Settings of the algorithm. Raises ValueError for one outside its range, naming it."""

    __pydantic_config__ = {"extra": "forbid"}

    group_size: int = 24
    """Images of one prompt that are compared with each other; at least 2."""
    kernel: Kernel = field(default_factory=Kernel)
    """Kernel of the stochastic steps."""
    window_start: int = 0
    """First step that injects noise and is trained on."""
    window_stop: int | None = None
    """Step before which the noise ends; None for all steps."""
    substeps: int = 1
    """Euler sub-steps of a clean estimate, T'; 1 is one-step Tweedie, the paper takes 5."""
    credit: str = "gain"
    """One of sfgrpo.credit.CREDITS."""
    gae_lambda: float = 0.9
    """Of credit `gain_gae`."""
    ema_decay: float = 0.9
    """Of credit `gain_ema`."""
    step_weight: str = "none"
    """One of sfgrpo.objective.STEP_WEIGHTS."""
    clip_range: float = 1e-3
    """eps of the clipped ratio; belongs to log-probabilities averaged over elements."""
    kl_weight: float = 0.0
    """beta of the KL term to the adapter-off model; 0 spares its forward pass."""
    updates: int = 1
    """Optimizer steps an iteration; each takes its share of the prompts."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    rollout_batch: int | None = None
    """Latents in one forward pass of the rollout; None for all. The results do not depend on it."""
    estimate_batch: int | None = None
    """Latents in one forward pass of the estimates."""
    decode_batch: int | None = 64
    """Latents decoded and images scored at once."""
    update_batch: int | None = None
    """Steps of trajectories in one forward and backward pass of the update."""

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise ValueError(f"{name} must be {rule}, got {getattr(self, name)!r}")

        need(self.group_size >= 2, "group_size", "2 or more, for an advantage compares the members of a group")
        need(self.substeps >= 1, "substeps", "1 or more")
        need(self.credit in CREDITS, "credit", f"one of {', '.join(CREDITS)}")
        need(self.step_weight in STEP_WEIGHTS, "step_weight", f"one of {', '.join(STEP_WEIGHTS)}")
        need(0 <= self.gae_lambda <= 1, "gae_lambda", "from 0 to 1")
        need(0 <= self.ema_decay < 1, "ema_decay", "from 0 to below 1")
        need(0 < self.clip_range < 1, "clip_range", "above 0 and below 1")
        need(0 <= self.kl_weight < math.inf, "kl_weight", "0 or more")
        need(self.updates >= 1, "updates", "1 or more")
        need(self.max_grad_norm > 0, "max_grad_norm", "above 0")
        need(self.kernel.name != "ode" and self.kernel.eta > 0, "kernel", "stochastic: ode or eta 0 leaves nothing to train on")
        for name in ("rollout_batch", "estimate_batch", "decode_batch", "update_batch"):
            need(getattr(self, name) is None or getattr(self, name) >= 1, name, "1 or more")


ScoreFn = Callable[[Tensor, Sequence[str], Sequence[dict]], Scores]
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

        Raises ValueError for a window outside the grid or without a step that injects noise.
        """
        self.policy, self.score, self.optimizer, self.config = policy, score, optimizer, config
        self.sigmas, self.latent_shape, self.seed, self.device = sigmas, tuple(latent_shape), seed, device
        self.on_progress, self.after_update = on_progress, after_update
        self.scaler = scaler or torch.amp.GradScaler(enabled=False)
        self.stochastic = window_mask(len(sigmas) - 1, config.window_start, config.window_stop)
        if not bool((config.kernel.std(sigmas[:-1], sigmas[1:])[self.stochastic] > 0).any()):
            raise ValueError("no step of the window injects noise with this kernel and schedule; widen the window")
        self.ema: Tensor | None = None
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def _phase(self, name: str):
        start = time.perf_counter()
        yield
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
            images, scores = self._score(latents, [prompts[index[r // config.group_size]] for r in states.row.tolist()])
        shape = (len(index), config.group_size, -1)
        rewards = scores.total[states.index].view(shape)
        credit = assign_credit(
            rewards,
            config.credit,
            steps=trajectory.steps,
            gae_lambda=config.gae_lambda,
            ema=self.ema,
            ema_decay=config.ema_decay,
        )
        self.ema = credit.ema
        with self._phase("update"):
            update = self._update(iteration, trajectory, cond, credit)
        final = images[states.index[:, -1]]
        metrics = self._metrics(rewards, scores, states, credit, final) | update
        metrics |= {f"seconds/{name}": seconds for name, seconds in self._seconds.items()}
        return Iteration(trajectory, rewards, credit, final, metrics)

    def sample(self, iteration: int, index: Sequence[int]) -> tuple[Trajectory, Tensor]:
        """Roll out one group for each prompt index; returns the G * N trajectories and their `cond`."""
        size = self.config.group_size
        cond = torch.tensor(list(index), device=self.device).repeat_interleave(size)
        steps = len(self.sigmas) - 1
        trajectory = rollout(
            self.policy.velocity,
            noise.initial_noise(self.seed, iteration, index, size, self.latent_shape).to(self.device),
            self.sigmas,
            cond,
            kernel=self.config.kernel,
            generators=noise.member_generators(self.seed, iteration, index, size),
            stochastic=self.stochastic,
            group_size=size,
            micro_batch=self.config.rollout_batch,
            on_step=lambda k: self.on_progress("sample", k, steps),
        )
        return trajectory, cond

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

    @torch.no_grad()
    def _score(self, latents: Tensor, prompts: Sequence[Prompt]) -> tuple[Tensor, Scores]:
        """Decode and score in chunks; images and scores on the CPU, in the order of `latents`."""
        images, scores = [], []
        for part in batches(len(latents), self.config.decode_batch):
            self.on_progress("score", part.start, len(latents))
            image = self.policy.decode(latents[part]).float().clamp(0, 1)
            rows = prompts[part]
            scores.append(self.score(image, [p.text for p in rows], [dict(p.metadata) for p in rows]))
            images.append(image.cpu())
        parts = {name: torch.cat([s.parts[name] for s in scores]) for name in scores[0].parts}
        return torch.cat(images), Scores(torch.cat([s.total for s in scores]), parts)

    def _update(self, iteration: int, trajectory: Trajectory, cond: Tensor, credit: Credit) -> dict[str, float]:
        """One or more optimizer steps on the rollout; returns their metrics."""
        groups = len(credit.alive)
        order = torch.randperm(groups, generator=noise.generator_for(self.seed, iteration, "updates"))
        weights = step_weights(trajectory.stds, self.config.step_weight)
        entries = trained_entries(credit, trajectory.stds, self.config.kl_weight)
        chunks = [c for c in order.tensor_split(min(self.config.updates, groups)) if len(c)]
        parameters = list(self.policy.trainable_parameters())
        seen: dict[str, list[Tensor]] = defaultdict(list)
        norms, skipped, first_error = [], 0, 0.0
        total = int(entries.sum())
        done = 0
        for number, chunk in enumerate(chunks):
            chosen = torch.zeros(groups, dtype=torch.bool)
            chosen[chunk] = True
            # Sorted by step, so that a micro-batch holds many trajectories at few noise levels.
            step, group, member = (entries & chosen.view(-1, 1, 1)).permute(2, 0, 1).nonzero(as_tuple=True)
            if not len(step):
                continue
            denominator = len(chunk) * self.config.group_size * int((trajectory.stds > 0).sum())
            self.optimizer.zero_grad(set_to_none=True)
            row = group * self.config.group_size + member
            for part in batches(len(row), self.config.update_batch):
                self.on_progress("update", done, total)
                loss, kl = self.losses(trajectory, cond, row[part], step[part], credit.advantages[group[part], member[part], step[part]], weights)
                self.scaler.scale(loss.loss.sum() / denominator).backward()
                seen["loss"].append(loss.loss.detach().cpu())
                seen["ratio"].append(loss.ratio.cpu())
                seen["clipped"].append(loss.clipped.float().cpu())
                if kl is not None:
                    seen["kl"].append(kl.detach().cpu())
                done += part.stop - part.start
            if number == 0:
                first_error = float((torch.cat(seen["ratio"]) - 1).abs().max())
            self.scaler.unscale_(self.optimizer)
            norm = torch.nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm)
            if torch.isfinite(norm):
                self.scaler.step(self.optimizer)
                self.after_update()
                norms.append(float(norm))
            else:
                skipped += 1
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        ratio = torch.cat(seen["ratio"]) if seen["ratio"] else torch.ones(1)
        metrics = {
            "loss": float(torch.cat(seen["loss"]).sum()) / entries.numel() if seen["loss"] else 0.0,
            "ratio/mean": float(ratio.mean()),
            "ratio/max": float(ratio.max()),
            "ratio/first_error": first_error,
            "clipped": float(torch.cat(seen["clipped"]).mean()) if seen["clipped"] else 0.0,
            "grad_norm": sum(norms) / len(norms) if norms else 0.0,
            "updates": len(norms),
            "updates_skipped": skipped,
        }
        return metrics | ({"kl": float(torch.cat(seen["kl"]).mean())} if seen["kl"] else {})

    def losses(self, trajectory: Trajectory, cond: Tensor, row: Tensor, step: Tensor, advantage: Tensor, weights: Tensor):
        """Loss of M entries (row, step) of the trajectories, with its graph, and their KL or None."""
        device, config = trajectory.latents.device, self.config
        x, x_next = trajectory.latents[row, step], trajectory.latents[row, step + 1]
        t, s = trajectory.sigmas[step].to(device), trajectory.sigmas[step + 1].to(device)
        c = cond[row.to(cond.device)]
        transition = config.kernel.transition(x, self.policy.velocity(x, t, c), t, s)
        kl = None
        if config.kl_weight > 0:
            with torch.no_grad():
                reference = config.kernel.transition(x, self.policy.reference_velocity(x, t, c), t, s)
            kl = transition.kl(reference)
        loss = surrogate_loss(
            transition.log_prob(x_next),
            trajectory.log_probs[row, step].to(device),
            advantage.to(device),
            clip_range=config.clip_range,
            weight=weights[step].to(device),
            kl=kl,
            kl_weight=config.kl_weight,
        )
        return loss, kl

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
            metrics[f"reward/{name}"] = float(values.mean())
            metrics[f"reward/{name}_std"] = float(values.std(unbiased=False))
        if credit.gains.shape[-1]:
            metrics["gain"] = credit.gains.nanmean((0, 1)).tolist()
            metrics["gain_abs"] = credit.gains.abs().nanmean((0, 1)).tolist()
        return metrics
