"""Training on other models than the demo as it comes: video latents, fp16, ComfyUI's dynamic VRAM."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from sfgrpo.shapes import MODEL_DIR
from tests.comfy.training import Graph

WAN_TEXT = 4096


def cosine(one: dict, other: dict) -> float:
    """Cosine of the angle between the B factors of two LoRAs."""
    keys = [key for key in one if "lora_B" in key]
    a, b = (torch.cat([state[key].flatten().double() for key in keys]) for state in (one, other))
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))


def wan(server, **settings):
    """A training on a tiny Wan whose two prompts have 7 and 12 tokens."""
    graph = Graph(server)
    texts = [graph.add(f"text {n}", "Probe_Text", seed=n, tokens=n, width=WAN_TEXT) for n in (7, 12)]
    graph.train(
        model=graph.add("wan", "Probe_TinyWan"),
        vae=graph.add("vae", "Probe_VideoVAE"),
        clip=None,
        positive=graph.add("both", "ConditioningCombine", conditioning_1=texts[0], conditioning_2=texts[1]),
        negative=graph.add("none", "Probe_Text", seed=1, tokens=9, width=WAN_TEXT),
        **{"guidance": 2.0, "learning_rate": 1e-3} | settings,
    )
    return graph.run()


@pytest.fixture(scope="module")
def trained_wan(server):
    return wan(server)


def test_a_video_model_is_trained_on_prompts_of_different_lengths(trained_wan):
    state = trained_wan.lora()
    names = {key.rsplit(".", 2)[0] for key in state}
    attentions = ("self_attn", "cross_attn")
    assert names == {f"diffusion_model.blocks.0.{kind}.{part}" for kind in attentions for part in "qkvo"}
    assert all(state[f"{name}.lora_B.weight"].abs().max() > 1e-5 for name in names)


def test_prompts_of_different_lengths_do_not_touch_each_other(server, trained_wan):
    """One row a pass cannot mix prompts; every batch must give the same LoRA."""
    alone = wan(server, rollout_batch=1, update_batch=1, decode_batch=1).lora()
    together = trained_wan.lora()
    assert cosine(alone, together) > 0.9999
    for key, value in alone.items():
        torch.testing.assert_close(value, together[key], rtol=0, atol=1e-4)


def test_the_lora_of_a_video_model_loads_in_stock_nodes(server, trained_wan):
    graph = Graph(server)
    file = trained_wan.place().removeprefix("output/loras/")
    model = graph.add("wan", "Probe_TinyWan")
    graph.look(graph.add("lora", "LoraLoaderModelOnly", model=model, lora_name=file, strength_model=1.0))
    before = len(server.log())
    assert graph.run().look()["patches"] == 8
    assert "lora key not loaded" not in server.log()[before:]


@pytest.fixture(scope="module")
def transformer(server) -> str:
    """The demo transformer as a file of the models folder, in the numbers that fp16 has."""
    file = server.base / "models" / "diffusion_models" / "demo_fp16.safetensors"
    state = load_file(MODEL_DIR / "transformer" / "diffusion_pytorch_model.safetensors")
    save_file({key: value.half() for key, value in state.items()}, file)
    return file.name


def test_fp16_learns_what_fp32_learns(server, transformer):
    """So many images and steps share the loss that without scaling many gradients inside would be 0 (cosine .84)."""
    found = {}
    for dtype in ("float32", "float16"):
        graph = Graph(server)
        model = graph.add("unet", "Probe_InDtype", file=transformer, dtype=dtype)
        many = {"group_size": 12, "steps": 8, "rollout_batch": 96, "update_batch": 96}
        graph.train(model=model, iterations=1, eval_every=100, **many)
        found[dtype] = graph.run().lora()
    assert cosine(found["float32"], found["float16"]) > 0.99


def test_a_model_under_dynamic_vram_is_read_again(server):
    """ComfyUI has none on a CPU: the patcher only says so, but what is trained is its `clone(disable_dynamic=True)`."""
    graph = Graph(server)
    graph.train(model=graph.add("dynamic", "Probe_Dynamic", model=graph.model, from_file=True))
    plain = Graph(server)
    plain.train()
    expected = plain.run().lora()
    for key, value in graph.run().lora().items():
        torch.testing.assert_close(value, expected[key], rtol=0, atol=1e-5)


def test_a_model_under_dynamic_vram_without_a_file_is_refused(server):
    graph = Graph(server)
    graph.train(model=graph.add("dynamic", "Probe_Dynamic", model=graph.model, from_file=False))
    assert "--disable-dynamic-vram" in graph.error()
