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
from sfgrpo_trainer.prepare import prepare
from sfgrpo_trainer.run import Run
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


def strays(one: dict, other: dict) -> float:
    """Share of the elements of two LoRAs that differ by more than 1e-5."""
    apart = torch.cat([(one[name] - other[name]).abs().flatten() for name in one])
    return (apart > 1e-5).float().mean().item()


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
        optimizer = {{ lr = {s["learning_rate"]}, final_lr = {s.get("final_lr", 1.0)} }}

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
        SMOOTH | GUIDED | {"layers": "all", "kl_weight": 0.1, "updates": 2, "iterations": 2, "final_lr": 0.5},
    ),
    ids=("plain", "smooth", "guided", "kl", "everything"),
)
def test_an_iteration_is_that_of_the_headless_trainer(server, graph, tmp_path, monkeypatch, settings):
    settings = {"iterations": 1, "eval_every": 100, "eval_prompts": 1} | settings
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
    if "max_grad_norm" in settings:
        assert far(result.lora(), expected) < 1e-5
    else:
        assert strays(result.lora(), expected) < 1e-3
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


def file_of(result) -> str:
    """The name in ComfyUI's lora list of the LoRA that a training saved."""
    return result.place().removeprefix("output/loras/")


def test_continue_from_goes_on_from_the_file(server, graph, smooth):
    # Steps too small to see: what comes out is what went in, though alpha / rank is another.
    still = {"learning_rate": 1e-7, "iterations": 1, "continue_from": file_of(smooth)}
    graph.train(**SMOOTH, **still, alpha=8.0)
    graph.add("numbers", "PreviewAny", source=["train", 4])
    result = graph.run()
    assert far(result.lora(), smooth.lora()) < 1e-6
    assert size(smooth.lora()) > 0.01
    first, last = numbers(result)["samples"][0], numbers(smooth)["samples"][-1]
    assert first["scores"] == pytest.approx(last["scores"], abs=1e-6)
    assert first["scores"] != numbers(smooth)["samples"][0]["scores"]


@pytest.mark.parametrize(
    ("settings", "words"),
    (
        ({"rank": 8}, "the LoRA to continue from has rank 4; set rank to 4"),
        (
            {"layers": "all"},
            "the LoRA to continue from is for other layers than layers = all (first difference: "
            "transformer.context_embedder); set layers to attention",
        ),
    ),
)
def test_continue_from_a_lora_that_does_not_fit(server, graph, smooth, settings, words):
    files = set(server.output.rglob("*"))
    graph.train(**settings, continue_from=file_of(smooth), name="misfit")
    assert graph.error() == words
    assert set(server.output.rglob("*")) == files


@pytest.mark.parametrize("guided", (False, True), ids=("", "guided"))
def test_ready_conditioning_is_as_a_clip(server, graph, smooth, guided):
    settings = SMOOTH | (GUIDED | {"iterations": 1} if guided else {})
    expected = smooth
    if guided:
        graph.train(**settings)
        expected = graph.run()
    graph = Graph(server)
    one, other = (graph.add(text, "CLIPTextEncode", clip=graph.clip, text=text) for text in TINY["prompts"].split("\n"))
    ready = {"positive": graph.add("both", "ConditioningCombine", conditioning_1=one, conditioning_2=other)}
    if guided:
        ready["negative"] = graph.add("negative", "CLIPTextEncode", clip=graph.clip, text=NEGATIVE)
    graph.train(**settings, **ready, clip=None)
    assert far(graph.run().lora(), expected.lora()) == 0


def test_prompt_file_with_metadata(server, graph, smooth):
    rows = [{"prompt": text, "tag": f"tag {i}", "n": {"m": [i]}} for i, text in enumerate(TINY["prompts"].split("\n"))]
    file = server.input / "prompts for training.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    settings = SMOOTH | {"prompts": "", "prompt_file": file.name, "reward": graph.reward(record="seen.json")}
    graph.train(**settings)
    graph.add("numbers", "PreviewAny", source=["train", 4])
    result = graph.run()
    assert far(result.lora(), smooth.lora()) == 0
    seen = json.loads((server.output / "seen.json").read_text())
    expected = {row["prompt"]: {k: v for k, v in row.items() if k != "prompt"} for row in rows}
    # The check before, three evaluations, and twice two groups with 4 states of each image after the one they share.
    assert sum(len(prompts) for prompts, _ in seen) == 2 + 3 * 2 + 2 * 2 * (1 + 4 * 4)
    for prompts, metadata in seen:
        assert metadata == [expected[prompt] for prompt in prompts]
    assert {"total/tag 0", "total/tag 1"} < numbers(result)["samples"][0]["scores"].keys()


def test_a_changed_prompt_file_is_read_again(server, graph):
    file = server.input / "changing.txt"
    # A reward of the pack, which ComfyUI keeps from one prompt to the next.
    settings = {
        "prompts": "",
        "prompt_file": file.name,
        "iterations": 1,
        "reward": graph.add("jpeg", "SFGRPO_JPEGSizeReward", quality=90),
    }
    file.write_text("two circles\n", encoding="utf-8")
    graph.train(**settings)
    first, again = graph.run().place(), graph.run().place()
    file.write_text("two crosses\n", encoding="utf-8")
    changed = graph.run().place()
    assert first == again != changed


def test_a_model_with_a_lora_is_trained_on_top_and_left_as_it_was(server, graph, smooth):
    def on(graph):
        return graph.add(
            "lora", "LoraLoaderModelOnly", model=graph.model, lora_name=file_of(smooth), strength_model=1.0
        )

    model = graph.look(on(graph), at_rest=True)
    graph.draw("before", model)
    before = graph.run()
    assert before.look()["patches"] > 0
    graph = Graph(server)
    graph.look(at_rest=True)
    assert graph.run().look()["hash"] == before.look()["hash"]

    graph = Graph(server)
    lora = graph.train(model=on(graph), **SMOOTH, kl_weight=0.1)
    graph.add("numbers", "PreviewAny", source=["train", 4])
    graph.draw("trained", ["train", 1])
    graph.draw("after", graph.look(on(graph), at_rest=True, after=lora))
    result = graph.run()
    assert result.look() == before.look()
    assert torch.equal(result.latent("after"), before.latent("before"))
    # It starts at the samples with which the training of the first LoRA ended.
    start, end = numbers(result)["samples"][0], numbers(smooth)["samples"][-1]
    assert start["scores"] == pytest.approx(end["scores"], abs=1e-6)
    # The KL term pulls to the MODEL that came in, with its LoRA: at first there is nothing to pull at.
    first, second = numbers(result)["iterations"]
    assert first["kl"] == 0 and second["kl"] > 0.001

    graph = Graph(server)
    both = graph.add("both", "LoraLoaderModelOnly", model=on(graph), lora_name=file_of(result), strength_model=1.0)
    graph.draw("stacked", both)
    stacked = graph.run().latent("stacked")
    torch.testing.assert_close(result.latent("trained"), stacked, rtol=0, atol=1e-4)
    assert (stacked - before.latent("before")).abs().max() > 0.02

    graph = Graph(server)
    graph.train(model=on(graph), **SMOOTH, kl_weight=0.1, adapter="weight")
    assert far(graph.run().lora(), result.lora()) < 1e-5


def test_a_shifted_model_is_trained_at_its_own_sigmas(server, graph):
    settings = SMOOTH | {"iterations": 1}
    shifted = graph.add("shifted", "ModelSamplingSD3", model=graph.model, shift=1.5)
    graph.draw("before", graph.look(shifted, at_rest=True))
    before = graph.run()
    lora = graph.train(**settings, model=shifted)
    graph.draw("after", graph.look(shifted, at_rest=True, after=lora))
    after = graph.run()
    assert after.look() == before.look()
    assert torch.equal(after.latent("after"), before.latent("before"))

    graph = Graph(server)
    sigmas = graph.add(
        "sigmas", "SFGRPO_FlowSigmas", steps=4, family="sd3", shift=1.5, width=32, height=32, denoise=1.0
    )
    graph.train(**settings, sigmas=sigmas)
    assert far(graph.run().lora(), after.lora()) < 1e-6
    graph = Graph(server)
    graph.train(**settings)
    assert far(graph.run().lora(), after.lora()) > 1e-3
