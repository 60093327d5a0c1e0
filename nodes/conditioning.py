"""Prompts as ComfyUI's CONDITIONING: encoded by CLIP, or ready."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor

from ..sfgrpo.prompts import Prompt

UNSUPPORTED = {
    "area": "an area",
    "mask": "a mask",
    "control": "a ControlNet",
    "gligen": "GLIGEN boxes",
    "hooks": "hooks",
    "start_percent": "a timestep range",
    "end_percent": "a timestep range",
}
"""What conditioning may carry in ComfyUI and not here."""


def conditioning_for(
    prompts: Sequence[Prompt],
    clip,
    positive,
    negative,
    guidance: float,
    *,
    used: Collection[int] | None = None,
    on_encode: Callable[[int], None] = lambda done: None,
) -> tuple[list, list | None]:
    """(positive, negative): a CONDITIONING for each prompt; negative None where guidance is off, or one for all.

    positive and negative: ready CONDITIONING with an entry a prompt (or one negative for all), else None for CLIP.
    used: prompts that will be needed; the others are given another's. on_encode(done) comes before each text that is
    encoded. Raises ValueError where neither is there, or where there are not as many ready ones as prompts.
    """
    cache: dict[str, list] = {}

    def encode(text: str) -> list:
        if text not in cache:
            on_encode(len(cache))
            cache[text] = clip.encode_from_tokens_scheduled(clip.tokenize(text))
        return cache[text]

    spare = min(used) if used else 0
    wanted = [p if used is None or i in used else prompts[spare] for i, p in enumerate(prompts)]
    if positive is not None:
        ready = _split(positive)
        if len(ready) != len(prompts):
            raise ValueError(
                f"positive holds conditioning for {len(ready)} prompt{'s' if len(ready) > 1 else ''}, and prompts has "
                f"{len(prompts)}; write those that were encoded, one a line, or connect CLIP instead of positive"
            )
    elif clip is None:
        raise ValueError("connect a CLIP, or ready CONDITIONING in its place")
    else:
        ready = [encode(p.text) for p in wanted]
    if guidance <= 1:
        return ready, None
    if negative is not None:
        against = _split(negative)
        if len(against) not in (1, len(prompts)):
            raise ValueError(
                f"negative must hold one conditioning for all {len(prompts)} prompts, or one for each, and holds "
                f"{len(against)}"
            )
        return ready, against
    if clip is None:
        raise ValueError("guidance above 1 needs a negative; connect negative or CLIP, or set guidance to 1")
    texts = {p.negative for p in wanted}
    return ready, [encode(p.negative) for p in (wanted if len(texts) > 1 else wanted[:1])]


def _split(conditioning) -> list:
    """One CONDITIONING for each entry of a CONDITIONING that holds several (Conditioning Combine)."""
    return [[entry] for entry in conditioning]


def check_conditioning(prompts: Sequence, name: str) -> None:
    """Raise ValueError for conditioning that is more than text."""
    for conditioning in prompts:
        if len(conditioning) != 1:
            raise ValueError(f"{name} conditioning of one prompt must be one entry, and has {len(conditioning)}")
        for key, what in UNSUPPORTED.items():
            if conditioning[0][1].get(key) is not None:
                raise ValueError(
                    f"{name} conditioning with {what} is not supported here; connect plain text conditioning"
                )


def ordinary(value: Any) -> Any:
    """Nested conditioning with copies of those tensors that were made in inference mode, which autograd cannot save."""
    if isinstance(value, Tensor):
        return value.clone() if value.is_inference() else value
    if isinstance(value, dict):
        return {k: ordinary(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(ordinary(v) for v in value)
    if hasattr(value, "_copy_with"):
        return value._copy_with(ordinary(value.cond))
    return value
