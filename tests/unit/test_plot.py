"""Plots: round ticks, and points and bars where their values are."""

import math

import pytest
import torch

from sfgrpo.plot import FAINT, PALETTE, Series, nice_ticks, plot, span, tick_text


@pytest.mark.parametrize(
    "low, high, count, whole, ticks",
    (
        (0, 10, 5, False, [0, 2, 4, 6, 8, 10]),
        (-0.3, 0.42, 6, False, [-0.2, 0, 0.2, 0.4]),
        (0.93, 1.07, 5, False, [0.95, 1.0, 1.05]),
        (0, 3, 6, False, [0, 0.5, 1, 1.5, 2, 2.5, 3]),
        (0, 3, 6, True, [0, 1, 2, 3]),
        (-0.6, 10.6, 3, True, [0, 5, 10]),
        (0, 99e6, 6, False, [0, 2e7, 4e7, 6e7, 8e7]),
    ),
)
def test_ticks_are_round(low, high, count, whole, ticks):
    assert nice_ticks(low, high, count, whole) == pytest.approx(ticks, abs=1e-9)


@pytest.mark.parametrize(
    "value, step, text",
    (
        (0.6, 0.2, "0.6"),
        (1.05, 0.05, "1.05"),
        (10, 5, "10"),
        (-0.001, 0.0005, "-0.0010"),
        (2e7, 2e7, "2e+07"),
        (0.5, 0.1, "0.5"),
    ),
)
def test_ticks_are_written_with_the_decimals_they_need(value, step, text):
    assert tick_text(value, step) == text


def test_an_axis_shows_all_finite_values():
    assert span([1.0, 2.0, math.nan, math.inf], False) == pytest.approx((0.94, 2.06))
    assert span([1.0, 2.0], True) == pytest.approx((-0.12, 2.12))
    assert span([], False) == span([math.nan], False) == (0.0, 1.0)
    for value in (0.0, 1e-9, 3.0, -7e6):
        low, high = span([value, value], False)
        assert low < value < high


def where(picture, colour, tolerance=8):
    """(N, 2) rows and columns of the pixels of a colour."""
    pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(picture.height, picture.width, 3)
    return ((pixels.int() - torch.tensor(colour)).abs().amax(-1) <= tolerance).nonzero()


def test_a_line_goes_through_its_points():
    y = [0.0, 1.0, 0.25, 0.5]
    picture = plot([Series(y=y)], width=400, height=300)
    dots = where(picture, PALETTE[0]).float()
    left, right = float(dots[:, 1].min()), float(dots[:, 1].max())
    rows = []
    for n in range(4):
        column = left + 3 + (right - left - 6) * n / 3
        near = dots[(dots[:, 1] - column).abs() <= 1]
        rows.append(float(near[:, 0].mean()))
    # Between the lowest and the highest point the height is the value.
    heights = [(rows[0] - r) / (rows[0] - rows[1]) for r in rows]
    assert heights == pytest.approx(y, abs=0.03)


def test_a_value_that_is_not_finite_is_a_gap():
    whole = plot([Series(y=[1.0, 1.0, 1.0, 1.0, 2.0])], width=400)
    gap = plot([Series(y=[1.0, math.nan, 1.0, 1.0, 2.0])], width=400)
    columns = where(gap, PALETTE[0])[:, 1].unique()
    filled = where(whole, PALETTE[0])[:, 1].unique()
    missing = sorted(set(filled.tolist()) - set(columns.tolist()))
    # From the first point to the third is half the plot.
    assert len(missing) == pytest.approx(len(filled) / 2, rel=0.1)
    assert missing == list(range(missing[0], missing[-1] + 1))


def test_bars_stand_on_zero_with_the_height_of_their_value():
    values = [0.4, -0.2, math.nan, 0.1]
    picture = plot([Series(y=values, bars=True), Series(y=[0.2] * 4, bars=True)], width=500, height=300)
    first, second = where(picture, PALETTE[0]), where(picture, PALETTE[1])
    bars = split_columns(first)
    assert len(bars) == 3 and len(split_columns(second)) == 4
    heights = [int(b[:, 0].max() - b[:, 0].min()) + 1 for b in bars]
    scale = heights[0] / 0.4
    assert [h / scale for h in heights] == pytest.approx([0.4, 0.2, 0.1], abs=0.02)
    zero = int(bars[0][:, 0].max())
    assert abs(int(bars[2][:, 0].max()) - zero) <= 1 and abs(int(bars[1][:, 0].min()) - zero) <= 3
    widths = [int(b[:, 1].max() - b[:, 1].min()) for b in bars]
    assert max(widths) - min(widths) <= 1


def split_columns(points):
    """The points in groups without an empty column inside."""
    columns = points[:, 1].unique()
    starts = [columns[0]] + [b for a, b in zip(columns, columns[1:], strict=False) if b - a > 1]
    ends = [a for a, b in zip(columns, columns[1:], strict=False) if b - a > 1] + [columns[-1]]
    return [points[(points[:, 1] >= a) & (points[:, 1] <= b)] for a, b in zip(starts, ends, strict=True)]


def test_faint_lines_take_no_colour_of_the_palette():
    picture = plot([Series(y=[0.0, 1.0], faint=True), Series(y=[1.0, 0.0]), Series(y=[0.5, 0.5])])
    assert len(where(picture, FAINT, 16)) > 100
    assert len(where(picture, PALETTE[0])) > 100 and len(where(picture, PALETTE[1])) > 100
    assert len(where(picture, PALETTE[2])) == 0


def test_the_legend_has_an_entry_for_each_label_and_wraps():
    y = [0.0, 1.0]
    bare = plot([Series(y=y), Series(y=y)], width=300)
    short = plot([Series(y=y, label="one"), Series(y=y)], width=300)
    both = plot([Series(y=y, label="one"), Series(y=y, label="a label of some length")], width=300)
    long = plot([Series(y=y, label="a label of some length"), Series(y=y, label="another of that length")], width=300)

    def top(picture) -> int:
        """First row of the plot's left axis."""
        ink = where(picture, (40, 48, 56), 30)
        column = ink[:, 1].mode().values
        return int(ink[ink[:, 1] == column][:, 0].min())

    assert top(bare) < top(short) == top(both) < top(long) < 130
    assert len(where(short, PALETTE[0])) > len(where(bare, PALETTE[0]))


@pytest.mark.parametrize("size", ((200, 150), (720, 380), (1500, 900)))
@pytest.mark.parametrize(
    "series",
    ([], [Series(y=[])], [Series(y=[1.0])], [Series(y=[math.nan] * 3)], [Series(y=[1.0], bars=True)]),
    ids=("none", "empty", "one point", "nan", "one bar"),
)
def test_little_to_show_gives_a_plot_all_the_same(series, size):
    picture = plot(series, title="title", x_label="step", y_label="reward", width=size[0], height=size[1])
    assert picture.size == size and picture.mode == "RGB"
    assert len(where(picture, (40, 48, 56), 30)) > 100
    assert bool(len(where(picture, PALETTE[0]))) == (series != [] and bool(series[0].y) and series[0].y[0] == 1.0)


def test_a_mark_is_a_dashed_line_from_top_to_bottom():
    series = Series(y=[0.0, 1.0, 0.5], x=[0, 10, 20])

    def red(picture) -> list[int]:
        """Columns with more than 50 pixels of the mark's red."""
        pixels = torch.tensor(list(picture.getdata())).view(picture.height, picture.width, 3)
        is_red = (pixels[..., 0] > 180) & (pixels[..., 1:] < 130).all(-1)
        return (is_red.sum(0) > 50).nonzero().flatten().tolist()

    assert not red(plot([series]))
    found = red(plot([series], marks=[10], mark_label="alarm"))
    # The axis begins at the ticks' texts, so that its middle is a little right of the picture's.
    assert 1 <= len(found) <= 3 and 360 <= found[0] <= 400
