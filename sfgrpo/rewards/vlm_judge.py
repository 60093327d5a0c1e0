"""A vision-language model as judge, behind any server with OpenAI's chat API: vLLM, SGLang, llama.cpp.

Each image is one request to /v1/chat/completions: the image, then the question (`vlm_prompts`); the answer becomes a
number in [0, 1] (`vlm_answers`). An image whose answers say no score has NaN, never 0.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Literal, get_args

import torch
from torch import Tensor

from .http import read_json
from .server import ServerError, ServerReward, in_threads
from .vlm_answers import NoScore, from_json, from_tokens, from_words
from .vlm_prompts import PRESETS, Reading, check_template, fill_in

OURS = ("model", "messages", "max_tokens", "logprobs", "top_logprobs", "stream", "n")


@dataclass(frozen=True, kw_only=True)
class VLMJudge(ServerReward):
    """`[rewards] vlm_judge`."""

    model: str
    """Its name at the server; `/v1/models` lists them."""
    preset: Literal["rating", "digits", "yes_no", "unified_reward", "unified_reward_2"] = "rating"
    """Question and reading: see `vlm_prompts`. The settings below replace parts of it."""
    template: str = ""
    """Another question; {prompt} and {field} stand for the prompt and for fields of its metadata, other braces for
    themselves."""
    read: Reading | None = None
    """`number`: the last match of `pattern`; `json`: `field` of a JSON object in the answer; `yes_no`, `digits`: by
    the probabilities of the answer's token, which the server must give (logprobs)."""
    pattern: str = ""
    """Of `number`: a regular expression; its first group that matched is the number, or all of it where it has none."""
    field: str = "score"
    """Of `json`."""
    lowest: float | None = None
    """Number that becomes 0; a number below it is no score."""
    highest: float | None = None
    """Number that becomes 1; a number above it is no score."""
    max_tokens: int | None = None
    """Of the answer."""
    temperature: float = 0.0
    image_format: Literal["png", "jpeg"] = "png"
    """`jpeg` (quality 95) sends less."""
    extra: dict = dataclasses.field(default_factory=dict)
    """Further fields of the request, such as `chat_template_kwargs = { enable_thinking = false }`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model.strip():
            raise ValueError("model must be the name of a model at the server")
        for name, choices in (("preset", tuple(PRESETS)), ("image_format", ("png", "jpeg"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, not {getattr(self, name)!r}")
        if self.reading not in get_args(Reading):
            raise ValueError(f"read must be one of {', '.join(get_args(Reading))}, not {self.read!r}")
        check_template(self.question)
        if self.pattern and self.reading != "number":
            raise ValueError('pattern is used by read = "number" alone')
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern {self.pattern!r} is no regular expression: {error}") from None
        low, high = self.range
        if not -math.inf < low < high < math.inf:
            raise ValueError(f"lowest must be below highest, and both finite; they are {low:g} and {high:g}")
        if self.reading == "digits" and not (low >= 0 and high <= 9 and low == int(low) and high == int(high)):
            raise ValueError("lowest and highest must be whole numbers from 0 to 9, each one token, to read digits")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError("max_tokens must be 1 or more")
        if not 0 <= self.temperature < math.inf:
            raise ValueError("temperature must be 0 or more")
        ours = [name for name in OURS if name in self.extra]
        if ours:
            raise ValueError(f"extra must not hold {', '.join(ours)}, which the reward sets itself")
        try:
            json.dumps(self.extra)
        except (TypeError, ValueError) as error:
            raise ValueError(f"extra cannot be sent: {error}") from None

    @property
    def question(self) -> str:
        """The template in use."""
        return self.template or PRESETS[self.preset].template

    @property
    def reading(self) -> str:
        """How the answer is read."""
        return self.read or PRESETS[self.preset].read

    @property
    def range(self) -> tuple[float, float]:
        """Numbers that become 0 and 1."""
        own = PRESETS[self.preset]
        low = own.lowest if self.lowest is None else self.lowest
        return low, own.highest if self.highest is None else self.highest

    def check_prompt(self, prompt: str, metadata: Mapping, size: tuple[int, int]) -> None:
        """Raise ValueError for a field of the template that the prompt does not have."""
        fill_in(self.question, prompt, metadata)

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping] | None = None) -> Tensor:
        """Scores (B,) float32 in [0, 1] of (B, 3, H, W) images in [0, 1].

        NaN where the model's answers say no score, where a pixel is not finite, and where the server fails for some
        images and not for others. Raises ServerError where it fails for all.
        """
        metadata = [{}] * len(prompts) if metadata is None else metadata
        if not len(images) == len(prompts) == len(metadata):
            raise ValueError(f"{len(images)} images, {len(prompts)} prompts and {len(metadata)} metadata do not agree")
        texts = [fill_in(self.question, p, m) for p, m in zip(prompts, metadata, strict=True)]
        finite = images.isfinite().flatten(1).all(1).tolist()
        pixels = (images.detach().float().clamp(0, 1) * 255).round().byte().movedim(1, -1).cpu().numpy()
        answered, failed = [], []

        def judge(i: int, stop: Event) -> float:
            if len(failed) >= self.concurrency and not answered:
                return math.nan  # One failure of each thread is enough to know a server that is down.
            try:
                body = json.dumps(self._request(pixels[i], texts[i])).encode()
                score = self.post(self._path, body, "application/json", self._read, stop)
            except ServerError as error:
                failed.append(error)
                if isinstance(error.__cause__, NoScore):
                    answered.append(i)
                return math.nan
            answered.append(i)
            return score

        rows = [i for i, good in enumerate(finite) if good]
        scores = torch.full((len(images),), math.nan)
        scores[rows] = torch.tensor(in_threads(judge, rows, self.concurrency))
        if failed and not answered:
            raise failed[0]
        if failed:
            # Not a warning: the command line turns those of libraries off.
            missing = int(scores[rows].isnan().sum())
            logging.getLogger(__name__).error("%d of %d images have no score: %s", missing, len(images), failed[0])
        return scores

    @property
    def _path(self) -> str:
        return "/chat/completions" if self.url.rstrip("/").endswith("/v1") else "/v1/chat/completions"

    def _request(self, pixels, text: str) -> dict:
        """Of one image, (H, W, 3) uint8."""
        image = {"type": "image_url", "image_url": {"url": data_uri(pixels, self.image_format)}}
        out = {
            "model": self.model,
            "messages": [{"role": "user", "content": [image, {"type": "text", "text": text}]}],
            "max_tokens": self.max_tokens or PRESETS[self.preset].max_tokens,
            "temperature": self.temperature,
        }
        if self.reading in ("yes_no", "digits"):
            out |= {"logprobs": True, "top_logprobs": 20}
        return out | self.extra

    def _read(self, answer: bytes) -> float:
        value = read_json(answer)
        try:
            choice = value["choices"][0]
            text = choice["message"]["content"] or ""
        except (TypeError, KeyError, IndexError):
            raise ValueError("no choices with a message") from None
        if not isinstance(text, str):
            raise ValueError("a message that is not text")
        (low, high), own = self.range, PRESETS[self.preset]
        try:
            if self.reading == "number":
                return from_words(text, (self.pattern,) if self.pattern else own.patterns, low, high)
            if self.reading == "json":
                return from_json(text, self.field, low, high)
            values = {"yes": 1.0, "no": 0.0}
            if self.reading == "digits":
                values = {str(n): (n - low) / (high - low) for n in range(int(low), int(high) + 1)}
            return from_tokens((choice.get("logprobs") or {}).get("content"), values, text)
        except NoScore as error:
            if choice.get("finish_reason") == "length":
                raise NoScore(f"{error}, which was cut off; raise max_tokens") from None
            raise


def data_uri(pixels, image_format: str) -> str:
    """An (H, W, 3) uint8 image as a `data:` URI."""
    from PIL import Image

    file = io.BytesIO()
    options = {"compress_level": 1} if image_format == "png" else {"quality": 95}
    Image.fromarray(pixels).save(file, image_format, **options)
    return f"data:image/{image_format};base64,{base64.b64encode(file.getvalue()).decode()}"
