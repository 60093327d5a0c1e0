"""Grids of pictures, pixel by pixel."""

import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

from sfgrpo.pictures import arrange, before_after, text_width, tile, titled


def pixels(sheet) -> torch.Tensor:
    """(H, W, 3) uint8."""
    return torch.frombuffer(bytearray(sheet.tobytes()), dtype=torch.uint8).view(sheet.height, sheet.width, 3)


def random_images(count: int, height: int, width: int):
    levels = torch.randint(256, (count, 3, height, width), generator=torch.Generator().manual_seed(0))
    return levels / 255, levels.to(torch.uint8).movedim(1, -1)


def test_tile_enlarges_small_images_by_a_whole_factor():
    images, levels = random_images(5, 32, 32)
    sheet = pixels(tile(images, columns=3))
    gap, side = 6, 128  # 32 pixels enlarged four times
    assert sheet.shape == (2 * side + 3 * gap, 3 * side + 4 * gap, 3)
    covered = torch.zeros(sheet.shape[:2], dtype=torch.bool)
    for n in range(5):
        y, x = gap + n // 3 * (side + gap), gap + n % 3 * (side + gap)
        block = sheet[y : y + side, x : x + side]
        assert torch.equal(block, levels[n].repeat_interleave(4, 0).repeat_interleave(4, 1))
        covered[y : y + side, x : x + side] = True
    assert bool((sheet[~covered] == 255).all())


def test_tile_keeps_large_images_and_their_shape():
    images, levels = random_images(2, 130, 40)
    sheet = pixels(tile(images))
    assert sheet.shape == (130 + 12, 2 * 40 + 3 * 6, 3)
    assert torch.equal(sheet[6:136, 52:92], levels[1])
    wide, _ = random_images(1, 20, 50)  # 50 -> 150 is the first multiple that reaches 128
    assert tile(wide).size == (150 + 12, 60 + 12)


def test_tile_writes_captions_below_and_inside_their_column():
    images, levels = random_images(3, 64, 64)
    bare, long = tile(images, columns=2), "a very long caption that does not fit below an image " * 3
    sheet = tile(images, ["", "two words", long], columns=2)
    extra = (sheet.height - bare.height) // 2  # two rows of captions
    assert sheet.width == bare.width and 10 <= extra <= 30 and sheet.height == bare.height + 2 * extra
    full = pixels(sheet)
    row = 6 + 128 + extra
    for n, (y, x) in enumerate([(6, 6), (6, 140), (row + 6, 6)]):
        assert torch.equal(full[y : y + 128, x : x + 128], levels[n].repeat_interleave(2, 0).repeat_interleave(2, 1))

    def ink(y, x) -> torch.Tensor:
        return (full[y : y + extra, x : x + 128] < 255).any(-1)

    assert not ink(134, 6).any() and ink(134, 140).any() and ink(row + 134, 6).any()
    # The long one is cut before the image ends: nothing in the gap to its right or under the empty place beside it.
    assert not (full[row + 134 :, 134:] < 255).any()


def test_tile_clamps_and_rounds():
    image = torch.tensor([-1.0, 0.0, 0.499 / 255, 0.501 / 255, 1.0, 2.0]).view(1, 1, 1, 6).expand(1, 3, 128, 6)
    sheet = pixels(tile(image))
    assert sheet[6, 6:12, 0].tolist() == [0, 0, 0, 1, 255, 255]


def test_tile_shrinks_images_above_the_largest_side():
    images, _ = random_images(3, 100, 400)
    assert tile(images, columns=3, largest=200).size == (3 * 200 + 4 * 6, 50 + 12)
    assert tile(images, columns=3, largest=400).size == tile(images, columns=3).size == (3 * 400 + 4 * 6, 100 + 12)
    flat = torch.tensor([0.2, 0.4, 0.6]).view(1, 3, 1, 1).expand(1, 3, 300, 300)
    assert pixels(tile(flat, largest=150))[6:156, 6:156].unique(dim=0).unique(dim=1).tolist() == [[[51, 102, 153]]]


def test_labels_of_rows_and_columns_move_the_tiles_and_stand_in_the_margin():
    images, levels = random_images(6, 128, 128)
    plain = pixels(tile(images, columns=3))
    labels = {"column_labels": ["a", "b", ""], "row_labels": ["first", "last"]}
    sheet = pixels(tile(images, columns=3, **labels))
    top, left = sheet.shape[0] - plain.shape[0], sheet.shape[1] - plain.shape[1]
    assert 12 <= top <= 24 and text_width("first", 12) < left < text_width("first", 12) + 20
    assert torch.equal(sheet[top + 6 :, left + 6 :], plain[6:, 6:])
    ink = (sheet < 255).any(-1)
    for n, written in enumerate((True, True, False)):
        x = left + 6 + n * 134
        assert bool(ink[: top + 6, x : x + 128].any()) == written
    rows = ink[:, :left].any(1).nonzero().flatten()
    middles = [top + 6 + 64, top + 6 + 134 + 64]
    assert all(min(abs(int(r) - m) for m in middles) < 14 for r in rows) and len(rows) > 12


def test_captions_have_lines_and_a_ground():
    images, _ = random_images(2, 128, 128)
    one, two = tile(images, ["x", "x"]), tile(images, ["x\ny", "x"])
    assert two.height - one.height == 15
    sheet = pixels(tile(images, ["", ""], shades=[(10, 200, 30), None]))
    assert (sheet[134 : 134 + 18, 6:134] == torch.tensor([10, 200, 30])).all()
    assert (sheet[134 : 134 + 18, 134:] == 255).all()


def test_arrange_puts_pictures_of_any_size_side_by_side():
    colours = [(200, 0, 0), (0, 200, 0), (0, 0, 200)]
    sizes = [(10, 20), (30, 5), (12, 7)]
    pictures = [Image.new("RGB", size, colour) for size, colour in zip(sizes, colours, strict=True)]
    sheet = pixels(arrange(pictures, columns=2, gap=3))
    assert sheet.shape == (20 + 3 + 7, 12 + 3 + 30, 3)
    expected = torch.full_like(sheet, 255)
    for (x, y), (w, h), colour in zip([(0, 0), (15, 0), (0, 23)], sizes, colours, strict=True):
        expected[y : y + h, x : x + w] = torch.tensor(colour, dtype=torch.uint8)
    assert torch.equal(sheet, expected)
    assert arrange(pictures).size == (30, 32) and arrange(pictures[:1], 4, 3).size == (10, 20)


def test_a_title_stands_above_and_is_cut():
    picture = Image.new("RGB", (80, 40), "red")
    sheet = pixels(titled(picture, "a title much longer than that"))
    head = len(sheet) - 40
    assert sheet.shape[1] == 80 and 16 <= head <= 32
    assert (sheet[head:] == torch.tensor([255, 0, 0])).all()
    assert (sheet[:head] < 128).any() and (sheet[:, 78:][:head] == 255).all() and (sheet[0] == 255).all()


def test_before_and_after_stand_side_by_side():
    before, levels_before = random_images(3, 128, 128)
    after, levels_after = before.flip(0), levels_before.flip(0)
    captions = [("before 0.1", "after 0.9")] * 3
    sheet = pixels(before_after(before, after, ["a", "b", "c"], captions, columns=2))
    pair = before_after(before[:1], after[:1], ["a"], captions[:1])
    assert sheet.shape[1] == 2 * pair.width + 12 and sheet.shape[0] == 2 * pair.height + 12
    head = pair.height - tile(before[:2], list(captions[0]), font_size=14).height
    for n, (y, x) in enumerate([(0, 0), (0, pair.width + 12), (pair.height + 12, 0)]):
        y, x = y + head + 6, x + 6
        assert torch.equal(sheet[y : y + 128, x : x + 128], levels_before[n])
        assert torch.equal(sheet[y : y + 128, x + 134 : x + 262], levels_after[n])
    with pytest.raises(ValueError):
        before_after(before, after[:2], ["a", "b", "c"], captions)


@pytest.mark.parametrize("text", ("", "a red circle", "0.123"))
def test_text_width_is_that_of_pillow(text):
    draw = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    assert text_width(text, 15) == draw.textlength(text, font=ImageFont.load_default(15))
