"""Grids of pictures with captions, for reports and for nodes. Functions return PIL images; PIL is imported inside."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL import Image, ImageDraw

TILE = 128
"""Least side of an image in a grid, pixels; smaller ones are enlarged by a whole factor."""
GAP = 6
"""Between tiles, pixels."""
Colour = tuple[int, int, int]


def tile(
    images: Tensor,
    captions: Sequence[str] | None = None,
    columns: int = 4,
    *,
    column_labels: Sequence[str] | None = None,
    row_labels: Sequence[str] | None = None,
    shades: Sequence[Colour | None] | None = None,
    largest: int | None = None,
    font_size: int = 12,
) -> Image.Image:
    """A grid of images (B, 3, H, W) in [0, 1], small ones enlarged, each with its caption below.

    captions may have several lines; what is too long for its column is cut. column_labels stand above the first row,
    row_labels left of the first column; shades: the ground of each caption; largest: longest side of an image in the
    grid, pixels, to which larger ones are shrunk.
    """
    from PIL import Image

    height, width = images.shape[-2:]
    side, resample = max(height, width), Image.Resampling.NEAREST
    if largest is not None and side > largest:
        h, w = max(1, round(height * largest / side)), max(1, round(width * largest / side))
        resample = Image.Resampling.LANCZOS
    else:
        factor = max(1, math.ceil(TILE / side))
        h, w = height * factor, width * factor
    line = round(1.25 * font_size)
    text = 3 + line * (1 + max(c.count("\n") for c in captions)) if captions else 0
    columns = min(columns, len(images))
    rows = math.ceil(len(images) / columns)
    top = line + 3 if column_labels else 0
    left = math.ceil(max(text_width(label, font_size) for label in row_labels)) + 2 * GAP if row_labels else 0
    sheet, draw = canvas(left + columns * (w + GAP) + GAP, top + rows * (h + text + GAP) + GAP, font_size)
    for n, image in enumerate((images.clamp(0, 1) * 255).round().byte().movedim(1, -1).cpu().numpy()):
        x, y = left + GAP + n % columns * (w + GAP), top + GAP + n // columns * (h + text + GAP)
        sheet.paste(Image.fromarray(image).resize((w, h), resample), (x, y))
        if captions:
            if shades and shades[n]:
                draw.rectangle((x, y + h, x + w - 1, y + h + text - 1), fill=shades[n])
            for i, words in enumerate(captions[n].split("\n")):
                draw.text((x + 2, y + h + 2 + i * line), fit(draw, words, w), fill="black")
    for n, label in enumerate(column_labels or ()):
        draw.text((left + GAP + n * (w + GAP) + 2, GAP - 1), fit(draw, label, w), fill="black")
    for n, label in enumerate(row_labels or ()):
        y = top + GAP + n * (h + text + GAP) + (h - line) // 2
        draw.text((GAP, y), label, fill="black")
    return sheet


def titled(picture: Image.Image, title: str, font_size: int = 16) -> Image.Image:
    """The picture under a line of text, which is cut where it is longer than the picture is wide."""
    head = round(1.25 * font_size) + GAP
    sheet, draw = canvas(picture.width, picture.height + head, font_size)
    draw.text((GAP + 2, GAP - 1), fit(draw, title, picture.width - 2 * GAP), fill="black")
    sheet.paste(picture, (0, head))
    return sheet


def arrange(pictures: Sequence[Image.Image], columns: int = 1, gap: int = 0) -> Image.Image:
    """Pictures of any size in rows of `columns`, `gap` pixels apart."""
    rows = [pictures[i : i + columns] for i in range(0, len(pictures), columns)]
    widths = [max(p.width for p in pictures[c::columns]) for c in range(min(columns, len(pictures)))]
    heights = [max(p.height for p in row) for row in rows]
    sheet, _ = canvas(sum(widths) + gap * (len(widths) - 1), sum(heights) + gap * (len(heights) - 1))
    for r, row in enumerate(rows):
        for c, picture in enumerate(row):
            sheet.paste(picture, (sum(widths[:c]) + gap * c, sum(heights[:r]) + gap * r))
    return sheet


def before_after(
    before: Tensor,
    after: Tensor,
    titles: Sequence[str],
    captions: Sequence[tuple[str, str]],
    *,
    columns: int = 2,
    largest: int | None = None,
) -> Image.Image:
    """Pairs of images: before and after (B, 3, H, W) in [0, 1] side by side, two captions below, a title above."""
    pairs = [
        titled(tile(torch.stack(pair), two, 2, largest=largest, font_size=14), title)
        for pair, title, two in zip(zip(before, after, strict=True), titles, captions, strict=True)
    ]
    return arrange(pairs, columns, 2 * GAP)


def canvas(width: int, height: int, font_size: int = 12) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    """A white sheet and a pen with the font."""
    from PIL import Image, ImageDraw

    sheet = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(sheet)
    draw.font = font(font_size)
    return sheet, draw


def font(size: int):
    """Pillow's own font."""
    from PIL import ImageFont

    return ImageFont.load_default(size=size)


def text_width(text: str, font_size: int) -> float:
    """Width of a line of text, pixels."""
    return font(font_size).getlength(text)


def fit(draw: ImageDraw.ImageDraw, text: str, width: int) -> str:
    """The text cut so that it fits `width` pixels."""
    if draw.textlength(text) <= width:
        return text
    while text and draw.textlength(text + "...") > width:
        text = text[:-1]
    return text + "..."
