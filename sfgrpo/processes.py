"""Several processes that train one LoRA: who holds which trajectories, and what they tell each other.

Each of W processes holds an even, contiguous share of the G * N trajectories of an iteration, so that a group may lie
in two of them. Rewards are gathered, so that every process sees all of them and computes the same credit; gradients
are summed once for each optimizer step. Nothing depends on W but the order of sums.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Processes:
    """This process among `size`; talks by torch.distributed's default group where there are several."""

    rank: int = 0
    size: int = 1

    @classmethod
    def current(cls) -> Processes:
        """Of torch.distributed, where it is initialised; else one process."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls()

    @property
    def is_main(self) -> bool:
        """Whether this is the one that writes files and talks to the user."""
        return self.rank == 0

    def share(self, rows: int) -> slice:
        """The rows of this process."""
        return slice(rows * self.rank // self.size, rows * (self.rank + 1) // self.size)

    def gather(self, value: Any) -> list[Any]:
        """The value of every process, in their order; small things, which are pickled between processes of one run."""
        if self.size == 1:
            return [value]
        out = [None] * self.size
        dist.all_gather_object(out, value)
        return out

    def gather_rows(self, rows: Tensor) -> Tensor:
        """The rows of all processes, in order, on the CPU."""
        return rows.cpu() if self.size == 1 else torch.cat(self.gather(rows.cpu()))

    def any(self, flag: bool) -> bool:
        """Whether the flag is up in any process."""
        return any(self.gather(flag))

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replace each gradient by its sum over the processes, in one message; a missing one counts as 0."""
        if self.size == 1:
            return
        parameters = list(parameters)
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        flat = torch.cat([p.grad.flatten() for p in parameters])
        dist.all_reduce(flat)
        for p, grad in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.grad.copy_(grad.view_as(p))

    def sum(self, values: Tensor) -> Tensor:
        """The sum of a tensor over the processes."""
        if self.size > 1:
            values = values.clone()
            dist.all_reduce(values)
        return values


ALONE = Processes()


@dataclass(frozen=True)
class Segment:
    """Members `members` of each of the groups `groups`: a run of rows in which all groups are cut alike."""

    groups: slice
    members: slice

    @property
    def size(self) -> int:
        """Rows of one group."""
        return self.members.stop - self.members.start


def segments(rows: slice, group_size: int, groups_at_once: int | None = None) -> list[Segment]:
    """Cut rows of G * N trajectories, group by group, into the end of a group, whole groups, and the start of one.

    groups_at_once: most whole groups of one segment; None for all.
    """
    out, start = [], rows.start
    while start < rows.stop:
        group, member = divmod(start, group_size)
        whole = 0 if member else (rows.stop - start) // group_size
        if whole:
            count = min(whole, groups_at_once or whole)
            out.append(Segment(slice(group, group + count), slice(0, group_size)))
            start += count * group_size
        else:
            end = min(group_size, member + rows.stop - start)
            out.append(Segment(slice(group, group + 1), slice(member, end)))
            start += end - member
    return out
