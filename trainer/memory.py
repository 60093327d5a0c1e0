"""How much device memory a run needs, by calculation: its model is built without weights and run on shapes alone.

Activations are what autograd would keep for the backward pass of one micro-batch (activations.py). What cannot be known
here (allocator, CUDA's own context, workspaces) is left out: leave about 2 GB. Models of rewards are left out too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .activations import META, saved_bytes
from .config import RunConfig
from .families import Family, family_class, read_json
from .policy import attach_lora, lora_layers
from .prepare import load_options

BITS = {"none": None, "int8": 8.0, "nf4": 4.127}
"""Bits of a quantised weight; nf4 with its constants in double quantisation."""
LORA_BYTES = 4 * 5
"""Of one LoRA parameter: itself, gradient, AdamW's two moments and the moving average, in float32."""


@dataclass
class Component:
    """One model of the pipeline."""

    name: str
    kind: str
    """Its class."""
    parameters: int
    bytes: float


@dataclass
class Memory:
    """Bytes of device memory."""

    encoders: list[Component]
    denoiser: list[Component]
    """Transformers and VAE."""
    lora_layers: int
    lora_parameters: int
    phases: dict[str, float] = field(default_factory=dict)
    """Phase -> bytes: encode, sample, estimate, score, update."""

    @property
    def peak(self) -> float:
        return max(self.phases.values())


def bytes_of(module: nn.Module, dtype: torch.dtype, quantize: str) -> float:
    """Of a model's weights, with those of its linear layers quantised."""
    bits, size = BITS[quantize], torch.empty((), dtype=dtype).element_size()
    linear = sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear)) if bits else 0
    all_of_it = sum(t.numel() for t in (*module.parameters(), *module.buffers()))
    return linear * (bits or 0) / 8 + (all_of_it - linear) * size


def components_of(path: str) -> dict[str, tuple[str, str]]:
    """Component -> (library, class) of a pipeline."""
    index = read_json(path, "model_index.json")
    return {k: tuple(v) for k, v in index.items() if isinstance(v, list) and len(v) == 2 and None not in v}


def build(path: str, name: str, library: str, kind: str) -> Any:
    """A component of the pipeline by its config, without weights; None for what has none (tokenizers)."""
    import diffusers
    import transformers

    if library == "diffusers" and kind.endswith("Scheduler"):
        return getattr(diffusers, kind).from_config(read_json(path, f"{name}/scheduler_config.json"))
    with META:
        if library == "diffusers":
            cls = getattr(diffusers, kind)
            return cls.from_config({k: v for k, v in read_json(path, f"{name}/config.json").items()})
        if name.startswith("text_encoder"):
            cls = getattr(transformers, kind)
            return cls(cls.config_class.from_dict(read_json(path, f"{name}/config.json")))
    return None


def without_weights(config: RunConfig, encoders: bool = True) -> tuple[Family, dict[str, nn.Module]]:
    """The family of a run and its text encoders, on the meta device; of the model only configs are read."""
    path = config.model_path
    cls = family_class(path)
    # What has no weights cannot rest on the CPU.
    options = replace(load_options(config, META), offload_vae=False)
    left_out = {*cls.unused(options), *(() if encoders else cls.ENCODERS)}
    built = {name: build(path, name, *of) for name, of in components_of(path).items() if name not in left_out}
    index = read_json(path, "model_index.json")
    settings = SimpleNamespace(**{k: v for k, v in index.items() if not isinstance(v, list)})
    parts = {name: built.pop(name) for name in list(built) if not name.startswith(("text_encoder", "tokenizer"))}
    pipeline = SimpleNamespace(config=settings, **parts)
    family = cls(pipeline, options)
    for name, module in parts.items():
        if isinstance(module, nn.Module):
            module.to(dtype_of(family, name)).requires_grad_(False)
            keep_float32(module)
    return family, {k: v for k, v in built.items() if isinstance(v, nn.Module)}


class _Largest(TorchDispatchMode):
    """The largest tensor that is computed."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, Tensor):
                self.bytes = max(self.bytes, value.numel() * value.element_size())
        return out


def keep_float32(module: nn.Module) -> None:
    """What diffusers keeps in float32 when it loads the model in another dtype."""
    kept = set(getattr(module, "_keep_in_fp32_modules", None) or ())
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if kept & set(name.split(".")):
            tensor.data = tensor.data.float()


def dtype_of(family: Family, name: str) -> torch.dtype:
    """Of a component's weights."""
    return family.VAE_DTYPE or family.dtype if name == "vae" else family.dtype


def estimate(config: RunConfig) -> Memory:
    """Device memory of a run, without that of its rewards.

    Raises UserError as loading would for a folder that lacks its configs.
    """
    return measure(config, *without_weights(config))


def measure(config: RunConfig, family: Family, encoders: dict[str, nn.Module]) -> Memory:
    """`estimate` of a model that is built; puts a LoRA on it."""
    model, grpo, s = config.model, config.grpo, config.sampling
    shape = family.latent_shape(s.height, s.width, s.frames)
    kinds = components_of(config.model_path)

    def component(name: str, module: nn.Module, quantize: str) -> Component:
        count = sum(p.numel() for p in module.parameters())
        return Component(name, kinds[name][1], count, bytes_of(module, dtype_of(family, name), quantize))

    texts = [component(n, m, model.quantize) for n, m in encoders.items()]
    parts = vars(family.pipeline)
    denoiser = [
        component(n, m, model.quantize if n.startswith("transformer") else "none")
        for n, m in parts.items()
        if isinstance(m, nn.Module)
    ]
    attach_factors(family, config)
    layers = lora_layers(family)
    count = sum(p.numel() for p in family.transformer.parameters() if p.requires_grad)

    guided = s.guidance > 1
    rows = grpo.update_batch * (2 if guided else 1)
    cond = family.example_cond(rows)
    plain = saved_bytes(family, grpo.update_batch, guided, shape, cond)
    blocks = block_count(family.transformer)
    if model.gradient_checkpointing:
        family.transformer.enable_gradient_checkpointing()
        family.transformer.train()
        # Of one block all is kept while it is computed again.
        activations = saved_bytes(family, grpo.update_batch, guided, shape, cond) + plain / blocks
    else:
        activations = float(plain)
    per_row = plain / blocks / grpo.update_batch
    largest = _Largest()
    with largest, torch.no_grad():
        family.decode(torch.empty(grpo.decode_batch, *shape, device=META))
    weights = sum(c.bytes for c in denoiser)
    vae = next(c.bytes for c in denoiser if c.name == "vae")
    resting = weights - (vae if model.offload_vae else 0) + count * LORA_BYTES
    memory = Memory(texts, denoiser, len(layers), count)
    # Latents and velocities of all steps stay on the device in float32, and are there twice while they are stacked.
    latents = 4 * math.prod(shape) * config.prompts.per_iteration * grpo.group_size
    trajectory, states = (2 * s.steps + 1) * latents, (s.steps + 1) * latents
    memory.phases = {
        "encode": sum(c.bytes for c in texts),
        "sample": resting + 2 * trajectory + per_row * max(grpo.rollout_batch, config.eval.batch),
        "estimate": resting + trajectory + 2 * states + per_row * grpo.estimate_batch,
        # A convolution has its input, its output and as much again for itself.
        "score": weights + count * LORA_BYTES + trajectory + states + 3 * largest.bytes,
        "update": resting + trajectory + states + activations,
    }
    return memory


def attach_factors(family: Family, config: RunConfig) -> None:
    """The LoRA of a run on the transformer, its factors float32 as they are in training."""
    attach_lora(family, config.lora)
    for parameter in family.transformer.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def block_count(transformer: nn.Module) -> int:
    """Transformer blocks: the entries of its lists of modules."""
    return max(1, sum(len(m) for m in transformer.children() if isinstance(m, nn.ModuleList)))
