"""SDE Sampler: the core's transition kernels as a SAMPLER for every flow model.

ComfyUI speaks k-diffusion's sampler interface: `model(x, sigma)` returns the denoised latent x0_hat after guidance, so
v = (x - x0_hat) / sigma. In ComfyUI's inpainting x0_hat is the given latent outside the mask; a kernel then adds its
noise around that latent, and the step to 0 returns it as it is.

Each image draws its noise from a stream of its own, seeded by the seed and by the noise that the image starts from. So
it does not depend on the batch around it, also where Latent From Batch takes one image of a batch out.
"""

from __future__ import annotations

import hashlib

import comfy.model_sampling
import comfy.samplers
import torch
from comfy_api.latest import io
from torch import Tensor
from tqdm.auto import trange

from ..sfgrpo.kernels import DEFAULT_ETA, KERNELS, SCHEDULES, Kernel
from ..sfgrpo.noise import draw, generator_for
from ..sfgrpo.schedule import window_mask
from .comfy_model import is_flow
from .compat import make

TO_THE_END = 10000
"""Window end that no grid reaches; ComfyUI's KSampler (Advanced) has the same default for its last step."""


def flow_sampling(model):
    """The model_sampling behind a sampler's model; ValueError where it is not that of a flow from noise to image."""
    sampling = model.inner_model.inner_model.model_sampling
    if not is_flow(sampling):
        raise ValueError(
            "SDE Sampler works with flow models only (SD3, FLUX, Qwen-Image, Z-Image, Wan and the like), and this "
            f"{type(model.inner_model.inner_model).__name__} model is set up as another kind; use a sampler of "
            "KSamplerSelect with it, such as euler_ancestral or dpmpp_2m_sde."
        )
    return sampling


def check_falling(sigmas: Tensor) -> Tensor:
    """`sigmas` on the CPU in float32; ValueError where they do not fall strictly within 1..0."""
    grid = sigmas.detach().float().cpu()
    for k in range(len(grid) - 1):
        if not grid[k + 1] < grid[k]:
            raise ValueError(
                f"the sigmas must fall at every step, but step {k} goes from {grid[k]:.4g} to {grid[k + 1]:.4g}; "
                "use fewer steps, or another scheduler"
            )
    if len(grid) > 1 and not (grid[0] <= 1 and grid[-1] >= 0):
        raise ValueError(
            f"the sigmas of a flow model lie between 1 and 0, and these go from {grid[0]:.4g} to {grid[-1]:.4g}; "
            "use Flow Sigmas or Basic Scheduler"
        )
    return grid


def noise_streams(seed: int, offset: int, first_sigma: float, start: Tensor | None, count: int) -> list:
    """One CPU generator an image.

    start: (B, ...) the noise that each image starts from. Images that share it (as after Disable Noise, when it is
    zero) are told apart by their order. The first sigma keeps two samplers in a row from drawing the same noise.
    """
    seen: dict[str, int] = {}
    streams = []
    for i in range(count):
        mark = ""
        if start is not None and len(start) == count:
            data = start[i].detach().float().cpu().contiguous().numpy().tobytes()
            mark = hashlib.blake2b(data, digest_size=8).hexdigest()
        streams.append(generator_for(seed, offset, repr(first_sigma), mark, seen.get(mark, 0)))
        seen[mark] = seen.get(mark, 0) + 1
    return streams


@torch.no_grad()
def sample_stepwise(
    model,
    x: Tensor,
    sigmas: Tensor,
    extra_args: dict | None = None,
    callback=None,
    disable: bool | None = None,
    *,
    kernel: Kernel,
    window_start: int = 0,
    window_end: int = TO_THE_END,
    seed_offset: int = 0,
) -> Tensor:
    """Carry x (B, ...) from sigmas[0] to sigmas[-1] by `kernel`; steps outside the window are Euler steps.

    Raises ValueError for a model that is no flow model, sigmas that do not fall, and a window after the last step.
    """
    sampling = flow_sampling(model)
    grid = check_falling(sigmas)
    steps = len(grid) - 1
    if steps < 1:
        return x
    if window_start >= steps:
        raise ValueError(
            f"window_start is {window_start} (steps count from 0), but the sigmas have {steps} steps; lower it"
        )
    extra_args = extra_args or {}
    window = window_mask(steps, window_start, min(window_end, steps))
    stds = torch.where(window, kernel.std(grid[:-1], grid[1:]), 0.0)
    streams = []
    if (stds > 0).any():
        start = getattr(model, "noise", None)
        streams = noise_streams(extra_args.get("seed") or 0, seed_offset, grid[0].item(), start, len(x))
    scale = getattr(sampling, "noise_scale", 1.0)
    ode = Kernel(name="ode")
    ones = x.new_ones([len(x)])
    for k in trange(steps, disable=disable):
        t, s = grid[k], grid[k + 1]
        denoised = model(x, sigmas[k] * ones, **extra_args)
        if callback is not None:
            callback({"x": x, "i": k, "sigma": sigmas[k], "sigma_hat": sigmas[k], "denoised": denoised})
        if s == 0:
            # What every kernel does there, without the rounding of x - t (x - x0_hat) / t.
            return denoised.to(x.dtype)
        velocity = (x.float() - denoised.float()) / t
        if stds[k] > 0:
            noise = scale * draw(streams, x.shape[1:], x.device)
            following = kernel.transition(x, velocity, t, s).sample(noise)
        else:
            following = ode.transition(x, velocity, t, s).mean
        x = following.to(x.dtype)
    return x


class SDESampler(io.ComfyNode):
    """The kernels of Stepwise-Flow-GRPO as a sampler."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        usual = ", ".join(f"{DEFAULT_ETA[name]:g} for {name}" for name in KERNELS if name != "ode")
        return make(
            io.Schema,
            node_id="SFGRPO_SDESampler",
            display_name="SDE Sampler (Stepwise-Flow-GRPO)",
            category="model/sampling/samplers",
            search_aliases=["flow SDE", "stochastic sampler", "GRPO sampler", "Flow-GRPO", "DanceGRPO", "Flow-CPS"],
            description="Samples a flow model with fresh noise at each step, as reinforcement learning explores it: "
            "the same seed with another offset gives variations of an image. For Sampler Custom.",
            inputs=[
                io.Combo.Input(
                    "kernel",
                    options=list(KERNELS),
                    default="ddim",
                    tooltip="How a step adds noise. ddim: Stepwise-Flow-GRPO's, keeps the amount of noise that the "
                    "model expects, and is clean with few steps. flow_grpo and dance: the SDEs of Flow-GRPO and "
                    "DanceGRPO. ode: no noise, the same as euler.",
                ),
                io.Float.Input(
                    "eta",
                    default=0.7,
                    min=0.0,
                    max=10.0,
                    step=0.05,
                    round=False,
                    tooltip=f"Strength of the noise; 0 is the same as euler. Usual: {usual}. ddim takes 0 to 1; ode "
                    "does not read it.",
                ),
                io.Combo.Input(
                    "schedule",
                    options=list(SCHEDULES),
                    default="annealed",
                    tooltip="Read by ddim only. annealed: most noise at the first step, falling. as_printed: none at "
                    "the first step. constant: always the same share (Flow-CPS).",
                ),
                io.Int.Input(
                    "window_start",
                    default=0,
                    min=0,
                    max=TO_THE_END,
                    tooltip="First step that adds noise; steps count from 0. Earlier steps are euler steps.",
                ),
                io.Int.Input(
                    "window_end",
                    default=TO_THE_END,
                    min=1,
                    max=TO_THE_END,
                    tooltip="Step before which the noise ends; later steps are euler steps. Anything at or above the "
                    f"number of steps, like {TO_THE_END}, means to the end.",
                ),
                make(
                    io.Int.Input,
                    "noise_seed_offset",
                    default=0,
                    min=0,
                    max=2**32 - 1,
                    advanced=True,
                    tooltip="Changes the noise of the steps and keeps the noise that the image starts from, which is "
                    "that of the seed.",
                ),
            ],
            outputs=[io.Sampler.Output(tooltip="For Sampler Custom or Sampler Custom Advanced.")],
        )

    @classmethod
    def execute(
        cls, kernel: str, eta: float, schedule: str, window_start: int, window_end: int, noise_seed_offset: int = 0
    ) -> io.NodeOutput:
        if window_start >= window_end:
            raise ValueError(f"window_start ({window_start}) must be below window_end ({window_end})")
        options = {
            "kernel": Kernel(name=kernel, eta=eta, schedule=schedule),
            "window_start": window_start,
            "window_end": window_end,
            "seed_offset": noise_seed_offset,
        }
        return io.NodeOutput(comfy.samplers.KSAMPLER(sample_stepwise, options))
