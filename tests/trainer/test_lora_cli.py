"""`sfgrpo lora` as a process: what it prints, its exit codes, and that it leaves files alone."""

import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.lora_dialects import ALPHA, DIALECTS, RANK, SCALE, write

LINEARS = {"double_blocks.0.img_attn.qkv": (128, 384), "single_blocks.0.linear2": (640, 128)}


@pytest.fixture
def kohya(tmp_path):
    state, meant = write(DIALECTS["kohya"], LINEARS)
    save_file(state, tmp_path / "kohya.safetensors", {"ss_network_alpha": str(ALPHA), "ss_output_name": "cats"})
    return meant


def test_inspect_convert_and_merge(kohya, cli, tmp_path):
    done = cli("lora", "inspect", "kohya.safetensors", cwd=tmp_path)
    assert done.returncode == 0 and not done.stderr
    assert "model: FLUX.1" in done.stdout and f"times {SCALE:g}" in done.stdout and "rank 4" in done.stdout
    done = cli("lora", "convert", "kohya.safetensors", "new.safetensors", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    state = load_file(tmp_path / "new.safetensors")
    name = "transformer.single_transformer_blocks.0.proj_out"
    got = state[f"{name}.lora_B.weight"] @ state[f"{name}.lora_A.weight"]
    torch.testing.assert_close(got, kohya["single_blocks.0.linear2"], rtol=1e-5, atol=1e-4)
    with safe_open(tmp_path / "new.safetensors", "pt") as file:
        metadata = file.metadata()
    assert metadata["ss_output_name"] == "cats" and "ss_network_alpha" not in metadata
    files = ("kohya.safetensors:0.25", "new.safetensors:-1")
    done = cli("lora", "merge", "sum.safetensors", *files, "--rank", RANK, "--dtype", "bf16", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summed = load_file(tmp_path / "sum.safetensors")
    assert {v.dtype for v in summed.values()} == {torch.bfloat16}
    got = summed[f"{name}.lora_B.weight"].float() @ summed[f"{name}.lora_A.weight"].float()
    wanted = -0.75 * kohya["single_blocks.0.linear2"]
    assert (got - wanted).norm() < 0.01 * wanted.norm()


def test_a_file_is_not_overwritten(kohya, cli, tmp_path):
    (tmp_path / "there.safetensors").write_bytes(b"mine")
    done = cli("lora", "convert", "kohya.safetensors", "there.safetensors", cwd=tmp_path)
    assert done.returncode == 2 and "there.safetensors exists" in done.stderr
    assert (tmp_path / "there.safetensors").read_bytes() == b"mine"
    done = cli("lora", "convert", "kohya.safetensors", "there.safetensors", "--force", cwd=tmp_path)
    assert done.returncode == 0 and load_file(tmp_path / "there.safetensors")


MISTAKES = {
    "no command": ((), "required"),
    "another command": (("bless",), "invalid choice: 'bless'"),
    "no file": (("inspect",), "FILE"),
    "missing": (("inspect", "no.safetensors"), "no.safetensors does not exist"),
    "damaged": (("convert", "bad.safetensors", "o.safetensors"), "bad.safetensors cannot be read"),
    "another ending": (("convert", "kohya.safetensors", "o.pt"), "OUT must end in .safetensors"),
    "no folder": (("convert", "kohya.safetensors", "no/o.safetensors"), "cannot be written"),
    "dtype": (("convert", "kohya.safetensors", "o.safetensors", "--dtype", "fp8"), "invalid choice: 'fp8'"),
    "rank": (("merge", "o.safetensors", "kohya.safetensors", "--rank", "0"), "rank must be 1 or more"),
    "weight": (("merge", "o.safetensors", "kohya.safetensors:inf"), "must be a number"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name, kohya, cli, tmp_path):
    arguments, words = MISTAKES[name]
    (tmp_path / "bad.safetensors").write_bytes(b"no safetensors")
    before = sorted(tmp_path.iterdir())
    done = cli("lora", *arguments, cwd=tmp_path)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("sfgrpo: error: ") and done.stderr.count("\n") == 1 and words in done.stderr
    assert sorted(tmp_path.iterdir()) == before


def test_help(cli, tmp_path):
    done = cli("lora", "--help", cwd=tmp_path)
    assert done.returncode == 0 and "inspect" in done.stdout
    assert "sfgrpo lora convert" in cli("--help", cwd=tmp_path).stdout


def test_neither_diffusers_nor_peft_is_imported(kohya, tmp_path):
    code = (
        "import sys; from sfgrpo_trainer.cli import main; assert main(['lora', 'inspect', 'kohya.safetensors']) == 0; "
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'diffusers', 'peft', 'transformers', 'accelerate'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stdout.endswith("[]\n"), done.stderr
