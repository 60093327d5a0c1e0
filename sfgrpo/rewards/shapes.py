"""The shapes verifier: does a picture show exactly what its caption asks for?

Steps, for a whole batch at once: the ground is the median of the border; what differs from it falls into
connected components (scipy.ndimage.label); the colour of a component is the nearest of the palette, and its shape
the template (`sfgrpo.shapes.scenes.coverage`) of the same area and centroid with the highest soft IoU.

    quality  = ramp(IoU) * ramp(colour), each 0 at "not recognisable" and 1 at "clean"
    strict   = 1 if the components are exactly the objects asked for, each of them clean enough, else 0
    partial  = mean match of the asked objects * min(1, asked / seen)
    soft     = partial^2 * (1/2 + strict/2)

`soft` is smooth where a picture is half right and is capped at 1/2 until everything is right, so that it cannot
rise for long while `strict` falls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..shapes.captions import SHAPES, Caption, parse
from ..shapes.scenes import AREAS, CENTROIDS, IMAGE_SIZE, PALETTE, coverage, holds

FOREGROUND = 0.3
"""Least RGB distance (of at most sqrt 3) from the ground."""

MIN_AREA = 14.0
"""Components of less covered area, in pixels, are specks: no objects, but a picture with one does not pass. Half of the
smallest shape that is drawn."""

IOU_RAMP = (0.70, 0.88)
"""Soft IoU with the best template: 0 below the first, 1 above the second."""

COLOUR_RAMP = (0.45, 0.20)
"""RGB distance to the palette colour: 0 above the first, 1 below the second."""

CLEAN = 0.5
"""Least quality of every object in a picture that passes."""

RELATION_OFFSET = 3.0
"""Least offset of two centres along the axis that a relation names, pixels."""

WINDOW = 18
"""Side of the crop in which a component meets its templates, pixels."""


@dataclass
class Objects:
    """M components found in a batch of N pictures."""

    image: Tensor
    """(M,) int64, index of the picture."""
    shape: Tensor
    """(M,) int64, index into SHAPES of the best template."""
    shape_quality: Tensor
    """(M, len(SHAPES)) in [0, 1], by template."""
    colour: Tensor
    """(M,) int64, index into COLOUR_NAMES of the nearest colour."""
    colour_quality: Tensor
    """(M, len(COLOUR_NAMES)) in [0, 1], by colour."""
    centre: Tensor
    """(M, 2) float32, nominal centre (x, y) in pixels under the best template."""
    area: Tensor
    """(M,) float32, covered area in pixels."""


def find_objects(images: Tensor) -> Objects:
    """Find the components of (N, 3, H, W) pictures in [0, 1]."""
    import numpy as np
    from scipy import ndimage

    images = images.detach().float().cpu().clamp(0, 1)
    n, _, height, width = images.shape
    border = torch.cat([images[..., 0, :], images[..., -1, :], images[..., 1:-1, 0], images[..., 1:-1, -1]], dim=-1)
    ground = border.median(dim=-1).values.view(n, 3, 1, 1)
    difference = (images - ground).square().sum(1).sqrt()
    # 8-connected within a picture, never across pictures.
    structure = np.zeros((3, 3, 3), dtype=bool)
    structure[1] = True
    labels, count = ndimage.label((difference > FOREGROUND).numpy(), structure=structure)
    label = torch.from_numpy(labels).long()
    owner = torch.zeros(count + 1, dtype=torch.int64)
    owner[label.flatten()] = torch.arange(n).repeat_interleave(height * width)

    # The component's own colour: mean over its pixels that differ from the ground nearly as much as its extreme.
    peak = torch.zeros(count + 1).scatter_reduce_(0, label.flatten(), difference.flatten(), "amax")
    core = (difference > 0.75 * peak[label]) & (label > 0)
    weight = torch.zeros(count + 1).index_add_(0, label[core], torch.ones(int(core.sum())))
    own = torch.zeros(count + 1, 3).index_add_(0, label[core], images.movedim(1, -1)[core])
    own = own / weight.clamp(min=1).unsqueeze(-1)

    # Soft coverage: where a pixel lies on the way from the ground to the component's colour. One dilation of the
    # labels takes in the anti-aliased rim.
    grown = torch.from_numpy(ndimage.grey_dilation(labels, footprint=structure)).long()
    label = torch.where(label > 0, label, grown)
    axis = own[label] - ground.movedim(1, -1)
    offset = images.movedim(1, -1) - ground.movedim(1, -1)
    alpha = ((offset * axis).sum(-1) / axis.square().sum(-1).clamp(min=1e-6)).clamp(0, 1) * (label > 0)
    y, x = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
    flat = label.flatten()
    area = torch.zeros(count + 1).index_add_(0, flat, alpha.flatten())
    cx = torch.zeros(count + 1).index_add_(0, flat, (alpha * x).flatten()) / area.clamp(min=1e-6)
    cy = torch.zeros(count + 1).index_add_(0, flat, (alpha * y).flatten()) / area.clamp(min=1e-6)

    keep = torch.arange(1, count + 1)
    owner, own, area, centre = owner[keep], own[keep], area[keep], torch.stack([cx[keep], cy[keep]], dim=-1)
    iou = _template_iou(alpha, label, keep, owner, area, centre)
    best = iou.argmax(-1)
    centre[:, 1] -= (area / torch.tensor(AREAS)[best]).sqrt() * torch.tensor(CENTROIDS)[best]
    lo, hi = IOU_RAMP
    shape_quality = ((iou - lo) / (hi - lo)).clamp(0, 1)
    distance = (own.unsqueeze(1) - torch.tensor(PALETTE)).norm(dim=-1)
    far, near = COLOUR_RAMP
    nearest = distance == distance.amin(dim=-1, keepdim=True)
    colour_quality = ((far - distance) / (far - near)).clamp(0, 1) * nearest
    return Objects(
        image=owner,
        shape=best,
        shape_quality=shape_quality * (iou == iou.amax(-1, keepdim=True)),
        colour=distance.argmin(-1),
        colour_quality=colour_quality,
        centre=centre,
        area=area,
    )


def _template_iou(alpha: Tensor, label: Tensor, ids: Tensor, owner: Tensor, area: Tensor, centre: Tensor) -> Tensor:
    """Soft IoU (M, len(SHAPES)) of each component with the templates of its area and centroid."""
    half = WINDOW // 2
    height, width = alpha.shape[1:]
    grid = torch.arange(WINDOW) - half
    col = centre[:, 0].floor().long().view(-1, 1, 1) + grid.view(1, 1, -1)
    row = centre[:, 1].floor().long().view(-1, 1, 1) + grid.view(1, -1, 1)
    inside = (col >= 0) & (col < width) & (row >= 0) & (row < height)
    at = (owner.view(-1, 1, 1), row.clamp(0, height - 1), col.clamp(0, width - 1))
    crop = torch.where(inside & (label[at] == ids.view(-1, 1, 1)), alpha[at], torch.zeros(()))
    kind = torch.arange(len(SHAPES)).view(1, -1, 1, 1)
    radius = (area.unsqueeze(-1) / torch.tensor(AREAS)).sqrt()
    radius = radius.view(len(ids), len(SHAPES), 1, 1)
    shift = radius * torch.tensor(CENTROIDS).view(1, -1, 1, 1)
    x = (col + 0.5 - centre[:, 0].view(-1, 1, 1)).unsqueeze(1)
    y = (row + 0.5 - centre[:, 1].view(-1, 1, 1)).unsqueeze(1) + shift
    template = coverage(kind, x, y, radius)
    crop = crop.unsqueeze(1)
    overlap = torch.minimum(crop, template).sum((-1, -2))
    # The union counts the whole component, also what lies outside the crop.
    return overlap / (area.unsqueeze(-1) + template.sum((-1, -2)) - overlap).clamp(min=1e-6)


@dataclass
class Verdict:
    """Scores of N pictures."""

    strict: Tensor
    """(N,) float32, 1 for a picture that shows exactly what its caption asks for, else 0."""
    soft: Tensor
    """(N,) float32 in [0, 1]; 1/2 or less where strict is 0."""


def verify(images: Tensor, captions: Sequence[Caption]) -> Verdict:
    """Hold (N, 3, H, W) pictures in [0, 1] against one caption each."""
    found = find_objects(images)
    large = (found.area >= MIN_AREA).numpy()
    by_image: list[list[int]] = [[] for _ in captions]
    flawed = [False] * len(captions)
    for m, image in enumerate(found.image.tolist()):
        if large[m]:
            by_image[image].append(m)
        else:
            flawed[image] = True
    shape, colour = found.shape_quality.numpy(), found.colour_quality.numpy()
    scores = []
    for caption, members, speck in zip(captions, by_image, flawed, strict=True):
        matches, chosen = _match(shape[members], colour[members], caption)
        asked, seen = caption.count, len(members)
        partial = sum(matches) / asked * min(1.0, asked / max(seen, 1))
        exact = seen == asked and min(matches) >= CLEAN and not speck
        if caption.relation is not None and not _related(found, members, chosen, caption.relation):
            partial, exact = partial / 2, False
        scores.append((float(exact), partial**2 * (1.0 if exact else 0.5)))
    strict, soft = torch.tensor(scores, dtype=torch.float32).reshape(-1, 2).unbind(1)
    return Verdict(strict, soft)


def _match(shape, colour, caption: Caption) -> tuple[list[float], list[int | None]]:
    """Give each asked object its best component, at most one each; the best assignment of all.

    shape, colour: qualities (seen, kinds) of the components of one picture. Returns the match in [0, 1] of each asked
    object, and which component was given to it.
    """
    from scipy.optimize import linear_sum_assignment

    asked = [(s, c) for s, c, number in caption.objects for _ in range(number)]
    matches, chosen = [0.0] * len(asked), [None] * len(asked)
    if len(shape):
        anything = colour.max(axis=1)
        quality = [shape[:, s] * (anything if c is None else colour[:, c]) for s, c in asked]
        for r, p in zip(*linear_sum_assignment(quality, maximize=True), strict=True):
            matches[r], chosen[r] = float(quality[r][p]), int(p)
    return matches, chosen


def _related(found: Objects, members: list[int], chosen: list[int | None], relation: int) -> bool:
    """Whether the two asked objects were found and stand in the relation."""
    if None in chosen:
        return False
    first, second = found.centre[[members[p] for p in chosen]].split(1)
    return bool(holds(torch.tensor([relation]), first, second, RELATION_OFFSET))


def shapes_reward(
    images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping] | None = None, *, mode: str = "soft"
) -> Tensor:
    """Score (N, 3, H, W) pictures in [0, 1] by the verifier; returns (N,) float32 in [0, 1].

    mode: `soft` or `strict` (see the module's docstring). Raises ValueError for a prompt that is no caption of
    the domain, for another mode or for pictures of another size.
    """
    if mode not in ("soft", "strict"):
        raise ValueError(f"mode must be 'soft' or 'strict', not {mode!r}")
    if images.shape[-2:] != (IMAGE_SIZE, IMAGE_SIZE):
        height, width = images.shape[-2:]
        raise ValueError(f"the shapes verifier reads {IMAGE_SIZE} x {IMAGE_SIZE} pictures, not {width} x {height}")
    verdict = verify(images, [parse(p) for p in prompts])
    return verdict.soft if mode == "soft" else verdict.strict
