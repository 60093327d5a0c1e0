"""Settings of the algorithm, shared by the headless trainer and the ComfyUI node."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from .credit import CREDITS, MIXES
from .kernels import Kernel
from .objective import STEP_WEIGHTS
from .schedule import window_mask


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
    window_size: int | None = None
    """Only so many consecutive steps inject noise and are trained on, at a place between start and stop that is drawn
    anew for each iteration, for the whole batch; None for all of them."""
    substeps: int = 1
    """Euler sub-steps of a clean estimate, T'; 1 is one-step Tweedie, the paper takes 5."""
    credit: str = "gain"
    """One of sfgrpo.credit.CREDITS."""
    gae_lambda: float = 0.9
    """Of credit `gain_gae`."""
    ema_decay: float = 0.9
    """Of credit `gain_ema`."""
    mix: str = "sum"
    """Of several rewards, one of sfgrpo.credit.MIXES: credit for their weighted sum, or for each, then mixed."""
    step_weight: str = "none"
    """One of sfgrpo.objective.STEP_WEIGHTS."""
    clip_range: float = 1e-3
    """eps of the clipped ratio; belongs to log-probabilities averaged over elements."""
    kl_weight: float = 0.0
    """beta of the KL term to the adapter-off model, in Flow-GRPO's convention (its 0.01 to 0.04 mean the same here); 0
    spares its forward pass."""
    updates: int = 1
    """Optimizer steps an iteration; each takes its share of the prompts."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    max_skipped: int = 20
    """So many updates in a row whose gradient is NaN or infinite end the training; each is skipped."""
    rollout_batch: int = 32
    """Latents in one forward pass of the rollout. Results do not depend on this or the next four; memory does, and
    where it runs out they are halved."""
    estimate_batch: int = 32
    """Latents in one forward pass of the estimates."""
    decode_batch: int = 8
    """Latents decoded and images scored at once."""
    update_batch: int = 8
    """Steps of trajectories in one forward and backward pass of the update."""
    score_ahead: int = 0
    """So many decoded images may wait for their scores on another thread while sampling goes on; 0 scores each batch
    before anything else. Pays where the reward is another machine's or another device's work."""

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise ValueError(f"{name} must be {rule}, got {getattr(self, name)!r}")

        need(self.group_size >= 2, "group_size", "2 or more, for an advantage compares the members of a group")
        need(self.substeps >= 1, "substeps", "1 or more")
        need(self.credit in CREDITS, "credit", f"one of {', '.join(CREDITS)}")
        need(self.mix in MIXES, "mix", f"one of {', '.join(MIXES)}")
        need(self.step_weight in STEP_WEIGHTS, "step_weight", f"one of {', '.join(STEP_WEIGHTS)}")
        need(0 <= self.gae_lambda <= 1, "gae_lambda", "from 0 to 1")
        need(0 <= self.ema_decay < 1, "ema_decay", "from 0 to below 1")
        need(0 < self.clip_range < 1, "clip_range", "above 0 and below 1")
        need(0 <= self.kl_weight < math.inf, "kl_weight", "0 or more")
        need(self.updates >= 1, "updates", "1 or more")
        need(self.max_grad_norm > 0, "max_grad_norm", "above 0")
        need(
            self.kernel.name != "ode" and self.kernel.eta > 0,
            "kernel",
            "stochastic: ode or eta 0 leaves nothing to train on",
        )
        for name in ("rollout_batch", "estimate_batch", "decode_batch", "update_batch"):
            need(getattr(self, name) >= 1, name, "1 or more")
        need(self.max_skipped >= 1, "max_skipped", "1 or more")
        need(self.score_ahead >= 0, "score_ahead", "0 or more")
        need(self.window_size is None or self.window_size >= 1, "window_size", "1 or more")

    def windows(self, steps: int) -> list[Tensor]:
        """Every window (steps,) bool that an iteration can draw; one where the size is not set.

        Raises ValueError for a window that is empty or outside the steps.
        """
        stop = steps if self.window_stop is None else self.window_stop
        whole = window_mask(steps, self.window_start, stop)
        if self.window_size is None:
            return [whole]
        if self.window_size > stop - self.window_start:
            raise ValueError(
                f"window_size {self.window_size} is more than the {stop - self.window_start} steps of the window; "
                "lower it, or move the start or the end of the window"
            )
        starts = range(self.window_start, stop - self.window_size + 1)
        return [window_mask(steps, start, start + self.window_size) for start in starts]

    def check_windows(self, sigmas: Tensor) -> list[Tensor]:
        """`windows` for a time grid (T + 1,). Raises ValueError also for one in which no step injects noise."""
        windows = self.windows(len(sigmas) - 1)
        noisy = self.kernel.std(sigmas[:-1], sigmas[1:]) > 0
        if not all(bool((noisy & window).any()) for window in windows):
            raise ValueError("no step of the window injects noise with this kernel and schedule; widen the window")
        return windows
