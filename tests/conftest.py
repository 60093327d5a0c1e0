"""Shared fixtures: a small random SD3 model on disk, run files, the command line, one finished run, a ComfyUI."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sfgrpo.shapes import MODEL_DIR
from tests.comfyui import Server, start, stop
from tests.small_models import sd3

PROMPTS = ("a circle", "two red circles", "a blue square", "a circle and a square")


@dataclass
class Model:
    """A model folder, and what it is run with."""

    path: Path
    max_sequence_length: int
    size: int = 32


@pytest.fixture(scope="session")
def embedded() -> Model:
    """The model that comes with the project, without T5, as run files use it."""
    return Model(MODEL_DIR, 0)


@pytest.fixture(scope="session")
def random_sd3(tmp_path_factory) -> Model:
    """SD3.5's layout in small, with random weights: two CLIPs of different widths, a T5, one dual-attention block."""
    path = tmp_path_factory.mktemp("random_sd3")
    sd3.build(path)
    return Model(path, sd3.LENGTH)


@pytest.fixture(scope="session", params=["embedded", "random_sd3"])
def model(request) -> Model:
    """Each of the two models in turn."""
    return request.getfixturevalue(request.param)


Cli = Callable[..., subprocess.CompletedProcess]


@pytest.fixture(scope="session")
def cli() -> Cli:
    """`cli(*arguments, cwd=...)`: the command line as a process of its own, output captured."""

    def run(*arguments: object, cwd: Path) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-m", "sfgrpo_trainer.cli", *map(str, arguments)],
            cwd=cwd,
            env=os.environ | {"COLUMNS": "100"},
            capture_output=True,
            text=True,
            timeout=900,
        )

    return run


RUN_FILE = """
seed = 2                    # with it the evaluations are better than at the start, and the first of them is best
iterations = 2
save_every = 2

[model]
path = "shapes"
dtype = "fp32"
device = "cpu"
max_sequence_length = 0

[prompts]
file = "prompts.jsonl"
per_iteration = 2

[rewards]
jpeg_size = -1.0
shapes = 0.5

[sampling]
height = 32
width = 32
steps = 4

[grpo]
group_size = 3

[lora]
rank = 4
alpha = 12.0

[optimizer]
lr = 1e-3

[eval]
every = 2
grid = 4
"""


@pytest.fixture(scope="session")
def write_run() -> Callable[[Path], Path]:
    """`write_run(folder)`: a small run file and its four prompts; returns the run file.

    The JPEG size stands in it because its gains differ whatever the model can draw.
    """

    def write(folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        lines = [f'{{"prompt": "{prompt}", "tag": "tag{i % 2}"}}' for i, prompt in enumerate(PROMPTS)]
        (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
        (folder / "run.toml").write_text(RUN_FILE)
        return folder / "run.toml"

    return write


@dataclass
class Finished:
    """A run that the command line made."""

    file: Path
    """Its run file."""
    out: Path
    process: subprocess.CompletedProcess


@pytest.fixture(scope="session")
def finished(tmp_path_factory, write_run, cli) -> Finished:
    """Three iterations with two evaluations after the first, through the command line."""
    folder = tmp_path_factory.mktemp("finished")
    file = write_run(folder)
    process = cli("train", "run.toml", "--out", "a & b", "--iterations", 3, cwd=folder)
    assert process.returncode == 0, process.stderr
    return Finished(file, folder / "a & b", process)


@pytest.fixture(scope="session")
def server(tmp_path_factory) -> Iterator[Server]:
    """One ComfyUI for all tests of the session, with the test-only nodes of `comfy/custom_nodes/`."""
    probes = {file.name: file for file in sorted((Path(__file__).parent / "comfy" / "custom_nodes").glob("*.py"))}
    server = start(tmp_path_factory.mktemp("comfyui"), nodes=probes)
    yield server
    stop(server)


def pytest_terminal_summary(terminalreporter):
    """Say how many of the tests that need a ComfyUI checkout ran."""
    stats = terminalreporter.stats
    ran, skipped = (
        sum(
            any(word in getattr(report, "nodeid", "") for word in ("comfy", "tests/browser"))
            for key in keys
            for report in stats.get(key, [])
        )
        for keys in (("passed", "failed"), ("skipped",))
    )
    terminalreporter.write_line(f"tests that need a ComfyUI checkout: {ran} ran, {skipped} skipped")
