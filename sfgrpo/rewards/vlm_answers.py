"""A number from the answer of a language model: from its words, or from the probabilities of its tokens.

Words: the last match of a pattern, or a field of the last JSON object, from `lowest` to `highest`, as a share of that
range. Tokens: with p_a the summed probability of the tokens that say answer a, at the answer's first word, which must
say one (20 alternatives are asked for, the most that servers give),

    score = sum_a p_a v_a / sum_a p_a

with v = 1, 0 for yes, no; or v_a = (a - lowest) / (highest - lowest) for a digit a. VQAScore (arXiv 2404.01291) has
p_yes alone, which also falls with what the model spends on other words.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .http import shown


class NoScore(ValueError):
    """The model has answered, and its answer says no score."""


def from_words(text: str, patterns: Sequence[str], lowest: float, highest: float) -> float:
    """Mean over the patterns of the number in their last match, as a share of the range. Raises NoScore."""
    found = []
    for pattern in patterns:
        matches = list(re.finditer(pattern, text))
        if not matches:
            raise NoScore(f"no score in the model's answer {shown(text)}")
        groups = [group for group in matches[-1].groups() if group is not None]
        found.append(_share(groups[0] if groups else matches[-1][0], lowest, highest, text))
    return sum(found) / len(found)


def from_json(text: str, field: str, lowest: float, highest: float) -> float:
    """The field of the last JSON object in a text that has it, as a share of the range. Raises NoScore."""
    value, end, decoder = None, 0, json.JSONDecoder()
    for start in (m.start() for m in re.finditer(r"\{", text)):
        if start < end:
            continue
        try:
            given, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        value = given.get(field, value)
    if value is None or isinstance(value, (bool, list, dict)):
        raise NoScore(f"no JSON object with a number {field!r} in the model's answer {shown(text)}")
    return _share(value, lowest, highest, text)


def from_tokens(tokens: Any, values: Mapping[str, float], text: str) -> float:
    """Expectation of the values of answers at the first token that is a word; it must say one.

    tokens: `logprobs.content` of the response. values: answer, in small letters -> value. Raises NoScore, and
    ValueError where the server has sent no log-probabilities.
    """
    try:
        places = [(t["token"], [(a["token"], float(a["logprob"])) for a in t["top_logprobs"]]) for t in tokens]
    except (TypeError, KeyError, ValueError):
        raise ValueError("no logprobs with top_logprobs; the server must give them, or set read to number") from None
    said, alternatives = next((place for place in places if _word(place[0])), ("", []))
    mass = dict.fromkeys(values, 0.0)
    for token, logprob in alternatives:
        if _word(token) in mass:
            mass[_word(token)] += math.exp(min(logprob, 0.0))
    total = sum(mass.values())
    if _word(said) not in values or not total > 0:
        raise NoScore(f"the model's answer {shown(text)} begins with none of {', '.join(values)}")
    return sum(values[answer] * p for answer, p in mass.items()) / total


def _word(token: str) -> str:
    """A token without the marks of its beginning, in small letters."""
    return token.strip(" \n\t\r▁ĠĊ\"'*.,:").casefold()


def _share(given: Any, lowest: float, highest: float, text: str) -> float:
    try:
        number = float(given)
    except ValueError:
        raise NoScore(f"{given!r} is no number, in the model's answer {shown(text)}") from None
    if not lowest <= number <= highest:
        raise NoScore(f"{number:g} is not from {lowest:g} to {highest:g}, in the model's answer {shown(text)}")
    return (number - lowest) / (highest - lowest)
