"""Tokens of a text, alone or in a chat template, as the pipelines tokenize them but without cutting."""

from __future__ import annotations

from typing import Any


def token_count(tokenizer: Any, text: str, **options: Any) -> int:
    """Tokens of a text, with the special ones that the tokenizer adds."""
    return len(tokenizer(text, truncation=False, verbose=False, **options).input_ids)


def count_before_end(tokenizer: Any, written: str, text: str, total: int | None = None) -> int:
    """Tokens of a chat up to the end of the text in it: all of them less those of the template's end.

    written: the chat template with the text in it. total: all tokens, where they are not those of `written`.
    """
    total = token_count(tokenizer, written) if total is None else total
    place = written.rfind(text.strip())
    end = "" if place < 0 else written[place + len(text.strip()) :]
    return total - (token_count(tokenizer, end, add_special_tokens=False) if end else 0)
