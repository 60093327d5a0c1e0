"""Transition kernels: the Gaussian N(mean, std^2) of the next latent x_s, given x_t, the velocity v and t > s.

With x0_hat = x_t - t v and x1_hat = x_t + (1 - t) v:

    ddim       mean = (1 - s) x0_hat + sqrt(s^2 - std^2) x1_hat     (Stepwise-Flow-GRPO, Eq. 8; the DDIM of flows)
               std  = eta s sqrt(1 - t)     schedule `as_printed`: none at t = 1
                      eta s sqrt(t)         schedule `annealed`: most at t = 1, falling to 0, as the text says
                      s sin(eta pi / 2)     schedule `constant`: Flow-CPS (Wang & Yu 2025)
    flow_grpo  a = eta sqrt(t / (1 - t)), dt = s - t < 0            (Flow-GRPO, Liu et al. 2025)
               mean = x_t (1 + a^2 dt / 2t) + v (1 + a^2 (1 - t) / 2t) dt,  std = a sqrt(-dt)
               At t = 1 the next time stands in the denominator of a, as in the published code.
    dance      flow_grpo's SDE with a = eta at every step           (DanceGRPO, Xue et al. 2025)
    ode        mean = x_t + (s - t) v, std = 0                      (Euler)

Deviation: the step to s = 0 is an Euler step in every kernel, so that the finished image carries no fresh noise. The
published Flow-GRPO adds a little there and leaves that step out of training.

The log-probability is the mean over a latent's elements, not the sum (Flow-GRPO's convention): ratios and clip
ranges of about 1e-4 to 1e-3 belong to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

KERNELS = ("ddim", "flow_grpo", "dance", "ode")
SCHEDULES = ("as_printed", "annealed", "constant")
DEFAULT_ETA = {"ddim": 0.7, "flow_grpo": 0.7, "dance": 0.3, "ode": 0.0}


def expand(values: Tensor | float, like: Tensor) -> Tensor:
    """Values () or (B,) as float32 that broadcasts against `like` (B, ...)."""
    values = torch.as_tensor(values, dtype=torch.float32, device=like.device)
    return values.reshape(-1, *[1] * (like.ndim - 1))


@dataclass
class Transition:
    """The Gaussian of one step for B latents."""

    mean: Tensor
    """(B, ...) float32."""
    std: Tensor
    """(B, 1, ...) or (1, 1, ...) float32, one value a sample; 0 where the step is deterministic."""

    def sample(self, noise: Tensor) -> Tensor:
        """mean + std * noise, (B, ...) float32."""
        return self.mean + self.std * noise.float()

    def log_prob(self, x_next: Tensor) -> Tensor:
        """Log-density of x_next in float32, averaged over the elements of a latent, (B,).

        Meaningless (inf or NaN) where std is 0: such a step has no density, and no caller trains on it.
        """
        z = (x_next.float() - self.mean) / self.std
        density = -0.5 * z.square() - torch.log(self.std) - 0.5 * math.log(2 * math.pi)
        return density.flatten(1).mean(dim=1)

    def kl(self, reference: Transition, span: Tensor | float) -> Tensor:
        """KL to a Gaussian of the same std for a step of `span` = t - s, averaged as log_prob is, (B,).

        |mean - mean_ref|^2 / 2 a^2 with a = std / sqrt(span), the noise per root of time: Flow-GRPO's convention, in
        which its published weights are given. It is the KL divergence times `span`.
        """
        rate = self.std.square() / expand(span, self.mean)
        return ((self.mean - reference.mean).square() / (2 * rate)).flatten(1).mean(dim=1)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel by name. Raises ValueError for an unknown name or schedule, or an eta outside its range."""

    __pydantic_config__ = {"extra": "forbid"}

    name: str = "ddim"
    """One of KERNELS."""
    eta: float | None = None
    """Strength of the noise; None takes DEFAULT_ETA. 0..1 for `ddim`, where 0 is the ODE; >= 0 for the others."""
    schedule: str = "annealed"
    """Schedule of std of `ddim`, one of SCHEDULES."""

    def __post_init__(self) -> None:
        if self.name not in KERNELS:
            raise ValueError(f"unknown kernel {self.name!r}; choose one of {', '.join(KERNELS)}")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"unknown schedule {self.schedule!r}; choose one of {', '.join(SCHEDULES)}")
        if self.eta is None:
            object.__setattr__(self, "eta", DEFAULT_ETA[self.name])
        if not self.eta >= 0 or math.isinf(self.eta) or (self.name == "ddim" and self.eta > 1):
            allowed = "0 to 1" if self.name == "ddim" else "0 or more"
            raise ValueError(f"eta of the {self.name} kernel must be {allowed}, got {self.eta}")

    def std(self, t: Tensor, s: Tensor) -> Tensor:
        """Standard deviation of the noise of steps t -> s, elementwise, float32; 0 where s is 0."""
        t, s = torch.as_tensor(t, dtype=torch.float32), torch.as_tensor(s, dtype=torch.float32)
        if self.name == "ddim":
            if self.schedule == "as_printed":
                std = self.eta * s * torch.sqrt(1 - t)
            elif self.schedule == "annealed":
                std = self.eta * s * torch.sqrt(t)
            else:
                std = s * math.sin(self.eta * math.pi / 2)
        elif self.name == "ode":
            std = torch.zeros_like(t)
        else:
            std = self._diffusion(t, s) * torch.sqrt(t - s)
        return torch.where(s > 0, std, torch.zeros_like(std))

    def _diffusion(self, t: Tensor, s: Tensor) -> Tensor:
        """The SDE's diffusion coefficient a of `flow_grpo` and `dance`."""
        if self.name == "dance":
            return torch.full_like(t, self.eta)
        return self.eta * torch.sqrt(t / (1 - torch.where(t == 1, s, t)))

    def transition(self, x: Tensor, velocity: Tensor, t: Tensor | float, s: Tensor | float) -> Transition:
        """The Gaussian of x_s for latents x (B, ...) and velocity (B, ...); t and s are () or (B,), t > s.

        Works in float32 whatever the inputs' dtype.
        """
        x, v = x.float(), velocity.float()
        t, s = expand(t, x), expand(s, x)
        std = self.std(t, s)
        if self.name == "ddim":
            x0_hat, x1_hat = x - t * v, x + (1 - t) * v
            mean = (1 - s) * x0_hat + torch.sqrt(s.square() - std.square()) * x1_hat
        else:
            mean = x + (s - t) * v
            if self.name != "ode":
                # The drift that the noise asks for: a^2/2 times the score, -x1_hat / t.
                a = torch.where(s > 0, self._diffusion(t, s), torch.zeros_like(t))
                mean = mean + a.square() / (2 * t) * (x + (1 - t) * v) * (s - t)
        return Transition(mean, std)
