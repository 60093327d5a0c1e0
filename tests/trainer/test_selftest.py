"""`sfgrpo selftest`: green on a sound model, and red where something is really broken."""

import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from sfgrpo_trainer import selftest
from sfgrpo_trainer.cli import main
from sfgrpo_trainer.policy import lora_layers
from sfgrpo_trainer.selftest import CHECKS, Checks, parser


@pytest.fixture
def checks() -> Checks:
    """The checks on the embedded model, before any was run."""
    return Checks(parser().parse_args(["--device=cpu"]))


def green(check, checks: Checks) -> bool:
    value, bound = check(checks)
    assert math.isfinite(bound)
    return value <= bound


def test_all_checks_are_green(capfd):
    assert main(["selftest"]) == 0
    said = capfd.readouterr()
    *lines, summary = said.out.splitlines()
    assert len(lines) == len(CHECKS) >= 8
    for line, (title, _) in zip(lines, CHECKS, strict=True):
        assert line.startswith(f"green  {title} ")
    assert summary == f"{len(CHECKS)} green, 0 red: shapes, torch.float32, cpu"
    assert said.err == ""


@pytest.mark.slow  # 256 T5 tokens, which the embedded model has not
def test_another_model_is_green_with_its_t5(random_sd3, capsys):
    assert main(["selftest", f"--model={random_sd3.path}", "--device=cpu"]) == 0
    assert f"0 red: {random_sd3.path.name}, torch.float32, cpu" in capsys.readouterr().out


@pytest.mark.slow
def test_bf16_is_green(capsys):
    assert main(["selftest", "--dtype=bf16", "--device=cpu"]) == 0, capsys.readouterr().out


def test_a_changed_base_weight_is_seen(checks):
    assert green(Checks.adapter_off, checks) and green(Checks.round_trip, checks)
    layer = checks.family.transformer.transformer_blocks[1].attn.to_q.base_layer
    layer.weight.data[0, 0] += 0.5
    assert not green(Checks.adapter_off, checks)
    assert not green(Checks.round_trip, checks)


def test_a_lora_without_effect_is_seen(checks):
    assert green(Checks.adapter_on, checks)
    for layer in lora_layers(checks.family).values():
        layer.lora_B["default"].weight.data.zero_()
    assert not green(Checks.adapter_on, checks)


def test_a_lora_scale_that_the_file_does_not_have_is_seen(checks):
    """Files are written with the scale of the first layer; here another layer has another."""
    *_, last = lora_layers(checks.family).values()
    last.scaling["default"] *= 3
    assert not green(Checks.round_trip, checks)


def test_a_policy_that_draws_lots_is_seen(checks):
    """Dropout in the LoRA: another velocity for the same inputs."""
    for layer in lora_layers(checks.family).values():
        layer.lora_dropout["default"] = torch.nn.Dropout(0.5).train()
    for check in (Checks.rounding, Checks.micro_batch, Checks.eta_zero):
        assert not green(check, checks)


def test_a_model_of_nan_is_red_throughout(checks):
    """A number that is NaN is never green, nor is a check that had nothing to look at."""
    checks.family.transformer.proj_out.bias.data.fill_(math.nan)
    assert [title for title, check in CHECKS if green(check, checks)] == []


def test_red_ends_with_exit_code_1(embedded, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "model"
    shutil.copytree(embedded.path, folder)
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    state = load_file(file)
    state["proj_out.bias"].fill_(math.nan)
    save_file(state, file)
    monkeypatch.setattr(selftest, "CHECKS", [c for c in CHECKS if c[1] == Checks.eta_zero])  # one of them will do
    assert main(["selftest", f"--model={folder}", "--device=cpu"]) == 1
    line, summary = capsys.readouterr().out.splitlines()
    assert line.startswith("RED  ") and line.endswith(" nan (at most 1e-05)")
    assert summary == "0 green, 1 red: model, torch.float32, cpu"
