"""What scoring beside sampling (`grpo.score_ahead`) saves: seconds of rollout and scoring, one by one and overlapped.

    python -m benchmarks.score_ahead [--repeats 3] [--threads 1]

The embedded model on the CPU, and two kinds of reward: one of another machine, which leaves this one idle (a wait a
picture), and one of this machine (JPEG sizes, many times over), each as long as a share of the sampling. Sampling has
one thread of the CPU, as it has a device of its own where this is meant to be used; with as many as there are cores,
scores on the same CPU take them away from it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace

import torch

from sfgrpo.config import GRPOConfig
from sfgrpo.loop import StepwiseGRPO
from sfgrpo.prompts import Prompt
from sfgrpo.rewards import Term, combine
from sfgrpo.rewards.jpeg import jpeg_size_reward
from sfgrpo.shapes import MODEL_DIR
from trainer.config import LoRAConfig
from trainer.families import load_family
from trainer.policy import LoRAPolicy, add_lora, encode_prompts
from trainer.prepare import quiet

PROMPTS = [Prompt(text) for text in ("a circle", "two red circles", "a blue square", "a circle and a square")]
CONFIG = GRPOConfig(group_size=8, rollout_batch=8, decode_batch=8)


def waits(seconds: float):
    """A reward that waits so long for each picture, as for another machine."""

    def reward(images, prompts, metadata):
        time.sleep(seconds * len(images))
        return images.mean((1, 2, 3))

    return reward


def works(seconds: float):
    """A reward that computes on this machine for about so long for each picture."""

    def reward(images, prompts, metadata):
        end = time.perf_counter() + seconds * len(images)
        while True:
            scores = jpeg_size_reward(images, prompts)
            if time.perf_counter() > end:
                return scores

    return reward


def seconds(policy: LoRAPolicy, reward, ahead: int) -> tuple[float, float]:
    """Seconds of sampling and scoring together, and of sampling alone, in one iteration."""
    family = policy.family
    loop = StepwiseGRPO(
        policy,
        combine([Term("reward", reward)]),
        torch.optim.SGD(policy.trainable_parameters(), lr=0.0),
        sigmas=family.sigmas(10, 32, 32),
        latent_shape=family.latent_shape(32, 32),
        config=replace(CONFIG, score_ahead=ahead),
    )
    metrics = loop.iterate(0, PROMPTS, range(len(PROMPTS))).metrics
    sampled = metrics["seconds/sample"] + metrics["seconds/estimate"]
    return sampled + metrics["seconds/score"], sampled


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of the CPU, for sampling")
    args = parser.parse_args()
    repeats = args.repeats
    torch.set_num_threads(args.threads)
    quiet()
    family = load_family(str(MODEL_DIR), torch.float32, torch.device("cpu"), max_sequence_length=0)
    conditioning = encode_prompts(family, PROMPTS, set(range(len(PROMPTS))), False)
    policy = LoRAPolicy(family, conditioning, guidance=1.0, dtype=torch.float32)
    add_lora(family, LoRAConfig(rank=4), 0)
    images = len(PROMPTS) * (CONFIG.group_size * 10 + 1)
    seconds(policy, waits(0.0), 0)
    alone = statistics.median(seconds(policy, waits(0.0), 0)[1] for _ in range(repeats))
    print("| reward | its time, of sampling's | one by one | overlapped | saved |\n|---|---|---|---|---|")
    for name, kind in (("of another machine", waits), ("of this machine", works)):
        for share in (0.25, 1.0, 2.0):
            reward = kind(share * alone / images)
            taken = [[seconds(policy, reward, ahead)[0] for ahead in (0, images)] for _ in range(repeats)]
            one, both = map(statistics.median, zip(*taken, strict=True))
            print(f"| {name} | {share:g} | {one / alone:.2f} | {both / alone:.2f} | {1 - both / one:.0%} |")


if __name__ == "__main__":
    main()
