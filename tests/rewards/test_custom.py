"""Rewards of the user's own: found, asked, or refused with a sentence."""

import sys

import pytest
import torch

from sfgrpo.rewards import check_prompts, get_reward, mix
from sfgrpo.rewards.custom import locate
from sfgrpo_trainer.config import load_config, to_toml, without_folders
from sfgrpo_trainer.errors import UserError

CODE = """
from dataclasses import dataclass

def redness(images, prompts, metadata, *, gain: float = 1.0):
    return (gain * images[:, 0].mean((1, 2))).tolist()

def reward(images, prompts, metadata):
    return images.mean((1, 2, 3))

@dataclass(frozen=True)
class Sized:
    size: "Nothing that is defined" = 3
    def __call__(self, images, prompts, metadata):
        return [float(self.size)] * len(images)

class Plain:
    def __call__(self, images, prompts, metadata):
        return [0.0] * len(images)

plain = Plain()
number = 3

def two(images, prompts): ...
def four(images, prompts, metadata, more): ...
def broken(images, prompts, metadata):
    raise KeyError("seed")
def short(images, prompts, metadata):
    return []
"""
IMAGES = torch.rand(3, 3, 4, 4, generator=torch.Generator().manual_seed(0))
ARGUMENTS = (IMAGES, ["x"] * 3, [{}] * 3)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(CODE)
    return path


def test_functions_and_classes_of_a_file(file):
    red = IMAGES[:, 0].mean((1, 2))
    torch.testing.assert_close(torch.tensor(get_reward(f"{file}:redness")(*ARGUMENTS)), red)
    torch.testing.assert_close(torch.tensor(get_reward(f"{file}:redness", gain=2.5)(*ARGUMENTS)), 2.5 * red)
    torch.testing.assert_close(get_reward(str(file))(*ARGUMENTS), IMAGES.mean((1, 2, 3)))
    assert get_reward(f"{file}:Sized", size=7)(*ARGUMENTS) == [7.0] * 3
    assert get_reward(f"{file}:plain")(*ARGUMENTS) == [0.0] * 3


def test_two_files_of_one_name_do_not_mix(file, tmp_path):
    other = tmp_path / "other" / "mine.py"
    other.parent.mkdir()
    other.write_text(
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Sized:\n    size: int = 3\n"
        "    def __call__(self, images, prompts, metadata):\n        return [-1.0] * len(images)\n"
    )
    first, second = get_reward(f"{file}:Sized"), get_reward(f"{other}:Sized")
    assert first(*ARGUMENTS) == [3.0] * 3 and second(*ARGUMENTS) == [-1.0] * 3


def test_a_module_that_is_installed(file, monkeypatch):
    monkeypatch.syspath_prepend(str(file.parent))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    assert get_reward("mine:plain")(*ARGUMENTS) == [0.0] * 3


REFUSED = {
    "mine.py:nothing": "has no 'nothing'; it has dataclass, redness, reward, Sized, Plain, plain, two, four",
    "mine.py:number": "is neither a function nor a dataclass that can be called",
    "mine.py:Plain": "is neither a function nor a dataclass that can be called",
    "mine.py:two": r"must take \(images, prompts, metadata\), settings by keyword only",
    "mine.py:four": r"must take \(images, prompts, metadata\), settings by keyword only",
    "gone.py:reward": "gone.py of a custom reward does not exist",
    "no_such_module:reward": "there is no module 'no_such_module'.*; put no_such_module.py beside the run file",
    "json.no_such:reward": "there is no module 'json.no_such'",
    "wrong.py:reward": "wrong.py, line 1 .* cannot be imported: ZeroDivisionError: division by zero",
    "needs.py:reward": "needs.py .* cannot be imported: No module named 'no_such_package'",
    "syntax.py:reward": "syntax.py .* cannot be imported: SyntaxError",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused(kind, file):
    (file.parent / "wrong.py").write_text("1 / 0\n")
    (file.parent / "needs.py").write_text("import no_such_package\n")
    (file.parent / "syntax.py").write_text("def\n")
    place = f"{file.parent}/{kind}" if ".py" in kind else kind
    with pytest.raises(ValueError, match=REFUSED[kind]):
        get_reward(place)


def test_settings_are_checked(file):
    with pytest.raises(ValueError, match="has no setting 'gian'; did you mean gain"):
        get_reward(f"{file}:redness", gian=1.0)
    with pytest.raises(ValueError, match="gain of .* must be a number, got 'much'"):
        get_reward(f"{file}:redness", gain="much")


def test_what_cannot_score_is_found_before_the_model_loads(file):
    from sfgrpo.prompts import Prompt

    with pytest.raises(ValueError, match="broken failed on a grey image of the prompt 'a cat': KeyError: 'seed'"):
        check_prompts(mix({f"{file}:broken": 1.0}), [Prompt("a cat")], (8, 8))
    with pytest.raises(ValueError, match=r"returned scores of shape \(0,\) for 1 images, asked with a grey image"):
        check_prompts(mix({f"{file}:short": 1.0}), [Prompt("a cat")], (8, 8))


# ----- in run files

RUN = """
model = { path = "shapes" }
prompts = { file = "p.txt" }
[rewards]
"mine:redness" = 0.5
again = { kind = "mine.py:redness", gain = 2.0, weight = -1.0, normalise = true }
[watch]
whole = { kind = "mine.py" }
"""


def test_files_are_looked_for_beside_the_run_file(file, tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    (tmp_path / "run.toml").write_text(RUN)
    config = load_config(tmp_path / "run.toml")
    assert config.rewards == {
        "mine:redness": {"weight": 0.5, "kind": f"{file}:redness"},
        "again": {"kind": f"{file}:redness", "gain": 2.0, "weight": -1.0, "normalise": True},
    }
    assert config.watch == {"whole": {"kind": f"{file}:reward"}}
    # What a run folder keeps can be read from anywhere; what a LoRA file passes on names no folder.
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "again.toml").write_text(to_toml(config))
    assert load_config(tmp_path / "elsewhere" / "again.toml") == config
    assert without_folders(config)["rewards"]["again"]["kind"] == "mine.py:redness"
    assert str(tmp_path) not in to_toml(without_folders(config))
    red = IMAGES[:, 0].mean((1, 2))
    scores = mix(config.rewards)(*ARGUMENTS)
    torch.testing.assert_close(scores.total, 0.5 * red - 2 * red)


def test_a_kind_on_the_command_line_is_looked_for_in_the_working_directory(file, tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "run.toml").write_text(
        RUN.replace('"mine:redness" = 0.5', "").split("again")[0] + "shapes = 1\n"
    )
    monkeypatch.chdir(tmp_path)
    config = load_config("sub/run.toml", ["--rewards.x.kind", "mine:plain"])
    assert config.rewards == {"shapes": 1, "x": {"kind": f"{file}:plain"}}


def test_an_error_names_the_field(file, tmp_path):
    (tmp_path / "run.toml").write_text(RUN.replace("mine:redness", "mine:blueness"))
    with pytest.raises(UserError, match=r"run.toml: rewards.mine:blueness: .*mine.py has no 'blueness'"):
        load_config(tmp_path / "run.toml")


def test_locate_leaves_installed_modules(tmp_path):
    assert locate("package.module:name", tmp_path) == "package.module:name"
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "module.py").write_text("")
    assert locate("package.module:name", tmp_path) == f"{tmp_path}/package/module.py:name"
