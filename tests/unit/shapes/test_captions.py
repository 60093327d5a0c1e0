"""The captions of the domain, counted and read a second time with a regular expression."""

import re
import zlib
from collections import Counter

import pytest

from sfgrpo.shapes.captions import CATEGORIES, COLOUR_NAMES, RELATIONS, SHAPES, all_captions, is_held_out, parse, split

COUNTS = {
    "single_object": 4,
    "two_objects": 4 * 3,
    "counting": 3 * 4 * (1 + 6),
    "colours": 6 * 4,
    "position": 4 * 3 * 4,
    "attributes": 4 * 3 * 6 * 5,
}


def read(text):
    """(objects, relation) of a caption, from its words alone."""
    for relation, words in enumerate(RELATIONS):
        if f" {words} " in text:
            first, second = text.split(f" {words} ")
            return read(first)[0] + read(second)[0], relation
    objects = []
    for part in text.split(" and "):
        number, colour, noun = re.fullmatch(r"(a|two|three|four) (?:(\w+) )?(\w+)", part).groups()
        shape = next(s for s in SHAPES if noun in (s, s + "s", s + "es"))
        assert (noun == shape) == (number == "a")
        colour = None if colour is None else COLOUR_NAMES.index(colour)
        objects.append((SHAPES.index(shape), colour, {"a": 1, "two": 2, "three": 3, "four": 4}[number]))
    return tuple(objects), None


def test_every_category_has_its_captions_once():
    captions = all_captions()
    assert Counter(c.category for c in captions) == COUNTS
    assert len({c.text for c in captions}) == len(captions) == 532
    assert tuple(COUNTS) == CATEGORIES


def test_objects_are_those_that_the_text_names():
    for caption in all_captions():
        objects, relation = read(caption.text)
        assert (caption.objects, caption.relation) == (objects, relation), caption.text
        assert caption.count == sum(n for _, _, n in objects)
        assert 1 <= caption.count <= 4


@pytest.mark.parametrize(
    "text, category, objects, relation",
    (
        ("a circle", "single_object", ((0, None, 1),), None),
        ("a square and a cross", "two_objects", ((1, None, 1), (3, None, 1)), None),
        ("four crosses", "counting", ((3, None, 4),), None),
        ("two black triangles", "counting", ((2, 5, 2),), None),
        ("a yellow square", "colours", ((1, 3, 1),), None),
        ("a cross right of a circle", "position", ((3, None, 1), (0, None, 1)), 1),
        ("a circle above a square", "position", ((0, None, 1), (1, None, 1)), 2),
        ("a green circle and a blue square", "attributes", ((0, 1, 1), (1, 2, 1)), None),
    ),
)
def test_parse_by_hand(text, category, objects, relation):
    caption = parse(text)
    assert (caption.text, caption.category, caption.objects, caption.relation) == (text, category, objects, relation)
    assert parse("  " + text.upper().replace(" ", " \t ") + "\n") == caption


def test_parse_finds_every_caption():
    assert [parse(c.text) for c in all_captions()] == all_captions()


@pytest.mark.parametrize(
    "text",
    ("", "circle", "a pink circle", "five circles", "two circle", "a circle and a circle", "a circles", "a red star"),
)
def test_other_texts_are_rejected_with_the_forms_that_exist(text):
    with pytest.raises(
        ValueError, match="is not a caption that the shapes verifier can check; write one like 'a circle'"
    ):
        parse(text)


def test_split_parts_the_captions_by_a_hash_of_their_text():
    train, held_out = split("train"), split("held_out")
    single = {c for c in all_captions() if c.category == "single_object"}
    assert set(train) | set(held_out) == set(all_captions()) and set(train) & set(held_out) == single
    for caption in set(held_out) - single:
        assert zlib.crc32(caption.text.encode()) % 1000 < 300 and is_held_out(caption)
    for caption in set(train) - single:
        assert zlib.crc32(caption.text.encode()) % 1000 >= 300 and not is_held_out(caption)
    # 528 captions, a share of 0.3: standard deviation 0.02.
    assert 0.24 < (len(held_out) - 4) / 528 < 0.36
    assert {c.category for c in train} == {c.category for c in held_out} == set(CATEGORIES)


def test_split_by_category():
    counting = split("train", ("counting",))
    assert counting == [c for c in split("train") if c.category == "counting"]
    assert len(split("train", ("single_object",))) == len(split("held_out", ("single_object",))) == 4


def test_unknown_splits_and_categories_are_rejected():
    with pytest.raises(ValueError, match="split must be 'train' or 'held_out', not 'test'"):
        split("test")
    with pytest.raises(ValueError, match=r"unknown category \['colors'\]; choose from single_object, "):
        split("train", ("counting", "colors"))
