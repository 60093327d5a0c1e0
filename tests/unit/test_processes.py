"""Several processes: real ones, by gloo, against one."""

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sfgrpo.processes import Processes, Segment, segments

ROOT = Path(__file__).parents[2]

SIZES = [(1, 2, 1, 1), (1, 3, 32, 1), (2, 2, 3, 2), (2, 3, 2, 1), (3, 3, 5, 3), (3, 4, 32, 2), (4, 5, 7, 1)]
"""Prompts of an iteration, members of a group, micro-batch, updates; a process may have no row at all."""

CASES = [
    {
        "prompts": prompts,
        "group_size": size,
        "update_batch": batch,
        "rollout_batch": batch,
        "decode_batch": 3,
        "updates": updates,
    }
    for prompts, size, batch, updates in SIZES
]
CASES += [
    {"prompts": 3, "group_size": 3, "credit": "uniform"},
    {"prompts": 3, "group_size": 3, "credit": "gain_ema", "kl_weight": 0.04, "substeps": 3},
    {"prompts": 2, "group_size": 5, "score_ahead": 4, "mix": "each", "rollout_batch": 5},
]


def start(size: int, cases: list[dict], folder: Path) -> list[list[dict]]:
    """What each process returns."""
    (folder / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, str(Path(__file__).with_name("processes_run.py")), str(ROOT)]
    rest = [str(size), str(folder / "rendezvous"), str(folder / "cases.json"), str(folder / "out")]
    running = [
        subprocess.Popen([*command, str(rank), *rest], stderr=subprocess.PIPE, text=True) for rank in range(size)
    ]
    errors = [process.communicate(timeout=300)[1] for process in running]
    assert [process.returncode for process in running] == [0] * size, errors
    return [torch.load(folder / f"out.{rank}", weights_only=False) for rank in range(size)]


def compare(got, expected, where):
    """Equal numbers to 1e-5, in whatever they lie."""
    if isinstance(expected, dict):
        assert list(got) == list(expected), where
        for name in expected:
            compare(got[name], expected[name], f"{where}.{name}")
    elif isinstance(expected, torch.Tensor):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5, equal_nan=True, msg=lambda m: f"{where}: {m}")
    elif isinstance(expected, list) and expected and isinstance(expected[0], float):
        compare(torch.tensor(got), torch.tensor(expected), where)
    elif isinstance(expected, float):
        assert got == pytest.approx(expected, abs=1e-5, nan_ok=True), where
    else:
        assert got == expected, where


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return start(1, CASES, tmp_path_factory.mktemp("alone"))[0]


@pytest.mark.parametrize("size", (2, 3))
def test_as_one_process(size, alone, tmp_path):
    """Parameters, rewards, metrics and evaluations, for groups that the processes divide and that they do not."""
    ranks = start(size, CASES, tmp_path)
    for rank, results in enumerate(ranks):
        for case, got, expected in zip(CASES, results, alone, strict=True):
            compare(got, expected, f"process {rank} of {size}, {case}")
        # Not only near each other: no process drifts away from the others.
        for got, first in zip(results, ranks[0], strict=True):
            assert torch.equal(got["parameters"], first["parameters"])


def test_rows_are_shared_evenly_and_once():
    for rows, size in itertools.product(range(1, 20), range(1, 6)):
        shares = [Processes(rank, size).share(rows) for rank in range(size)]
        assert [r for s in shares for r in range(s.start, s.stop)] == list(range(rows))
        assert max(s.stop - s.start for s in shares) <= math.ceil(rows / size)


def test_segments_cover_their_rows_in_order():
    for size, start_, length, at_once in itertools.product((2, 3, 5), range(7), range(12), (None, 1, 2)):
        found = segments(slice(start_, start_ + length), size, at_once)
        covered = [
            g * size + m
            for s in found
            for g in range(s.groups.start, s.groups.stop)
            for m in range(s.members.start, s.members.stop)
        ]
        assert covered == list(range(start_, start_ + length))
        assert all(s.members == slice(0, size) or s.groups.stop - s.groups.start == 1 for s in found)
        assert at_once is None or all(s.groups.stop - s.groups.start <= at_once for s in found)


def test_segments_by_hand():
    assert segments(slice(2, 11), 4) == [
        Segment(slice(0, 1), slice(2, 4)),
        Segment(slice(1, 2), slice(0, 4)),
        Segment(slice(2, 3), slice(0, 3)),
    ]
    assert segments(slice(5, 7), 4) == [Segment(slice(1, 2), slice(1, 3))]
