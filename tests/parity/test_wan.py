"""Wan: what the tests of all families leave out. The solver, two transformers, sizes, the published models' layers."""

import json
import os
import subprocess
import sys

import pytest
import torch
from diffusers import UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from safetensors.torch import save_file
from torch import nn

from sfgrpo.config import GRPOConfig
from sfgrpo.export import save_lora
from sfgrpo.kernels import Kernel
from sfgrpo.loop import StepwiseGRPO
from sfgrpo.lora import TARGETS, choose_targets
from sfgrpo.prompts import Prompt
from sfgrpo.rewards import Scores
from sfgrpo.rollout import rollout
from sfgrpo.schedule import FAMILIES, family_sigmas
from sfgrpo_trainer.config import LoRAConfig
from sfgrpo_trainer.errors import UserError
from sfgrpo_trainer.families import check_size, load_family
from sfgrpo_trainer.families.base import linear_names
from sfgrpo_trainer.families.wan import Wan
from sfgrpo_trainer.policy import LoRAPolicy, add_lora, encode_prompts, lora_state
from tests.comfyui import ROOT, comfyui
from tests.small_models import wan, wan22_5b, wan22_a14b

CPU = torch.device("cpu")
TEXTS, NEGATIVES = ["a circle", "two red circles"], ["", "a green cross"]
BOUNDARY = 0.875
"""Of the published A14B. Four steps at shift 3 are at 1, 0.9 and 0.75, 0.5: two for each transformer."""
NAMES = ("transformer", "transformer_2")
PUBLISHED = {
    "1.3B": {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
    "5B": {"num_attention_heads": 24, "ffn_dim": 14336, "num_layers": 30, "in_channels": 48, "out_channels": 48},
    "14B": {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40},
}
IN_COMFYUI = """
import importlib, importlib.util, json, os, sys
from types import SimpleNamespace

pack, jobs = sys.argv[1], json.loads(sys.argv[2])
sys.argv[1:] = ["--cpu"]
sys.path.insert(0, os.getcwd())
import comfy.options

comfy.options.enable_args_parsing()
import comfy.supported_models
import torch

spec = importlib.util.spec_from_file_location("pack", f"{pack}/__init__.py", submodule_search_locations=[pack])
sys.modules["pack"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
places = importlib.import_module("pack.nodes.comfy_patch").lora_places
found = {}
for name, (kind, config) in jobs.items():
    model_config = getattr(comfy.supported_models, kind)(config)
    model_config.set_inference_dtype(torch.float32, None)
    model = model_config.get_model({}, "", device="meta")
    found[name] = {k: v[2] for k, v in places(SimpleNamespace(model=model)).items()}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("wan")
    wan.build(path)
    return path


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A14B with the published boundary."""
    path = tmp_path_factory.mktemp("wan_two")
    wan22_a14b.build(path, boundary_ratio=BOUNDARY, flow_shift=3.0)
    return path


def load(path, **options) -> Wan:
    return load_family(str(path), torch.float32, CPU, max_sequence_length=wan.LENGTH, **options)


def policy_of(family, guidance=1.0) -> LoRAPolicy:
    prompts = [Prompt(t, n) for t, n in zip(TEXTS, NEGATIVES, strict=True)]
    return LoRAPolicy(
        family, encode_prompts(family, prompts, {0, 1}, guidance > 1), guidance=guidance, dtype=torch.float32
    )


def noise_for(family, frames=1):
    return torch.randn(2, *family.latent_shape(32, 48, frames), generator=torch.Generator().manual_seed(7))


def euler(family, noise, steps, guidance=1.0):
    sigmas, ode = family.sigmas(steps, 32, 48), Kernel(name="ode")
    return rollout(
        policy_of(family, guidance).velocity, noise, sigmas, torch.arange(2), kernel=ode, generators=[]
    ).final


# ----- times and solver


@pytest.mark.parametrize("shift", (3.0, 5.0, 12.0))
def test_sigmas_are_those_of_the_scheduler_and_of_the_node(small, shift):
    family = load(small)
    family.pipeline.scheduler = UniPCMultistepScheduler.from_config(family.pipeline.scheduler.config, flow_shift=shift)
    for steps in (1, 2, 4, 10, 28, 50):
        sigmas = family.sigmas(steps, 480, 832)
        family.pipeline.scheduler.set_timesteps(steps)
        assert sigmas[0] == 1  # UniPC has 1 - 1e-6
        torch.testing.assert_close(sigmas, family.pipeline.scheduler.sigmas, rtol=0, atol=1.1e-6)
        torch.testing.assert_close(sigmas, family_sigmas(FAMILIES["wan"], steps, shift=shift), rtol=0, atol=1e-7)
        for name in ("ddim", "flow_grpo", "dance"):
            assert Kernel(name=name).std(sigmas[:-1], sigmas[1:]).max() <= 1


def test_unipc_of_order_1_without_corrector_is_euler_at_rounded_times(small):
    """The pipeline with its own class of scheduler; the transformer's times are whole numbers in both here."""
    family = load(small)
    pipeline = family.pipeline
    pipeline.set_progress_bar_config(disable=True)
    pipeline.scheduler = UniPCMultistepScheduler.from_config(
        pipeline.scheduler.config, solver_order=1, disable_corrector=list(range(6))
    )
    pipeline.scheduler.set_timesteps(6)
    times, sigmas = pipeline.scheduler.timesteps, pipeline.scheduler.sigmas
    assert torch.equal(times, (sigmas[:-1].double() * 1000).floor().long())
    noise = noise_for(family)
    theirs = pipeline(
        TEXTS,
        num_inference_steps=6,
        guidance_scale=1.0,
        max_sequence_length=wan.LENGTH,
        num_frames=1,
        height=32,
        width=48,
        latents=noise,
        output_type="latent",
    ).frames
    velocity, x = policy_of(family).velocity, noise
    with torch.no_grad():
        for time, t, s in zip(times, sigmas[:-1], sigmas[1:], strict=True):
            x = x + (s - t) * velocity(x, (time / 1000).expand(2), torch.arange(2))
    torch.testing.assert_close(x, theirs, rtol=0, atol=1e-5)


# ----- sizes


def test_sizes(small, tmp_path):
    wan22_5b.build(tmp_path)
    assert check_size(str(small), None, None) == (16, 1, 60, 104)
    assert check_size(str(small), 480, 832, 81) == (16, 21, 60, 104)
    assert check_size(str(tmp_path), None, None, 121) == (48, 31, 44, 80)
    for path, size, words in (
        (small, (480, 840), "multiples of 16, at most 16384, .* got 480 x 840"),
        (small, (0, 832), "multiples of 16"),
        (small, (480, 16400), "at most 16384"),
        (tmp_path, (720, 1280), "multiples of 32"),
        (small, (480, 832, 4), "frames must be 1 or 4 k \\+ 1 for this model: 1, 5, 9 ...; got 4"),
        (small, (480, 832, 0), "frames must be"),
    ):
        with pytest.raises(UserError, match=words):
            check_size(str(path), *size)
    # Published configs of Wan 2.1 do not name the scales of their VAE.
    assert Wan.shape_for({"patch_size": [1, 2, 2], "in_channels": 16}, {}, 480, 832, 5) == (16, 2, 60, 104)


# ----- two transformers


@pytest.mark.parametrize("guidance", (1.0, 4.0))
@pytest.mark.parametrize("steps", (1, 4, 7))
def test_two_transformers_draw_as_the_pipeline(two, steps, guidance):
    family, pipeline = load(two), WanPipeline.from_pretrained(two, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    noise = noise_for(family, frames=5)
    theirs = wan.draw("latent")(pipeline, list(TEXTS), list(NEGATIVES), noise, steps, guidance)
    torch.testing.assert_close(euler(family, noise, steps, guidance), theirs, rtol=0, atol=1e-4)
    if steps > 1:
        family.pipeline.transformer_2 = family.pipeline.transformer
        assert (euler(family, noise, steps, guidance) - theirs).abs().max() > 0.01


def test_rows_go_to_the_transformer_of_their_sigma(two):
    family = load(two)
    cond = family.encode(TEXTS).rows(torch.tensor([0, 1, 0, 1]), CPU, torch.float32)
    x, sigma = noise_for(family).repeat(2, 1, 1, 1, 1), torch.tensor([0.9, 0.3, BOUNDARY, 0.8749])
    high, low = (getattr(family.pipeline, n) for n in NAMES)
    with torch.no_grad():
        together = family.velocity(x, sigma, cond)
        for i, transformer in enumerate((high, low, high, low)):
            row = {k: v[i : i + 1] for k, v in cond.items()}
            alone = family.ask(transformer, x[i : i + 1], sigma[i : i + 1], row)
            torch.testing.assert_close(together[i : i + 1], alone, rtol=0, atol=1e-5)


def parameters(family):
    """Those of both transformers."""
    return dict(nn.ModuleDict({n: getattr(family.pipeline, n) for n in NAMES}).named_parameters())


@pytest.mark.parametrize(
    "expert, name, window",
    ((None, "transformer", (0, 2)), ("high", "transformer", (0, 2)), ("low", "transformer_2", (2, 4))),
)
def test_one_of_two_is_trained(two, tmp_path, expert, name, window):
    """Its LoRA alone changes, in its window; the file loads in diffusers as what was trained."""
    family = load(two, expert=expert)
    assert family.transformer is getattr(family.pipeline, name)
    sigmas = family.sigmas(4, 32, 48)
    assert family.trained_steps(sigmas).nonzero().flatten().tolist() == list(range(*window))
    policy = policy_of(family)
    add_lora(family, LoRAConfig(rank=4), seed=0)
    before = {n: p.detach().clone() for n, p in parameters(family).items()}
    loop = StepwiseGRPO(
        policy,
        lambda images, prompts, metadata: Scores(images.flatten(1).std(1), {}),
        torch.optim.AdamW(policy.trainable_parameters(), lr=1e-2),
        sigmas=sigmas,
        latent_shape=family.latent_shape(32, 48),
        # The last step injects no noise.
        config=GRPOConfig(group_size=3, window_start=window[0], window_stop=window[1]),
    )
    metrics = loop.iterate(0, [Prompt(t) for t in TEXTS], [0, 1]).metrics
    assert metrics["ratio/mean"] == metrics["ratio/max"] == 1 and metrics["updates"] == 1
    changed = {n for n, p in parameters(family).items() if not torch.equal(p, before[n])}
    assert changed and all(n.startswith(f"{name}.") and "lora_" in n for n in changed)

    save_lora(lora_state(family), tmp_path / "lora.safetensors", {"format": "pt"})
    pipeline = WanPipeline.from_pretrained(two, torch_dtype=torch.float32)
    pipeline.load_lora_weights(str(tmp_path / "lora.safetensors"), load_into_transformer_2=expert == "low")
    noise = noise_for(family)
    other = euler(Wan(pipeline, family.options), noise, 4)
    torch.testing.assert_close(other, euler(family, noise, 4), rtol=0, atol=1e-4)
    assert (other - euler(load(two), noise, 4)).abs().max() > 1e-3


def test_a_single_file_is_that_of_the_trained_one(two, tmp_path):
    state = {k: v + 1 for k, v in load(two).pipeline.transformer_2.state_dict().items()}
    file = tmp_path / "low.safetensors"
    save_file(wan.native(state, {}), file)
    family, plain = load(two, parts="denoiser", transformer_file=file, expert="low"), load(two, parts="denoiser")
    for name, value in family.pipeline.transformer_2.state_dict().items():
        assert torch.equal(value, state[name])
    for name, value in family.pipeline.transformer.state_dict().items():
        assert torch.equal(value, plain.pipeline.transformer.state_dict()[name])
    assert load(two, parts="encoders").pipeline.transformer_2 is None


def test_an_expert_of_a_model_without_is_refused(small):
    with pytest.raises(UserError, match="model.expert is for a model of two transformers"):
        load(small, expert="low", parts="encoders")


def test_the_vae_keeps_its_weights_in_float32(small):
    family = load_family(str(small), torch.bfloat16, CPU, parts="denoiser")
    assert family.transformer.proj_out.weight.dtype == torch.bfloat16
    for name, value in load(small).pipeline.vae.state_dict().items():
        assert torch.equal(family.pipeline.vae.state_dict()[name], value)


# ----- layers of the published models


@pytest.fixture(scope="module")
def in_comfyui():
    """Published size -> {name in a LoRA file: rows of the layer}, as the node finds them."""
    jobs = {}
    for name, config in PUBLISHED.items():
        heads, channels = config["num_attention_heads"], config.get("in_channels", 16)
        jobs[name] = (
            "WAN22_T2V" if channels == 48 else "WAN21_T2V",
            wan.comfy_config(
                {
                    "attention_head_dim": 128,
                    "in_channels": channels,
                    "out_channels": channels,
                    "text_dim": 4096,
                    **config,
                }
            )
            | {"num_heads": heads},
        )
    process = subprocess.run(
        [sys.executable, "-c", IN_COMFYUI, str(ROOT), json.dumps(jobs)],
        cwd=comfyui(),
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("name", PUBLISHED)
def test_layers_of_published_sizes_in_comfyui(in_comfyui, name):
    """Trainer and node name the same layers, none is left over, and diffusers' loader takes a file of all of them."""
    with torch.device("meta"):
        transformer = WanTransformer3DModel(**PUBLISHED[name])
    rows = {n: transformer.get_submodule(n).out_features for n in linear_names(transformer)}
    renamed = {Wan.export_name(None, n): count for n, count in rows.items()}
    assert len(renamed) == len(rows) == 10 * PUBLISHED[name]["num_layers"] + 6
    assert renamed == in_comfyui[name]
    for choice in TARGETS:
        ours = [Wan.export_name(None, n) for n in choose_targets(rows, choice)]
        assert sorted(ours) == sorted(choose_targets(in_comfyui[name], choice))
        assert len(ours) == {"attention": 8, "attention_mlp": 10, "all": 10}[choice] * PUBLISHED[name]["num_layers"] + (
            6 if choice == "all" else 0
        )
    file = {f"{n}.lora_{x}.weight": torch.zeros(1, 1) for n in renamed for x in "AB"}
    converted = WanPipeline.lora_state_dict(file)
    assert {k.removeprefix("transformer.").rsplit(".lora_", 1)[0] for k in converted} == set(rows)
