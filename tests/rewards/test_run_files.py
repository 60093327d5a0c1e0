"""`[rewards]` in run files and on the command line: tables, kinds, paths, and a run trained on a model."""

import json

import pytest

from sfgrpo_trainer.config import load_config, to_toml, without_folders
from sfgrpo_trainer.errors import UserError
from sfgrpo_trainer.prepare import check_inputs, check_scoring
from sfgrpo_trainer.run import train
from tests.rewards.small import save_clip

BASE = """
iterations = 1
model = { path = "shapes", dtype = "fp32", device = "cpu", max_sequence_length = 0 }
prompts = { file = "p.txt", per_iteration = 1 }
sampling = { height = 32, width = 32, steps = 3 }
grpo = { group_size = 2, updates = 1 }
lora = { rank = 2 }
"""


@pytest.fixture
def write(tmp_path):
    def write(rewards: str, prompts: str = "a red cat\n"):
        (tmp_path / "p.txt").write_text(prompts)
        file = tmp_path / "run.toml"
        file.write_text(BASE + rewards)
        return file

    return write


TABLES = """
[rewards]
jpeg_size = -0.5
pickscore = { weight = 0.25, dtype = "bf16" }
sharp = { kind = "sharpness" }
[eval.rewards.watched]
kind = "clip_score"
batch_size = 4
"""


def test_tables_are_read_and_written_back(write, tmp_path):
    config = load_config(write(TABLES))
    assert config.rewards == {
        "jpeg_size": -0.5,
        "pickscore": {"weight": 0.25, "dtype": "bf16"},
        "sharp": {"kind": "sharpness"},
    }
    assert config.eval.rewards == {"watched": {"kind": "clip_score", "batch_size": 4}}
    (tmp_path / "again.toml").write_text(to_toml(config))
    assert load_config(tmp_path / "again.toml") == config


OVERRIDES = {
    "a weight": (["--rewards.jpeg-size", "2"], {"jpeg_size": 2}),
    "a weight keeps the settings": (["--rewards.pickscore", "0.5"], {"pickscore": {"weight": 0.5, "dtype": "bf16"}}),
    "a setting": (["--rewards.pickscore.dtype", "fp16"], {"pickscore": {"weight": 0.25, "dtype": "fp16"}}),
    "a setting keeps the weight": (
        ["--rewards.jpeg-size.quality", "50"],
        {"jpeg_size": {"weight": -0.5, "quality": 50}},
    ),
    "a table": (["--rewards.pickscore", "{batch_size = 2}"], {"pickscore": {"batch_size": 2}}),
    "a new one": (["--rewards.clip-score.offload=true"], {"clip_score": {"offload": True}}),
}


@pytest.mark.parametrize(("arguments", "changed"), OVERRIDES.values(), ids=OVERRIDES)
def test_overrides(write, arguments, changed):
    file = write(TABLES)
    assert load_config(file, arguments).rewards == load_config(file).rewards | changed


WRONG = {
    "setting": (["--rewards.pickscore.batchsize", "2"], "rewards.pickscore: pickscore has no setting 'batchsize'; did"),
    "value": (["--rewards.pickscore.dtype", "fp8"], "rewards.pickscore: dtype of pickscore must be one of"),
    "kind": (["--rewards.sharp.kind", "sharp"], "rewards.sharp: unknown reward 'sharp'; choose one of"),
    "weight": (["--rewards.pickscore.weight", "inf"], "rewards.pickscore: the weight must be finite, got inf"),
    "eval": (["--eval.rewards.watched.scale", "-1"], "eval.rewards.watched: scale must be above 0"),
    "eval weight": (["--eval.rewards.watched", "x"], "eval.rewards.watched: needs a weight, or a table .*'x'"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG)
def test_wrong_tables_are_named(write, arguments, message):
    with pytest.raises(UserError, match=message) as error:
        load_config(write(TABLES), arguments)
    assert "\n" not in str(error.value)


def test_files_are_relative_to_the_run_file_or_to_where_they_are_typed(write, tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "clip"
    for folder in (here, there):
        folder.mkdir()
    (here / "head.pth").write_text("x")
    (tmp_path / "head.safetensors").write_text("x")
    monkeypatch.chdir(here)
    table = '[rewards.aesthetic]\nhead = "head.safetensors"\nmodel = "clip"\n'
    file = write(table + '[eval.rewards.clip_score]\nmodel = "clip"\n')
    config = load_config(file)
    assert config.rewards["aesthetic"] == {"head": str(tmp_path / "head.safetensors"), "model": str(there)}
    assert config.eval.rewards["clip_score"]["model"] == str(there)
    typed = load_config(file, ["--rewards.aesthetic.head", "head.pth", "--rewards.aesthetic.model", "owner/name"])
    assert typed.rewards["aesthetic"] == {"head": str(here / "head.pth"), "model": "owner/name"}
    # What a LoRA file says of its run names no folder of this machine.
    bare = without_folders(config)
    assert bare["rewards"]["aesthetic"] == {"head": "head.safetensors", "model": "clip"}
    assert bare["eval"]["rewards"]["clip_score"]["model"] == "clip"
    assert str(tmp_path) not in to_toml(bare)


def check(config) -> None:
    """What a run checks of its rewards before it loads a model."""
    check_scoring(config, *check_inputs(config))


def test_a_missing_model_is_an_error_of_the_reward_and_a_long_prompt_one_of_the_file(write, tmp_path):
    config = load_config(write('[rewards.clip_score]\nmodel = "/no/such/folder"\n'))
    with pytest.raises(UserError, match=r"^reward clip_score: folder /no/such/folder \(model\) does not exist$"):
        check(config)
    save_clip(tmp_path / "clip")
    rewards = '[rewards.clip_score]\nmodel = "clip"\n'
    check(load_config(write(rewards)))
    config = load_config(write(rewards, "a cat\n" + "the dog " * 20))
    with pytest.raises(UserError, match=r"^.*p\.txt: the prompt 'the dog .*' has .* shorten it, or set truncate"):
        check(config)
    check(load_config(write(rewards), ["--rewards.clip-score.truncate=true"]))


def test_a_run_is_trained_on_a_model_and_watched_by_another(write, tmp_path):
    save_clip(tmp_path / "clip")
    rewards = """
    [rewards]
    clip_score = { model = "clip", weight = 2.0, truncate = true }
    [eval]
    images_per_prompt = 2
    [eval.rewards]
    pickscore = { model = "clip", truncate = true }
    bright = { kind = "brightness", weight = 0.0 }
    """
    config = load_config(write(rewards, "a red circle\n"))
    result = train(config, tmp_path / "out")
    row = json.loads((tmp_path / "out" / "metrics.jsonl").read_text())
    assert row["reward"] == pytest.approx(2 * row["reward/clip_score"], rel=1e-5) and row["reward_std"] > 0
    assert row["updates"] == 1 and row["dropped_rewards"] == 0
    scores = result.end.scores
    assert set(scores) == {"total", "pickscore", "bright"} and scores["total"] == pytest.approx(scores["pickscore"])
    assert 0 < scores["bright"] < 1
