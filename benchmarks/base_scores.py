"""Strict pass rate of the embedded model by category, at 10 ODE steps and several guidances.

    python -m benchmarks.base_scores [--images 4] [--zero-tokens 256]

All 532 captions of the domain, `--images` images each; "overall" is the mean of the six categories, as in GenEval.
"""

from __future__ import annotations

import argparse
from statistics import mean

import torch

from sfgrpo.evaluate import evaluate
from sfgrpo.prompts import Prompt
from sfgrpo.rewards import mix
from sfgrpo.shapes import MODEL_DIR
from sfgrpo.shapes.captions import CATEGORIES, all_captions
from trainer.families import load_family
from trainer.policy import LoRAPolicy, encode_prompts
from trainer.prepare import quiet


def scores(guidance: float, images: int, zero_tokens: int = 0) -> dict[str, float]:
    """Pass rate of each category and `overall`; zero_tokens as in the model's `max_sequence_length`."""
    family = load_family(str(MODEL_DIR), torch.float32, torch.device("cpu"), max_sequence_length=zero_tokens)
    prompts = [Prompt(c.text, metadata={"tag": c.category}) for c in all_captions()]
    everyone = set(range(len(prompts)))
    policy = LoRAPolicy(
        family, encode_prompts(family, prompts, everyone, guidance > 1), guidance=guidance, dtype=torch.float32
    )
    height, width = family.native_size
    result = evaluate(
        policy,
        prompts,
        sorted(everyone),
        mix({"shapes_strict": 1.0}),
        sigmas=family.sigmas(10, height, width),
        latent_shape=family.latent_shape(height, width),
        images_per_prompt=images,
        grid=1,
        batch=128,
        device=torch.device("cpu"),
    )
    by_category = {c: result.scores[f"shapes_strict/{c}"] for c in CATEGORIES}
    return {"overall": mean(by_category.values()), **by_category}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=4)
    parser.add_argument("--zero-tokens", type=int, default=0, help="tokens of the silent T5; diffusers' default is 256")
    args = parser.parse_args()
    quiet()
    print("| guidance | overall | " + " | ".join(c.replace("_", " ") for c in CATEGORIES) + " |")
    print("|---" * (len(CATEGORIES) + 2) + "|")
    for guidance in (1.0, 2.0):
        values = scores(guidance, args.images, args.zero_tokens)
        print(f"| {guidance:g} | " + " | ".join(f"{v:.2f}" for v in values.values()) + " |", flush=True)


if __name__ == "__main__":
    main()
