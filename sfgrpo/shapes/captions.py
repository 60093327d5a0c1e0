"""Captions of the shapes domain in GenEval's six categories (Ghosh et al. 2023), and what each asks for.

    single_object   a circle
    two_objects     a circle and a square
    counting        three circles / three red circles
    colours         a red circle
    position        a circle left of a square
    attributes      a red circle and a blue square

Every caption asks for exactly the named shapes and nothing else. The split is fixed: a caption is held out by
a hash of its text, so that it never depends on an order or a seed.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from itertools import permutations, product

SHAPES = ("circle", "square", "triangle", "cross")
COLOUR_NAMES = ("red", "green", "blue", "yellow", "purple", "black")
RELATIONS = ("left of", "right of", "above", "below")
CATEGORIES = ("single_object", "two_objects", "counting", "colours", "position", "attributes")
NUMBERS = {"two": 2, "three": 3, "four": 4}
PLURALS = {"circle": "circles", "square": "squares", "triangle": "triangles", "cross": "crosses"}
HELD_OUT_SHARE = 0.3


@dataclass(frozen=True)
class Caption:
    """One caption and the scene that it asks for."""

    text: str
    category: str
    objects: tuple[tuple[int, int | None, int], ...]
    """(index into SHAPES, index into COLOUR_NAMES or None for any, count), in the order of the text."""
    relation: int | None = None
    """Index into RELATIONS, of the first object against the second."""

    @property
    def count(self) -> int:
        """Number of shapes in the picture."""
        return sum(n for _, _, n in self.objects)


def all_captions() -> list[Caption]:
    """Every caption of the domain, in a fixed order."""
    shapes = range(len(SHAPES))
    colours = range(len(COLOUR_NAMES))
    out = [Caption(f"a {SHAPES[s]}", "single_object", ((s, None, 1),)) for s in shapes]
    for a, b in permutations(shapes, 2):
        out.append(Caption(f"a {SHAPES[a]} and a {SHAPES[b]}", "two_objects", ((a, None, 1), (b, None, 1))))
    for word, n in NUMBERS.items():
        for s in shapes:
            plural = PLURALS[SHAPES[s]]
            out.append(Caption(f"{word} {plural}", "counting", ((s, None, n),)))
            for c in colours:
                out.append(Caption(f"{word} {COLOUR_NAMES[c]} {plural}", "counting", ((s, c, n),)))
    for c, s in product(colours, shapes):
        out.append(Caption(f"a {COLOUR_NAMES[c]} {SHAPES[s]}", "colours", ((s, c, 1),)))
    for (a, b), r in product(permutations(shapes, 2), range(len(RELATIONS))):
        text = f"a {SHAPES[a]} {RELATIONS[r]} a {SHAPES[b]}"
        out.append(Caption(text, "position", ((a, None, 1), (b, None, 1)), r))
    for (a, b), (c, d) in product(permutations(shapes, 2), permutations(colours, 2)):
        text = f"a {COLOUR_NAMES[c]} {SHAPES[a]} and a {COLOUR_NAMES[d]} {SHAPES[b]}"
        out.append(Caption(text, "attributes", ((a, c, 1), (b, d, 1))))
    return out


def is_held_out(caption: Caption) -> bool:
    """Whether the caption belongs to the held-out split, by a hash of its text.

    The four single-object captions are too few to split: they are in both.
    """
    return zlib.crc32(caption.text.encode()) % 1000 < HELD_OUT_SHARE * 1000


def split(name: str, categories: tuple[str, ...] = CATEGORIES) -> list[Caption]:
    """Captions of `train` or `held_out` in the given categories.

    Raises ValueError for another split or category.
    """
    if name not in ("train", "held_out"):
        raise ValueError(f"split must be 'train' or 'held_out', not {name!r}")
    unknown = set(categories) - set(CATEGORIES)
    if unknown:
        raise ValueError(f"unknown category {sorted(unknown)}; choose from {', '.join(CATEGORIES)}")
    chosen = [c for c in all_captions() if c.category in categories]
    return [c for c in chosen if c.category == "single_object" or is_held_out(c) == (name == "held_out")]


_BY_TEXT: dict[str, Caption] = {}


def parse(text: str) -> Caption:
    """The caption with this text (case and surrounding space ignored).

    Raises ValueError, with the forms that exist, for a text that is not a caption of the domain.
    """
    if not _BY_TEXT:
        _BY_TEXT.update((c.text, c) for c in all_captions())
    caption = _BY_TEXT.get(" ".join(text.lower().split()))
    if caption is None:
        raise ValueError(
            f"{text!r} is not a caption that the shapes verifier can check; write one like 'a circle', "
            "'a red circle', 'three blue crosses', 'a circle and a square', 'a circle left of a square' or "
            f"'a red circle and a blue square' (shapes: {', '.join(SHAPES)}; colours: {', '.join(COLOUR_NAMES)})"
        )
    return caption
