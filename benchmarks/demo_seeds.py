"""The demo with several training seeds: strict pass rate on held-out prompts by category, before and after.

    python -m benchmarks.demo_seeds --out runs/seeds                                # the README's table
    python -m benchmarks.demo_seeds --out runs/uniform --grpo.credit uniform        # any setting of the demo changed

Evaluation noise is the same for every seed; only the training differs. "noise" is twice the standard error of the
difference of two pass rates over as many images.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from trainer.config import load_config
from trainer.errors import UserError, out_folder
from trainer.run import Result, train

DEMO = Path(__file__).parents[1] / "trainer" / "runs" / "demo.toml"
SCORE = "shapes_strict"


def noise(before: float, after: float, count: int) -> float:
    """Twice the standard error of the difference of two proportions over `count` images each."""
    return 2 * ((before * (1 - before) + after * (1 - after)) / count) ** 0.5


def table(results: list[Result]) -> str:
    """Markdown: one row a category, one column a seed."""
    tags = [n for n in results[0].start.scores if n.startswith(f"{SCORE}/")]
    lines = [
        "| held-out prompts | images | before | "
        + " | ".join(f"seed {i}" for i in range(len(results)))
        + " | mean change | noise |",
        "|---" * (len(results) + 5) + "|",
    ]
    for name in [SCORE, *tags]:
        before, count = results[0].start.scores[name], results[0].start.counts[name]
        after = [r.end.scores[name] for r in results]
        mean = statistics.mean(after)
        label = "all" if name == SCORE else name.removeprefix(f"{SCORE}/").replace("_", " ")
        cells = " | ".join(f"{a:.3f}" for a in after)
        lines.append(
            f"| {label} | {count} | {before:.3f} | {cells} | {mean - before:+.3f} | {noise(before, mean, count):.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the seeds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=out_folder, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=3)
    try:
        args, overrides = parser.parse_known_args()
    except UserError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    results = []
    for seed in range(args.seeds):
        results.append(train(load_config(DEMO, [*overrides, "--seed", str(seed)]), args.out / f"seed{seed}"))
        print(table(results), flush=True)
    seconds = [r.seconds for r in results]
    print(f"\nseconds a run: {', '.join(f'{s:.0f}' for s in seconds)}")


if __name__ == "__main__":
    main()
