"""Random numbers that depend only on (seed, iteration, prompt, member) and on what they are for.

Each trajectory has a generator of its own, so that it is the same whatever the batch size, the chunking, the order
of prompts or the number of processes. Noise is drawn on the CPU and moved, so that it is the same on every device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def generator_for(*key: int | str) -> torch.Generator:
    """A CPU generator seeded by a hash of `key`; equal keys give equal streams, others independent ones."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") & (2**63 - 1))


ALL = slice(None)


def initial_noise(
    seed: int,
    iteration: int,
    prompts: Sequence[int],
    group_size: int,
    shape: tuple[int, ...],
    part: slice = ALL,
) -> Tensor:
    """x_1 of G groups of N members, (G * N, *shape) float32: equal within a group, group by group.

    prompts: G prompt indices; a prompt that comes twice is given two different noises. part: only these of the groups.
    """
    keys = _keys(prompts)[part]
    noises = [torch.randn(shape, generator=generator_for(seed, iteration, *key, "x1")) for key in keys]
    return torch.stack(noises).repeat_interleave(group_size, dim=0)


def member_generators(
    seed: int, iteration: int, prompts: Sequence[int], group_size: int, part: slice = ALL, members: slice = ALL
) -> list[torch.Generator]:
    """One generator a trajectory, G * N of them in the order of `initial_noise`, for the noise of the steps.

    members: only these of each group.
    """
    keys, chosen = _keys(prompts)[part], range(group_size)[members]
    return [generator_for(seed, iteration, *key, member) for key in keys for member in chosen]


def _keys(prompts: Sequence[int]) -> list[tuple[int, int]]:
    """(prompt, how often it came before) of each entry."""
    seen: dict[int, int] = {}
    keys = []
    for prompt in prompts:
        keys.append((prompt, seen.get(prompt, 0)))
        seen[prompt] = seen.get(prompt, 0) + 1
    return keys


def draw(generators: Sequence[torch.Generator], shape: tuple[int, ...], device: torch.device | str) -> Tensor:
    """One standard normal sample from each generator, (B, *shape) float32 on `device`."""
    return torch.stack([torch.randn(shape, generator=g) for g in generators]).to(device)
