"""Line and bar plots with axes, ticks, labels and a legend, drawn by PIL: for nodes, where there is no matplotlib.

All is drawn at twice the size and halved at the end, which smooths the lines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .pictures import Colour, canvas, fit, font

if TYPE_CHECKING:
    from PIL import Image

PALETTE: tuple[Colour, ...] = (
    (0, 114, 178),
    (213, 94, 0),
    (0, 158, 115),
    (204, 121, 167),
    (86, 180, 233),
    (230, 159, 0),
    (90, 90, 90),
)
"""Colours that colour-blind readers tell apart (Okabe & Ito)."""

FAINT: Colour = (190, 198, 206)
GRID: Colour = (228, 232, 236)
INK: Colour = (40, 48, 56)
ALARM: Colour = (198, 40, 40)
SCALE = 2
LEGEND_SIZE = 300
"""Longest text of the legend, pixels."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line, or one set of bars."""

    y: Sequence[float]
    """Values; a NaN or infinite one is a gap."""
    x: Sequence[float] | None = None
    """Places, ascending; None takes 0, 1, 2, ..."""
    label: str = ""
    """Text in the legend; none where empty."""
    bars: bool = False
    """Bars from 0 instead of a line."""
    faint: bool = False
    """A thin grey line, for what stands behind others."""

    def points(self) -> list[tuple[float, float]]:
        """(x, y) of all values."""
        return list(zip(self.x if self.x is not None else range(len(self.y)), self.y, strict=True))


def nice_ticks(low: float, high: float, count: int = 6, whole: bool = False) -> list[float]:
    """About `count` round values (1, 2 or 5 times a power of ten) from low to high; only whole numbers if asked."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    step = max(1.0, step) if whole else step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [n * step for n in range(first, last + 1)]


def tick_text(value: float, step: float) -> str:
    """A tick's value with as many decimals as its step needs."""
    if max(abs(value), step) >= 1e5 or 0 < step < 1e-4:
        return f"{value:.3g}"
    return f"{value:.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"


def span(values: Sequence[float], with_zero: bool) -> tuple[float, float]:
    """Range of an axis that shows all finite values with a little room."""
    finite = [v for v in values if math.isfinite(v)] + ([0.0] if with_zero else [])
    if not finite:
        return 0.0, 1.0
    low, high = min(finite), max(finite)
    room = 0.06 * (high - low)
    if room <= 1e-9 * max(abs(low), abs(high)):
        room = max(0.1 * abs(high), 0.05)
    return low - room, high + room


def plot(
    series: Sequence[Series],
    *,
    title: str = "",
    x_label: str = "",
    y_label: str = "",
    marks: Sequence[float] = (),
    mark_label: str = "",
    width: int = 720,
    height: int = 380,
) -> Image.Image:
    """A plot of `width` x `height` pixels; what comes later is drawn over what comes before.

    Bars of several series stand side by side. An empty plot shows its axes. marks: places in x of red dashed lines from
    top to bottom, whose text in the legend is mark_label.
    """
    s = SCALE
    sheet, draw = canvas(width * s, height * s, 13 * s)
    small, large = font(13 * s), font(16 * s)
    every = [point for one in series for point in one.points()]
    has_bars = any(one.bars for one in series)
    x_values = [*(x for x, _ in every), *marks]
    x_low, x_high = (min(x_values), max(x_values)) if x_values else (0, 1)
    room = 0.6 if has_bars else 0.03 * (x_high - x_low) or 0.5
    x_low, x_high = x_low - room, x_high + room
    y_low, y_high = span([y for _, y in every], has_bars)
    y_ticks = nice_ticks(y_low, y_high, max(3, height // 50))
    y_texts = [tick_text(v, y_ticks[1] - y_ticks[0] if len(y_ticks) > 1 else abs(y_ticks[0]) or 1) for v in y_ticks]
    whole = all(float(x).is_integer() for x in x_values)
    x_ticks = nice_ticks(x_low, x_high, max(3, width // 55), whole)

    top = 10 * s
    if title:
        draw.text((12 * s, top), fit(draw, title, (width - 24) * s * 13 // 16), fill=INK, font=large)
        top += 26 * s
    keys = [(one.label, _colour(series, n)) for n, one in enumerate(series)]
    top = _legend(draw, [*keys, (mark_label, ALARM)] if marks else keys, top, width * s)
    if y_label:
        draw.text((12 * s, top), y_label, fill=INK, font=small)
        top += 20 * s
    left = 20 * s + round(max(draw.textlength(text) for text in y_texts))
    right, bottom = (width - 14) * s, (height - (46 if x_label else 28)) * s

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            left + (x - x_low) / (x_high - x_low) * (right - left),
            bottom - (y - y_low) / (y_high - y_low) * (bottom - top),
        )

    for value, text in zip(y_ticks, y_texts, strict=True):
        y = at(0, value)[1]
        draw.line((left, y, right, y), fill=GRID, width=s)
        draw.text((left - 6 * s, y), text, fill=INK, anchor="rm", font=small)
    step = x_ticks[1] - x_ticks[0] if len(x_ticks) > 1 else 1
    for value in x_ticks:
        x = at(value, 0)[0]
        draw.line((x, bottom, x, bottom + 4 * s), fill=INK, width=s)
        draw.text((x, bottom + 7 * s), tick_text(value, step), fill=INK, anchor="mt", font=small)
    if x_label:
        draw.text(((left + right) / 2, (height - 8) * s), x_label, fill=INK, anchor="mb", font=small)

    for mark in marks:
        _dashed(draw, at(mark, 0)[0], top, bottom)
    places = sorted({x for one in series if one.bars for x, _ in one.points()})
    slot = 0.8 * min((b - a for a, b in zip(places, places[1:], strict=False)), default=1.0)
    sets = [n for n, one in enumerate(series) if one.bars]
    for n, one in enumerate(series):
        if one.bars:
            start, thick = -slot / 2 + slot * sets.index(n) / len(sets), slot / len(sets)
            for x, y in one.points():
                if math.isfinite(y):
                    (x0, y0), (x1, y1) = at(x + start, max(y, 0)), at(x + start + thick, min(y, 0))
                    draw.rectangle((x0, y0, x1, y1), fill=_colour(series, n))
    if y_low < 0 < y_high:
        y = at(0, 0)[1]
        draw.line((left, y, right, y), fill=INK, width=s)
    draw.line((left, top, left, bottom, right, bottom), fill=INK, width=s)
    for n, one in enumerate(series):
        if not one.bars:
            _line(
                draw, [at(x, y) if math.isfinite(y) else None for x, y in one.points()], _colour(series, n), one.faint
            )
    return sheet.reduce(s)


def _colour(series: Sequence[Series], n: int) -> Colour:
    """Colour of series n: that of its place among those that are not faint."""
    if series[n].faint:
        return FAINT
    return PALETTE[sum(not one.faint for one in series[:n]) % len(PALETTE)]


def _line(draw, points: Sequence[tuple[float, float] | None], colour: Colour, faint: bool) -> None:
    width, dot = (3 * SCALE // 2, 0) if faint else (2 * SCALE, 3 * SCALE if len(points) <= 40 else 0)
    run: list[tuple[float, float]] = []
    for point in [*points, None]:
        if point is not None:
            run.append(point)
            continue
        if len(run) > 1:
            draw.line(run, fill=colour, width=width, joint="curve")
        for x, y in run if dot or len(run) == 1 else ():
            r = dot or 2 * SCALE
            draw.ellipse((x - r, y - r, x + r, y + r), fill=colour)
        run = []


def _dashed(draw, x: float, top: float, bottom: float) -> None:
    dash = 6 * SCALE
    for y in range(round(top), round(bottom), 2 * dash):
        draw.line((x, y, x, min(y + dash, bottom)), fill=ALARM, width=3 * SCALE // 2)


def _legend(draw, keys: Sequence[tuple[str, Colour]], top: int, width: int) -> int:
    """Draw the legend, (text, colour) each, in as many rows as it needs; returns where it ends."""
    s = SCALE
    x, y = 12 * s, top
    for label, colour in keys:
        if label:
            text = fit(draw, label, LEGEND_SIZE * s)
            need = 18 * s + draw.textlength(text) + 16 * s
            if x > 12 * s and x + need > width:
                x, y = 12 * s, y + 20 * s
            draw.rectangle((x, y + 3 * s, x + 12 * s, y + 13 * s), fill=colour)
            draw.text((x + 18 * s, y), text, fill=INK)
            x += need
    return y + 24 * s if x > 12 * s else y
