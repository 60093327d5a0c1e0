"""The template `train_shapes_demo` in a real ComfyUI with several seeds: reward of its samples as it trains, seconds.

    python -m benchmarks.training_template [--seeds 3]

Runs workflows/api/train_shapes_demo.json in the checkout at $COMFYUI_PATH or ~/comfy/ComfyUI, on the CPU and without a
browser. The prompts of the samples are those of the training, their seeds are not.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import pytest

from tests.comfyui import comfyui, start, stop

WORKFLOW = Path(__file__).parents[1] / "workflows" / "api" / "train_shapes_demo.json"
NODE = "SFGRPO_TrainLoRA"
METRICS = 4
"""Output of the node."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    try:
        comfyui()
    except pytest.skip.Exception as absent:
        raise SystemExit(str(absent)) from None
    with tempfile.TemporaryDirectory() as base:
        server = start(Path(base))
        try:
            for seed in range(args.seeds):
                prompt = json.loads(WORKFLOW.read_text(encoding="utf-8"))
                (train,) = (name for name, node in prompt.items() if node["class_type"] == NODE)
                prompt[train]["inputs"]["seed"] = seed
                prompt["metrics"] = {"class_type": "PreviewAny", "inputs": {"source": [train, METRICS]}}
                started = time.monotonic()
                outcome = server.run(prompt)
                seconds = time.monotonic() - started
                if outcome.status != "success":
                    raise SystemExit(f"the workflow ended in {outcome.status}: {outcome.error}")
                samples = json.loads(outcome.outputs["metrics"]["text"][0])["samples"]
                if seed == 0:
                    print("| seed | " + " | ".join(f"iteration {s['iteration']}" for s in samples) + " | seconds |")
                    print("|---" * (len(samples) + 2) + "|")
                scores = " | ".join(f"{s['scores']['total']:.3f}" for s in samples)
                print(f"| {seed} | {scores} | {seconds:.0f} |", flush=True)
        finally:
            stop(server)


if __name__ == "__main__":
    main()
