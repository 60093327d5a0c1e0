"""LoRA Doctor in a running ComfyUI: its words, its file, what it refuses; training that goes on from kohya's file."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sfgrpo.shapes import MODEL_DIR
from tests.comfy.training import Graph
from tests.lora_dialects import DIALECTS, sd3_attention, write

LAYERS = sd3_attention(json.loads((MODEL_DIR / "transformer" / "config.json").read_text()))


@pytest.fixture(scope="module")
def theirs(server):
    """A LoRA of the embedded model as kohya writes it, in the loras folder; its change of native weights."""
    state, _ = write(DIALECTS["kohya"], LAYERS)
    state = {k: v if k.endswith("alpha") else 0.1 * v for k, v in state.items()}
    save_file(state, server.base / "models" / "loras" / "kohya.safetensors", {"ss_output_name": "cats"})
    return {n: 2.5 * state[key + ".lora_up.weight"] @ state[key + ".lora_down.weight"] for n, key in keys().items()}


def keys() -> dict[str, str]:
    return {name: "lora_unet_" + name.replace(".", "_") for name in LAYERS}


def examine(server, **inputs):
    graph = Graph(server)
    lora = graph.add("doctor", "SFGRPO_LoRADoctor", slot=1, **({"name": "", "dtype": "same"} | inputs))
    return graph, lora


def change(state: dict, name: str) -> torch.Tensor:
    return state[f"{name}.lora_B.weight"].float() @ state[f"{name}.lora_A.weight"].float()


def assert_meant(state: dict, theirs: dict, scale: float = 1.0, atol: float = 1e-4) -> None:
    for block in (0, 1):
        rows = theirs[f"joint_blocks.{block}.x_block.attn.qkv"].chunk(3)
        for part, value in zip(("to_q", "to_k", "to_v"), rows, strict=True):
            got = change(state, f"transformer.transformer_blocks.{block}.attn.{part}")
            torch.testing.assert_close(got, scale * value, rtol=1e-2 if atol > 1e-4 else 1e-5, atol=atol)


def test_report_and_file(server, theirs):
    before = set(server.output.rglob("*"))
    graph, _ = examine(server, lora_file="kohya.safetensors")
    (text,) = graph.run().outputs["doctor"]["text"]
    assert "model: Stable Diffusion 3" in text and "kohya" in text and "saved" not in text
    assert f"{len(LAYERS)} of {len(LAYERS)} layers are loaded, at its true strength" in text
    assert set(server.output.rglob("*")) == before
    for number, dtype in ((1, "same"), (2, "fp16")):
        graph, lora = examine(server, lora_file="kohya.safetensors", name="fixed", dtype=dtype)
        graph.add("save", "SaveLoRA", lora=lora, prefix=f"loras/stock_{dtype}")
        (text,) = graph.run().outputs["doctor"]["text"]
        place = f"output/loras/fixed_{number:05}_fixed.safetensors"
        assert text.endswith(f"saved: {place}")
        state = load_file(server.output.parent / place)
        assert {v.dtype for v in state.values()} == {torch.float32 if dtype == "same" else torch.float16}
        assert_meant(state, theirs, atol=1e-4 if dtype == "same" else 1e-2)
        # What the output holds is what the file holds.
        (stock,) = server.output.glob(f"loras/stock_{dtype}*.safetensors")
        saved = load_file(stock)
        assert saved.keys() == state.keys() and all(torch.equal(saved[k], v) for k, v in state.items())
        with safe_open(server.output.parent / place, "pt") as file:
            assert file.metadata()["ss_output_name"] == "cats"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"no safetensors at all", "LoRA file sick.safetensors cannot be read: it is no safetensors file"),
        ({"x.weight": torch.ones(2, 2)}, "LoRA file sick.safetensors holds no LoRA: it is a whole model"),
        ({"x.lora_A.weight": torch.ones(2, 2), "x.dora_scale": torch.ones(2)}, "LoRA file sick.safetensors is a DoRA"),
    ],
)
def test_a_file_that_is_refused(server, data, words):
    path = server.base / "models" / "loras" / "sick.safetensors"
    path.write_bytes(data) if isinstance(data, bytes) else save_file(data, path)
    graph, _ = examine(server, lora_file="sick.safetensors", name="sick")
    error = graph.error()
    assert error.startswith(words) and "\n" not in error and str(server.base) not in error
    assert not list(server.output.rglob("sick*"))


ATTENTION = "transformer.transformer_blocks.0.attn.to_q"
SHARED = "transformer.double_stream_modulation_img.linear"
REFUSED = {
    "too large for fp16": (ATTENTION, 1e30, "model: Stable Diffusion 3", "is too large for torch.float16; choose bf16"),
    "unknown to ComfyUI": (SHARED, 1.0, "model: FLUX.2", "has only layers that ComfyUI cannot load"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_lora_that_cannot_be_fixed_is_reported_all_the_same(server, case):
    """Nothing is saved; a node that wants the LoRA does not run, and the rest of the workflow does."""
    layer, size, model, reason = REFUSED[case]
    factors = {f"{layer}.lora_A.weight": torch.ones(2, 64), f"{layer}.lora_B.weight": torch.full((64, 2), size)}
    save_file(factors, server.base / "models" / "loras" / "unfit.safetensors")
    before = set(server.output.rglob("*"))
    graph, lora = examine(server, lora_file="unfit.safetensors", name="unfit", dtype="fp16")
    graph.add("save", "SaveLoRA", lora=lora, prefix="loras/unfit")
    graph.add("patch", "LoraModelLoader", model=graph.model, lora=lora, strength_model=1.0, bypass=False)
    graph.add("look", "Probe_Look", model=["patch", 0], at_rest=False)
    graph.add("text", "PreviewAny", source=["doctor", 0])
    outputs = graph.run().outputs
    (text,) = outputs["doctor"]["text"]
    assert model in text and "alpha:" in text
    last = text.splitlines()[-1]
    assert last.startswith("no fixed LoRA: ") and reason in last
    assert outputs["text"]["text"] == [text]
    assert outputs.keys() == {"doctor", "text"} and set(server.output.rglob("*")) == before


def test_a_model_in_doubt_and_an_alpha_that_the_user_knows(server):
    """What metadata alone tell is told, and what the user sets decides."""
    factors = {f"{ATTENTION}.lora_A.weight": torch.ones(2, 64), f"{ATTENTION}.lora_B.weight": torch.ones(64, 2)}
    metadata = {"ss_base_model_version": "framepack", "ss_network_alpha": "1.0", "ss_network_dim": "2"}
    save_file(factors, server.base / "models" / "loras" / "doubt.safetensors", metadata)
    graph, _ = examine(server, lora_file="doubt.safetensors", name="doubt")
    (text,) = graph.run().outputs["doctor"]["text"]
    assert "in doubt: its metadata name FramePack" in text and "an alpha of 1 (ss_network_alpha)" in text
    assert "no fixed LoRA: " in text and not list(server.output.rglob("doubt*"))
    graph, _ = examine(server, lora_file="doubt.safetensors", name="doubt", model="sd3", alpha=1.0)
    (text,) = graph.run().outputs["doctor"]["text"]
    assert "in doubt" not in text and "alpha: 1, as it was given" in text
    state = load_file(server.output.parent / text.splitlines()[-1].removeprefix("saved: "))
    assert torch.equal(change(state, ATTENTION), torch.full((64, 64), 1.0))


def test_names_that_are_refused(server, theirs):
    for name in ("../x", "a/b", "CON"):
        graph, _ = examine(server, lora_file="kohya.safetensors", name=name)
        assert graph.error().startswith("the name ")
    graph, _ = examine(server, lora_file="none")
    assert graph.error().startswith("choose a lora_file")
    graph, _ = examine(server, lora_file="../../secret.safetensors")
    with pytest.raises(ValueError, match="not in list"):
        server.queue(graph.nodes)


def test_training_goes_on_from_another_trainers_file(server, theirs):
    """Steps too small to see: what comes out is what went in, though alpha / rank is another."""
    graph = Graph(server)
    graph.train(continue_from="kohya.safetensors", iterations=1, learning_rate=1e-7, alpha=8.0, name="goes_on")
    assert_meant(graph.run().lora(), theirs)
    graph = Graph(server)
    graph.train(continue_from="kohya.safetensors", rank=8, name="misfit")
    assert graph.error() == "the LoRA to continue from has rank 4; set rank to 4"
