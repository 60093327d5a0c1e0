"""Exact sums of several LoRAs of one model family, whatever dialects they are in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..export import fold
from .convert import check_finite, check_sure, describe, loadable
from .file import LoRAFile, common_dtype
from .names import Family
from .understand import Pair, Read, understand


def merge(
    files: Sequence[LoRAFile], weights: Sequence[float], *, rank: int | None = None, dtype: torch.dtype | None = None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(state dict, metadata) of the sum of weight * B A over files of one family, in whatever dialects.

    Exact, by stacking the factors, so that ranks add up; with `rank`, the nearest sum of at most that rank in each
    layer. dtype: the first file's without one. Raises ValueError for files of different families or other widths, or of
    a model that is in doubt.
    """
    return merge_read([understand(file) for file in files], weights, rank=rank, dtype=dtype)


def merge_read(
    reads: Sequence[Read], weights: Sequence[float], *, rank: int | None = None, dtype: torch.dtype | None = None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """`merge` of files that were read."""
    if len(reads) != len(weights) or not reads:
        raise ValueError("a merge needs at least one file, and a weight for each")
    for read in reads:
        check_sure(read)
    family = _common_family(reads)
    parts: dict[str, list[Pair]] = {}
    for read, weight in zip(reads, weights, strict=True):
        for name, (a, b) in loadable(read).items():
            others = parts.setdefault(name, [])
            if others and (others[0][0].shape[1] != a.shape[1] or others[0][1].shape[0] != b.shape[0]):
                sizes = [(len(b), a.shape[1]), (len(others[0][1]), others[0][0].shape[1])]
                raise ValueError(
                    f"LoRA file {read.file.name} is for a model of another width: {name} has {sizes[0]} (outputs, "
                    f"inputs) there and {sizes[1]} in the files before; merge LoRAs of one model"
                )
            others.append((a, b * weight))
    summed = {n: (torch.cat([a for a, _ in p]), torch.cat([b for _, b in p], 1)) for n, p in parts.items()}
    if rank is not None:
        summed = {name: cut_rank(a, b, rank) for name, (a, b) in summed.items()}
    state = fold(summed, 1.0, dtype or common_dtype(reads[0].file))
    check_finite(state, reads[0].file.name)
    return state, describe(LoRAFile("", {}), state, family, "LoRA merge")


def _common_family(reads: Sequence[Read]) -> Family:
    """The family that all files fit. Raises ValueError where there is none."""
    for family in [reads[0].family, *reads[0].also]:
        if all(family in (read.family, *read.also) for read in reads):
            return family
    other = next(r for r in reads if r.family is not reads[0].family)
    raise ValueError(
        f"LoRA files of different models cannot be merged: {reads[0].file.name} is of {reads[0].family.title}, "
        f"{other.file.name} of {other.family.title}"
    )


def cut_rank(a: Tensor, b: Tensor, rank: int) -> Pair:
    """The B A of at most `rank` that is nearest to b @ a (singular values; Eckart and Young)."""
    if rank < 1:
        raise ValueError(f"rank must be 1 or more, got {rank}")
    if rank >= len(a):
        return a, b
    q_b, r_b = torch.linalg.qr(b.double())
    q_a, r_a = torch.linalg.qr(a.double().T)
    u, s, v = torch.linalg.svd(r_b @ r_a.T)
    root = s[:rank].sqrt()
    return (root[:, None] * v[:rank] @ q_a.T).float(), (q_b @ u[:, :rank] * root).float()
