"""Rewards as a type of their own, and nodes that make, mix and apply them.

A SFGRPO_REWARD is a tuple of `sfgrpo.rewards.Term`: the weighted sum that `combine` scores.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial

import torch
from comfy_api.latest import io, ui
from torch import Tensor

from ..sfgrpo.metrics import plain
from ..sfgrpo.rewards import Scores, Term, combine, get_reward, number_names
from ..sfgrpo.rewards.jpeg import jpeg_size_reward
from .compat import make
from .pictures import from_image, show_text

RewardType = io.Custom("SFGRPO_REWARD")
"""The reward type: a tuple of Terms whose names differ."""

MIXED = 4
"""Rewards that one Reward Mix takes; a mix can be mixed again."""

SHOWN = 20
"""Images whose scores are written on the node; all are in the outputs."""


def prompt_lines(text: str) -> list[str]:
    """The prompts of a text, one a line, without empty lines. Raises ValueError where there is none."""
    prompts = [line.strip() for line in text.splitlines() if line.strip()]
    if not prompts:
        raise ValueError("no prompt given; write one a line")
    return prompts


def write_json(data: dict) -> str:
    """A JSON object with a line a key, or a line an item where the value is a list of objects."""

    def value(v) -> str:
        if isinstance(v, list) and v and isinstance(v[0], dict):
            return "[\n  " + ",\n  ".join(json.dumps(item) for item in v) + "\n ]"
        return json.dumps(v)

    return "{\n" + ",\n".join(f" {json.dumps(k)}: {value(v)}" for k, v in data.items()) + "\n}"


def score_text(scores: Scores, prompts: Sequence[str]) -> str:
    """Scores in words: the mean, then a line an image."""
    many = len(scores.parts) > 1
    lines = [f"mean {scores.total.mean():.4f} of {len(prompts)} image{'s' if len(prompts) > 1 else ''}"]
    for n, prompt in enumerate(prompts[:SHOWN]):
        parts = ", ".join(f"{name} {values[n]:.4f}" for name, values in scores.parts.items())
        lines.append(f"{n + 1}. {scores.total[n]:.4f}{f' ({parts})' if many else ''}  {prompt}")
    if len(prompts) > SHOWN:
        lines.append(f"... and {len(prompts) - SHOWN} more")
    return "\n".join(lines)


class ShapesReward(io.ComfyNode):
    """The embedded verifier of the shapes demo."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return make(
            io.Schema,
            node_id="SFGRPO_ShapesReward",
            display_name="Shapes Reward",
            category="model/training/rewards",
            description="Checks a picture of 32 x 32 pixels, as the Shapes Demo Model draws it, against its prompt: "
            "the number of shapes, their kinds, colours and places.",
            search_aliases=["verifier", "GenEval", "counting reward", "shapes demo", "reward"],
            inputs=[
                io.Combo.Input(
                    "mode",
                    options=["soft", "strict"],
                    default="soft",
                    tooltip="soft: 0 to 1, at most 0.5 until everything is right; has a slope to train on. strict: 1 "
                    "where everything is right, else 0; for measuring.",
                )
            ],
            outputs=[
                RewardType.Output(
                    "reward", display_name="reward", tooltip="For Score Images, Reward Mix, the preview and training."
                )
            ],
        )

    @classmethod
    def execute(cls, mode: str) -> io.NodeOutput:
        name = "shapes" if mode == "soft" else "shapes_strict"
        return io.NodeOutput((Term(name, get_reward(name)),))


class JPEGSizeReward(io.ComfyNode):
    """How large an image is as a JPEG file."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return make(
            io.Schema,
            node_id="SFGRPO_JPEGSizeReward",
            display_name="JPEG Size Reward",
            category="model/training/rewards",
            description="Size of the image as a JPEG file, in kilobytes of 1000 bytes: busy images are large. Works "
            "for any model and prompt. In Reward Mix, weight -1 prefers plain images.",
            search_aliases=["compressibility", "incompressibility", "DDPO", "file size", "reward"],
            inputs=[
                io.Int.Input(
                    "quality",
                    default=95,
                    min=1,
                    max=100,
                    tooltip="JPEG quality of the file that is measured. With weight 1 busy images win; weight -1 in "
                    "Reward Mix prefers plain images.",
                )
            ],
            outputs=[
                RewardType.Output(
                    "reward", display_name="reward", tooltip="For Score Images, Reward Mix, the preview and training."
                )
            ],
        )

    @classmethod
    def execute(cls, quality: int) -> io.NodeOutput:
        return io.NodeOutput((Term("jpeg_size", partial(jpeg_size_reward, quality=quality)),))


class RewardMix(io.ComfyNode):
    """A weighted sum of rewards."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = []
        for n in range(1, MIXED + 1):
            inputs.append(
                RewardType.Input(
                    f"reward_{n}",
                    optional=True,
                    tooltip="A reward, or another mix. Leave out what you do not need.",
                )
            )
            inputs.append(
                io.Float.Input(
                    f"weight_{n}",
                    default=1.0,
                    min=-1000.0,
                    max=1000.0,
                    step=0.05,
                    round=False,
                    optional=True,
                    tooltip=f"Weight of reward_{n} in the sum; negative where less is better, 0 only watches it.",
                )
            )
        return make(
            io.Schema,
            node_id="SFGRPO_RewardMix",
            display_name="Reward Mix",
            category="model/training/rewards",
            description="Several rewards as one: their weighted sum. Each is also reported by itself.",
            search_aliases=["combine rewards", "weighted reward", "negate reward", "reward"],
            inputs=inputs,
            outputs=[RewardType.Output("reward", display_name="reward", tooltip="The weighted sum.")],
        )

    @classmethod
    def execute(cls, **inputs) -> io.NodeOutput:
        terms = []
        for n in range(1, MIXED + 1):
            weight = inputs.get(f"weight_{n}", 1.0)
            if not math.isfinite(weight):
                raise ValueError(f"weight_{n} must be a finite number, got {weight}")
            terms += [Term(t.name, t.fn, weight * t.weight) for t in inputs.get(f"reward_{n}") or ()]
        if not terms:
            raise ValueError("Reward Mix has no reward; connect at least one, such as Shapes Reward")
        return io.NodeOutput(tuple(number_names(terms)))


class ScoreImages(io.ComfyNode):
    """Apply a reward to images."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return make(
            io.Schema,
            node_id="SFGRPO_ScoreImages",
            display_name="Score Images",
            category="model/training/rewards",
            description="What a reward gives for images and their prompts. The scores are shown on the node.",
            search_aliases=["rate images", "evaluate images", "verify images", "reward", "metric"],
            inputs=[
                io.Image.Input("images", tooltip="One image or a batch."),
                RewardType.Input("reward", tooltip="A reward, or a Reward Mix."),
                io.String.Input(
                    "prompts",
                    multiline=True,
                    default="",
                    placeholder="a red circle",
                    tooltip="The prompt of all images, or one a line for each image.",
                ),
            ],
            outputs=[
                io.Float.Output(
                    "scores",
                    display_name="scores",
                    is_output_list=True,
                    tooltip="Score of each image: the weighted sum of the rewards.",
                ),
                io.Float.Output("mean", display_name="mean", tooltip="Mean score of the images."),
                io.String.Output(
                    "json",
                    display_name="json",
                    tooltip="All numbers as JSON: mean, and for each image prompt, score and every reward by itself.",
                ),
            ],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
            # Of two nodes with equal inputs ComfyUI would run one, and the other would show no scores.
            not_idempotent=True,
        )

    @classmethod
    def execute(cls, images: Tensor, reward: tuple[Term, ...], prompts: str) -> io.NodeOutput:
        texts = prompt_lines(prompts)
        if len(texts) == 1:
            texts = texts * len(images)
        if len(texts) != len(images):
            raise ValueError(
                f"{len(texts)} prompts for {len(images)} image{'s' if len(images) > 1 else ''}; write one prompt for "
                "all images, or one a line for each image"
            )
        with torch.no_grad():
            scores = combine(reward)(from_image(images), texts, [{}] * len(texts))
        text = score_text(scores, texts)
        show_text(cls, text)
        mean = scores.total.mean()
        parts = {name: plain(values) for name, values in scores.parts.items()}
        rows = [
            {"prompt": prompt, "score": total, "rewards": {name: values[n] for name, values in parts.items()}}
            for n, (prompt, total) in enumerate(zip(texts, plain(scores.total), strict=True))
        ]
        numbers = write_json({"mean": plain(mean.view(1))[0], "images": rows})
        return io.NodeOutput(scores.total.tolist(), float(mean), numbers, ui=ui.PreviewText(text))
