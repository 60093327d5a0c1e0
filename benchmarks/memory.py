"""Device memory that the run files in configs/ need, by calculation on the published configs; no weights, no device.

    python -m benchmarks.memory [--quantize none int8 nf4]

A row for each run file and quantisation of its base weights: GB in each phase, and the smallest usual card that holds
the largest of them with 2 GB to spare.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.published_models import write
from trainer.config import load_config
from trainer.memory import BITS, estimate

CONFIGS = Path(__file__).parents[1] / "configs"
CARDS = (8, 12, 16, 24, 32, 48, 80, 141)
SPARE = 2.0
PICKSCORE = 3.9e9
"""Bytes of its weights in float32; on the device while images are scored, or all the time."""


def reward_phases(rewards: dict) -> tuple[str, ...]:
    """The phases in which PickScore lies on the device."""
    if "pickscore" not in rewards:
        return ()
    rests = isinstance(rewards["pickscore"], dict) and rewards["pickscore"].get("offload")
    return ("score",) if rests else ("sample", "estimate", "score", "update")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quantize", nargs="*", choices=list(BITS), help="default: what the run file says")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    names = ("run file", "base weights", "encode", "sample", "estimate", "score", "update", "card, GB")
    print("| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|")
    with tempfile.TemporaryDirectory() as folder:
        for file in sorted(CONFIGS.glob("*.toml")):
            config = load_config(file)
            model = replace(config.model, path=str(write(config.model.path, Path(folder))))
            for quantize in args.quantize or [model.quantize]:
                memory = estimate(replace(config, model=replace(model, quantize=quantize)))
                for name in reward_phases(config.rewards):
                    memory.phases[name] += PICKSCORE
                phases = " | ".join(f"{size / 1e9:.1f}" for size in memory.phases.values())
                card = next((c for c in CARDS if memory.peak / 1e9 + SPARE <= c), "more")
                print(f"| {file.stem} | {quantize} | {phases} | {card} |", flush=True)


if __name__ == "__main__":
    main()
