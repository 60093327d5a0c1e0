"""Time grids: the noise levels t_0 > t_1 > ... > t_T = 0 that a rollout visits (sigma in diffusers and ComfyUI).

Every grid is a float32 tensor of T + 1 values that ends in 0. A family's own sigmas can be passed as they are
(`check_sigmas`). The shifts are those of "Scaling Rectified Flow Transformers" (Esser et al. 2024; SD3) and
of FLUX and Qwen-Image in diffusers:

    static shift s:     t -> s t / (1 + (s - 1) t)
    dynamic shift mu:   t -> e^mu / (e^mu + 1/t - 1)      (the static shift with s = e^mu)
    terminal t_end:     1 - t -> (1 - t) (1 - t_end) / (1 - t_{T-1})

FAMILIES has the numbers of each model family: those of the scheduler_config.json that is published with its weights,
used as its pipeline in diffusers 0.42 uses them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TRAIN_TIMESTEPS = 1000


def check_sigmas(sigmas: Tensor | Sequence[float]) -> Tensor:
    """Return `sigmas` as float32 (T + 1,), or raise ValueError where they are no time grid.

    A grid falls strictly from at most 1 to exactly 0 and has at least one step.
    """
    grid = torch.as_tensor(sigmas, dtype=torch.float32)
    if grid.ndim != 1 or len(grid) < 2:
        raise ValueError(f"sigmas must be a list of at least 2 values, got shape {tuple(grid.shape)}")
    if not bool((grid[1:] < grid[:-1]).all()):
        raise ValueError(f"sigmas must fall strictly from step to step, got {grid.tolist()}")
    if grid[0] > 1 or grid[-1] != 0:
        raise ValueError(f"sigmas must start at 1 or below and end at exactly 0, got {grid.tolist()}")
    return grid


def shift_static(t: Tensor, shift: float) -> Tensor:
    """Static shift of times in [0, 1]; `shift` > 0, 1 changes nothing."""
    return shift * t / (1 + (shift - 1) * t)


def shift_dynamic(t: Tensor, mu: float) -> Tensor:
    """Exponential shift of times in [0, 1] by mu, as FLUX and Qwen-Image use it; mu = 0 changes nothing."""
    return shift_static(t, math.exp(mu))


def mu_for_tokens(
    tokens: int, base_tokens: int = 256, max_tokens: int = 4096, base_shift: float = 0.5, max_shift: float = 1.15
) -> float:
    """mu for an image of `tokens` latent tokens, linear in their number (FLUX's defaults; `calculate_shift`)."""
    slope = (max_shift - base_shift) / (max_tokens - base_tokens)
    return tokens * slope + base_shift - slope * base_tokens


def stretch_to_terminal(t: Tensor, terminal: float) -> Tensor:
    """Stretch nonzero times so that the last is `terminal` (Qwen-Image: 0.02); the first stays where 1 is."""
    one_minus = 1 - t
    return 1 - one_minus * (1 - terminal) / one_minus[-1]


def _with_zero(t: Tensor) -> Tensor:
    return torch.cat([t, t.new_zeros(1)]).float()


def sd3_sigmas(steps: int, shift: float = 3.0) -> Tensor:
    """SD3's grid, (steps + 1,): equal to diffusers' FlowMatchEulerDiscreteScheduler(shift=shift).

    diffusers spaces the unshifted times evenly between 1 and the SHIFTED least training time and then shifts all,
    so that the least is shifted twice.
    """
    least = shift_static(torch.tensor(1 / TRAIN_TIMESTEPS, dtype=torch.float64), shift).item()
    return _with_zero(shift_static(torch.linspace(1, least, steps, dtype=torch.float64), shift))


def even_sigmas(
    steps: int, *, shift: float | None = None, mu: float | None = None, terminal: float | None = None
) -> Tensor:
    """Times 1, 1 - 1/T, ..., 1/T, 0, shifted statically or dynamically, (steps + 1,).

    With mu this is FLUX's grid, with mu and terminal Qwen-Image's. Raises ValueError for a terminal with one step.
    """
    if terminal is not None and steps < 2:
        raise ValueError("a terminal time needs 2 or more steps")
    t = torch.linspace(1, 1 / steps, steps, dtype=torch.float64)
    if shift is not None:
        t = shift_static(t, shift)
    if mu is not None:
        t = shift_dynamic(t, mu)
    if terminal is not None:
        t = stretch_to_terminal(t, terminal)
    return _with_zero(t)


def unipc_sigmas(steps: int, shift: float) -> Tensor:
    """Wan's grid, (steps + 1,): T + 1 even times from 1 to 1/1000 without the last, shifted statically, then 0.

    That of diffusers' UniPCMultistepScheduler(use_flow_sigmas=True), which starts at 1 - 1e-6 for the sake of a
    logarithm of its own.
    """
    return _with_zero(shift_static(torch.linspace(1, 1 / TRAIN_TIMESTEPS, steps + 1, dtype=torch.float64)[:-1], shift))


def flux2_mu(tokens: int, steps: int) -> float:
    """mu of FLUX.2 for an image of `tokens` latent tokens (`compute_empirical_mu`): lines fitted at 10 and 200 steps.

    Linear in the steps between them; above 4300 tokens the line of 200 steps holds for all.
    """
    at_200 = 0.00016927 * tokens + 0.45666666
    if tokens > 4300:
        return at_200
    at_10 = 8.73809524e-05 * tokens + 1.89833333
    return at_200 + (at_200 - at_10) / 190 * (steps - 200)


@dataclass(frozen=True, kw_only=True)
class Family:
    """How a model family spaces and shifts its times. Either `shift` or `mu` is set."""

    spacing: str = "even"
    """`even` (even_sigmas), `sd3` (sd3_sigmas) or `unipc` (unipc_sigmas)."""
    shift: float | None = None
    """Static shift."""
    mu: Callable[[int, int], float] | None = None
    """mu for (latent tokens, steps)."""
    terminal: float | None = None
    """Last time before 0."""


FAMILIES = {
    "sd3": Family(spacing="sd3", shift=3.0),
    "flux": Family(mu=lambda tokens, steps: mu_for_tokens(tokens)),
    "flux-schnell": Family(shift=1.0),
    "flux2": Family(mu=flux2_mu),
    "qwen-image": Family(mu=lambda tokens, steps: mu_for_tokens(tokens, 256, 8192, 0.5, 0.9), terminal=0.02),
    "z-image": Family(shift=3.0),
    "wan": Family(spacing="unipc", shift=3.0),
    "plain": Family(shift=1.0),
}
"""Of SD3 and SD3.5, FLUX.1-dev and -schnell, FLUX.2, Qwen-Image, Z-Image-Turbo and Wan 2.1 at 480p (diffusers advises
a shift of 5 at 720p); `plain` are even times for any shift."""


def family_sigmas(family: Family, steps: int, *, tokens: int = 4096, shift: float | None = None) -> Tensor:
    """The grid of a family, (steps + 1,).

    tokens: latent tokens of the image, which mu depends on; one is 16 x 16 pixels in all families of FAMILIES with a
    mu. shift: another static shift (> 0), or another mu, than the family's own. Raises ValueError as even_sigmas does.
    """
    if family.mu is not None:
        mu = family.mu(tokens, steps) if shift is None else shift
        return even_sigmas(steps, mu=mu, terminal=family.terminal)
    shift = family.shift if shift is None else shift
    if family.spacing == "sd3":
        return sd3_sigmas(steps, shift)
    if family.spacing == "unipc":
        return unipc_sigmas(steps, shift)
    return even_sigmas(steps, shift=shift, terminal=family.terminal)


def window_mask(steps: int, start: int = 0, stop: int | None = None) -> Tensor:
    """(steps,) bool: which steps inject noise; the others are ODE steps.

    One window holds for the whole batch: drawn per sample it was seen to collapse training. Raises ValueError for a
    window that is empty or outside 0..steps.
    """
    stop = steps if stop is None else stop
    if not 0 <= start < stop <= steps:
        raise ValueError(
            f"the stochastic window must start before it ends and end by the last step: its start is {start}, its end "
            f"{stop}, and there are {steps} steps"
        )
    index = torch.arange(steps)
    return (index >= start) & (index < stop)
