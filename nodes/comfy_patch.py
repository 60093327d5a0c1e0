"""Everything that changes a ComfyUI model, and how it is undone: the LoRA in flight, checkpointing, autograd.

A model's weights are never written. What is put on it while it trains:

- a forward hook (`hook`) or a weight function (`weight`) on each layer that carries a LoRA, as a ComfyUI injection of
  a clone of the patcher, so that ComfyUI takes it off and puts it back when it moves the model;
- another `forward` on the transformer blocks, which recomputes them in the backward pass;
- another `forward` on layers whose weight is cast in each pass (offloaded, fp8, quantised), which does the same for
  one layer: the cast copy is not kept for the backward pass, and a buffer that is used again cannot spoil it.

Weights that ComfyUI made in inference mode cannot be saved for a backward pass. `usable_by_autograd` puts a Parameter
over the same memory in their place; that one stays, for it is the same weight.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import comfy.lora
import comfy.model_base
import comfy.model_management
import torch
import torch.nn.functional as F
from comfy.patcher_extension import PatcherInjection
from torch import Tensor, nn

from ..sfgrpo.lora import choose_targets, init_factors

KEY = "stepwise_grpo"
ADAPTERS = ("hook", "weight")
ONLY_FLUX_1 = re.compile(
    r"time_text_embed|\.ff(_context)?\.net\.|single_transformer_blocks\.\d+\.(proj_|attn\.to_[qkv]$)"
)
ONLY_FLUX_2 = re.compile(r"\.linear_(in|out)$|single_transformer_blocks\.\d+\.attn\.to_(qkv_mlp_proj|out)$")
"""Names of layers that one of FLUX.1 and FLUX.2 has in diffusers. ComfyUI's table has both for either model."""


@dataclass
class Layer:
    """One LoRA layer: a whole linear layer of the model, or some of its rows (to_q of a fused qkv)."""

    name: str
    """As in the LoRA file, without suffix."""
    a: Tensor
    """(rank, in) float32, trained."""
    b: Tensor
    """(rows, rank) float32, trained."""
    start: int
    """First of the rows."""
    reorder: Callable[[Tensor], Tensor] | None
    """ComfyUI's change of the order of rows between the two layouts, if any."""

    def rows(self) -> Tensor:
        """B in the model's order of rows."""
        return self.b if self.reorder is None else self.reorder(self.b)


@dataclass
class LoRA:
    """The LoRA on a model."""

    layers: dict[str, list[Layer]]
    """Name of a module of the model -> what stands on it."""
    scale: float
    """alpha / rank."""
    enabled: bool = True
    adapter: str = "hook"
    """One of ADAPTERS."""
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def parameters(self) -> list[Tensor]:
        return [p for layers in self.layers.values() for layer in layers for p in (layer.a, layer.b)]

    def factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Name in the LoRA file -> (A, B)."""
        return {layer.name: (layer.a, layer.b) for layers in self.layers.values() for layer in layers}

    @contextmanager
    def off(self) -> Iterator[None]:
        """The base model inside the block."""
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = True

    def injection(self) -> PatcherInjection:
        return PatcherInjection(inject=self._inject, eject=self._eject)

    def _inject(self, patcher) -> None:
        self._eject(patcher)
        for name, layers in self.layers.items():
            module = patcher.model.get_submodule(name)
            if self.adapter == "hook":
                handle = module.register_forward_hook(self._hook(layers))
                self._undo.append(handle.remove)
            else:
                before, function = module.weight_function, self._weight_function(layers)
                module.weight_function = [*before, function]
                self._undo.append(lambda m=module, f=function: _remove(m, f))

    def _eject(self, patcher) -> None:
        while self._undo:
            self._undo.pop()()

    def _hook(self, layers: list[Layer]):
        def hook(module: nn.Module, inputs: tuple, output: Tensor) -> Tensor | None:
            if not self.enabled:
                return None
            x = inputs[0]
            parts = [
                (layer.start, F.linear(F.linear(x, layer.a.to(x.dtype)), layer.rows().to(x.dtype)) * self.scale)
                for layer in layers
            ]
            return output + _place(parts, output.shape[-1], -1).to(output.dtype)

        return hook

    def _weight_function(self, layers: list[Layer]):
        def function(weight: Tensor) -> Tensor:
            if not self.enabled:
                return weight
            parts = [(layer.start, layer.rows() @ layer.a * self.scale) for layer in layers]
            return weight + _place(parts, weight.shape[0], 0).to(weight.dtype)

        function.trains = True
        return function


def _remove(module: nn.Module, function: Callable) -> None:
    """Take a weight function off, wherever ComfyUI has put others meanwhile."""
    module.weight_function = [f for f in module.weight_function if f is not function]


def _place(parts: list[tuple[int, Tensor]], size: int, dim: int) -> Tensor:
    """Put parts, each with its first row, into a tensor of `size` rows along dim; zeros where there is none."""
    pieces, at = [], 0
    for start, part in sorted(parts, key=lambda p: p[0]):
        if start > at:
            pieces.append(part.new_zeros(_resized(part.shape, dim, start - at)))
        pieces.append(part)
        at = start + part.shape[dim]
    if at < size:
        pieces.append(parts[0][1].new_zeros(_resized(parts[0][1].shape, dim, size - at)))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def _resized(shape: torch.Size, dim: int, size: int) -> list[int]:
    shape = list(shape)
    shape[dim] = size
    return shape


def make_lora(patcher, choice: str, rank: int, alpha: float, seed: int, adapter: str, device: torch.device) -> LoRA:
    """A fresh LoRA for the model of a patcher.

    choice: one of sfgrpo.lora.TARGETS. Raises ValueError for a model without layers of that kind.
    """
    modules, found = dict(patcher.model.named_modules()), lora_places(patcher)
    layers: dict[str, list[Layer]] = {}
    for name in choose_targets(found, choice):
        module, start, rows, reorder = found[name]
        fresh = init_factors(name, rank, modules[module].in_features, rows, seed)
        with torch.inference_mode(False):
            a, b = (t.clone().to(device).requires_grad_() for t in (fresh.a, fresh.b))
        layers.setdefault(module, []).append(Layer(name, a, b, start, reorder))
    return LoRA(layers, alpha / rank, adapter=adapter)


def lora_places(patcher) -> dict[str, tuple[str, int, int, Callable | None]]:
    """Every linear layer that a LoRA file can name -> (module, first row, rows, reorder).

    Layers bear the names of ComfyUI's own table of LoRA keys, so that the file loads in stock ComfyUI: diffusers' names
    where the table has them, the model's own otherwise.
    """
    modules = dict(patcher.model.named_modules())
    table = comfy.lora.model_lora_keys_unet(patcher.model, {})
    if isinstance(patcher.model, comfy.model_base.Flux):
        other = ONLY_FLUX_1 if isinstance(patcher.model, getattr(comfy.model_base, "Flux2", ())) else ONLY_FLUX_2
        table = {name: target for name, target in table.items() if not other.search(name)}
    found: dict[str, tuple[str, int, int, Callable | None]] = {}
    for prefix in ("transformer.", "diffusion_model."):
        for name, target in table.items():
            if name.startswith(prefix):
                place = _place_of(target, modules)
                if place is not None:
                    found[name] = place
        if found:
            break
    return found


def _place_of(target, modules: dict[str, nn.Module]) -> tuple[str, int, int, Callable | None] | None:
    """(module, first row, rows, reorder) of an entry of ComfyUI's table; None where it is no linear layer."""
    key, offset, reorder = target, None, None
    if isinstance(target, tuple):
        key, offset = target[0], target[1]
        reorder = target[2] if len(target) > 2 else None
    if not key.endswith(".weight"):
        return None
    name = key.removesuffix(".weight")
    module = modules.get(name)
    if not hasattr(module, "in_features") or not hasattr(module, "weight_function"):
        return None
    start, rows = 0, module.out_features
    if offset is not None:
        dim, start, rows = offset
        if dim != 0:
            return None
    return name, start, rows, reorder


def usable_by_autograd(model: nn.Module) -> None:
    """Put ordinary parameters and buffers, over the same memory, in the place of those made in inference mode."""
    for module in model.modules():
        for name, tensor in list(module._parameters.items()):
            if _plain_inference(tensor):
                module._parameters[name] = nn.Parameter(_alias(tensor), requires_grad=False)
        for name, tensor in list(module._buffers.items()):
            if _plain_inference(tensor):
                module._buffers[name] = _alias(tensor)


def _plain_inference(tensor: Tensor | None) -> bool:
    """Whether it is such a tensor. Quantised ones, a subclass, are left: a pass saves what it makes of them."""
    return tensor is not None and type(tensor) in (Tensor, nn.Parameter) and tensor.is_inference()


def _alias(tensor: Tensor) -> Tensor:
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


class _Recomputed(torch.autograd.Function):
    """A layer with one tensor in and one out that is run again in the backward pass and saves nothing but its input."""

    @staticmethod
    def forward(ctx, x: Tensor, module: nn.Module, forward: Callable) -> Tensor:
        ctx.save_for_backward(x)
        ctx.module, ctx.forward = module, forward
        with torch.no_grad():
            return forward(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        (x,) = ctx.saved_tensors
        with torch.enable_grad(), _unquantised(ctx.module):
            again = x.detach().requires_grad_()
            ctx.forward(again).backward(gradient)
        return again.grad, None, None


@contextmanager
def _unquantised(module: nn.Module) -> Iterator[None]:
    """Inside the block ComfyUI multiplies with the plain numbers of a quantised weight, as for a layer with a LoRA.

    Some of its formats have no product for a backward pass. The gradient is that of the plain numbers, which passes
    the rounding of the layer's input by.
    """
    if type(module.weight) in (Tensor, nn.Parameter):
        yield
        return
    own, before = "weight_function" in module.__dict__, module.weight_function
    module.weight_function = [*before, lambda weight: weight]
    try:
        yield
    finally:
        if own:
            module.weight_function = before
        else:
            del module.weight_function


@contextmanager
def recomputed_in_backward(model: nn.Module, blocks: bool) -> Iterator[None]:
    """Inside the block: layers that cast their weight, and with `blocks` the transformer blocks, save no weights.

    The forward hooks of a layer stand outside what is run again, for it is the layer's `forward` that is replaced.
    """
    undo: list[tuple[nn.Module, Callable, Callable | None]] = []

    def replace(module: nn.Module, forward: Callable) -> None:
        undo.append((module, forward, module.__dict__.get("forward")))
        module.forward = forward

    try:
        for module in model.modules():
            if hasattr(module, "weight_function"):
                replace(module, _casting_forward(module, module.forward))
            elif blocks and isinstance(module, nn.ModuleList):
                for block in module:
                    replace(block, _checkpointed_forward(block.forward))
        yield
    finally:
        for module, ours, before in reversed(undo):
            # ComfyUI's bypass LoRA replaces `forward` too, and may have put its own there meanwhile.
            if module.__dict__.get("forward") is not ours:
                continue
            if before is None:
                del module.forward
            else:
                module.forward = before


def _trains(module: nn.Module) -> bool:
    """Whether a LoRA stands in the weight, which needs a gradient of its own."""
    return any(getattr(function, "trains", False) for function in module.weight_function)


def _casting_forward(module: nn.Module, forward: Callable) -> Callable:
    def run(x: Tensor, *args, **kwargs) -> Tensor:
        weight = getattr(module, "weight", None)
        casts = weight is not None and (
            type(weight) not in (Tensor, nn.Parameter) or weight.dtype != x.dtype or weight.device != x.device
        )
        # A LoRA in the weight needs its own gradient, which a pass inside the function would not give.
        if casts and x.requires_grad and torch.is_grad_enabled() and not _trains(module) and not args and not kwargs:
            return _Recomputed.apply(x, module, forward)
        return forward(x, *args, **kwargs)

    return run


def _checkpointed_forward(forward: Callable) -> Callable:
    def run(*args, **kwargs):
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return torch.utils.checkpoint.checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


@contextmanager
def training_mode() -> Iterator[None]:
    """Outside inference mode, with ComfyUI told that a model trains (several then avoid in-place mathematics)."""
    management = comfy.model_management
    before = getattr(management, "in_training", False)
    with torch.inference_mode(False), torch.enable_grad():
        management.in_training = True
        try:
            yield
        finally:
            management.in_training = before
