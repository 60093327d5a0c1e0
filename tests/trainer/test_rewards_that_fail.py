"""Runs whose rewards fail, and runs that are stopped by an alarm: what is on disk, what is said."""

import json

import pytest

from sfgrpo_trainer.config import load_config
from sfgrpo_trainer.errors import UserError
from sfgrpo_trainer.prepare import eval_rewards
from sfgrpo_trainer.report import write_report
from sfgrpo_trainer.run import train

REWARD = '''
def dark(images, prompts, metadata, *, bad: int = 0):
    """The darker the better; the first `bad` images of a call have no score."""
    scores = 1 - images.mean((1, 2, 3))
    scores[:bad] = float("nan")
    return scores

calls = 0

def goes_down(images, prompts, metadata):
    """A server that goes down after the checks, the evaluation and one iteration."""
    global calls
    calls += 1
    if calls > 21:
        raise ConnectionError("connection refused")
    return dark(images, prompts, metadata)
'''


@pytest.fixture
def run_file(tmp_path, write_run):
    file = write_run(tmp_path)
    (tmp_path / "mine.py").write_text(REWARD)
    text = file.read_text()
    file.write_text(text[: text.index("[rewards]")] + "[rewards]\nREWARDS\n" + text[text.index("[sampling]") :])

    def write(rewards: str, more: str = ""):
        file.write_text(file.read_text().replace("REWARDS", rewards) + more)
        return file

    return write


def rows(out, name):
    return [json.loads(line) for line in (out / name).read_text().splitlines()]


def test_images_without_a_score_are_counted_and_the_rest_is_trained(run_file, tmp_path, capfd):
    file = run_file('dark = { kind = "mine.py:dark", bad = 1 }', "[failures]\nretries = 0\n")
    train(load_config(file), tmp_path / "out")
    metrics = rows(tmp_path / "out", "metrics.jsonl")
    assert len(metrics) == 2 and all(row["dropped_rewards"] > 0 and row["updates"] == 1 for row in metrics)
    # 4 images of an evaluation are one call.
    assert [row["counts"]["dark"] for row in rows(tmp_path / "out", "evals.jsonl")] == [3, 3]
    said = capfd.readouterr().out
    assert "evaluation after iteration 0: reward dark gave no score for 1 of 4 images: a score was NaN" in said
    assert "warning: iteration 0: reward dark gave no score for 1 of 8 images: a score was NaN or infinite" in said


def test_a_reward_that_goes_down_stops_the_run_with_its_lora_on_disk(run_file, tmp_path, capfd):
    file = run_file('"mine:goes_down" = 1.0', "[failures]\nretry_wait = 0.0\n")
    with pytest.raises(
        UserError, match="have no score, more than failures.max_dropped = 0.25 allows; the last reason: .*refused"
    ):
        train(
            load_config(file, ["--iterations", "4", "--eval.every", "9", "--grpo.decode-batch", "3"]), tmp_path / "out"
        )
    done = len(rows(tmp_path / "out", "metrics.jsonl"))
    assert done == 1 and (tmp_path / "out" / "last.safetensors").is_file()
    assert "stopped; the LoRA so far is in" in capfd.readouterr().out
    assert (tmp_path / "out" / "report.html").is_file()


def test_an_alarm_is_said_marked_and_ends_the_run(run_file, tmp_path, capfd):
    more = "[watch]\nbright = { kind = 'brightness' }\n[alarms]\nreward_drop = 0.03\nstop = true\n"
    file = run_file('dark = { kind = "mine.py:dark" }', more)
    overrides = ["--iterations", "8", "--eval.every", "1", "--optimizer.lr", "1e-2", "--grpo.group-size", "6"]
    result = train(load_config(file, overrides), tmp_path / "out")
    evals = rows(tmp_path / "out", "evals.jsonl")
    alarmed = [row["iteration"] for row in evals if row["alarms"]]
    assert alarmed == [result.iterations] and result.iterations < 8
    names = [a["name"] for a in evals[-1]["alarms"]]
    assert names and set(names) <= {"dark", "bright"}
    assert all(evals[-1]["scores"][name] < evals[0]["scores"][name] for name in names)
    said = capfd.readouterr().out
    assert f"alarm after iteration {result.iterations}: {names[0]} fell from" in said and "stopped by an alarm" in said
    page = write_report(tmp_path / "out").read_text()
    assert "<h2>Alarms</h2>" in page and evals[-1]["alarms"][0]["words"] in page
    kept = result.best_iteration
    assert ("best (the start)" if kept is None else f"best (iteration {kept})") in page
    if result.iterations == 1:
        assert not (tmp_path / "out" / "best.safetensors").exists()


def test_what_is_watched_and_in_which_direction(run_file):
    file = run_file("shapes = 1.0\njpeg_size = -0.5", "[watch]\nshapes = 1.0\nsharpness = -1.0\n")
    score, directions = eval_rewards(load_config(file))
    assert [(t.name, t.weight) for t in score.terms] == [
        ("shapes", 1.0),
        ("jpeg_size", -0.5),
        ("shapes_2", 0.0),
        ("sharpness", 0.0),
    ]
    assert directions == {"shapes": 1.0, "shapes_2": 1.0, "sharpness": -1.0}
