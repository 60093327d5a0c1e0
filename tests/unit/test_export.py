"""LoRA files."""

import hashlib

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from sfgrpo.export import file_hash, fold, save_lora

A = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
B = torch.tensor([[1.0, 0.0], [0.5, -1.0], [2.0, 3.0], [0.1, 0.2]])


def test_fold_puts_the_scale_into_b_and_writes_no_alpha():
    state = fold({"blocks.0.attn.to_q": (A, B), "out": (2 * A, B)}, 0.5, torch.float32)
    assert set(state) == {
        "blocks.0.attn.to_q.lora_A.weight",
        "blocks.0.attn.to_q.lora_B.weight",
        "out.lora_A.weight",
        "out.lora_B.weight",
    }
    a, b = state["blocks.0.attn.to_q.lora_A.weight"], state["blocks.0.attn.to_q.lora_B.weight"]
    assert torch.equal(a, A) and torch.equal(state["out.lora_A.weight"], 2 * A)
    torch.testing.assert_close(b @ a, 0.5 * (B @ A))


def test_fold_multiplies_before_it_rounds():
    # bfloat16 holds 1 + 1/128 but not a third of it: float32 first, one rounding after.
    b = torch.tensor([[1.0078125]], dtype=torch.bfloat16)
    state = fold({"m": (A.bfloat16(), b)}, 1 / 3, torch.float16)
    assert state["m.lora_B.weight"].dtype == state["m.lora_A.weight"].dtype == torch.float16
    assert float(state["m.lora_B.weight"]) == float(torch.tensor(1.0078125 / 3).half())


def test_fold_takes_parameters_and_views():
    a, b = torch.nn.Parameter(A.clone()), torch.nn.Parameter(B.clone())
    state = fold({"m": (a.T, b.T)}, 2.0, torch.float32)
    assert all(v.is_contiguous() and not v.requires_grad for v in state.values())
    assert torch.equal(state["m.lora_A.weight"], A.T) and torch.equal(state["m.lora_B.weight"], 2 * B.T)


def test_saved_file_is_loaded_equal_with_its_metadata(tmp_path):
    path = tmp_path / "lora.safetensors"
    state = fold({"m": (A, B)}, 0.5, torch.bfloat16)
    save_lora(state, path, {"iteration": 30, "base": "shapes", "reward": 0.25})
    loaded = load_file(path)
    assert set(loaded) == set(state)
    for name in state:
        assert loaded[name].dtype == torch.bfloat16 and torch.equal(loaded[name], state[name])
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"iteration": "30", "base": "shapes", "reward": "0.25"}
    assert [p.name for p in tmp_path.iterdir()] == ["lora.safetensors"]


def test_a_second_save_replaces_the_first(tmp_path):
    path = tmp_path / "lora.safetensors"
    (tmp_path / "lora.safetensors.part").write_bytes(b"left by a crash")
    save_lora({"a": A}, str(path), {})
    save_lora({"b": B}, str(path), {})
    assert torch.equal(load_file(path)["b"], B) and "a" not in load_file(path)
    assert [p.name for p in tmp_path.iterdir()] == ["lora.safetensors"]


def test_a_failed_save_leaves_the_old_file_whole(tmp_path):
    path = tmp_path / "lora.safetensors"
    save_lora({"a": A}, path, {})
    with pytest.raises(ValueError, match="non contiguous"):
        save_lora({"a": A.T}, path, {})
    assert torch.equal(load_file(path)["a"], A)


def test_a_failed_save_leaves_no_part_file(tmp_path):
    with pytest.raises(ValueError, match="non contiguous"):
        save_lora({"a": A.T}, tmp_path / "lora.safetensors", {})
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_an_os_error(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        save_lora({"a": A}, tmp_path / "no" / "lora.safetensors", {})


def test_file_hash_is_sha_256(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"abc")
    assert file_hash(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert file_hash(str(path)) == hashlib.sha256(b"abc").hexdigest()
