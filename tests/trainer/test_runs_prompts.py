"""The shipped prompt files against the captions of the domain."""

import json
from pathlib import Path

import pytest

import sfgrpo_trainer.runs
from sfgrpo.prompts import read_prompts
from sfgrpo.shapes.captions import split

RUNS = Path(sfgrpo_trainer.runs.__file__).parent
FILES = {
    "shapes_train.jsonl": split("train"),
    "shapes_counting_train.jsonl": split("train", ("counting",)),
    "shapes_held_out.jsonl": split("held_out"),
}


def pairs(name: str) -> list[tuple[str, str]]:
    """(text, tag) of each line."""
    prompts = read_prompts(RUNS / name)
    assert all(p.negative == "" and p.metadata.keys() == {"tag"} for p in prompts)
    return [(p.text, p.metadata["tag"]) for p in prompts]


def test_there_are_no_other_prompt_files():
    assert {p.name for p in RUNS.glob("*.jsonl")} == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_its_split(name):
    found = pairs(name)
    assert len(set(found)) == len(found)
    assert sorted(found) == sorted((c.text, c.category) for c in FILES[name])


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_plain(name):
    """One object a line, nothing but prompt and tag."""
    for line in (RUNS / name).read_text().splitlines():
        assert list(json.loads(line)) == ["prompt", "tag"]


def test_what_is_held_out_is_not_trained_on():
    """The four single objects are too few to split: they are in both."""
    train, held_out = set(pairs("shapes_train.jsonl")), set(pairs("shapes_held_out.jsonl"))
    single = {pair for pair in train if pair[1] == "single_object"}
    assert len(single) == 4
    assert train & held_out == single
    assert set(pairs("shapes_counting_train.jsonl")) < train
    assert {tag for _, tag in held_out} == {tag for _, tag in train}
