"""Stepwise GRPO Train LoRA, cancelled at random moments again and again in one real ComfyUI; then a ComfyUI is killed.

    python -m benchmarks.comfy_cancel_soak [--runs 100] [--seed 0]

Runs in the checkout at $COMFYUI_PATH or ~/comfy/ComfyUI, on the CPU, with the embedded model. After each Cancel the
weights of the MODEL and a picture by stock nodes are compared with those from before. Prints the memory of the server
(resident set) as it goes on, and exits with 1 where anything differs. At the end a server is killed (SIGKILL) while it
trains; a new one loads the LoRA that it left and draws with it.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.comfy.training import Graph, Result
from tests.comfyui import Server, comfyui, start, stop

PROBES = Path(__file__).parents[1] / "tests" / "comfy" / "custom_nodes" / "training_probe.py"
TRAINING = {
    "iterations": 3,
    "prompts_per_iteration": 1,
    "substeps": 3,
    "rollout_batch": 2,
    "update_batch": 2,
    "decode_batch": 2,
    "gradient_checkpointing": True,
    "eval_prompts": 1,
}
"""Three rounds of many short calls, so that a Cancel falls into every phase."""

TELLING = ("object", "hash", "left", "requires_grad", "injections", "patches", "in_training")


def main() -> None:
    """Print the table; exit with 1 where a comparison fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        comfyui()
    except pytest.skip.Exception as absent:
        raise SystemExit(str(absent)) from None
    with tempfile.TemporaryDirectory() as folder:
        wrong = soak(Path(folder) / "soak", args.runs, random.Random(args.seed))
        wrong += killed(Path(folder) / "killed")
    if wrong:
        raise SystemExit("\n".join(wrong))


def soak(base: Path, runs: int, draw: random.Random) -> list[str]:
    """Cancel `runs` trainings at moments spread over the length of one; returns what was wrong, a line each."""
    server = start(base, nodes={PROBES.name: PROBES})
    try:
        before = state(server)
        training(server, "whole").run()
        began = time.monotonic()
        training(server, "whole again").run()
        length = time.monotonic() - began
        process, wrong, phases = psutil.Process(server.process.pid), [], {}
        curve = [(0, process.memory_info().rss / 2**20)]
        for n in range(1, runs + 1):
            texts: list[str] = []
            status = cancelled(server, training(server, f"run {n}").nodes, length * draw.random(), texts)
            phase = phase_of(texts) if status == "interrupted" else status
            phases[phase] = phases.get(phase, 0) + 1
            if status not in ("interrupted", "success"):
                wrong.append(f"run {n}: ended in {status}")
            after = state(server)
            wrong += [f"run {n}: {name} differs" for name in before if not same(before[name], after[name])]
            curve.append((n, process.memory_info().rss / 2**20))
        print(f"{runs} trainings of {length:.1f} s, cancelled at random moments: in which phase the Cancel came\n")
        print("| phase | runs |\n|---|---|")
        print("\n".join(f"| {phase} | {count} |" for phase, count in sorted(phases.items(), key=lambda p: -p[1])))
        print("\n| after run | memory of the server, MiB |\n|---|---|")
        print("\n".join(f"| {n} | {mib:.0f} |" for n, mib in curve if n % max(runs // 10, 1) == 0))
        print(f"\nweights, stock picture, state of the MODEL: {'as before after each run' if not wrong else 'DIFFER'}")
        return wrong
    finally:
        stop(server)


def training(server: Server, name: str) -> Graph:
    graph = Graph(server)
    graph.train(**TRAINING, name=name)
    return graph


def state(server: Server) -> dict:
    """What must be the same after each Cancel."""
    graph = Graph(server)
    graph.draw("picture", graph.look())
    result: Result = graph.run()
    look = result.look()
    return {"picture": result.latent("picture"), **{name: look[name] for name in TELLING}}


def same(a: object, b: object) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def cancelled(server: Server, nodes: dict, seconds: float, texts: list[str]) -> str:
    """Run a prompt and press Cancel after so many seconds; returns how it ended. `texts` gets what the node showed."""
    timer = threading.Timer(seconds, server.interrupt)
    timer.start()
    try:
        return server.watch(nodes, texts.append).status
    finally:
        timer.cancel()
        timer.join()


def phase_of(texts: list[str]) -> str:
    """In which phase a training was when it was stopped, by what it showed before."""
    shown = [text for text in texts if not text.startswith("stopped")]
    if not shown:
        return "before the first text"
    return re.match(r"(?:iteration \d+ of \d+: )?([a-z]+)", shown[-1])[1]


def killed(base: Path) -> list[str]:
    """Kill a server that trains, start another one, and draw with the LoRA on disk."""
    server = start(base, nodes={PROBES.name: PROBES})
    try:
        graph = Graph(server)
        graph.train(**TRAINING | {"iterations": 1000}, name="killed")
        server.queue(graph.nodes)
        file = server.output / "loras" / "killed_00001_last.safetensors"
        while not file.is_file():
            time.sleep(0.05)
        time.sleep(random.random())
    finally:
        server.process.kill()
        server.process.wait()
    parts = list((base / "output").rglob("*.part"))
    again = base.with_name("restarted")
    loras = again / "models" / "loras"
    loras.mkdir(parents=True)
    shutil.copy(file, loras / "killed.safetensors")
    server = start(again, nodes={PROBES.name: PROBES})
    try:
        graph = Graph(server)
        graph.draw("plain")
        on = {"lora_name": "killed.safetensors", "strength_model": 1.0}
        graph.draw("picture", graph.add("lora", "LoraLoaderModelOnly", model=graph.model, **on))
        result = graph.run()
        wrong = [f"after SIGKILL: {line}" for line in server.log().splitlines() if "lora key not loaded" in line]
        if torch.equal(result.latent("plain"), result.latent("picture")):
            wrong.append("after SIGKILL: the LoRA changes nothing")
        loads = "DOES NOT LOAD" if wrong else "loads"
        print(f"\nkilled in training, started again: the LoRA {loads}; unfinished files left: {len(parts)}")
        return wrong
    finally:
        stop(server)


if __name__ == "__main__":
    main()
