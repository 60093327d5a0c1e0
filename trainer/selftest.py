"""`sfgrpo selftest`: what must hold for the numbers of a run to mean anything, checked on this machine and model."""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from sfgrpo.dtypes import DTYPES
from sfgrpo.export import save_lora
from sfgrpo.kernels import Kernel
from sfgrpo.loop import GRPOConfig, StepwiseGRPO
from sfgrpo.noise import initial_noise, member_generators
from sfgrpo.prompts import Prompt
from sfgrpo.rewards import Scores
from sfgrpo.rollout import rollout
from sfgrpo.shapes import MODEL_DIR

from .config import EMBEDDED, LoRAConfig
from .families import check_size, load_family
from .policy import LoRAPolicy, add_lora, encode_prompts, lora_layers, lora_state
from .prepare import pick_device, quiet
from .sample import Parser

PROMPTS = ("three red circles", "a square", "a blue cross")
STEPS, GROUP = 6, 4


def parser() -> argparse.ArgumentParser:
    """The arguments of `sfgrpo selftest`."""
    p = Parser(prog="sfgrpo selftest", description=__doc__)
    p.add_argument("--model", default=EMBEDDED, help="diffusers folder, hub id, or `shapes` (default)")
    p.add_argument("--dtype", choices=tuple(DTYPES), default="fp32")
    p.add_argument("--device", default="auto")
    p.add_argument("--height", type=int, help="pixels; default: the model's own")
    p.add_argument("--width", type=int, help="pixels; default: the model's own")
    return p


class Checks:
    """The checks, on one loaded model. Each returns (number, bound): green where number <= bound."""

    def __init__(self, args: argparse.Namespace) -> None:
        embedded = args.model == EMBEDDED
        self.model = str(MODEL_DIR) if embedded else args.model
        check_size(self.model, args.height, args.width)
        self.device, self.dtype = pick_device(args.device), DTYPES[args.dtype]
        self.length = 0 if embedded else None
        self.family = load_family(self.model, self.dtype, self.device, max_sequence_length=self.length)
        own = self.family.native_size
        height, width = args.height or own[0], args.width or own[1]
        self.shape = self.family.latent_shape(height, width)
        self.sigmas = self.family.sigmas(STEPS, height, width)
        prompts = [Prompt(text) for text in PROMPTS]
        conditioning = encode_prompts(self.family, prompts, set(range(len(prompts))), False)
        self.prompts, self.index = prompts, list(range(len(prompts)))
        self.family.free_encoders()
        self.policy = LoRAPolicy(self.family, conditioning, guidance=1.0, dtype=self.dtype)
        self.base = self._ode()
        add_lora(self.family, LoRAConfig(rank=4, alpha=8.0), seed=0)
        generator = torch.Generator().manual_seed(0)
        for layer in lora_layers(self.family).values():
            b = layer.lora_B["default"].weight
            b.data.copy_(0.02 * torch.randn(b.shape, generator=generator))

    def _roll(self, kernel: Kernel, micro_batch: int | None = None):
        return rollout(
            self.policy.velocity,
            initial_noise(0, 0, self.index, GROUP, self.shape).to(self.device),
            self.sigmas,
            torch.tensor(self.index, device=self.device).repeat_interleave(GROUP),
            kernel=kernel,
            generators=member_generators(0, 0, self.index, GROUP),
            group_size=GROUP,
            micro_batch=micro_batch,
        )

    def _ode(self) -> Tensor:
        return self._roll(Kernel(name="ode")).final

    def _loose(self, fp32: float, low: float) -> float:
        return fp32 if self.dtype == torch.float32 else low

    def ratio(self) -> tuple[float, float]:
        """Largest |ratio - 1| that the objective sees."""
        metrics = self._trained(update_batch=5, rollout_batch=7)
        return _largest(abs(metrics["ratio/max"] - 1), abs(metrics["ratio/mean"] - 1)), 1e-6

    def rounding(self) -> tuple[float, float]:
        """Rollout and update in other micro-batches: how far their log-probabilities are apart."""
        sizes = ((100, 100), (5, 100), (100, 5))
        apart = [self._trained(update_batch=u, rollout_batch=r)["ratio/rounding"] for r, u in sizes]
        return _largest(*apart), self._loose(2e-4, 0.5)

    def _trained(self, **settings) -> dict:
        """Metrics of an iteration; NaN where nothing could be trained."""
        metrics = self._loop(**settings).iterate(0, self.prompts, self.index).metrics
        if metrics["updates"] == 0:
            metrics |= {"ratio/max": math.nan, "ratio/rounding": math.nan}
        return metrics

    def _loop(self, **settings) -> StepwiseGRPO:
        def score(images: Tensor, prompts, metadata) -> Scores:
            redness = (images[:, 0] - images[:, 1:].mean(1)).flatten(1).mean(1).cpu()
            return Scores(redness, {"redness": redness})

        parameters = self.policy.trainable_parameters()
        return StepwiseGRPO(
            self.policy,
            score,
            torch.optim.SGD(parameters, lr=0.0),
            sigmas=self.sigmas,
            latent_shape=self.shape,
            config=GRPOConfig(group_size=GROUP, **settings),
            device=self.device,
        )

    def eta_zero(self) -> tuple[float, float]:
        return _apart(self._roll(Kernel(name="ddim", eta=0.0)).final, self._ode()), 1e-5

    def telescope(self) -> tuple[float, float]:
        done = self._loop().iterate(0, self.prompts, self.index)
        whole = done.rewards[..., -1] - done.rewards[..., 0]
        return _apart(done.credit.gains.sum(-1), whole), 1e-5

    def log_prob(self) -> tuple[float, float]:
        trajectory, apart = self._roll(Kernel()), []
        for k in range(STEPS - 1):
            x, v = trajectory.latents[:, k], trajectory.velocities[:, k]
            step = Kernel().transition(x, v, trajectory.sigmas[k], trajectory.sigmas[k + 1])
            normal = torch.distributions.Normal(step.mean.double(), step.std.double(), validate_args=False)
            exact = normal.log_prob(trajectory.latents[:, k + 1].double()).flatten(1).mean(1)
            apart.append(_apart(trajectory.log_probs[:, k], exact.float().cpu()))
        return _largest(*apart), 1e-5

    def adapter_off(self) -> tuple[float, float]:
        with self.policy.adapter_off():
            return _apart(self._ode(), self.base), 0.0

    def adapter_on(self) -> tuple[float, float]:
        """The opposite: the LoRA must change something, or the check above says nothing."""
        return 1e-3 / max(_apart(self._ode(), self.base), 1e-30), 1.0

    def round_trip(self) -> tuple[float, float]:
        expected = self._ode()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "lora.safetensors"
            save_lora(lora_state(self.family), path, {"format": "pt"})
            other = load_family(self.model, self.dtype, self.device, "denoiser")
            other.pipeline.load_lora_weights(folder, weight_name=path.name)
        mine, self.policy.family = self.policy.family, other
        try:
            return _apart(self._ode(), expected), self._loose(1e-4, 5e-2)
        finally:
            self.policy.family = mine

    def micro_batch(self) -> tuple[float, float]:
        return _apart(self._roll(Kernel(), 5).final, self._roll(Kernel()).final), self._loose(1e-4, 5e-2)


def _largest(*values: float) -> float:
    """The largest value; NaN where one is NaN, which max() would miss."""
    return float(torch.tensor(values).max())


def _apart(a: Tensor, b: Tensor) -> float:
    """Largest absolute difference."""
    return float((a.cpu().double() - b.cpu().double()).abs().max())


CHECKS: tuple[tuple[str, Callable[[Checks], tuple[float, float]]], ...] = (
    ("ratio is 1 before the first update: largest |ratio - 1|", Checks.ratio),
    ("rollout and update agree in log-probability: largest difference", Checks.rounding),
    ("ddim with eta 0 is the ODE: largest difference of latents", Checks.eta_zero),
    ("gains add up to the whole rise of the reward: largest difference", Checks.telescope),
    ("log-probability as torch.distributions': largest difference", Checks.log_prob),
    ("the LoRA changes the image: 0.001 over the largest difference", Checks.adapter_on),
    ("LoRA off is the base model: largest difference of latents", Checks.adapter_off),
    ("LoRA file through diffusers' loader: largest difference of latents", Checks.round_trip),
    ("rollout in micro-batches: largest difference of latents", Checks.micro_batch),
)


def main(arguments: list[str]) -> int:
    """Print one line a check; returns 0 where all are green, else 1."""
    args = parser().parse_args(arguments)
    quiet()
    checks = Checks(args)
    colour = sys.stdout.isatty()
    failed = 0
    for title, check in CHECKS:
        value, bound = check(checks)
        good = value <= bound
        failed += not good
        word = "green" if good else "RED  "
        if colour:
            word = f"\033[{32 if good else 31}m{word}\033[0m"
        print(f"{word}  {title} {value:.1e} (at most {bound:.0e})")
    print(f"{len(CHECKS) - failed} green, {failed} red: {self_name(checks)}")
    return 1 if failed else 0


def self_name(checks: Checks) -> str:
    """What was tested, in words."""
    name = EMBEDDED if checks.model == str(MODEL_DIR) else Path(checks.model).name
    return f"{name}, {checks.dtype}, {checks.device}"
