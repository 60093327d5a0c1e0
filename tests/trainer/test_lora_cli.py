"""`sfgrpo lora`: what it prints, its exit codes, and that it leaves files alone."""

import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sfgrpo_trainer.cli import main
from tests.lora_dialects import ALPHA, DIALECTS, RANK, SCALE, write

LINEARS = {"double_blocks.0.img_attn.qkv": (128, 384), "single_blocks.0.linear2": (640, 128)}


@pytest.fixture
def kohya(tmp_path):
    state, meant = write(DIALECTS["kohya"], LINEARS)
    save_file(state, tmp_path / "kohya.safetensors", {"ss_network_alpha": str(ALPHA), "ss_output_name": "cats"})
    return meant


@pytest.fixture
def lora(tmp_path, monkeypatch, capsys):
    """`lora(*arguments)`: the command in this process, in tmp_path; (exit code, what it printed, its errors)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[int, str, str]:
        code = main(["lora", *map(str, arguments)])
        return code, *capsys.readouterr()

    return run


def test_inspect_convert_and_merge(kohya, lora, tmp_path):
    code, said, errors = lora("inspect", "kohya.safetensors")
    assert code == 0 and not errors
    assert "model: FLUX.1" in said and f"times {SCALE:g}" in said and "rank 4" in said
    code, _, errors = lora("convert", "kohya.safetensors", "new.safetensors")
    assert code == 0, errors
    state = load_file(tmp_path / "new.safetensors")
    name = "transformer.single_transformer_blocks.0.proj_out"
    got = state[f"{name}.lora_B.weight"] @ state[f"{name}.lora_A.weight"]
    torch.testing.assert_close(got, kohya["single_blocks.0.linear2"], rtol=1e-5, atol=1e-4)
    with safe_open(tmp_path / "new.safetensors", "pt") as file:
        metadata = file.metadata()
    assert metadata["ss_output_name"] == "cats" and "ss_network_alpha" not in metadata
    files = ("kohya.safetensors:0.25", "new.safetensors:-1")
    code, _, errors = lora("merge", "sum.safetensors", *files, "--rank", RANK, "--dtype", "bf16")
    assert code == 0, errors
    summed = load_file(tmp_path / "sum.safetensors")
    assert {v.dtype for v in summed.values()} == {torch.bfloat16}
    got = summed[f"{name}.lora_B.weight"].float() @ summed[f"{name}.lora_A.weight"].float()
    wanted = -0.75 * kohya["single_blocks.0.linear2"]
    assert (got - wanted).norm() < 0.01 * wanted.norm()


def test_alpha_and_model_that_the_user_knows(lora, tmp_path):
    state, meant = write(DIALECTS["kohya, alpha in metadata"], LINEARS)
    metadata = {"ss_network_alpha": str(ALPHA), "ss_network_dim": str(RANK), "ss_base_model_version": "framepack"}
    save_file(state, tmp_path / "x.safetensors", metadata)
    code, said, _ = lora("inspect", "x.safetensors")
    assert code == 0 and "in doubt: its metadata name FramePack" in said and "alpha of 10 (ss_network_alpha)" in said
    code, _, errors = lora("convert", "x.safetensors", "new.safetensors")
    assert code == 2 and "--model flux1" in errors and not (tmp_path / "new.safetensors").exists()
    code, said, errors = lora("convert", "x.safetensors", "new.safetensors", "--model", "flux1", "--alpha", ALPHA)
    assert code == 0 and "alpha of 10" not in said, errors
    state = load_file(tmp_path / "new.safetensors")
    name = "transformer.single_transformer_blocks.0.proj_out"
    got = state[f"{name}.lora_B.weight"] @ state[f"{name}.lora_A.weight"]
    torch.testing.assert_close(
        got, SCALE * meant["single_blocks.0.linear2"] / DIALECTS["kohya, alpha in metadata"].scale
    )
    code, said, _ = lora("inspect", "new.safetensors")
    assert code == 0 and said.strip().endswith("to do: nothing")
    assert lora("merge", "sum.safetensors", "x.safetensors", "new.safetensors")[0] == 2
    assert lora("merge", "sum.safetensors", "x.safetensors", "new.safetensors", "--model", "flux1")[0] == 0


def test_a_file_is_not_overwritten(kohya, lora, tmp_path):
    (tmp_path / "there.safetensors").write_bytes(b"mine")
    code, _, errors = lora("convert", "kohya.safetensors", "there.safetensors")
    assert code == 2 and "there.safetensors exists" in errors
    assert (tmp_path / "there.safetensors").read_bytes() == b"mine"
    code, _, _ = lora("convert", "kohya.safetensors", "there.safetensors", "--force")
    assert code == 0 and load_file(tmp_path / "there.safetensors")


MISTAKES = {
    "no command": ((), "required"),
    "another command": (("bless",), "invalid choice: 'bless'"),
    "no file": (("inspect",), "FILE"),
    "missing": (("inspect", "no.safetensors"), "no.safetensors does not exist"),
    "damaged": (("convert", "bad.safetensors", "o.safetensors"), "bad.safetensors cannot be read"),
    "another ending": (("convert", "kohya.safetensors", "o.pt"), "OUT must end in .safetensors"),
    "no folder": (("convert", "kohya.safetensors", "no/o.safetensors"), "cannot write no/o.safetensors"),
    "dtype": (("convert", "kohya.safetensors", "o.safetensors", "--dtype", "fp8"), "invalid choice: 'fp8'"),
    "rank": (("merge", "o.safetensors", "kohya.safetensors", "--rank", "0"), "rank must be 1 or more"),
    "weight": (("merge", "o.safetensors", "kohya.safetensors:inf"), "must be a number"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name, kohya, lora, tmp_path):
    arguments, words = MISTAKES[name]
    (tmp_path / "bad.safetensors").write_bytes(b"no safetensors")
    before = sorted(tmp_path.iterdir())
    code, said, errors = lora(*arguments)
    assert code == (1 if "cannot write" in words else 2) and not said
    assert errors.startswith("sfgrpo: error: ") and errors.count("\n") == 1 and words in errors
    assert sorted(tmp_path.iterdir()) == before


def test_help(lora, capsys):
    code, said, _ = lora("--help")
    assert code == 0 and "inspect" in said
    assert main(["--help"]) == 0 and "sfgrpo lora convert" in capsys.readouterr().out


def test_as_a_process_it_imports_neither_diffusers_nor_peft(kohya, tmp_path):
    code = (
        "import sys; from sfgrpo_trainer.cli import main; assert main(['lora', 'inspect', 'kohya.safetensors']) == 0; "
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'diffusers', 'peft', 'transformers', 'accelerate'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stdout.endswith("[]\n") and "model: FLUX.1" in done.stdout and not done.stderr, done.stderr
