"""A diffusers transformer with a peft LoRA as the core's `Policy`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig as PeftLoraConfig
from peft.tuners.lora import LoraLayer
from torch import Tensor

from sfgrpo.export import fold
from sfgrpo.lora import init_factors
from sfgrpo.lora_files.convert import doubts, factors_named
from sfgrpo.lora_files.file import read_lora as read_file
from sfgrpo.prompts import Prompt

from .config import LoRAConfig
from .errors import UserError
from .families import Encoded, Family

ADAPTER = "default"


@dataclass
class Conditioning:
    """Encoded prompts: texts are encoded once each, prompts point at them."""

    encoded: Encoded
    positive: Tensor
    """(P,) int64: row of each prompt."""
    negative: Tensor
    """(P,) int64: row of each prompt's negative prompt."""


def encode_prompts(family: Family, prompts: Sequence[Prompt], needed: set[int], guided: bool) -> Conditioning:
    """Encode the prompts whose index is in `needed`, each different text once; negatives only where guided."""
    rows: dict[str, int] = {}
    positive, negative = torch.full((len(prompts),), -1), torch.full((len(prompts),), -1)
    for i in sorted(needed):
        positive[i] = rows.setdefault(prompts[i].text, len(rows))
        if guided:
            negative[i] = rows.setdefault(prompts[i].negative, len(rows))
    return Conditioning(family.encode(list(rows)), positive, negative)


class LoRAPolicy:
    """The policy of a run: `velocity` with the LoRA on, `reference_velocity` with it off."""

    def __init__(self, family: Family, conditioning: Conditioning, *, guidance: float, dtype: torch.dtype) -> None:
        """guidance: 1 is off. dtype: of the forward passes; below float32 they run under autocast."""
        self.family, self.conditioning, self.guidance, self.dtype = family, conditioning, guidance, dtype

    def velocity(self, x: Tensor, sigma: Tensor, cond: Tensor) -> Tensor:
        """See sfgrpo.policy.Policy; cond (B,) indexes the prompts."""
        device, c = x.device, self.conditioning
        cond = cond.to(c.positive.device)
        rows = c.positive[cond]
        if self.guidance > 1:
            rows = torch.cat([c.negative[cond], rows])
            x, sigma = torch.cat([x, x]), torch.cat([sigma, sigma])
        tensors = c.encoded.rows(rows, device, self.dtype)
        with torch.autocast(device.type, self.dtype, enabled=self.dtype != torch.float32):
            v = self.family.velocity(x, sigma, tensors)
        if self.guidance > 1:
            negative, positive = v.float().chunk(2)
            v = self.family.guide(negative, positive, self.guidance)
        return v

    def reference_velocity(self, x: Tensor, sigma: Tensor, cond: Tensor) -> Tensor:
        """The velocity with the LoRA switched off."""
        with self.adapter_off():
            return self.velocity(x, sigma, cond)

    @contextmanager
    def adapter_off(self) -> Iterator[None]:
        """The base model inside the block."""
        self.family.transformer.disable_adapters()
        try:
            yield
        finally:
            self.family.transformer.enable_adapters()

    @contextmanager
    def guided(self, guidance: float) -> Iterator[None]:
        """Another guidance inside the block, for evaluation."""
        before, self.guidance = self.guidance, guidance
        try:
            yield
        finally:
            self.guidance = before

    def decode(self, latents: Tensor) -> Tensor:
        """See sfgrpo.policy.Policy."""
        with torch.no_grad():
            return self.family.decode(latents)

    def trainable_parameters(self) -> list[Tensor]:
        """The LoRA's factors."""
        return [p for p in self.family.transformer.parameters() if p.requires_grad]


def lora_layers(family: Family) -> dict[str, LoraLayer]:
    """Module name -> the LoRA layer on it."""
    return {n: m for n, m in family.transformer.named_modules() if isinstance(m, LoraLayer)}


def add_lora(family: Family, config: LoRAConfig, seed: int) -> list[str]:
    """Put a LoRA on the transformer, A drawn from `seed` and B zero, or both from a file to continue from.

    Returns what of that file is not proven, a sentence each.

    The factors are float32 and the only parameters with a gradient. Raises UserError for a file that does not fit.
    """
    attach_lora(family, config)
    for name, layer in lora_layers(family).items():
        a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
        start = init_factors(family.export_name(name), config.rank, a.shape[1], b.shape[0], seed)
        a.data, b.data = start.a.to(a.device), start.b.to(b.device)
    return [] if config.continue_from is None else read_lora(family, config.continue_from)


def attach_lora(family: Family, config: LoRAConfig) -> None:
    """Put peft's layers on the transformer, with whatever in them."""
    targets = family.targets(config.targets)
    with torch.random.fork_rng(devices=[]):  # peft draws factors of its own, on the CPU
        family.transformer.add_adapter(
            PeftLoraConfig(r=config.rank, lora_alpha=config.alpha or config.rank, target_modules=targets)
        )


def scale_of(family: Family) -> float:
    """alpha / rank of the LoRA on the transformer."""
    return next(iter(lora_layers(family).values())).scaling[ADAPTER]


def lora_state(family: Family, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The LoRA as the state dict of a LoRA file, its scale folded in."""
    factors = {
        family.export_name(name): (layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight)
        for name, layer in lora_layers(family).items()
    }
    return fold(factors, scale_of(family), dtype)


def _read(path: Path, wanted: Iterable[str]) -> tuple[dict[str, Tensor], list[str]]:
    """A file of any dialect as canonical tensors, float32, its scale folded in, and what of it is not proven.

    wanted: names of the model's layers.
    """
    try:
        file = read_file(path)
        return fold(factors_named(file, wanted), 1.0, torch.float32), doubts(file)
    except ValueError as error:
        raise UserError(str(error)) from None


def load_lora(family: Family, path: Path) -> list[str]:
    """Load a LoRA file of any dialect onto the transformer, at strength 1.0; returns what of it is not proven.

    path: a file, or a folder of peft's. Raises UserError where it is missing, damaged or does not fit the model.
    """
    state, unproven = _read(path, ())
    _check_widths(family, path, state)
    try:
        family.load_lora_weights(state, ADAPTER)
    except (ValueError, RuntimeError, KeyError) as error:
        words = " ".join(str(error).split())
        raise UserError(f"LoRA file {path} does not fit this model: {words}") from None
    if not lora_layers(family):
        raise UserError(f"LoRA file {path} has no weight for the transformer of this model")
    return unproven


def _check_widths(family: Family, path: Path, state: dict[str, Tensor]) -> None:
    """Raise UserError, naming the layer, where a LoRA's weight change is of another shape than a layer's weight."""
    for module, layer in family.transformer.named_modules():
        name = family.export_name(module)
        a, b = (state.get(f"{name}.lora_{factor}.weight") for factor in "AB")
        if a is None or b is None or not hasattr(layer, "in_features"):
            continue
        given, needed = (len(b), a.shape[1]), (layer.out_features, layer.in_features)
        if given != needed:
            raise UserError(
                f"LoRA file {path} is for a model of another width: layer {name} has the shape {given} in the file "
                f"(outputs, inputs) and {needed} in this model; choose a LoRA that was trained on this model, or the "
                "model that this one was trained on"
            )


def read_lora(family: Family, path: Path) -> list[str]:
    """Copy a LoRA file of any dialect onto the adapter; returns what of the file is not proven.

    path: a file, or a folder of peft's. Raises UserError where it is missing, damaged, of another rank or width, or of
    other modules.
    """
    wanted = lora_state(family)
    state, unproven = _read(
        path, {key.removesuffix(".lora_A.weight") for key in wanted if key.endswith(".lora_A.weight")}
    )
    if state.keys() != wanted.keys():
        odd = sorted(state.keys() ^ wanted.keys())[0]
        raise UserError(f"LoRA file {path} is for other modules than lora.targets names (first difference: {odd})")
    _check_widths(family, path, state)
    for name, layer in lora_layers(family).items():
        a = state[f"{family.export_name(name)}.lora_A.weight"]
        b = state[f"{family.export_name(name)}.lora_B.weight"]
        if a.shape != layer.lora_A[ADAPTER].weight.shape or b.shape != layer.lora_B[ADAPTER].weight.shape:
            raise UserError(f"LoRA file {path} has rank {len(a)}; set lora.rank to it")
        layer.lora_A[ADAPTER].weight.data.copy_(a)
        layer.lora_B[ADAPTER].weight.data.copy_(b.float() / scale_of(family))
    return unproven
