"""LoRA files that are damaged, or no LoRA: each is refused in one sentence, quickly, and nothing in it is run."""

import io
import json
import pickle
import struct
import time
import zipfile

import pytest
import torch
from safetensors import deserialize
from safetensors.torch import save, save_file

from sfgrpo.lora_files.file import common_dtype, read_lora
from sfgrpo.lora_files.header import parse_header
from sfgrpo.lora_files.keys import parse

A, B = (
    "transformer.transformer_blocks.0.attn.to_q.lora_A.weight",
    "transformer.transformer_blocks.0.attn.to_q.lora_B.weight",
)
GOOD = {A: torch.ones(4, 8), B: torch.ones(8, 4)}


def packed(header: dict | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(start: int, end: int, shape=(4, 8), dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


class Evil:
    """Something that would run if it were unpickled."""

    def __reduce__(self):
        return (print, ("unpickled",))


DAMAGED = {
    "empty": (b"", "it has 0 bytes"),
    "text": (b"no safetensors at all, but some text", "no safetensors file"),
    "noise": (bytes(range(256)) * 8, "no safetensors file"),
    "pickle": (pickle.dumps(Evil()), "a pickle, which can run code"),
    "old pickle": (pickle.dumps(Evil(), protocol=2), "a pickle, which can run code"),
    "huge header": (packed(b"{}", length=2**63 - 1), "a header of 9223372036854775807 bytes"),
    "large header": (packed(b"{}", length=99_000_000), "cut short or no safetensors"),
    "cut in the header": (save(GOOD)[:40], "cut short"),
    "cut in the data": (save(GOOD)[:-9], "ends after the file"),
    "more data": (save(GOOD) + b"123", "bytes that belong to no tensor"),
    "no JSON": (packed(b"{not json}"), "its header is no JSON"),
    "deep JSON": (packed(b"[" * 100_000), "its header is no JSON"),
    "a name twice": (packed(b'{"x": 1, "x": 2}'), "its header is no JSON"),
    "a list": (packed(b"[1, 2]"), "its header is no table"),
    "outside": (packed({A: entry(0, 128), B: entry(128, 256, (8, 4))}, bytes(200)), "ends after the file"),
    "overlap": (packed({A: entry(0, 128), B: entry(64, 192, (8, 4))}, bytes(192)), "overlap"),
    "gap": (packed({A: entry(0, 128), B: entry(160, 288, (8, 4))}, bytes(288)), "leave a gap"),
    "negative": (packed({A: entry(-128, 0)}, bytes(128)), "does not describe"),
    "backwards": (packed({A: entry(128, 0)}, bytes(128)), "do not have the size"),
    "another size": (packed({A: entry(0, 64)}, bytes(64)), "do not have the size of its shape"),
    "huge shape": (packed({A: entry(0, 128, (2**40, 2**40))}, bytes(128)), "do not have the size"),
    "unknown dtype": (packed({A: entry(0, 128, dtype="F99")}, bytes(128)), "unknown dtype 'F99'"),
    "bad entry": (packed({A: 5}), "does not describe"),
    "bad metadata": (packed({"__metadata__": {"a": 1}, A: entry(0, 128)}, bytes(128)), "metadata is no table"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file(name, tmp_path, capsys):
    data, words = DAMAGED[name]
    path = tmp_path / "file.safetensors"
    path.write_bytes(data)
    start = time.perf_counter()
    with pytest.raises(ValueError) as error:
        read_lora(path)
    assert time.perf_counter() - start < 1
    assert str(error.value).startswith(f"LoRA file {path} cannot be read: ") and words in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
    assert "unpickled" not in capsys.readouterr().out
    with pytest.raises(ValueError, match="LoRA file shown cannot"):
        read_lora(path, "shown")


KINDS = {
    "gguf": (b"GGUF\x03\0\0\0" + bytes(100), "a GGUF file"),
    "page": (b"\n  <!doctype html><html><body>Log in</body></html>", "a web page, such as a login"),
    "page without a type": (b"<HTML><head></head></HTML>", "a web page"),
    "git-lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n", "run `git lfs pull`"),
    "server": (b'{"error": "Invalid username or password."}', "a JSON text, such as a server's error message"),
    "xml": (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "an XML text"),
    "unfinished": (bytes(5000), "zeros alone"),
    "gzip": (b"\x1f\x8b\x08" + bytes(60), "a gzip archive; unpack it first"),
    "7z": (b"7z\xbc\xaf\x27\x1c" + bytes(60), "a 7z archive"),
    "picture": (b"\x89PNG\r\n\x1a\n" + bytes(60), "a picture"),
    "a broken zip": (b"PK\x03\x04" + bytes(60), "a pickle, which can run code"),
}


@pytest.mark.parametrize("name", KINDS)
def test_what_a_file_is_that_is_no_safetensors(name, tmp_path):
    data, words = KINDS[name]
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match="cannot be read: ") as error:
        read_lora(tmp_path / "x.safetensors")
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_zip_archive_names_what_is_in_it(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.safetensors", "w") as archive:
        archive.writestr("mine/lora.safetensors", save(GOOD))
    with pytest.raises(ValueError, match=r"a zip archive; unpack it first and take mine/lora\.safetensors"):
        read_lora(tmp_path / "x.safetensors")


def test_a_header_of_any_length(tmp_path):
    """The low bytes of the length may be those that a pickle, a zip archive or a page begins with."""
    text = json.dumps({A: entry(0, 128), B: entry(128, 256, (8, 4))}).encode()
    data = bytes(256)
    for low in range(65536):
        length = low if low >= len(text) else low + 65536
        whole = packed(text.ljust(length), data)
        assert parse_header(io.BytesIO(whole), len(whole)).keys() == {A, B}
        if low % 997 == 0 or low & 0xFF == 0x80:
            assert {name for name, _ in deserialize(whole)} == {A, B}


@pytest.mark.parametrize("start", [b"\x80\x02", b"\x80\x05", b"PK", b"{}", b"<h"])
def test_a_file_whose_length_looks_like_something_else(start, tmp_path):
    """As a whole, through the file; the header is padded with spaces, as the format's library does."""
    text = json.dumps({A: entry(0, 128), B: entry(128, 256, (8, 4))}).encode()
    length = int.from_bytes(start, "little")
    (tmp_path / "x.safetensors").write_bytes(packed(text.ljust(length), bytes(256)))
    assert read_lora(tmp_path / "x.safetensors").tensors.keys() == {A, B}


@pytest.mark.parametrize("dtype", ["F8_E8M0", "F4", "C64", "U16"])
def test_tensors_of_any_dtype_beside_the_factors(dtype):
    """What the format has is no damage; a LoRA is read from the factors."""
    bits = {"F8_E8M0": 8, "F4": 4, "C64": 64, "U16": 16}[dtype]
    header = {A: entry(0, 128), B: entry(128, 256, (8, 4)), "x": entry(256, 256 + 2 * bits, (16,), dtype)}
    whole = packed(header, bytes(256 + 2 * bits))
    assert parse_header(io.BytesIO(whole), len(whole)).keys() == header.keys()
    assert {name for name, _ in deserialize(whole)} == header.keys()


def test_a_torch_file_and_an_archive(tmp_path):
    torch.save(GOOD, tmp_path / "lora.pt")
    with zipfile.ZipFile(tmp_path / "archive.safetensors", "w") as archive:
        archive.writestr("data.pkl", pickle.dumps(Evil()))
    for name in ("lora.pt", "archive.safetensors"):
        with pytest.raises(ValueError, match="it is a pickle, which can run code"):
            read_lora(tmp_path / name)


def test_missing_files_and_folders(tmp_path):
    with pytest.raises(ValueError, match=r"no\.safetensors does not exist"):
        read_lora(tmp_path / "no.safetensors")
    with pytest.raises(ValueError, match="a folder without adapter_model"):
        read_lora(tmp_path)
    save_file(GOOD, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 8}')
    assert read_lora(tmp_path).config["lora_alpha"] == 8
    (tmp_path / "adapter_config.json").write_text("[")
    with pytest.raises(ValueError, match="adapter_config.json beside it is no JSON"):
        read_lora(tmp_path)


LAYER = "transformer_blocks.0.attn.to_q"
OTHER = {
    "whole model": ({f"double_blocks.{i}.img_attn.qkv.weight": torch.ones(2, 2) for i in range(4)}, "a whole model"),
    "embedding": ({"clip_l": torch.ones(2, 8), "clip_g": torch.ones(2, 8)}, "an embedding"),
    "nothing": ({}, "it is empty"),
    "DoRA": (GOOD | {f"transformer.{LAYER}.dora_scale": torch.ones(8, 1)}, "magnitudes cannot be folded"),
    "DoRA of peft": (GOOD | {f"{LAYER}.lora_magnitude_vector": torch.ones(8)}, "magnitudes cannot be folded"),
    "LoHa": ({f"lora_unet_{LAYER}.hada_w1_a": torch.ones(2, 2)}, "is a LoHa"),
    "LoKr": ({f"lora_unet_{LAYER}.lokr_w1": torch.ones(2, 2)}, "is a LoKr"),
    "LoCon": (GOOD | {f"transformer.{LAYER}.lora_mid.weight": torch.ones(4, 4, 3, 3)}, "middle factors"),
    "OFT": ({f"lora_unet_{LAYER}.oft_blocks": torch.ones(2, 2, 2)}, "is an OFT"),
    "a lone factor": ({A: GOOD[A]}, "lacks one of the two factors"),
    "two spellings": ({A: GOOD[A], A.replace("lora_A", "lora_down"): GOOD[A], B: GOOD[B]}, "two factors A"),
    "other ranks": (GOOD | {A: torch.ones(5, 8)}, "factors of ranks 5 and 4"),
    "no rank": ({A: torch.ones(0, 8), B: torch.ones(8, 0)}, "factors of ranks 0 and 0"),
    "NaN": (GOOD | {B: torch.full((8, 4), torch.nan)}, "not finite"),
    "infinity": (GOOD | {A: torch.full((4, 8), torch.inf, dtype=torch.float16)}, "not finite"),
    "integers": (GOOD | {A: torch.ones(4, 8, dtype=torch.int32)}, "no matrix of real numbers"),
    "a vector": (GOOD | {A: torch.ones(4)}, "no matrix of real numbers"),
    "a bad alpha": (GOOD | {f"transformer.{LAYER}.alpha": torch.ones(2)}, "alpha is no number"),
    "a text encoder": (
        {f"lora_te1_text_model.lora_{x}.weight": torch.ones(4, 4) for x in ("up", "down")},
        "holds no LoRA of a transformer",
    ),
    "convolutions": (GOOD | {A: torch.ones(4, 8, 3, 3)}, "is part of a convolution"),
}


@pytest.mark.parametrize("name", OTHER)
def test_what_is_no_lora(name, tmp_path):
    state, words = OTHER[name]
    save_file({k: v.clone() for k, v in state.items()}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError) as error:
        parse(read_lora(tmp_path / "x.safetensors"))
    assert str(error.value).startswith(f"LoRA file {tmp_path / 'x.safetensors'}") and words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("dtypes", "common"),
    [
        ((torch.float16, torch.float16), torch.float16),
        ((torch.bfloat16, torch.bfloat16), torch.bfloat16),
        ((torch.float64, torch.float64), torch.float32),
        ((torch.float16, torch.float32), torch.float32),
        ((torch.float8_e4m3fn, torch.float8_e4m3fn), torch.bfloat16),
    ],
)
def test_dtype_of_a_file(dtypes, common, tmp_path):
    save_file({k: v.to(d) for (k, v), d in zip(GOOD.items(), dtypes, strict=True)}, tmp_path / "x.safetensors")
    file = read_lora(tmp_path / "x.safetensors")
    assert common_dtype(file) == common
    assert len(parse(file).layers) == 1
