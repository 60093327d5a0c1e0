"""Prompt files and the choice of prompts."""

import json
import re

import pytest

from sfgrpo.prompts import Prompt, pick_prompts, read_prompts


def written(tmp_path, name: str, content: str | bytes):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_txt_is_one_prompt_a_line(tmp_path):
    path = written(tmp_path, "p.txt", 'a cat\n\n  a dog, running  \n \t \n{"prompt": 1}')
    assert read_prompts(path) == [Prompt("a cat"), Prompt("a dog, running"), Prompt('{"prompt": 1}')]
    assert read_prompts(str(path))[0].negative == "" and read_prompts(path)[0].metadata == {}


@pytest.mark.parametrize("ending", ("\n", "\r\n", "\r"))
@pytest.mark.parametrize("bom", (b"", b"\xef\xbb\xbf"))
def test_byte_order_mark_and_line_endings(tmp_path, bom, ending):
    content = bom + ending.join(("ein Bär", "", "猫", "")).encode()
    assert [p.text for p in read_prompts(written(tmp_path, "p.txt", content))] == ["ein Bär", "猫"]
    rows = ending.join(json.dumps({"prompt": text}, ensure_ascii=False) for text in ("ein Bär", "猫"))
    assert [p.text for p in read_prompts(written(tmp_path, "p.jsonl", bom + rows.encode()))] == ["ein Bär", "猫"]


def test_jsonl_has_negatives_and_metadata(tmp_path):
    path = written(
        tmp_path,
        "p.jsonl",
        '{"prompt": " two cats ", "negative_prompt": "dogs", "count": 2, "tags": ["a", {"b": null}]}\n\n'
        '{"prompt": "sky"}\n',
    )
    first, second = read_prompts(path)
    assert first == Prompt("two cats", "dogs", {"count": 2, "tags": ["a", {"b": None}]})
    assert second == Prompt("sky", "", {})


@pytest.mark.parametrize("separator", ("\u2028", "\u2029", "\x85"))
def test_jsonl_text_may_hold_other_unicode_separators(tmp_path, separator):
    # Valid inside a JSON string as they are; json.dumps(..., ensure_ascii=False) writes them so.
    row = json.dumps({"prompt": f"a{separator}b"}, ensure_ascii=False)
    assert [p.text for p in read_prompts(written(tmp_path, "p.jsonl", row))] == [f"a{separator}b"]


@pytest.mark.parametrize(
    "name, content, message",
    (
        ("p.csv", "a", r"p\.csv must end in \.txt \(one prompt a line\) or \.jsonl"),
        ("p.txt", "", r"p\.txt is empty; write at least one prompt"),
        ("p.txt", " \n\r\n\t", r"p\.txt is empty"),
        ("p.jsonl", b"\xef\xbb\xbf\n", r"p\.jsonl is empty"),
        ("p.txt", b"\xff\xfea\x00", r"p\.txt cannot be read as UTF-8 text"),
        ("p.jsonl", '{"prompt": "a"}\n\n{"prompt": ', r"p\.jsonl, line 3: not JSON"),
        ("p.jsonl", '["a"]', r"p\.jsonl, line 1: is a JSON array; a \.jsonl file needs an object"),
        ("p.jsonl", '\n[\n{"prompt": "a"}\n]', r"p\.jsonl, line 2: is a JSON array"),
        ("p.jsonl", '[{"prompt": "a"},', r"p\.jsonl, line 1: is a JSON array"),
        ("p.jsonl", "{}", r'p\.jsonl, line 1: needs an object with a non-empty string "prompt"'),
        ("p.jsonl", '{"text": "a", "file_name": "b"}', r'line 1: has text, file_name; needs "prompt"'),
        (
            "p.jsonl",
            '{"a": 1, "b": 1, "c": 1, "d": 1, "e": 1, "f": 1}',
            r'has a, b, c, d, e and 1 more; needs "prompt"',
        ),
        ("p.txt", "a caf\xe9".encode("cp1252"), r"p\.txt cannot be read as UTF-8 text: .*; save it as UTF-8"),
        ("p.jsonl", '"a"', r"line 1: needs an object"),
        ("p.jsonl", '{"prompt": 3}', r"line 1: needs an object"),
        ("p.jsonl", '{"prompt": "  "}', r"line 1: needs an object"),
        (
            "p.jsonl",
            '{"prompt": "a"}\n{"prompt": "a", "negative_prompt": 3}',
            r'line 2: "negative_prompt" must be a string',
        ),
    ),
)
def test_bad_files_are_named_with_their_line(tmp_path, name, content, message):
    with pytest.raises(ValueError, match=message):
        read_prompts(written(tmp_path, name, content))


def test_missing_files_and_folders(tmp_path):
    with pytest.raises(ValueError, match=re.escape(f"prompt file {tmp_path / 'no.txt'} does not exist")):
        read_prompts(tmp_path / "no.txt")
    folder = tmp_path / "folder.txt"
    folder.mkdir()
    with pytest.raises(ValueError, match="folder.txt is a folder; name a .txt or .jsonl file"):
        read_prompts(folder)
    for name in ("a.jsonl", "train.txt"):
        (folder / name).write_text("")
        with pytest.raises(ValueError, match=f"folder.txt is a folder; name a file in it, e.g. its {name}"):
            read_prompts(folder)


@pytest.mark.parametrize("count, per_iteration", ((12, 3), (12, 1), (6, 6), (5, 1)))
def test_an_epoch_takes_each_prompt_once(count, per_iteration):
    per_epoch = count // per_iteration
    for epoch in range(3):
        picked = [
            p for i in range(per_epoch) for p in pick_prompts(count, per_iteration, epoch * per_epoch + i, seed=4)
        ]
        assert sorted(picked) == list(range(count))


def test_what_does_not_fill_an_iteration_is_left_to_the_next_epoch():
    picks = [pick_prompts(7, 3, iteration, seed=0) for iteration in range(40)]
    assert all(len(picked) == len(set(picked)) == 3 for picked in picks)
    # Two iterations an epoch, without a prompt in common; one prompt is left over, not always the same.
    epochs = [set(a) | set(b) for a, b in zip(picks[::2], picks[1::2], strict=True)]
    assert all(len(epoch) == 6 for epoch in epochs)
    assert {p for epoch in epochs for p in set(range(7)) - epoch} == set(range(7))


def test_picks_are_a_pure_function_and_change_with_seed_and_epoch():
    def epoch(number, seed):
        return [p for i in range(4) for p in pick_prompts(20, 5, 4 * number + i, seed)]

    assert epoch(2, 1) == epoch(2, 1)
    assert epoch(2, 1) != epoch(3, 1) and epoch(2, 1) != epoch(2, 2)
    assert epoch(0, 0) != list(range(20))


@pytest.mark.parametrize("count, per_iteration", ((3, 3), (3, 4), (3, 6), (3, 8), (1, 2)))
def test_prompts_repeat_evenly_where_an_iteration_takes_more_than_there_are(count, per_iteration):
    rests = set()
    for iteration in range(20):
        picked = pick_prompts(count, per_iteration, iteration, seed=0)
        assert len(picked) == per_iteration and picked == pick_prompts(count, per_iteration, iteration, seed=0)
        often = [picked.count(p) for p in range(count)]
        assert sum(often) == per_iteration and max(often) - min(often) <= 1
        rests.add(tuple(often))
    assert (len(rests) > 1) == (per_iteration % count > 0)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ('{"prompt": "a", "x": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested deeper than 64 levels"),
        ('{"prompt": "a", "x": ' + "[" * 65 + "]" * 65 + "}", "nested deeper than 64 levels"),
        ('{"prompt": "a \\ud800"}', "half of a surrogate pair (\\ud800)"),
        ('{"prompt": "a", "deep": [{"\\udfff": 1}]}', "half of a surrogate pair (\\udfff)"),
        ('{"prompt": "a", "n": ' + "9" * 5000 + "}", "5000 digits"),
        ('{"prompt": "a", "n": NaN}', "NaN"),
        ('{"prompt": "a", "n": [-Infinity]}', "-Infinity"),
        ('{"prompt": "a", "n": 1e999}', "too large"),
        ('{"prompt": "a", "prompt": "b"}', "the key 'prompt' twice"),
        ('{"prompt": "a\\u0000b"}', "control character U+0000"),
        ('{"prompt": "a", "negative_prompt": "\\u001b"}', "control character U+001B"),
        ('{"prompt": "\\u200b \\ufeff"}', "non-empty"),
    ],
)
def test_what_no_tokenizer_can_read_is_told_with_its_line(tmp_path, row, words):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "first"}\n' + row + "\n", encoding="utf-8")
    with pytest.raises(ValueError) as error:
        read_prompts(file)
    assert f"{file}, line 2: " in str(error.value) and words in str(error.value)
    assert len(str(error.value)) < 300 + len(str(file))


def test_text_files_that_are_not_utf8_text(tmp_path):
    file = tmp_path / "p.txt"
    for data, words in (
        ("a red circle".encode("utf-16"), "save it as UTF-8"),
        ("a red circle".encode("utf-16-le"), "line 1: has the control character U+0000"),
        ("\u200b\n\ufeff".encode(), "is empty"),
    ):
        file.write_bytes(data)
        with pytest.raises(ValueError) as error:
            read_prompts(file)
        assert str(file) in str(error.value) and words in str(error.value)


def test_characters_of_any_language_line_breaks_and_surrogate_pairs_are_kept(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "\\ud83d\\ude00 \u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645\\nx\\ty"}\n', "utf-8")
    assert read_prompts(file)[0].text == "\U0001f600 \u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645\nx\ty"
    long = tmp_path / "long.txt"
    long.write_text("word " * 200_000, "utf-8")
    assert len(read_prompts(long)[0].text) == 999_999


@pytest.mark.parametrize(
    "line",
    (
        "a cat --w 512",
        "a cat --w=512 --h=512",
        "a cat --w 512 --h 512 --i img.png",
        "a cat --d 1 --ci c.png",
        "a cat --cn x.png",
        "a cat --w 512 --of target",
        "a cat --d -1",
        "a cat --l .5",
        "a cat --ar 16:9",
        "a cat --n low quality, blurry",
        "a cat, running --n worst quality --w 832 --h 480 --f 81 --d 1 --l 5 --s 20",
        "a cat --d 1 --l 7.5",
        "a cat --s 20  ",
    ),
)
def test_lines_with_the_options_of_sample_prompts_are_refused(tmp_path, line):
    with pytest.raises(ValueError, match=r"p\.txt, line 2: ends in '--[a-z]+[ =].*options of sample prompts"):
        read_prompts(written(tmp_path, "p.txt", f"a dog\n{line}\n"))
    row = json.dumps({"prompt": line})
    assert read_prompts(written(tmp_path, "p.jsonl", row)) == [Prompt(line.strip())]


@pytest.mark.parametrize("line", ("# animals", "#", "## animals", "  #\tanimals"))
def test_comments_are_refused(tmp_path, line):
    with pytest.raises(ValueError, match=r"p\.txt, line 3: is a comment"):
        read_prompts(written(tmp_path, "p.txt", f"a dog\n\n{line}\n"))


@pytest.mark.parametrize(
    "line",
    (
        "#1 fan",
        "#sunset over # hills",
        "a sign that says --w",
        "a --n-- pattern",
        "a cat -- 512",
        "a terminal with ls --s 5 files",
        "word--w 512",
    ),
)
def test_what_only_looks_like_them_is_a_prompt(tmp_path, line):
    assert read_prompts(written(tmp_path, "p.txt", line)) == [Prompt(line)]


def test_a_negative_prompt_of_null_is_none_and_prompts_know_their_place(tmp_path):
    path = written(tmp_path, "p.jsonl", '\n{"prompt": "a", "negative_prompt": null}')
    (prompt,) = read_prompts(path)
    assert prompt == Prompt("a", "", {}) and prompt.where == f"{path}, line 2"
