"""Runs in several processes, started as users start them: the LoRA of one process, and what is said when one ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

ROUNDING = {"lora_A": 1e-6, "lora_B": 2e-3}
"""Most difference of two runs whose sums are taken in another order, relative to the factors' norm.

Another batch size in one process, which is rounding alone, makes 5e-8 and 3e-4; two and four processes 1e-7 and 5e-4.
B starts at 0, so that all of it is steps along gradients, whose sums over steps, rows and pixels cancel for the most
part; A is nearly what it was drawn as.
"""

# A large eps: Adam divides by the size of a gradient, and so makes large steps of those that are rounding alone.
SETTINGS = ["--optimizer.eps", "1.0", "--optimizer.lr", "0.05", "--grpo.updates", "2", "--iterations", "2"]
REWARD = ["--rewards", "{brightness = -1.0}"]  # a smooth one: a JPEG's size jumps by whole bytes


def launch(processes: int, folder: Path, *arguments: str) -> subprocess.Popen:
    """`accelerate launch` of the command line; --multi_gpu is what makes it start several, on CPUs too."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", str(processes)]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    return subprocess.Popen(
        [*command, "-m", "sfgrpo_trainer.cli", *arguments],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def one(tmp_path_factory, write_run, cli) -> Path:
    """A folder with a run file, and a run of it in one process."""
    folder = tmp_path_factory.mktemp("one")
    write_run(folder)
    process = cli("train", "run.toml", "--out", "one", *SETTINGS, *REWARD, cwd=folder)
    assert process.returncode == 0, process.stderr
    return folder


def norm(tensors: Iterable[Tensor]) -> float:
    return float(sum(t.double().square().sum() for t in tensors)) ** 0.5


# Six rows in two groups of three: two processes take a group each, four cut both groups.
@pytest.mark.parametrize("processes", [pytest.param(2, marks=pytest.mark.slow), pytest.param(4)])
def test_the_lora_of_one_process(processes, one):
    process = launch(processes, one, "train", "run.toml", "--out", f"of {processes}", *SETTINGS, *REWARD)
    said = process.communicate(timeout=300)[0]
    assert process.returncode == 0, said
    got, expected = (load_file(one / name / "last.safetensors") for name in (f"of {processes}", "one"))
    assert got.keys() == expected.keys()
    for part, bound in ROUNDING.items():
        names = [k for k in expected if part in k]
        assert names and norm(got[k] - expected[k] for k in names) < bound * norm(expected[k] for k in names), part
    assert max(float(v.abs().max()) for k, v in expected.items() if "lora_B" in k) > 1e-3
    # Only one process writes and speaks.
    for file in ("metrics.jsonl", "evals.jsonl"):
        assert len((one / f"of {processes}" / file).read_text().splitlines()) == 2
    assert said.count("report   ") == 1


def test_a_mistake_is_told_once(one):
    process = launch(2, one, "train", "run.toml", "--out", "wrong", "--model.path", "no/such/folder/here")
    said = process.communicate(timeout=300)[0]
    assert process.returncode != 0 and said.count("sfgrpo: error") == 1, said


def test_one_process_that_is_killed_ends_all(one):
    process = launch(
        2, one, "train", "run.toml", "--out", "killed", "--iterations", "500", "--save-every", "1", *REWARD
    )
    try:
        metrics, end = one / "killed" / "metrics.jsonl", time.monotonic() + 120
        while not (metrics.exists() and len(metrics.read_text().splitlines()) > 1):
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.1)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        ranks = {}
        for child in children:
            variables = dict(
                v.split("=", 1) for v in Path(f"/proc/{child}/environ").read_text().split("\0") if "=" in v
            )
            ranks[variables.get("RANK")] = int(child)
        os.kill(ranks["1"], signal.SIGKILL)
        said = process.communicate(timeout=120)[0]
    finally:
        process.kill()
    assert process.returncode != 0
    assert "another process of this run has ended" in said or "SIGKILL" in said, said[-3000:]
    assert load_file(one / "killed" / "last.safetensors")


def test_sigterm_to_the_launcher_ends_all_and_saves(one):
    process = launch(
        2, one, "train", "run.toml", "--out", "stopped", "--iterations", "500", "--eval.every", "500", *REWARD
    )
    try:
        metrics, end = one / "stopped" / "metrics.jsonl", time.monotonic() + 120
        while not (metrics.exists() and len(metrics.read_text().splitlines()) > 1):
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.1)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=60)[0]
    finally:
        process.kill()
    assert process.returncode == 143 and not any(Path(f"/proc/{child}").exists() for child in children)
    assert said.count("sfgrpo: stopped by SIGTERM") == said.count("stopped; the LoRA so far is in") == 1, said[-3000:]
    assert load_file(one / "stopped" / "last.safetensors") and (one / "stopped" / "report.html").exists()
