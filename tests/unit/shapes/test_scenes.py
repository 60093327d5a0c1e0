"""Placement and drawing, against geometry worked out a second time."""

import math

import pytest
import torch

from sfgrpo.shapes.captions import COLOUR_NAMES, SHAPES, all_captions, parse
from sfgrpo.shapes.scenes import (
    AREAS,
    CENTROIDS,
    GROUND_RANGE,
    PALETTE,
    RADIUS_RANGE,
    Scenes,
    coverage,
    holds,
    render,
    scenes_for,
)

SIDE = 32
TRIANGLE = ((0.0, -0.99), (1.1, 0.99), (-1.1, 0.99))


def inside(shape, x, y, r):
    """Whether a point is in the shape, from the definitions of a circle, square, triangle and cross."""
    x, y = x / r, y / r
    if shape == "circle":
        return math.hypot(x, y) <= 1
    if shape == "square":
        return abs(x) <= 0.9 and abs(y) <= 0.9
    if shape == "cross":
        return (abs(x) <= 1.05 and abs(y) <= 0.42) or (abs(x) <= 0.42 and abs(y) <= 1.05)
    sides = []
    for (ax, ay), (bx, by) in zip(TRIANGLE, TRIANGLE[1:] + TRIANGLE[:1], strict=True):
        sides.append((bx - ax) * (y - ay) - (by - ay) * (x - ax) >= 0)
    return all(sides)


def scene(*objects, ground=0.9):
    """One scene of (shape name, colour name, x, y, radius)."""
    k = 4
    filled = list(objects) + [("circle", "red", 0.0, 0.0, 1.0)] * (k - len(objects))
    return Scenes(
        shape=torch.tensor([[SHAPES.index(o[0]) for o in filled]]),
        colour=torch.tensor([[COLOUR_NAMES.index(o[1]) for o in filled]]),
        centre=torch.tensor([[o[2:4] for o in filled]]),
        radius=torch.tensor([[o[4] for o in filled]]),
        present=torch.arange(k).unsqueeze(0) < len(objects),
        ground=torch.tensor([ground]),
    )


@pytest.mark.parametrize("shape", range(4), ids=SHAPES)
def test_coverage_is_the_shape_with_a_soft_edge(shape):
    radius, wrong = 8.0, 0
    axis = torch.arange(-12, 12) + 0.37
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    alpha = coverage(torch.tensor(shape), x, y, torch.tensor(radius))
    assert bool(((alpha >= 0) & (alpha <= 1)).all())
    for xi, yi, a in zip(x.flatten().tolist(), y.flatten().tolist(), alpha.flatten().tolist(), strict=True):
        wrong += (a > 0.5) != inside(SHAPES[shape], xi, yi, radius) and abs(a - 0.5) > 1e-4
        # Fully in or out at a pixel and more from the outline, which lies within 1.5 radii.
        if all(inside(SHAPES[shape], xi + dx, yi + dy, radius) for dx in (-1, 0, 1) for dy in (-1, 0, 1)):
            assert a > 0.99
        if not any(inside(SHAPES[shape], xi + dx, yi + dy, radius) for dx in (-1, 0, 1) for dy in (-1, 0, 1)):
            assert a < 0.01 or (SHAPES[shape] == "triangle" and a < 0.2)
    assert wrong == 0
    assert not any(inside(SHAPES[shape], 1.5 * math.cos(a / 9), 1.5 * math.sin(a / 9), 1) for a in range(57))


@pytest.mark.parametrize("shape", range(4), ids=SHAPES)
def test_areas_and_centroids(shape):
    radius, n = 40.0, 128
    axis = torch.arange(n) + 0.5 - n / 2
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    alpha = coverage(torch.tensor(shape), x, y, torch.tensor(radius)).double()
    assert float(alpha.sum()) / radius**2 == pytest.approx(AREAS[shape], rel=3e-3)
    assert float((alpha * y).sum() / alpha.sum()) / radius == pytest.approx(CENTROIDS[shape], abs=2e-3)
    assert float((alpha * x).sum() / alpha.sum()) == pytest.approx(0, abs=1e-4)


def test_triangles_point_up():
    image = render(scene(("triangle", "black", 16.0, 16.0, 6.0)))[0, 0]
    dark = (image < 0.5).sum(1)
    assert int(dark[11]) < int(dark[16]) < int(dark[20])


def test_render_by_hand():
    image = render(scene(("square", "red", 8.0, 20.0, 5.0), ("circle", "blue", 24.0, 8.0, 4.0), ground=0.9))
    assert image.shape == (1, 3, SIDE, SIDE) and image.dtype == torch.float32
    palette = torch.tensor(PALETTE)
    # Row is y, column is x. The square reaches 4.5 from its centre: x in 3.5..12.5.
    torch.testing.assert_close(image[0, :, 20, 8], palette[0])
    torch.testing.assert_close(image[0, :, 8, 24], palette[2])
    torch.testing.assert_close(image[0, :, 8, 8], torch.full((3,), 0.9))
    torch.testing.assert_close(image[0, :, 20, 4], palette[0])
    torch.testing.assert_close(image[0, :, 20, 3], 0.5 * palette[0] + 0.5 * 0.9)
    torch.testing.assert_close(image[0, :, 20, 2], torch.full((3,), 0.9))


def test_every_caption_has_its_objects_placed_apart_inside_and_related():
    captions = all_captions()
    scenes = scenes_for(captions, torch.Generator().manual_seed(0))
    assert torch.equal(scenes.present.sum(1), torch.tensor([c.count for c in captions]))
    grounds, radii = scenes.ground, scenes.radius[scenes.present]
    assert GROUND_RANGE[0] <= float(grounds.min()) < float(grounds.max()) <= GROUND_RANGE[1]
    assert RADIUS_RANGE[0] <= float(radii.min()) < float(radii.max()) <= RADIUS_RANGE[1]
    free_colours = set()
    for i, caption in enumerate(captions):
        asked = [(s, c) for s, c, n in caption.objects for _ in range(n)]
        for j, (shape, colour) in enumerate(asked):
            assert int(scenes.shape[i, j]) == shape
            assert colour is None or int(scenes.colour[i, j]) == colour
            free_colours |= {int(scenes.colour[i, j])} if colour is None else set()
            x, y = scenes.centre[i, j].tolist()
            r = float(scenes.radius[i, j])
            assert 1.15 * r < min(x, y) and max(x, y) < SIDE - 1.15 * r
            for k in range(j):
                gap = math.dist((x, y), scenes.centre[i, k].tolist()) - 1.15 * (r + float(scenes.radius[i, k]))
                assert gap >= 2.0 - 1e-4
        if caption.relation is not None:
            (x0, y0), (x1, y1) = scenes.centre[i, :2].tolist()
            along = (x1 - x0, x0 - x1, y1 - y0, y0 - y1)[caption.relation]
            across = abs(y1 - y0) if caption.relation < 2 else abs(x1 - x0)
            assert along >= 8.0 and along > across
    assert free_colours == set(range(6))


def test_scenes_repeat_with_the_generator():
    captions = [parse("three circles"), parse("a red circle")]
    first, second, third = (scenes_for(captions, torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert torch.equal(render(first), render(second)) and not torch.equal(render(first), render(third))


def test_colours_and_ground_of_rendered_captions():
    images = render(scenes_for([parse(f"a {c} square") for c in COLOUR_NAMES], torch.Generator().manual_seed(0)))
    for image, colour in zip(images, PALETTE, strict=True):
        distance = (image - torch.tensor(colour).view(3, 1, 1)).norm(dim=0)
        assert int((distance < 1e-4).sum()) >= 25
        assert image[:, 0, 0].unique().numel() == 1


@pytest.mark.parametrize(
    "relation, first, second, expected",
    (
        (0, (5.0, 10.0), (15.0, 12.0), True),
        (0, (15.0, 10.0), (5.0, 12.0), False),
        (1, (15.0, 10.0), (5.0, 12.0), True),
        (1, (5.0, 10.0), (15.0, 12.0), False),
        (2, (10.0, 5.0), (12.0, 15.0), True),
        (2, (10.0, 15.0), (12.0, 5.0), False),
        (3, (10.0, 15.0), (12.0, 5.0), True),
        (3, (10.0, 5.0), (12.0, 15.0), False),
        (0, (5.0, 10.0), (12.9, 10.0), False),
        (0, (5.0, 10.0), (13.0, 10.0), True),
        (0, (5.0, 10.0), (15.0, 21.0), False),
        (2, (10.0, 5.0), (21.0, 15.0), False),
    ),
)
def test_relations_by_hand(relation, first, second, expected):
    assert bool(holds(torch.tensor([relation]), torch.tensor([first]), torch.tensor([second]))) is expected


def test_relations_with_another_offset():
    first, second = torch.tensor([[5.0, 10.0]]), torch.tensor([[8.5, 10.0]])
    assert bool(holds(torch.tensor([0]), first, second, 3.0)) and not bool(holds(torch.tensor([0]), first, second, 4.0))
