"""Seconds of one iteration by phase, and ratios of things measured in this one run.

    python -m benchmarks.speed [--rounds 5]

On the embedded model with the demo's settings. The parts are interleaved round by round, and medians are compared, so
that a machine whose speed drifts does not favour one of them. Ratios:

    gain / uniform          an iteration with gain credit (T' = 1 and 5) over one with uniform credit
    rollout / forwards      the rollout over as many bare transformer forwards of the same batch
    update / bare           the update over as many bare forward + backward passes of the same batch
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch

from trainer.config import load_config
from trainer.prepare import prepare, quiet
from trainer.run import Run

DEMO = Path(__file__).parents[1] / "trainer" / "runs" / "demo.toml"


def measure(rounds: int) -> dict[str, list[float]]:
    """Seconds of each part, one entry a round."""
    quiet()
    config = load_config(DEMO)
    seconds: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(prepare(config, Path(folder)))
    index = list(range(config.prompts.per_iteration))
    grpo = config.grpo
    variants = {
        "uniform": replace(grpo, credit="uniform"),
        "gain, T'=1": grpo,
        "gain, T'=5": replace(grpo, substeps=5),
    }
    for number in range(rounds + 1):
        for name, variant in variants.items():
            run.loop.config = variant
            start = time.perf_counter()
            done = run.loop.iterate(number, run.prompts, index)
            total = time.perf_counter() - start
            if number:  # the first round warms up
                seconds[name].append(total)
                for key, value in done.metrics.items():
                    if key.startswith("seconds/"):
                        seconds[f"{name}: {key[8:]}"].append(value)
            if name == "gain, T'=1" and number:
                bare_forward, bare_update = bare(run, done)
                seconds["rollout / forwards"].append(done.metrics["seconds/sample"] / bare_forward)
                seconds["update / bare"].append(done.metrics["seconds/update"] / bare_update)
    return seconds


def bare(run: Run, done) -> tuple[float, float]:
    """Seconds of the transformer alone: as many forwards, and forward + backward passes, as the iteration made."""
    transformer, trajectory = run.family.transformer, done.trajectory
    grpo, size = run.config.grpo, run.config.grpo.group_size
    cond = torch.zeros(len(trajectory.latents), dtype=torch.int64)
    x, c = trajectory.latents[:, 0], run.policy.conditioning
    tensors = c.encoded.rows(c.positive[cond], run.device, run.policy.dtype)

    def forward(rows: int) -> torch.Tensor:
        t = torch.full((rows,), 500.0, device=x.device)
        part = {k: v[:rows] for k, v in tensors.items()}
        return transformer(hidden_states=x[:rows], timestep=t, return_dict=False, **part)[0]

    # A group is one point until the first noise: those states take one forward a group.
    batches = [len(x) // size if k < trajectory.shared_states else len(x) for k in range(trajectory.steps)]
    start = time.perf_counter()
    with torch.no_grad():
        for rows in batches:
            forward(rows)
    forwards = time.perf_counter() - start
    entries = int(
        (
            done.credit.valid & done.credit.alive.view(-1, 1, 1) & (done.credit.advantages != 0) & (trajectory.stds > 0)
        ).sum()
    )
    start = time.perf_counter()
    for first in range(0, entries, grpo.update_batch):
        forward(min(grpo.update_batch, entries - first)).square().mean().backward()
    updates = time.perf_counter() - start
    run.optimizer.zero_grad()
    return forwards, updates


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    seconds = measure(parser.parse_args().rounds)
    median = {k: statistics.median(v) for k, v in seconds.items()}
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}; medians\n")
    print("| seconds an iteration | sample | estimate | score | update | all |\n|---|---|---|---|---|---|")
    for name in ("uniform", "gain, T'=1", "gain, T'=5"):
        cells = [f"{median[f'{name}: {phase}']:.2f}" for phase in ("sample", "estimate", "score", "update")]
        print(f"| {name} | {' | '.join(cells)} | {median[name]:.2f} |")
    print("\n| ratio | |\n|---|---|")
    for name in ("gain, T'=1", "gain, T'=5"):
        ratios = [a / b for a, b in zip(seconds[name], seconds["uniform"], strict=True)]
        print(f"| {name} / uniform | {statistics.median(ratios):.2f} |")
    for name in ("rollout / forwards", "update / bare"):
        print(f"| {name} | {median[name]:.2f} |")


if __name__ == "__main__":
    main()
