"""Which prompts are longer than the text encoders read: what is beyond is cut, so that two of them may be as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

ENDLESS = 1_000_000
"""A model_max_length above this is how transformers says that there is none."""


def load_tokenizers(path: str, names: Sequence[str]) -> dict[str, Any]:
    """The tokenizers of a diffusers folder or hub id by their component names; no weights."""
    from transformers import AutoTokenizer

    return {name: AutoTokenizer.from_pretrained(path, subfolder=name) for name in names}


def cut_prompts(tokenizers: Mapping[str, Any], limits: Mapping[str, int | None], texts: Sequence[str]) -> list[str]:
    """A sentence for each text encoder that cuts some of the texts, each different text counted once.

    limits: component name -> tokens that its encoder reads, special ones included, or None for the tokenizer's own
    model_max_length (`Family.text_limits`). The tokens of chat templates are not counted.
    """
    different = list(dict.fromkeys(texts))
    most = {name: tokenizers[name].model_max_length if limit is None else limit for name, limit in limits.items()}
    out = []
    for name, limit in most.items():
        if limit > ENDLESS:
            continue
        lengths = [len(tokenizers[name](text, truncation=False, verbose=False).input_ids) for text in different]
        cut = [n for n, length in enumerate(lengths) if length > limit]
        if not cut:
            continue
        longest = max(cut, key=lengths.__getitem__)
        others = [other for other in most.values() if other > limit]
        do = "shorten them"
        if limits[name] is not None:
            do += ", or raise model.max_sequence_length where the model takes more"
        elif others:
            do += f"; another encoder reads {max(others)} tokens, so that they are cut in part alone"
        out.append(
            f"{len(cut)} of {len(different)} prompts are longer than the {limit} tokens that the encoder of {name} "
            f"reads and are cut there; the longest, {lengths[longest]} tokens, begins {different[longest][:60]!r}; {do}"
        )
    return out
