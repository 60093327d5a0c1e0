"""Files that are not the transformer's plain weights: one sentence each, and no model with wrong weights."""

import pytest
import torch
from safetensors.torch import save_file

from sfgrpo_trainer.errors import UserError
from sfgrpo_trainer.families import load_family
from tests.small_models import sd3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("sd3")
    sd3.build(path)
    return path


def load(model, file):
    return load_family(str(model), torch.float32, torch.device("cpu"), "denoiser", transformer_file=file)


@pytest.mark.parametrize("key", ("scale_weight", "weight_scale", "comfy_quant"))
def test_scaled_weights_are_refused(model, key, tmp_path):
    file, layer = tmp_path / "fp8.safetensors", "joint_blocks.0.x_block.attn.qkv"
    save_file({f"{layer}.weight": torch.zeros(8, 8), f"{layer}.{key}": torch.ones(1)}, file)
    with pytest.raises(UserError, match="fp8.safetensors holds quantised weights with scales") as refusal:
        load(model, file)
    assert f"({layer}.{key})" in str(refusal.value)


def test_what_is_no_such_file_is_refused(model, tmp_path):
    with pytest.raises(UserError, match="model.transformer_file .*missing.safetensors does not exist"):
        load(model, tmp_path / "missing.safetensors")
    (tmp_path / "pickle.safetensors").write_bytes(b"PK" + bytes(100))
    with pytest.raises(UserError, match="pickle.safetensors is no safetensors file"):
        load(model, tmp_path / "pickle.safetensors")
    save_file({"some.weight": torch.zeros(4)}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match="other.safetensors is no transformer of this model: "):
        load(model, tmp_path / "other.safetensors")
