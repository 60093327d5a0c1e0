"""What a vision-language model is asked, and how its answer becomes a number.

Three kinds of question: for a number in words, for the token that says it, and those that UnifiedReward was trained on,
word for word. These two are from github.com/CodeGoat24/UnifiedReward
(inference_qwen/image_generation/qwen_point_score_image_generation.py and
inference_qwen/UnifiedReward-2.0-inference/point_score_ACS_image_generation.py), MIT License, Copyright (c) 2025 Yibin
Wang; Wang et al. 2025, arXiv 2503.05236.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Reading = Literal["number", "json", "yes_no", "digits"]

NUMBER = r"(-?\d+(?:\.\d+)?)(?!\.?\d|\s*(?:[-–]|to)\s*\d)"
"""And not the first of a range like 1-10."""
RANGE = r"(?:\s*\(\d+\s*(?:[-–]|to)\s*\d+\))?"
ANY_SCORE = rf"(?i)\bscore\b{RANGE}(?:\s+(?:is|of))?\W{{0,8}}?{NUMBER}|\A\W*?{NUMBER}\s*(?:/\s*\d+)?\W*\Z"
"""`Score: 7`, `**Score** (1-10): 7/10`, or a number alone."""

PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}")
NO_FIELD = re.compile(r"\{\s*\d*\s*\}|\{\s*[A-Za-z_]\w*(?![\w}])[^\s}]{0,20}\s?\}?")


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A question, and how its answer is read."""

    template: str
    read: Reading
    patterns: tuple[str, ...] = (ANY_SCORE,)
    """Of `number`: a regular expression for each number; the score is their mean."""
    lowest: float = 0.0
    highest: float = 1.0
    max_tokens: int


PRESETS = {
    "rating": Preset(
        template="This picture was made from the text between the lines.\n---\n{prompt}\n---\n"
        "Rate from 1 to 10 how well it shows what the text asks for and how good it looks: 1 is a picture of "
        "something else or a broken one, 10 one that shows all of it and that nothing is wrong with. In one sentence "
        'name its worst fault, then end with a line "Score: N", where N is the rating.',
        read="number",
        lowest=1,
        highest=10,
        max_tokens=256,
    ),
    "digits": Preset(
        template="This picture was made from the text between the lines.\n---\n{prompt}\n---\n"
        "How well does it show what the text asks for, from 1 (not at all) to 5 (all of it, without a fault)? Answer "
        "with one digit and nothing else.",
        read="digits",
        lowest=1,
        highest=5,
        max_tokens=8,
    ),
    "yes_no": Preset(
        template='Does this picture show "{prompt}"? Answer yes or no.',
        read="yes_no",
        max_tokens=8,
    ),
    "unified_reward": Preset(
        template="You are given a text caption and a generated image based on that caption. Your task is to evaluate "
        "this image based on two key criteria:\n1. Alignment with the Caption: Assess how well this image aligns with "
        "the provided caption. Consider the accuracy of depicted objects, their relationships, and attributes as "
        "described in the caption.\n2. Overall Image Quality: Examine the visual quality of this image, including "
        "clarity, detail preservation, color accuracy, and overall aesthetic appeal.\nExtract key elements from the "
        "provided text caption, evaluate their presence in the generated image using the format: 'element (type): "
        "value' (where value=0 means not generated, and value=1 means generated), and assign a score from 1 to 5 "
        "after 'Final Score:'.\nYour task is provided as follows:\nText Caption: [{prompt}]",
        read="number",
        patterns=(rf"Final Score{RANGE}\W{{0,8}}?{NUMBER}",),
        lowest=1,
        highest=5,
        max_tokens=1024,
    ),
    "unified_reward_2": Preset(
        template="You are presented with a generated image and its associated text caption. Your task is to analyze "
        "the image across multiple dimensions in relation to the caption. Specifically:\nProvide overall assessments "
        "for the image along the following axes (each rated from 1 to 5):\n- Alignment Score: How well the image "
        "matches the caption in terms of content.\n- Coherence Score: How logically consistent the image is (absence "
        "of visual glitches, object distortions, etc.).\n- Style Score: How aesthetically appealing the image looks, "
        "regardless of caption accuracy.\n\nOutput your evaluation using the format below:\n\nAlignment Score (1-5): "
        "X\nCoherence Score (1-5): Y\nStyle Score (1-5): Z\n\nYour task is provided as follows:\n"
        "Text Caption: [{prompt}]",
        read="number",
        patterns=tuple(rf"{axis} Score{RANGE}\W{{0,8}}?{NUMBER}" for axis in ("Alignment", "Coherence", "Style")),
        lowest=1,
        highest=5,
        max_tokens=256,
    ),
}


def check_template(template: str) -> None:
    """Raise ValueError for a brace that was meant to be a field and is none; other braces stand for themselves."""
    if not template.strip():
        raise ValueError("template is empty")
    wrong = NO_FIELD.search(template)
    if wrong:
        raise ValueError(f"{wrong[0]!r} in template is no field; fields are like {{prompt}}, without more")


def fill_in(template: str, prompt: str, metadata: Mapping) -> str:
    """The template with {prompt} and {field of the metadata} filled in once: braces in what is filled in stay.

    Text goes in as it is, anything else as JSON. Raises ValueError for a field that the prompt does not have.
    """
    fields = {**metadata, "prompt": prompt}

    def value(match: re.Match) -> str:
        name = match[1]
        if fields.get(name) is None:
            raise ValueError(
                f"template asks for {{{name}}}, which the prompt {prompt!r} does not have; it has {', '.join(fields)}"
            )
        given = fields[name]
        return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)

    return PLACEHOLDER.sub(value, template)
