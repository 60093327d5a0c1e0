"""The rules of GenEval (Ghosh et al. 2023, arXiv 2310.11513): do the objects found in a picture match its prompt?

A prompt comes with what it asks for, as in GenEval's evaluation_metadata.jsonl:

    {"tag": "position", "prompt": "a photo of a dog right of a bench",
     "include": [{"class": "bench", "count": 1}, {"class": "dog", "count": 1, "position": ["right of", 0]}]}

`include` clauses all have to hold, each judged by the `count` surest objects of its class: there are that many; they
have the `color`; each of them stands in the relation `position` names to each object of an earlier clause. No `exclude`
clause may hold: there are `count` objects of the class or more. Clauses are independent, so that two of one class look
at the same objects.

    strict = 1 if all of that is so, else 0
    soft   = mean of the requirements of `include` * product over `exclude` of min(1, count / (found + 1))

A requirement is a number of objects (min(1, found / count)), their colour (share of the `count` that have it) or a
relation (1 or 0). soft is 1 exactly where strict is. The factor of `exclude` is below 1 only where there are too many:
a picture of nothing earns nothing for what it leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import hypot, prod
from typing import Any

TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
RELATIONS = ("left of", "right of", "above", "below")


@dataclass(frozen=True)
class Clause:
    """One entry of `include` or `exclude`."""

    name: str
    """The class."""
    count: int
    colour: str = ""
    """Of COLOURS, or "" for any."""
    relation: str = ""
    """Of RELATIONS, or "" for none."""
    target: int = 0
    """Index of the clause of `include` that the relation is to."""


@dataclass(frozen=True)
class Task:
    """What a prompt asks for."""

    tag: str
    include: tuple[Clause, ...]
    exclude: tuple[Clause, ...] = ()

    @property
    def classes(self) -> tuple[str, ...]:
        """The different classes that must be looked for."""
        return tuple(dict.fromkeys(clause.name for clause in self.include + self.exclude))


@dataclass(frozen=True)
class Detection:
    """One object that was found."""

    box: tuple[float, float, float, float]
    """Left, top, right, bottom in pixels."""
    score: float
    """How sure the detector is, in [0, 1]."""
    colour: str = ""
    """Of COLOURS; "" where no clause asks."""


@dataclass(frozen=True)
class Verdict:
    """Scores of one picture."""

    strict: float
    """1 or 0."""
    soft: float
    """In [0, 1]; 1 exactly where strict is."""


def read_task(prompt: str, metadata: Mapping) -> Task:
    """What the metadata of a prompt asks for. Raises ValueError that names the prompt and the field."""

    def need(holds: bool, field: str, what: str, got: Any) -> None:
        if not holds:
            raise ValueError(
                f"the geneval reward needs {field} of prompt {prompt!r} to be {what}, got {got!r}; "
                f"give it beside the prompt in a .jsonl file in GenEval's format"
            )

    def clauses(field: str) -> tuple[Clause, ...]:
        rows = metadata.get(field, [])
        need(isinstance(rows, (list, tuple)), f'"{field}"', "a list", rows)
        out = []
        for i, row in enumerate(rows):
            at = f'"{field}"[{i}]'
            need(isinstance(row, Mapping), at, "an object", row)
            name, count = row.get("class"), row.get("count")
            need(isinstance(name, str) and bool(name.strip()), f'{at}["class"]', "a name", name)
            need(type(count) is int and count >= 1, f'{at}["count"]', "a whole number from 1 on", count)
            colour, place = row.get("color"), row.get("position")
            need(colour is None or colour in COLOURS, f'{at}["color"]', f"one of {', '.join(COLOURS)}", colour)
            relation, target = "", 0
            if place is not None:
                held = isinstance(place, (list, tuple)) and len(place) == 2 and place[0] in RELATIONS
                held = held and type(place[1]) is int and 0 <= place[1] < i
                what = f"[one of {', '.join(RELATIONS)}; the index of an earlier entry]"
                need(held, f'{at}["position"]', what, place)
                relation, target = place
            out.append(Clause(name.strip(), count, colour or "", relation, target))
        return tuple(out)

    tag = metadata.get("tag")
    need(tag in TAGS, '"tag"', f"one of {', '.join(TAGS)}", tag)
    include = clauses("include")
    need(bool(include), '"include"', "a list with at least one entry", metadata.get("include"))
    return Task(tag, include, clauses("exclude"))


def iou(a: Sequence[float], b: Sequence[float]) -> float:
    """Intersection over union of two boxes of whole pixels, borders included."""

    def area(left: float, top: float, right: float, bottom: float) -> float:
        return max(right - left + 1, 0) * max(bottom - top + 1, 0)

    both = area(max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3]))
    either = area(*a) + area(*b) - both
    return both / either if either else 0.0


def keep(detections: Sequence[Detection], threshold: float, max_objects: int, max_overlap: float) -> list[Detection]:
    """The detections of one class that count as objects, surest first; of equal ones the first given.

    Those above the threshold, at most `max_objects`, without any that overlaps a surer one by an IoU of `max_overlap`
    or more (1 keeps all).
    """
    rest = sorted((d for d in detections if d.score > threshold), key=lambda d: -d.score)[:max_objects]
    kept: list[Detection] = []
    for one in rest:
        if max_overlap >= 1 or all(iou(other.box, one.box) < max_overlap for other in kept):
            kept.append(one)
    return kept


def relations(a: Sequence[float], b: Sequence[float], threshold: float = 0.1) -> set[str]:
    """How box a lies to box b, of RELATIONS; two where it lies diagonally, none where the centres are close.

    From each offset of the centres is taken `threshold` times the sum of the sizes along that axis; what is left must
    exceed half of the distance of the centres.
    """
    offset, left = [], []
    for i in (0, 1):
        d = (a[i] + a[i + 2] - b[i] - b[i + 2]) / 2
        size = abs(a[i + 2] - a[i]) + abs(b[i + 2] - b[i])
        offset.append(d)
        left.append(max(abs(d) - threshold * size, 0.0) * (1 if d > 0 else -1))
    if max(map(abs, left)) < 1e-3:
        return set()
    dx, dy = (v / hypot(*offset) for v in left)
    holds = zip(RELATIONS, (dx < -0.5, dx > 0.5, dy < -0.5, dy > 0.5), strict=True)
    return {name for name, it_is in holds if it_is}


def judge(task: Task, found: Mapping[str, Sequence[Detection]], position_threshold: float = 0.1) -> Verdict:
    """Hold what was found, class -> objects as `keep` returns them, against what was asked for."""
    requirements: list[float] = []
    matched: list[Sequence[Detection]] = []  # The objects of each clause; none where it does not hold.
    for clause in task.include:
        objects = found.get(clause.name, ())[: clause.count]
        met = [len(objects) / clause.count]
        if clause.colour:
            met.append(sum(o.colour == clause.colour for o in objects) / clause.count)
        if clause.relation:
            others = matched[clause.target]
            stands = min(met) == 1 and bool(others)
            stands = stands and all(
                clause.relation in relations(o.box, other.box, position_threshold) for o in objects for other in others
            )
            met.append(float(stands))
        requirements += met
        matched.append(objects if min(met) == 1 else ())
    excess = [min(1.0, clause.count / (len(found.get(clause.name, ())) + 1)) for clause in task.exclude]
    soft = sum(requirements) / len(requirements) * prod(excess)
    return Verdict(float(soft == 1), soft)
