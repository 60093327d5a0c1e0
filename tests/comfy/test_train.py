"""Stepwise GRPO Train LoRA in a running ComfyUI: its LoRA in stock nodes, in diffusers, and beside the trainer's own.

Where two trainings are compared, the gradient is clipped to a norm of 1e-6. AdamW's first step is
lr * g / (|g| + 1e-8): with that norm over tens of thousands of elements it is smooth in g, while for a large g it is
lr * sign(g), which turns a rounding difference in an element near 0 into a difference of 2 lr.
"""

import json

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from safetensors.torch import load_file

from sfgrpo.rewards import REWARDS
from sfgrpo.shapes import MODEL_DIR
from sfgrpo_trainer.config import load_config
from sfgrpo_trainer.run import Run, prepare
from tests.comfy.training import SEED, TINY, Graph

SMOOTH = {"max_grad_norm": 1e-6}
NEGATIVE = "a green cross"
GUIDED = {"guidance": 2.0, "negative_prompt": NEGATIVE}


@pytest.fixture
def graph(server) -> Graph:
    return Graph(server)


@pytest.fixture(scope="module")
def pipe() -> StableDiffusion3Pipeline:
    """diffusers' own pipeline, without T5."""
    pipe = StableDiffusion3Pipeline.from_pretrained(
        MODEL_DIR, text_encoder_3=None, tokenizer_3=None, torch_dtype=torch.float32
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def smooth(server):
    """A training whose LoRA others are compared with."""
    graph = Graph(server)
    graph.train(**SMOOTH)
    graph.add("numbers", "PreviewAny", source=["train", 4])
    return graph.run()


def numbers(result) -> dict:
    """The training node's metrics."""
    return json.loads(result.outputs["numbers"]["text"][0])


def far(one: dict, other: dict) -> float:
    """Largest difference of two LoRAs of the same layers."""
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


def size(lora: dict) -> float:
    """How large the factors are that start at zero."""
    return max(value.abs().max().item() for name, value in lora.items() if "lora_B" in name)


@pytest.mark.parametrize("layers", ("attention", "attention_mlp", "all"))
def test_the_lora_is_the_same_in_stock_nodes_and_in_diffusers(server, graph, pipe, layers):
    pipe.scheduler.set_timesteps(6)
    sigmas = ", ".join(f"{s:.9f}" for s in pipe.scheduler.sigmas.tolist())
    said = len(server.log())
    lora = graph.train(layers=layers, name=f"stock_{layers}")
    graph.add("save", "SaveLoRA", lora=lora, prefix=f"loras/saved_{layers}")
    graph.draw("own", ["train", 1])
    stock = graph.add("loaded", "LoraModelLoader", model=graph.model, lora=lora, strength_model=1.0, bypass=False)
    graph.draw("lora_model", stock)
    graph.draw("base", after=lora)
    trained = graph.run()

    files = sorted((server.output / "loras").glob(f"saved_{layers}_*.safetensors"))
    assert len(files) == 1
    graph = Graph(server)
    loaded = graph.add("loader", "LoraLoaderModelOnly", model=graph.model, lora_name=files[0].name, strength_model=1.0)
    graph.draw("file", loaded)
    graph.draw("file_sigmas", loaded, sigmas=sigmas, cfg=2.0)
    from_file = graph.run()
    for latents in (trained.latent("lora_model"), from_file.latent("file")):
        torch.testing.assert_close(latents, trained.latent("own"), rtol=0, atol=1e-4)
    assert (trained.latent("own") - trained.latent("base")).abs().max() > 0.2
    assert "not loaded" not in server.log()[said:].lower()
    # The file that the node itself writes is the same.
    assert far(load_file(files[0]), trained.lora()) == 0

    pipe.load_lora_weights(str(files[0]))
    try:
        expected = pipe(
            "two circles",
            negative_prompt=NEGATIVE,
            num_inference_steps=6,
            guidance_scale=2.0,
            max_sequence_length=0,
            latents=torch.randn(1, 16, 8, 8, generator=torch.manual_seed(SEED)),
            output_type="latent",
        ).images
    finally:
        pipe.unload_lora_weights()
    torch.testing.assert_close(from_file.latent("file_sigmas"), expected, rtol=0, atol=1e-4)


def headless(folder, monkeypatch, **settings) -> tuple[dict, list[dict]]:
    """The trainer's LoRA and metrics of a run with TINY settings, but for those given."""

    def red(images, prompts, metadata):
        return images[:, 0].mean((1, 2)) - images[:, 1:].mean((1, 2, 3))

    monkeypatch.setitem(REWARDS, "red", red)
    s = TINY | {"max_grad_norm": 1.0, "updates": 1, "kl_weight": 0.0} | settings
    rows = [{"prompt": p, "negative_prompt": s["negative_prompt"]} for p in s["prompts"].splitlines()]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    file = folder / "run.toml"
    file.write_text(
        f"""
        iterations = {s["iterations"]}
        seed = {s["seed"]}
        model = {{ path = "shapes", dtype = "fp32", device = "cpu", max_sequence_length = 0 }}
        prompts = {{ file = "prompts.jsonl", per_iteration = {s["prompts_per_iteration"]} }}
        rewards = {{ red = 1.0 }}
        sampling = {{ height = 32, width = 32, steps = {s["steps"]}, guidance = {s["guidance"]} }}
        lora = {{ rank = {s["rank"]}, targets = "{s["layers"]}" }}
        optimizer = {{ lr = {s["learning_rate"]} }}

        [grpo]
        group_size = {s["group_size"]}
        kernel = {{ name = "ddim", eta = 0.7, schedule = "annealed" }}
        credit = "gain_centred"
        step_weight = "std"
        clip_range = 1e-3
        kl_weight = {s["kl_weight"]}
        updates = {s["updates"]}
        max_grad_norm = {s["max_grad_norm"]}
        update_batch = {s["update_batch"]}
        """
    )
    run = Run(prepare(load_config(file), folder / "out"))
    run.train()
    rows = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    return load_file(folder / "out" / "last.safetensors"), rows, run


@pytest.mark.parametrize(
    "settings",
    (
        # The plain comparison, at the learning rate that the node comes with.
        {"learning_rate": 3e-4},
        SMOOTH,
        SMOOTH | GUIDED,
        # With two updates the second has a policy that left the base, and so a KL gradient.
        SMOOTH | {"kl_weight": 0.1, "updates": 2},
        SMOOTH | GUIDED | {"layers": "all", "kl_weight": 0.1, "updates": 2, "iterations": 2},
    ),
    ids=("plain", "smooth", "guided", "kl", "everything"),
)
def test_an_iteration_is_that_of_the_headless_trainer(server, graph, tmp_path, monkeypatch, settings):
    settings = {"iterations": 1, "eval_every": 100} | settings
    graph.train(**settings)
    graph.add("numbers", "PreviewAny", source=["train", 4])
    text = graph.add("text", "CLIPTextEncode", clip=graph.clip, text="two circles")
    graph.add("encoded", "Probe_SaveConditioning", conditioning=text, name="encoded")
    result = graph.run()
    expected, rows, run = headless(tmp_path, monkeypatch, **settings)

    encoded, by_trainer = load_file(server.output / "encoded.safetensors"), run.policy.conditioning.encoded.tensors
    torch.testing.assert_close(encoded["context"], by_trainer["encoder_hidden_states"][:1], rtol=0, atol=1e-5)
    torch.testing.assert_close(encoded["pooled"], by_trainer["pooled_projections"][:1], rtol=0, atol=1e-5)
    assert size(expected) > settings.get("learning_rate", 0.01) * 0.8
    assert far(result.lora(), expected) < 1e-5
    for own, theirs in zip(numbers(result)["iterations"], rows, strict=True):
        for name in ("reward", "reward_std", "grad_norm"):
            assert own[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-7), name
        if settings.get("kl_weight"):
            assert own["kl"] == pytest.approx(theirs["kl"], rel=1e-2) and own["kl"] > 1e-3


@pytest.mark.parametrize(
    "settings",
    (
        {"rollout_batch": 3, "update_batch": 5, "decode_batch": 7, "gradient_checkpointing": True},
        {"adapter": "weight", "gradient_checkpointing": True},
        {"adapter": "weight", "update_batch": 64, "rollout_batch": 64, "decode_batch": 64},
    ),
    ids=("batches", "weight checkpointed", "weight"),
)
def test_how_it_is_computed_does_not_matter(graph, smooth, settings):
    graph.train(**SMOOTH, **settings)
    # Two iterations: the second starts from a LoRA that the first changed.
    assert size(smooth.lora()) > 0.01
    assert far(graph.run().lora(), smooth.lora()) < 1e-5
