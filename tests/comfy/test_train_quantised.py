"""Training a LoRA on quantised weights: fp8 as stock loaders store it, and ComfyUI's own quantised formats.

What a training on them gives is compared with one on the same numbers in float32. Where ComfyUI multiplies in fewer
bits than that (int8, int4), the two differ by its rounding of a layer's input, and only their direction is compared.
ConvRot is one of the formats that have no product for a backward pass of their own.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.comfy.training import Graph

NATIVE = "model.diffusion_model."
SETTINGS = {"iterations": 1, "eval_prompts": 1, "max_grad_norm": 1e-6, "learning_rate": 0.05}


def by_hand(weight: torch.Tensor, dtype: torch.dtype, largest: float) -> tuple[dict, torch.Tensor]:
    """Tensors of a per-tensor format, and the weight that they stand for."""
    scale = weight.abs().max() / largest
    scaled = weight / scale
    stored = (scaled.round() if dtype == torch.int8 else scaled).to(dtype)
    return {"weight": stored, "weight_scale": scale}, stored.float() * scale


def by_library(weight: torch.Tensor, layout: str) -> tuple[dict, torch.Tensor]:
    """The same by the library that ComfyUI takes its formats from."""
    tensor = pytest.importorskip("comfy_kitchen.tensor").QuantizedTensor.from_float(weight, layout)
    return {"weight": tensor._qdata, "weight_scale": tensor._params.scale}, tensor.dequantize().float()


FORMATS = {
    "float8_e4m3fn": lambda w: by_hand(w, torch.float8_e4m3fn, 448),
    "int8_tensorwise": lambda w: by_hand(w, torch.int8, 127),
    "convrot_w4a4": lambda w: by_library(w, "TensorCoreConvRotW4A4Layout"),
}
ROUNDS_INPUTS = ("int8_tensorwise", "convrot_w4a4")
"""Formats in which ComfyUI rounds the inputs of a layer on a CPU too."""


@pytest.fixture(scope="module")
def native(server) -> dict[str, torch.Tensor]:
    """The demo transformer under ComfyUI's own names, as Save Model writes it."""
    graph = Graph(server)
    graph.add("save", "ModelSave", model=graph.model, filename_prefix="native")
    assert server.run(graph.nodes).status == "success"
    (file,) = server.output.glob("native_*.safetensors")
    state = load_file(file)
    return {key.removeprefix(NATIVE): state[key] for key in state if key.startswith(NATIVE)}


def write(server, native: dict, name: str) -> tuple[str, str]:
    """Write the model in a format, and the numbers that it then has in float32; returns both file names."""
    stored, plain = dict(native), dict(native)
    for key, weight in native.items():
        # ConvRot turns groups of 256.
        fits = weight.ndim == 2 and (name != "convrot_w4a4" or weight.shape[1] % 256 == 0)
        if name != "cast" and key.startswith("joint_blocks.") and key.endswith(".weight") and fits:
            parts, plain[key] = FORMATS[name](weight)
            stored |= {key.removesuffix("weight") + part: value for part, value in parts.items()}
            mark = torch.tensor(list(json.dumps({"format": name}).encode()), dtype=torch.uint8)
            stored[key.removesuffix("weight") + "comfy_quant"] = mark
        elif name == "cast":
            plain[key] = weight.to(torch.float8_e4m3fn).float()
    names = f"{name}.safetensors", f"{name} in float32.safetensors"
    for file, state in zip(names, (stored, plain), strict=True):
        save_file({k: v.contiguous().clone() for k, v in state.items()}, server.base / "models/diffusion_models" / file)
    return names


class Model:
    """A file in models/diffusion_models, as a graph loads it."""

    def __init__(self, server, file: str, dtype: str = "default") -> None:
        self.server, self.file, self.dtype = server, file, dtype

    def graph(self) -> Graph:
        graph = Graph(self.server)
        graph.model = graph.add("load unet", "UNETLoader", unet_name=self.file, weight_dtype=self.dtype)
        return graph

    def train(self, adapter: str, **settings):
        """Train it, then look at it and draw with it."""
        graph = self.graph()
        graph.train(**SETTINGS | settings, adapter=adapter, name="quantised")
        graph.draw("own", ["train", 1])
        graph.draw("after", graph.look(at_rest=True, after=["train", 4]))
        return graph.run()

    def draw(self, lora: str = ""):
        graph = self.graph()
        model = graph.look(at_rest=True)
        if lora:
            model = graph.add("lora", "LoraLoaderModelOnly", model=model, lora_name=lora, strength_model=1.0)
        graph.draw("picture", model)
        return graph.run()


def direction(one: dict, other: dict) -> float:
    """Least cosine between what two trainings made of the factors that start at zero, over the layers."""
    names = [name for name in one if "lora_B" in name and other[name].any()]
    assert len(names) > 10
    return min(torch.cosine_similarity(one[n].flatten(), other[n].flatten(), 0).item() for n in names)


@pytest.mark.parametrize("name", ("cast", *FORMATS))
def test_training_on_quantised_weights(server, native, name):
    file, plain = write(server, native, name)
    model = Model(server, file, "fp8_e4m3fn" if name == "cast" else "default")
    expected, float_model = Model(server, plain).train("hook"), Model(server, plain).draw()
    before = model.draw()
    said = len(server.log())
    for adapter in ("hook", "weight"):
        trained = model.train(adapter, gradient_checkpointing=adapter == "weight")
        lora = trained.lora()
        if name in ROUNDS_INPUTS:
            assert direction(lora, expected.lora()) > 0.8
        else:
            assert max((lora[key] - expected.lora()[key]).abs().max().item() for key in lora) < 1e-5
        loaded = model.draw(trained.place().removeprefix("output/loras/"))
        torch.testing.assert_close(loaded.latent("picture"), trained.latent("own"), rtol=0, atol=1e-4)
        # Stock ComfyUI rounds the weights with the LoRA in them to the format again; it still does what it should.
        effect = expected.latent("own") - float_model.latent("picture")
        found = loaded.latent("picture") - before.latent("picture")
        assert effect.abs().max() > 0.1
        assert torch.cosine_similarity(found.flatten(), effect.flatten(), 0) > (0.6 if "w4" in name else 0.9)
        # Nothing of it stays on the model.
        assert trained.look() == before.look()
        assert torch.equal(trained.latent("after"), before.latent("picture"))
    assert "not loaded" not in server.log()[said:].lower()
    assert model.draw().look() == before.look()
