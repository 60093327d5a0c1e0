"""Rewards by name, and the settings that each takes.

A reward is a function, whose settings are its keyword-only parameters, or a frozen dataclass, whose settings are its
fields. Both are called with (images, prompts, metadata); see the package's docstring.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints
from weakref import WeakValueDictionary

from torch import Tensor

from .custom import is_custom, load_custom
from .jpeg import jpeg_size_reward
from .shapes import shapes_reward

Reward = Callable[[Tensor, Sequence[str], Sequence[Mapping]], Tensor]

REWARDS: dict[str, str | Reward] = {
    "shapes": shapes_reward,
    "shapes_strict": partial(shapes_reward, mode="strict"),
    "jpeg_size": jpeg_size_reward,
    "brightness": "simple:brightness_reward",
    "sharpness": "simple:sharpness_reward",
    "saturation": "simple:saturation_reward",
    "pickscore": "pickscore:PickScore",
    "clip_score": "clip_score:CLIPScore",
    "aesthetic": "aesthetic:Aesthetic",
    "hps_v2": "hps_v2:HPSv2",
    "image_reward": "image_reward:ImageReward",
    "ocr": "ocr:OCR",
    "geneval": "geneval:GenEval",
    "vlm_judge": "vlm_judge:VLMJudge",
    "remote": "remote:Remote",
}
"""Name -> function, or "module:attribute" of this package, imported when it is first asked for."""

PATH_SETTINGS = ("model", "head", "weights", "tokenizer", "clip")
"""Settings of any reward that may name a file or folder: a run file may give them relative to itself."""

_made: WeakValueDictionary[str, Any] = WeakValueDictionary()


def get_reward(kind: str, /, **settings: Any) -> Reward:
    """The reward of this name with these settings; equal settings give the same object, and so one model in memory.

    A kind `module:name` or `file.py:name` runs the user's own code (`custom`): never pass on one from a workflow.
    Raises ValueError for an unknown name or setting, or for a value that the setting does not take.
    """
    target = _find(kind)
    known = settings_of(target)
    for name, value in settings.items():
        if name not in known:
            raise ValueError(f"{kind} has no setting {name!r}{_nearest(name, known)}")
        if not _fits(value, known[name].type):
            raise ValueError(f"{name} of {kind} must be {_describe(known[name].type)}, got {value!r}")
    for name, setting in known.items():
        if setting.required and name not in settings:
            raise ValueError(f"{kind} needs the setting {name}")
    if not inspect.isclass(target):
        return partial(target, **settings) if settings else target
    made = target(**settings)
    # The class is part of it: a file of the user's own that has changed makes another one.
    return _made.setdefault(f"{kind} {id(target)} {made!r}", made)


@dataclass(frozen=True)
class Setting:
    """One setting of a reward."""

    type: Any
    """Its annotation."""
    required: bool


def settings_of(target: Any) -> dict[str, Setting]:
    """Name -> Setting of a reward's class or function."""
    if dataclasses.is_dataclass(target):
        hints, missing = _hints(target), dataclasses.MISSING
        return {
            f.name: Setting(hints.get(f.name, Any), f.default is missing and f.default_factory is missing)
            for f in dataclasses.fields(target)
            if f.init
        }
    fixed = target.keywords if isinstance(target, partial) else {}
    function = target.func if isinstance(target, partial) else target
    hints = _hints(function)
    return {
        p.name: Setting(hints.get(p.name, Any), p.default is p.empty)
        for p in inspect.signature(function).parameters.values()
        if p.kind is p.KEYWORD_ONLY and p.name not in fixed
    }


def _hints(target: Any) -> dict[str, Any]:
    try:
        return get_type_hints(target)
    except Exception:  # annotations of the user's own code may name anything
        return {}


def read_term(name: str, value: Any) -> tuple[Reward, float, bool]:
    """A reward, its weight, and whether its scores are normalised, as a run file has them.

    value: the weight, or a table of `weight` (1 if left out), `normalise` (false if left out), `kind` (`name` if left
    out) and the reward's settings. Raises ValueError where it is neither, or where the weight is not finite.
    """
    if isinstance(value, Mapping):
        settings = dict(value)
        kind, weight = settings.pop("kind", name), settings.pop("weight", 1.0)
        normalise = settings.pop("normalise", False)
    else:
        settings, kind, weight, normalise = {}, name, value, False
    if not isinstance(normalise, bool):
        raise ValueError(f"normalise must be true or false, got {normalise!r}")
    if not isinstance(kind, str):
        raise ValueError(f"kind must be the name of a reward, got {kind!r}")
    if isinstance(weight, bool) or not isinstance(weight, (int, float)):
        raise ValueError(f"needs a weight, or a table of settings, got {weight!r}")
    if not math.isfinite(weight):
        raise ValueError(f"the weight must be finite, got {weight}")
    return get_reward(kind, **settings), float(weight), normalise


def _find(kind: str) -> Any:
    if is_custom(kind):
        return load_custom(kind)
    if kind not in REWARDS:
        raise ValueError(f"unknown reward {kind!r}; choose one of {', '.join(REWARDS)}")
    target = REWARDS[kind]
    if isinstance(target, str):
        module, attribute = target.split(":")
        target = getattr(import_module(f".{module}", __package__), attribute)
    return target


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    if not known:
        return "; it takes none"
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; its settings are {', '.join(known)}"


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value that TOML gave fits an annotation; True for annotations beyond these."""
    origin = get_origin(hint)
    if origin is Literal:
        return value in get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, part) for part in get_args(hint))
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return isinstance(value, hint) if hint in (str, bool, dict, type(None)) else True


def _describe(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(repr, get_args(hint)))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_describe(part) for part in get_args(hint) if part is not type(None))
    names = {str: "text", int: "a whole number", float: "a number", bool: "true or false", dict: "a table"}
    return names.get(hint, str(hint))
