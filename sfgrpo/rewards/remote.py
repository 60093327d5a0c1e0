"""A reward that `sfgrpo reward serve` computes, on this machine or another; see `wire` for what travels."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Event

import torch
from torch import Tensor

from .http import read_json
from .server import ServerError, ServerReward, in_threads
from .wire import CONTENT_TYPE, pack, scores


@dataclass(frozen=True, kw_only=True)
class Remote(ServerReward):
    """`[rewards] NAME = {kind = "remote", url = "http://127.0.0.1:8190", ...}`."""

    reward: str | None = None
    """Which of the rewards that the server has, as it names them; None takes their weighted sum, which is the reward
    itself where there is one of weight 1."""
    batch: int = 8
    """Images of one request; 3 MB each at 512 x 512, 13 MB at 1024 x 1024."""
    concurrency: int = 2
    """Requests at once; the server computes one while the next arrives."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch < 1:
            raise ValueError("batch must be 1 or more")

    def check_prompt(self, prompt: str, metadata: Mapping, size: tuple[int, int]) -> None:
        """Raise ValueError for metadata that cannot be sent. Whether it can be scored, the server says when asked."""
        try:
            json.dumps(dict(metadata))
        except (TypeError, ValueError) as error:
            raise ValueError(f"the metadata of prompt {prompt!r} cannot be sent: {error}") from None

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping] | None = None) -> Tensor:
        """Scores (B,) float32 of (B, 3, H, W) images in [0, 1]; NaN where the server has none.

        Raises ServerError where the server gives none for a request after all retries, or cannot score a prompt.
        """
        if images.ndim != 4 or images.shape[1] != 3:
            raise ValueError(f"images must be (B, 3, H, W), got {tuple(images.shape)}")
        metadata = [{}] * len(prompts) if metadata is None else metadata
        if not len(images) == len(prompts) == len(metadata):
            raise ValueError(f"{len(images)} images, {len(prompts)} prompts and {len(metadata)} metadata do not agree")
        if not len(images):
            return torch.empty(0)

        def ask(rows: slice, stop: Event) -> Tensor:
            body = pack(images[rows], prompts[rows], metadata[rows])
            count = len(images[rows])
            return self.post("/score", body, CONTENT_TYPE, lambda answer: self._read(answer, count), stop)

        parts = [slice(start, start + self.batch) for start in range(0, len(images), self.batch)]
        return torch.cat(in_threads(ask, parts, self.concurrency))

    def _read(self, answer: bytes, count: int) -> Tensor:
        value = read_json(answer)
        if not isinstance(value, dict) or not isinstance(value.get("rewards"), dict):
            raise ValueError('no "rewards"')
        if self.reward is None:
            return scores(value.get("total"), count)
        if self.reward not in value["rewards"]:
            raise ServerError(
                f"{self.url}: has no reward {self.reward!r}; set reward to one of {', '.join(value['rewards'])}"
            )
        return scores(value["rewards"][self.reward], count)
