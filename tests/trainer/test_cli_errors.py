"""What a user can get wrong: exit code 2, one line that says what, no traceback, before any model is loaded.

Every case is a process of its own. All but a few are forked from one that has done the imports, which take seconds.
That one imports diffusers only when the cases have run that must not need it.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sfgrpo import __version__
from sfgrpo_trainer.config import RunConfig, field_names

CASES = {
    "unknown command": (
        ["tarin", "run.toml"],
        r"unknown command 'tarin'; commands are demo, train, sample, lora, selftest",
    ),
    "missing run file": (["train", "no.toml"], r"run file no\.toml does not exist"),
    "run file not first": (["train", "--seed", "1", "run.toml"], "the run file comes first"),
    "unknown field": (
        ["train", "run.toml", "--lora.rnak", "4"],
        r"unknown setting --lora\.rnak; did you mean lora\.rank",
    ),
    "out without folder": (["train", "run.toml", "--out"], "--out needs a folder"),
    "train out without a name": (["train", "run.toml", "--out", ""], "--out needs a folder"),
    "train out= without a name": (["train", "run.toml", "--out="], "--out needs a folder"),
    "demo out without a name": (["demo", "--out", ""], "--out needs a folder"),
    "sample out without a name": (["sample", "--prompt", "a circle", "--out", ""], "--out needs a folder"),
    "group of 1": (["train", "run.toml", "--grpo.group-size", "1"], "group_size must be 2 or more"),
    "rank 0": (["train", "run.toml", "--lora.rank", "0"], "rank must be 1 or more"),
    "missing prompt file": (["train", "run.toml", "--prompts.file", "no.txt"], r"prompt file .*no\.txt does not exist"),
    "empty prompt file": (["train", "run.toml", "--prompts.file", "empty.txt"], r"prompt file .*empty\.txt is empty"),
    "prompt file without prompts": (
        ["train", "run.toml", "--prompts.file", "bad.jsonl"],
        r'bad\.jsonl, line 2: has text; needs "prompt", a non-empty string',
    ),
    "prompt that the reward cannot check": (
        ["train", "run.toml", "--prompts.file", "unknown.txt"],
        r"unknown\.txt: 'a photo of a cat' is not a caption",
    ),
    "eval prompt that the reward cannot check": (
        ["train", "run.toml", "--eval.file", "unknown.txt"],
        r"unknown\.txt: 'a photo of a cat' is not a caption",
    ),
    "no flow model": (
        ["train", "run.toml", "--model.path", "sd1"],
        "is a StableDiffusionPipeline, not a flow-matching",
    ),
    "damaged model": (["train", "run.toml", "--model.path", "damaged"], "the model folder is damaged"),
    "folder without model": (["train", "run.toml", "--model.path", "no_pipeline"], r"it has no model_index\.json"),
    "missing model": (["train", "run.toml", "--model.path", "./no_model"], r"model \./no_model does not exist"),
    "missing LoRA": (
        ["train", "run.toml", "--lora.continue-from", "no.safetensors"],
        r"no\.safetensors .*does not exist",
    ),
    "unwritable out": (["train", "run.toml", "--out", "file/below"], "cannot write to the folder file/below"),
    "out is a file": (["train", "run.toml", "--out", "file"], "cannot write to the folder file"),
    "used out": (["train", "run.toml", "--out", "used"], "used already holds a run"),
    "bad device": (["train", "run.toml", "--model.device", "abacus"], "device 'abacus' cannot be used"),
    "bad size of images": (["sample", "--prompt", "a circle", "--height", "33"], r"height .* must be multiples of 8"),
    "sample without prompt": (["sample"], "give at least one --prompt TEXT or --prompts FILE"),
    "sample with an unknown option": (["sample", "--promt", "a circle"], r"sfgrpo sample: .*--promt"),
    "selftest with an unknown option": (["selftest", "--modle", "shapes"], r"sfgrpo selftest: .*--modle"),
    "selftest of a missing model": (["selftest", "--model", "./no_model"], r"model \./no_model does not exist"),
    "selftest on a bad device": (["selftest", "--device", "abacus"], "device 'abacus' cannot be used"),
    "height 0": (["train", "run.toml", "--sampling.height", "0"], "height and width must be multiples of 8"),
    "sample of height 0": (["sample", "--prompt", "a circle", "--height", "0"], "height"),
    "model without weights": (["train", "run.toml", "--model.path", "no_weights"], "no_weights"),
    "config without a field": (["train", "run.toml", "--model.path", "no_field"], "no_field"),
}

NEEDS_DIFFUSERS = ("model without weights", "selftest of a missing model", "selftest on a bad device")

NEEDS_PEFT = ("selftest with an unknown option",)

FORKED = """
import json, logging, os, sys
from sfgrpo_trainer.cli import main

logging.disable(logging.WARNING)  # as main does
codes = {}
for imports, cases in json.loads(sys.argv[1]):
    exec(imports)
    for name, arguments in cases.items():
        child = os.fork()
        if not child:
            for number, kind in ((1, "out"), (2, "err")):
                os.dup2(os.open(f"{name}.{kind}", os.O_WRONLY | os.O_CREAT), number)
            code = main(arguments)
            print("diffusers" in sys.modules, flush=True)
            os._exit(code)
        codes[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(json.dumps(codes))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, write_run, embedded) -> Path:
    """A good run file, and files that are wrong each in its own way."""
    folder = tmp_path_factory.mktemp("errors")
    write_run(folder)
    (folder / "empty.txt").write_text("\n \n")
    (folder / "unknown.txt").write_text("a circle\na photo of a cat\n")
    (folder / "bad.jsonl").write_text('{"prompt": "a circle"}\n{"text": "a circle"}\n')
    (folder / "file").write_text("a regular file")
    for name, index in (("sd1", '{"_class_name": "StableDiffusionPipeline"}'), ("damaged", "{")):
        (folder / name).mkdir()
        (folder / name / "model_index.json").write_text(index)
    (folder / "no_pipeline").mkdir()
    for name in ("no_weights", "no_field"):
        shutil.copytree(embedded.path, folder / name)
    (folder / "no_weights" / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    (folder / "no_field" / "transformer" / "config.json").write_text('{"_class_name": "SD3Transformer2DModel"}')
    (folder / "used").mkdir()
    (folder / "used" / "metrics.jsonl").write_text("{}\n")
    return folder


@pytest.fixture(scope="module")
def codes(folder) -> dict[str, int]:
    """Exit code of every case; what it printed lies in CASE.out and CASE.err."""
    if not hasattr(os, "fork"):
        pytest.skip("needs os.fork")
    slow = NEEDS_PEFT + NEEDS_DIFFUSERS
    stages = (
        ("import sfgrpo_trainer.run", [name for name in CASES if name not in slow]),
        ("import peft", NEEDS_PEFT),
        ("from diffusers import StableDiffusion3Pipeline", NEEDS_DIFFUSERS),
    )
    stages = json.dumps([(imports, {name: CASES[name][0] for name in names}) for imports, names in stages])
    process = subprocess.run(
        [sys.executable, "-c", FORKED, stages], cwd=folder, capture_output=True, text=True, timeout=900
    )
    assert process.returncode == 0 and process.stderr == "", process.stderr
    return json.loads(process.stdout)


def runs_in(folder: Path) -> list[Path]:
    """Files that a run leaves, and samples."""
    return [p for name in ("config.toml", "*.jsonl", "*.safetensors", "*.png") for p in (folder / "runs").rglob(name)]


def is_one_line(stderr: str, message: str) -> bool:
    return stderr.startswith("sfgrpo: error: ") and stderr.count("\n") == 1 and re.search(message, stderr) is not None


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_told_in_one_line(codes, folder, name):
    stderr, stdout = (folder / f"{name}.{kind}" for kind in ("err", "out"))
    assert is_one_line(stderr.read_text(), CASES[name][1]), stderr.read_text()
    assert codes[name] == 2
    # Nothing else was said, and diffusers, which loads the weights, was not even imported.
    assert stdout.read_text() == ("True\n" if name in NEEDS_DIFFUSERS else "False\n")
    assert runs_in(folder) == []
    assert (folder / "used" / "metrics.jsonl").read_text() == "{}\n"
    assert (folder / "file").read_text() == "a regular file"


def test_a_mistake_on_the_command_line_itself(cli, folder):
    arguments, message = CASES["rank 0"]
    process = cli(*arguments, cwd=folder)
    assert process.returncode == 2
    assert is_one_line(process.stderr, message), process.stderr
    assert process.stdout == ""


def test_help_names_every_setting(cli, tmp_path):
    process = cli("train", "--help", cwd=tmp_path)
    assert process.returncode == 0 and process.stderr == ""
    names = field_names(RunConfig)
    assert len(names) > 40
    for name in names:
        assert re.search(rf"--{re.escape(name.replace('_', '-'))}\b", process.stdout), name


def test_help_and_version(cli, tmp_path):
    assert cli("--version", cwd=tmp_path).stdout == f"sfgrpo {__version__}\n"
    usage = cli("--help", cwd=tmp_path)
    assert usage.returncode == 0
    bare = cli(cwd=tmp_path)
    assert bare.returncode == 2 and bare.stdout == usage.stdout
    for command in ("demo", "train", "sample", "selftest"):
        assert f"sfgrpo {command}" in usage.stdout
    demo = cli("demo", "--help", cwd=tmp_path)
    assert demo.returncode == 0 and "--out" in demo.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("module", ("benchmarks.demo_seeds", "trainer.shapes_base"))
def test_scripts_refuse_a_folder_without_a_name(module):
    process = subprocess.run(
        [sys.executable, "-m", module, "--out", ""],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 2 and process.stdout == ""
    # Before it libraries may warn of themselves.
    assert process.stderr.endswith(f"{module.split('.')[1]}.py: error: --out needs a folder; name one\n")
    assert "usage" not in process.stderr and "Traceback" not in process.stderr
