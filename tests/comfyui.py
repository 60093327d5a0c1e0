"""A real ComfyUI server: its own process, on the CPU, in a temporary base directory, with this pack linked in.

Needs a ComfyUI checkout at $COMFYUI_PATH or ~/comfy/ComfyUI; tests that ask for one are skipped where there is none.
What the pack must not need (diffusers, peft, accelerate) is made unimportable in the server.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FORBIDDEN = ("diffusers", "peft", "accelerate")
PACK = "ComfyUI-Stepwise-Flow-GRPO"
TEXT_EVENT = 3
"""Kind of a websocket message with the text of a node, after the length of the node's id and the id."""
START_SECONDS = 300
RUN_SECONDS = 600


def comfyui() -> Path:
    """The checkout, or a skip."""
    path = Path(os.environ.get("COMFYUI_PATH", "~/comfy/ComfyUI")).expanduser()
    if not (path / "comfy" / "sd.py").is_file():
        pytest.skip("no ComfyUI checkout at $COMFYUI_PATH or ~/comfy/ComfyUI")
    return path


@dataclass
class Outcome:
    """What one prompt did."""

    status: str
    """success, error or interrupted."""
    outputs: dict
    """Node id -> what its UI was given."""
    error: str
    """Message of the exception, or of the refusal; empty without one."""
    messages: list = field(default_factory=list)


def run_alone(coroutine: Coroutine) -> Any:
    """`asyncio.run` in a thread of its own: the browser's driver keeps an event loop running in that of the tests."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(asyncio.run, coroutine).result()


class Server:
    """A running ComfyUI."""

    def __init__(self, base: Path, process: subprocess.Popen, port: int, log: Path) -> None:
        self.base, self.process, self.port, self.log_file = base, process, port, log

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def output(self) -> Path:
        """ComfyUI's output folder."""
        return self.base / "output"

    @property
    def input(self) -> Path:
        """ComfyUI's input folder."""
        return self.base / "input"

    def log(self) -> str:
        """All that ComfyUI printed."""
        return self.log_file.read_text(errors="replace")

    def get(self, path: str) -> dict:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=60) as answer:
            return json.loads(answer.read() or "null")

    def post(self, path: str, body: dict) -> dict:
        request = urllib.request.Request(
            f"{self.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            data = answer.read()
        return json.loads(data) if data else {}

    def queue(self, prompt: dict, client: str = "") -> str:
        """Queue an API-format prompt; returns its id. Raises ValueError with ComfyUI's words where it is refused."""
        try:
            return self.post("/prompt", {"prompt": prompt, "client_id": client or uuid.uuid4().hex})["prompt_id"]
        except urllib.error.HTTPError as refusal:
            raise ValueError(refusal.read().decode()) from None

    def interrupt(self) -> None:
        """Press Cancel."""
        self.post("/interrupt", {})

    def wait(self, prompt_id: str, timeout: float = RUN_SECONDS) -> Outcome:
        """Wait for a queued prompt to end."""
        end = time.time() + timeout
        while time.time() < end:
            entry = self.get(f"/history/{prompt_id}").get(prompt_id)
            if entry is not None:
                messages = entry["status"]["messages"]
                kinds = {kind: data for kind, data in messages}
                status = "success"
                if "execution_interrupted" in kinds:
                    status = "interrupted"
                elif "execution_error" in kinds:
                    status = "error"
                error = kinds.get("execution_error", {}).get("exception_message", "").strip()
                return Outcome(status, entry["outputs"], error, messages)
            if self.process.poll() is not None:
                raise RuntimeError(f"ComfyUI ended with {self.process.returncode}:\n{self.log()[-3000:]}")
            time.sleep(0.02)
        raise TimeoutError(f"the prompt did not end in {timeout} s:\n{self.log()[-3000:]}")

    def run(self, prompt: dict, timeout: float = RUN_SECONDS) -> Outcome:
        """Queue a prompt and wait for its end; a refusal comes back as status `error`."""
        try:
            prompt_id = self.queue(prompt)
        except ValueError as refusal:
            return Outcome("error", {}, str(refusal))
        return self.wait(prompt_id, timeout)

    def watch(self, prompt: dict, on_text: Callable[[str], None], timeout: float = RUN_SECONDS) -> Outcome:
        """Queue a prompt, and hand on_text each text that nodes show while they run, as it comes; waits for the end.

        Raises ValueError where the prompt is refused.
        """
        return run_alone(asyncio.wait_for(self._watch(prompt, on_text), timeout))

    async def _watch(self, prompt: dict, on_text: Callable[[str], None]) -> Outcome:
        import aiohttp

        client = uuid.uuid4().hex
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"{self.url}/ws?clientId={client}", max_msg_size=0) as socket,
        ):
            # The server greets; no text is missed from here on.
            await socket.receive()
            prompt_id = self.queue(prompt, client)
            async for message in socket:
                if message.type == aiohttp.WSMsgType.BINARY:
                    kind, length = struct.unpack(">II", message.data[:8])
                    if kind == TEXT_EVENT:
                        on_text(message.data[8 + length :].decode())
                    continue
                event = json.loads(message.data)
                if event["type"] == "executing" and event["data"]["node"] is None:
                    break
        return self.wait(prompt_id)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(base: Path, *, nodes: dict[str, Path] | None = None, arguments: tuple[str, ...] = ()) -> Server:
    """Start ComfyUI in `base`, with the pack and other `nodes` (name -> file or folder) linked into custom_nodes."""
    checkout = comfyui()
    for folder in ("custom_nodes", "input", "output", "temp", "user", "models/loras", "models/diffusion_models"):
        (base / folder).mkdir(parents=True, exist_ok=True)
    for name, target in {PACK: ROOT, **(nodes or {})}.items():
        (base / "custom_nodes" / name).symlink_to(target)
    blocked = base / "blocked"
    for name in FORBIDDEN:
        (blocked / name).mkdir(parents=True, exist_ok=True)
        (blocked / name / "__init__.py").write_text(f"raise ImportError('ComfyUI users have no {name}')\n")
    port, log = free_port(), base / "log.txt"
    environment = os.environ | {"PYTHONPATH": str(blocked), "HF_HUB_OFFLINE": "1"}
    with log.open("w") as handle:
        process = subprocess.Popen(
            [
                *(sys.executable, "main.py", "--cpu", "--port", str(port), "--base-directory", str(base)),
                *("--disable-api-nodes", "--database-url", "sqlite:///:memory:", *arguments),
            ],
            cwd=checkout,
            env=environment,
            stdout=handle,
            stderr=subprocess.STDOUT,
        )
    server = Server(base, process, port, log)
    end = time.time() + START_SECONDS
    while time.time() < end:
        if process.poll() is not None:
            raise RuntimeError(f"ComfyUI did not start:\n{server.log()[-3000:]}")
        try:
            server.get("/system_stats")
            return server
        except OSError:
            time.sleep(0.1)
    stop(server)
    raise TimeoutError(f"ComfyUI did not answer in {START_SECONDS} s:\n{server.log()[-3000:]}")


def stop(server: Server) -> None:
    # Not by Ctrl-C: where the tests run in the background of a shell, SIGINT is ignored, and a child inherits that.
    server.process.terminate()
    try:
        server.process.wait(20)
    except subprocess.TimeoutExpired:
        server.process.kill()
        server.process.wait()
