"""Coloured shapes on plain ground: how they are placed and drawn.

A picture is 32 x 32 RGB with one to four shapes. Edges are anti-aliased with the signed distance d to the
outline in pixels: coverage = clamp(1/2 - d, 0, 1). The same `coverage` draws the training pictures and the
templates that the verifier (`sfgrpo.rewards.shapes`) holds a picture against.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .captions import COLOUR_NAMES, Caption

IMAGE_SIZE = 32
"""Side of a picture, pixels."""

MAX_SHAPES = 4

PALETTE = (
    (0.90, 0.12, 0.12),
    (0.10, 0.65, 0.20),
    (0.12, 0.25, 0.90),
    (0.95, 0.80, 0.05),
    (0.60, 0.15, 0.75),
    (0.08, 0.08, 0.08),
)
"""RGB of COLOUR_NAMES, in their order."""

GROUND_RANGE = (0.84, 0.94)
"""Grey level of the ground."""

RADIUS_RANGE = (3.6, 4.9)
"""Nominal radius of a shape, pixels; no shape reaches further than 1.5 radii from its centre."""

GAP = 2.0
"""Least distance between two centres beyond 1.15 of both radii, pixels. The corners of squares and triangles reach
further: in about 1 of 800 pictures two of them come so close that the verifier sees one component."""

RELATION_OFFSET = 8.0
"""Least offset of the centres along the axis that a relation names, pixels; it also exceeds the other axis's."""

# Of a shape with nominal radius 1: its area, and how far its centroid lies below its nominal centre.
AREAS = (3.141592653589793, 1.8**2, 2.2 * 1.98 / 2, 2 * 2.1 * 0.84 - 0.84**2)
CENTROIDS = (0.0, 0.0, 0.99 - 1.98 / 3, 0.0)


@dataclass
class Scenes:
    """N scenes of up to K = MAX_SHAPES shapes."""

    shape: Tensor
    """(N, K) int64, index into SHAPES."""
    colour: Tensor
    """(N, K) int64, index into COLOUR_NAMES."""
    centre: Tensor
    """(N, K, 2) float32, (x, y) in pixels from the top left corner."""
    radius: Tensor
    """(N, K) float32, pixels."""
    present: Tensor
    """(N, K) bool."""
    ground: Tensor
    """(N,) float32, grey level in [0, 1]."""


def scenes_for(captions: list[Caption], generator: torch.Generator) -> Scenes:
    """Draw one random scene for each caption; free colours, places and sizes are uniform."""
    n = len(captions)
    shape = torch.zeros(n, MAX_SHAPES, dtype=torch.int64)
    colour = torch.randint(len(COLOUR_NAMES), (n, MAX_SHAPES), generator=generator)
    count = torch.tensor([c.count for c in captions])
    relation = torch.tensor([-1 if c.relation is None else c.relation for c in captions])
    for i, caption in enumerate(captions):
        j = 0
        for s, c, number in caption.objects:
            shape[i, j : j + number] = s
            if c is not None:
                colour[i, j : j + number] = c
            j += number
    centre, radius = place(count, relation, generator)
    lo, hi = GROUND_RANGE
    ground = lo + (hi - lo) * torch.rand(n, generator=generator)
    return Scenes(shape, colour, centre, radius, torch.arange(MAX_SHAPES) < count.unsqueeze(1), ground)


def coverage(shape: Tensor, x: Tensor, y: Tensor, radius: Tensor) -> Tensor:
    """Anti-aliased coverage in [0, 1] at offsets (x, y) pixels from the nominal centre; arguments broadcast.

    `shape` holds indices into SHAPES. y points down, as rows of an image do.
    """
    ax, ay = x.abs(), y.abs()
    circle = torch.sqrt(x * x + y * y) - radius
    square = torch.maximum(ax, ay) - 0.9 * radius
    # Upright triangle: base 2.2 r, height 1.98 r, centred on its bounding box.
    slant = (1.98 * ax - 1.1 * (y + 0.99 * radius)) / (1.98**2 + 1.1**2) ** 0.5
    triangle = torch.maximum(slant, y - 0.99 * radius)
    arm_h = torch.maximum(ax - 1.05 * radius, ay - 0.42 * radius)
    arm_v = torch.maximum(ax - 0.42 * radius, ay - 1.05 * radius)
    cross = torch.minimum(arm_h, arm_v)
    distance = torch.where(
        shape == 0, circle, torch.where(shape == 1, square, torch.where(shape == 2, triangle, cross))
    )
    return (0.5 - distance).clamp(0, 1)


def render(scenes: Scenes) -> Tensor:
    """Draw scenes; returns (N, 3, 32, 32) float32 in [0, 1]."""
    n, k = scenes.shape.shape
    axis = torch.arange(IMAGE_SIZE, dtype=torch.float32) + 0.5
    palette = torch.tensor(PALETTE)
    image = scenes.ground.view(n, 1, 1, 1).expand(n, 3, IMAGE_SIZE, IMAGE_SIZE).clone()
    for j in range(k):
        x = axis.view(1, 1, -1) - scenes.centre[:, j, 0].view(n, 1, 1)
        y = axis.view(1, -1, 1) - scenes.centre[:, j, 1].view(n, 1, 1)
        alpha = coverage(scenes.shape[:, j].view(n, 1, 1), x, y, scenes.radius[:, j].view(n, 1, 1))
        alpha = (alpha * scenes.present[:, j].view(n, 1, 1)).unsqueeze(1)
        image = image * (1 - alpha) + palette[scenes.colour[:, j]].view(n, 3, 1, 1) * alpha
    return image


def place(count: Tensor, relation: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw centres and radii by rejection: inside the picture, GAP apart, and in the asked relation.

    count: (N,) int64 in 1..MAX_SHAPES. relation: (N,) int64, index into RELATIONS for the first shape against
    the second, or -1. Returns centre (N, K, 2) and radius (N, K); entries beyond `count` are unused.
    """
    n = len(count)
    centre = torch.zeros(n, MAX_SHAPES, 2)
    radius = torch.zeros(n, MAX_SHAPES)
    todo = torch.arange(n)
    lo, hi = RADIUS_RANGE
    while len(todo):
        m = len(todo)
        r = lo + (hi - lo) * torch.rand(m, MAX_SHAPES, generator=generator)
        margin = 1.15 * r.unsqueeze(-1) + 0.5
        c = margin + (IMAGE_SIZE - 2 * margin) * torch.rand(m, MAX_SHAPES, 2, generator=generator)
        free = (c.unsqueeze(1) - c.unsqueeze(2)).norm(dim=-1) - 1.15 * (r.unsqueeze(1) + r.unsqueeze(2)) - GAP
        index = torch.arange(MAX_SHAPES)
        pair = (index.view(1, -1, 1) < index.view(1, 1, -1)) & (index.view(1, 1, -1) < count[todo].view(-1, 1, 1))
        fits = ((free >= 0) | ~pair).all(dim=-1).all(dim=-1)
        fits &= holds(relation[todo], c[:, 0], c[:, 1]) | (relation[todo] < 0)
        done = todo[fits]
        centre[done], radius[done] = c[fits], r[fits]
        todo = todo[~fits]
    return centre, radius


def holds(relation: Tensor, first: Tensor, second: Tensor, offset: float = RELATION_OFFSET) -> Tensor:
    """Whether `first` stands to `second` in each relation: (N,), (N, 2), (N, 2) -> (N,) bool.

    The offset along the named axis is at least `offset` pixels and exceeds the offset along the other.
    """
    d = second - first
    along = torch.where(relation % 2 == 0, 1.0, -1.0) * torch.where(relation < 2, d[:, 0], d[:, 1])
    across = torch.where(relation < 2, d[:, 1], d[:, 0]).abs()
    return (along >= offset) & (along > across)
