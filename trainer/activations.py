"""What autograd keeps of a forward pass for the backward one, counted on shapes alone.

Attention keeps its inputs and its output (flash attention). Below float32 the pass runs under autocast as
`LoRAPolicy` has it: matrix products and the float32 factors of the LoRA in the lower dtype, norms in float32. The meta
device has no autocast, so that `Autocast` casts what torch's own would cast on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from .families import Family

META = torch.device("meta")
LOWER = frozenset(
    ("linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "baddbmm", "einsum", "conv1d", "conv2d", "conv3d")
)
"""What autocast computes in the lower dtype, whatever the device."""
FLOAT32 = frozenset(
    (
        *("layer_norm", "rms_norm", "group_norm", "norm", "softmax", "log_softmax", "sum", "cumsum"),
        *("pow", "__pow__", "rsqrt", "reciprocal", "exp", "log", "softplus"),
    )
)
"""What it computes in float32 on a GPU; a CPU's autocast does not."""


class Autocast(TorchFunctionMode):
    """torch.autocast for tensors on the meta device: casts what it casts on a GPU, or on a CPU."""

    def __init__(self, dtype: torch.dtype, gpu: bool = True) -> None:
        super().__init__()
        self.dtype, self.float32 = dtype, FLOAT32 if gpu else frozenset()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        dtype = self.dtype if name in LOWER else torch.float32 if name in self.float32 else None
        if dtype is not None:
            args, kwargs = tree_map(lambda x: cast(x, dtype), (args, kwargs))
        return func(*args, **kwargs)


def cast(x: Any, dtype: torch.dtype) -> Any:
    """A floating tensor on the meta device in the dtype; anything else as it is."""
    return x.to(dtype) if isinstance(x, Tensor) and x.is_meta and x.is_floating_point() else x


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value):
        out = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, out)
        return out

    @staticmethod
    def backward(ctx, gradient):
        return gradient, gradient, gradient


@contextmanager
def flash_attention(dtype: torch.dtype) -> Iterator[None]:
    """On the meta device torch takes attention apart, and would keep its whole matrix. dtype: of its inputs."""
    stock = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = lambda query, key, value, *_, **__: _Flash.apply(
        query.to(dtype), key.to(dtype), value.to(dtype)
    )
    try:
        yield
    finally:
        F.scaled_dot_product_attention = stock


def saved_bytes(
    family: Family,
    rows: int,
    guided: bool,
    shape: tuple[int, ...],
    cond: Mapping[str, Tensor],
    device: torch.device = META,
    gpu: bool = True,
) -> int:
    """What autograd keeps of the velocities of `rows` latents; weights and the LoRA's factors left out.

    device: of the family. gpu: whether autocast on the meta device is that of a GPU, or of a CPU.
    """
    seen: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        if not isinstance(x, nn.Parameter):
            storage = x.untyped_storage()
            seen[storage._cdata] = storage.nbytes()
        return x

    if family.dtype == torch.float32:
        autocast = nullcontext()
    else:
        autocast = Autocast(family.dtype, gpu) if device == META else torch.autocast(device.type, family.dtype)
    rows *= 2 if guided else 1
    x, sigma = torch.ones(rows, *shape, device=device), torch.ones(rows, device=device)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
    with flash_attention(family.dtype), hooks, autocast:
        kept = family.velocity(x, sigma, dict(cond))
    del kept
    return sum(seen.values())
