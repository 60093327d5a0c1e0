"""Fixtures of the tests of nodes: a running ComfyUI."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.comfyui import Server, start, stop


@pytest.fixture(scope="session")
def server(tmp_path_factory) -> Iterator[Server]:
    """One ComfyUI for all tests of the session, with the test-only nodes of `custom_nodes/`."""
    probes = {file.name: file for file in sorted((Path(__file__).parent / "custom_nodes").glob("*.py"))}
    server = start(tmp_path_factory.mktemp("comfyui"), nodes=probes)
    yield server
    stop(server)


@pytest.fixture(scope="session")
def start_server() -> Callable[..., Server]:
    """`start(base, nodes=..., arguments=...)`, for tests that need a ComfyUI of their own."""
    return start
