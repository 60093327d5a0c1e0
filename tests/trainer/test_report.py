"""report.html of a run: one page that holds all it shows, with the numbers of the run's files."""

import base64
import json
import math
import re
import shutil
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from sfgrpo_trainer.report import best_of, read_rows, smooth, write_report

VOID = ("meta", "img", "br")


class Page(HTMLParser):
    """Tags, attributes, tables and images of a page; fails on tags that do not close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.tags, self.attributes, self.tables, self.text = [], [], [], [], {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data
        elif self.open:
            self.text[self.open[-1]] = self.text.get(self.open[-1], "") + data

    def images(self) -> dict[str, Image.Image]:
        """alt -> image."""
        alts = [v for tag, name, v in self.attributes if (tag, name) == ("img", "alt")]
        sources = [v for tag, name, v in self.attributes if (tag, name) == ("img", "src")]
        assert len(alts) == len(sources) == self.tags.count("img")
        out = {}
        for alt, source in zip(alts, sources, strict=True):
            head, data = source.split(",", 1)
            assert head == "data:image/png;base64"
            out[alt] = Image.open(BytesIO(base64.b64decode(data, validate=True)))
            out[alt].load()
        return out


@pytest.fixture(scope="module")
def page(finished) -> Page:
    return Page((finished.out / "report.html").read_text())


def test_the_page_is_self_contained(finished, page):
    assert not set(page.tags) & {"script", "link", "iframe", "object", "embed", "base"}
    for tag, name, value in page.attributes:
        assert not name.startswith("on") and name not in ("href", "srcset", "action")
        if name == "src":
            assert tag == "img" and value.startswith("data:image/png;base64,")
    assert not re.search(r"https?:|//\w+\.|url\(|@import", (finished.out / "report.html").read_text())


def test_the_scores_are_those_of_the_evaluations(finished, page):
    evals = [json.loads(line) for line in (finished.out / "evals.jsonl").read_text().splitlines()]
    first, last = evals[0], evals[-1]
    best = max(evals[1:], key=lambda row: row["scores"]["total"])
    heads, *lines = page.tables[0]
    assert heads[3:5] == [f"best (iteration {best['iteration']})", f"end (iteration {last['iteration']})"]
    assert [line[0] for line in lines] == list(first["scores"])
    for name, count, *values in lines:
        a, b, c = (row["scores"][name] for row in (first, best, last))
        assert int(count) == first["counts"][name]
        assert values == [f"{a:.3f}", f"{b:.3f}", f"{c:.3f}", f"{c - a:+.3f}"]


def test_the_images_are_those_of_the_run(finished, page):
    images = page.images()
    samples = {"before": "00000", "after 3 iterations": "00003", "after 2 iterations": "00002"}
    for alt, name in (samples | {"rollout images": "00003_rollout"}).items():
        with Image.open(finished.out / "samples" / f"{name}.png") as image:
            assert images[alt].tobytes() == image.tobytes()
    plots = len(list((finished.out / "plots").glob("*.png")))
    assert plots >= 5 and len(images) == plots + 4
    assert all(min(image.size) > 100 for image in images.values())


def test_title_settings_and_times(finished, page):
    assert page.text["h1"] == "Stepwise-Flow-GRPO: a & b"
    assert page.text["pre"] == (finished.out / "config.toml").read_text()
    metrics = read_rows(finished.out / "metrics.jsonl")
    seconds = dict(page.tables[1][1:])
    assert list(seconds) == ["sample", "estimate", "score", "update"]
    for name, value in seconds.items():
        assert value == f"{sum(row[f'seconds/{name}'] for row in metrics) / 3:.2f}"


def test_the_page_is_made_anew_from_the_files(finished, tmp_path):
    copy = tmp_path / finished.out.name
    shutil.copytree(finished.out, copy)
    before = (copy / "report.html").read_bytes()
    shutil.rmtree(copy / "plots")
    (copy / "report.html").unlink()
    assert write_report(copy) == copy / "report.html"
    assert (copy / "report.html").read_bytes() == before


@pytest.fixture
def stopped(finished, tmp_path) -> Path:
    """A run that was stopped after its first evaluation, in the middle of a line, and whose names are hostile."""
    evaluation = {
        "iteration": 0,
        "scores": {"total": 0.25, "total/<b>": 0.25, "shapes": 0.25, "shapes/<b>": 0.25},
        "counts": {"total": 4, "total/<b>": 4, "shapes": 4, "shapes/<b>": 4},
    }
    (tmp_path / "evals.jsonl").write_text(json.dumps(evaluation) + '\n{"iteration": 2, "sco')
    (tmp_path / "config.toml").write_text('file = "</pre><script>x</script>"\n')
    (tmp_path / "samples").mkdir()
    shutil.copy(finished.out / "samples" / "00000.png", tmp_path / "samples")
    return tmp_path


def test_a_run_that_was_stopped_has_a_page(stopped):
    page = Page(write_report(stopped).read_text())
    assert "script" not in page.tags and "b" not in page.tags
    assert page.text["pre"] == 'file = "</pre><script>x</script>"\n'
    # One reward of weight 1: the total would only repeat it.
    assert [line[:3] for line in page.tables[0][1:]] == [["shapes", "4", "0.250"], ["shapes/<b>", "4", "0.250"]]
    assert set(page.images()) >= {"before"}


def test_smoothing_starts_at_the_first_value_and_skips_what_is_not_finite():
    assert smooth([2.0, 2.0, 2.0]) == pytest.approx([2.0, 2.0, 2.0])
    one, two = smooth([1.0, 3.0], share=0.25)
    assert (one, two) == pytest.approx((1.0, (0.75 * 0.25 * 1 + 0.25 * 3) / (0.75 * 0.25 + 0.25)))
    assert smooth([float("nan"), 4.0, float("inf"), 4.0])[1:] == pytest.approx([4.0, 4.0, 4.0])


@pytest.mark.parametrize(
    ("totals", "alarmed", "stop", "best"),
    [
        ((0.1, 0.3, 0.2), (), True, 1),
        ((0.1, 0.3, 0.9), (2,), True, 1),  # the run ended there, and best.safetensors is from before
        ((0.1, 0.3, 0.9), (2,), False, 2),
        ((0.1, 0.9), (1,), True, 0),
        ((0.1, 0.1), (), False, 0),
        ((0.2, math.nan), (), False, 0),
        ((math.nan, 0.2), (), False, 1),
    ],
)
def test_the_best_evaluation_is_that_of_the_best_lora(totals, alarmed, stop, best):
    evals = [
        {"iteration": i, "scores": {"total": total}, "alarms": [{"name": "x"}] if i in alarmed else []}
        for i, total in enumerate(totals)
    ]
    assert best_of(evals, stop)["iteration"] == best
