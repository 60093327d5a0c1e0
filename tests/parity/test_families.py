"""Every model family on a small random model: diffusers' own pipeline, ComfyUI, and training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file

from sfgrpo.config import GRPOConfig
from sfgrpo.export import save_lora
from sfgrpo.kernels import Kernel
from sfgrpo.loop import StepwiseGRPO
from sfgrpo.lora import TARGETS
from sfgrpo.prompts import Prompt
from sfgrpo.rewards import Scores
from sfgrpo.rollout import rollout
from sfgrpo_trainer.config import LoRAConfig
from sfgrpo_trainer.families import FAMILIES, load_family
from sfgrpo_trainer.policy import LoRAPolicy, add_lora, encode_prompts, lora_state
from tests.comfyui import ROOT, comfyui
from tests.small_models import FURTHER, ROWS, SMALL_MODELS, SmallModel, small_model

CPU = torch.device("cpu")
TEXTS, NEGATIVES = ["a circle", "two red circles", "a circle and a square"], ["", "a green cross", "a circle"]
SIGMAS = torch.tensor([1.0, 0.6, 0.05])


@dataclass
class Case:
    """A small model on disk."""

    name: str
    row: SmallModel
    path: Path

    def family(self, dtype=torch.float32, **options):
        return load_family(str(self.path), dtype, CPU, **(dict(self.row.options) | options))

    def shape(self, family):
        return family.latent_shape(*self.row.size, self.row.frames)

    def noise(self, family):
        return torch.randn(len(TEXTS), *self.shape(family), generator=torch.Generator().manual_seed(7))

    def policy(self, family, guidance=1.0):
        prompts = [Prompt(t, n) for t, n in zip(TEXTS, NEGATIVES, strict=True)]
        conditioning = encode_prompts(family, prompts, set(range(len(TEXTS))), guidance > 1)
        return LoRAPolicy(family, conditioning, guidance=guidance, dtype=family.dtype)

    def pipeline(self, dtype=torch.float32):
        name = json.loads((self.path / "model_index.json").read_text())["_class_name"]
        pipeline = getattr(diffusers, name).from_pretrained(self.path, torch_dtype=dtype)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline


@pytest.fixture(scope="module", params=ROWS)
def case(request, tmp_path_factory) -> Case:
    return build(request.param, tmp_path_factory.mktemp(request.param))


def build(name: str, path: Path) -> Case:
    row = small_model(name)
    row.build(path)
    return Case(name, row, path)


@pytest.fixture(scope="module")
def family(case):
    """The whole model, which no test changes."""
    return case.family()


@pytest.fixture(scope="module")
def pipeline(case):
    return case.pipeline()


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    """Within the tolerance of the largest value, or of 1."""
    size = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(got.float(), expected.float(), rtol=0, atol=tolerance * size)


def with_lora(case: Case, targets: str, seed: int = 0):
    """The model with a random LoRA whose scale is not 1."""
    family, generator = case.family(), torch.Generator().manual_seed(seed)
    add_lora(family, LoRAConfig(rank=4, alpha=12.0, targets=targets), seed=seed)
    for name, parameter in family.transformer.named_parameters():
        if "lora_" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    return family


def velocities(family, noise) -> torch.Tensor:
    """One row at a time, each of another text and sigma."""
    return velocities_of(family, family.encode(TEXTS), noise)


@torch.no_grad()
def velocities_of(family, encoded, noise) -> torch.Tensor:
    rows = [encoded.rows(torch.tensor([i]), CPU, torch.float32) for i in range(len(TEXTS))]
    return torch.cat([family.velocity(noise[i : i + 1], SIGMAS[i : i + 1], row) for i, row in enumerate(rows)]).float()


def test_every_family_has_a_row(tmp_path):
    kinds = set()
    for name in SMALL_MODELS:
        small_model(name).build(tmp_path / name)
        kinds.add(json.loads((tmp_path / name / "model_index.json").read_text())["_class_name"])
    assert kinds == set(FAMILIES)


@pytest.mark.parametrize("steps", (1, 4))
def test_latents_and_images_are_those_of_the_pipeline(case, family, pipeline, steps):
    noise = case.noise(family)
    sigmas = family.sigmas(steps, *case.row.size)
    assert sigmas.shape == (steps + 1,) and sigmas[-1] == 0
    for guidance in case.row.guidance:
        policy = case.policy(family, guidance)
        ode = Kernel(name="ode")
        ours = rollout(policy.velocity, noise, sigmas, torch.arange(len(TEXTS)), kernel=ode, generators=[]).final
        close(ours, case.row.stock(pipeline, list(TEXTS), list(NEGATIVES), noise, steps, guidance))
        images = policy.decode(ours)
        assert images.shape == (len(TEXTS), 3, *case.row.size) and images.std() > 0.01
        close(images, case.row.stock_images(pipeline, list(TEXTS), list(NEGATIVES), noise, steps, guidance))


def test_bf16_draws_as_the_pipeline_in_bf16(case):
    """A cosine of 0.999 or more, the noise taken off; our latents are float32 between steps, the pipeline's bf16."""
    family, pipeline, steps = case.family(torch.bfloat16), case.pipeline(torch.bfloat16), 2
    noise, sigmas, guidance = case.noise(family), family.sigmas(steps, *case.row.size), case.row.guidance[-1]
    ode, policy = Kernel(name="ode"), case.policy(family, guidance)
    ours = rollout(policy.velocity, noise, sigmas, torch.arange(len(TEXTS)), kernel=ode, generators=[]).final
    rounded = noise.to(torch.bfloat16)
    theirs = case.row.stock(pipeline, list(TEXTS), list(NEGATIVES), rounded, steps, guidance).float()
    assert ours.dtype == torch.float32 and theirs.isfinite().all()
    likeness = torch.nn.functional.cosine_similarity((ours - noise).flatten(1), (theirs - noise).flatten(1))
    assert likeness.min() > 0.999


def test_velocity_depends_on_everything(case, family):
    noise = case.noise(family)
    v = velocities(family, noise)
    assert bool(v.isfinite().all()) and v.std() > 0.01
    encoded = family.encode(TEXTS)
    rows = [encoded.rows(torch.tensor([i]), CPU, torch.float32) for i in range(2)]
    x, sigma = noise[:1], SIGMAS[1:2]
    with torch.no_grad():
        one = family.velocity(x, sigma, rows[0])
        for other in (
            family.velocity(x, sigma, rows[1]),
            family.velocity(x, 0.5 * sigma, rows[0]),
            family.velocity(x.flip(-1), sigma, rows[0]),
        ):
            assert (one - other).abs().max() > 1e-3


def test_a_row_does_not_depend_on_its_batch_or_on_padding(case, family):
    noise = case.noise(family)
    alone = velocities(family, noise)
    cond = family.encode(TEXTS).rows(torch.tensor([2, 0, 1]), CPU, torch.float32)
    with torch.no_grad():
        together = family.velocity(noise[[2, 0, 1]], SIGMAS[[2, 0, 1]], cond)
    close(together[[1, 2, 0]], alone, 1e-5)
    short = family.encode(TEXTS[:1]).rows(torch.tensor([0]), CPU, torch.float32)
    with torch.no_grad():
        close(family.velocity(noise[:1], SIGMAS[:1], short), alone[:1], 1e-5)


def score(images, prompts, metadata) -> Scores:
    """Contrast and colour: smooth, and different for each image."""
    total = images.flatten(1).std(1) + images[:, 0].flatten(1).mean(1)
    return Scores(total, {"contrast": total})


def train(case: Case, *, checkpointing: bool = False, iterations: int = 2, **options):
    """Two iterations; the family, what was trained before and after, and the metrics."""
    family = case.family(**options)
    policy = case.policy(family)
    add_lora(family, LoRAConfig(rank=4), seed=0)
    if checkpointing:
        family.transformer.enable_gradient_checkpointing()
        family.transformer.train()
    parameters = policy.trainable_parameters()
    everything = {n: p for m in family.pipeline.components.values() if hasattr(m, "parameters") for n, p in named(m)}
    before = {n: values(p).clone() for n, p in everything.items()}
    loop = StepwiseGRPO(
        policy,
        score,
        torch.optim.AdamW(parameters, lr=1e-2),
        sigmas=family.sigmas(4, *case.row.size),
        latent_shape=case.shape(family),
        config=GRPOConfig(group_size=3, credit="gain_centred", window_stop=2, update_batch=4, rollout_batch=2),
    )
    prompts = [Prompt(t, n) for t, n in zip(TEXTS, NEGATIVES, strict=True)]
    metrics = [loop.iterate(i, prompts, [0, 1]).metrics for i in range(iterations)]
    changed = {n for n, p in everything.items() if not torch.equal(values(p), before[n])}
    return family, everything, changed, metrics


def values(parameter: torch.Tensor) -> torch.Tensor:
    """The numbers, of a quantised weight too."""
    data = parameter.detach()
    return data.dequantize() if type(data.data) is not torch.Tensor else data


def named(module):
    return [(f"{id(module)}.{name}", parameter) for name, parameter in module.named_parameters()]


def test_training_changes_the_lora_alone(case):
    family, everything, changed, metrics = train(case)
    assert metrics[0]["ratio/mean"] == metrics[0]["ratio/max"] == 1 and metrics[0]["ratio/rounding"] < 1e-4
    assert all(m["updates"] == 1 and m["grad_norm"] > 0 and m["updates_skipped"] == 0 for m in metrics)
    trained = {n for n, p in everything.items() if p.requires_grad}
    assert trained and all("lora_" in n for n in trained) and changed <= trained
    # A layer may have no gradient (the last block's text side); all others have moved in both factors.
    assert len(changed) > 0.8 * len(trained)


# Z-Image's row is forty times as large as the others, and takes a minute.
CHECKPOINTED = [pytest.param(n, marks=pytest.mark.slow if n in (*FURTHER, "z_image") else ()) for n in SMALL_MODELS]


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_gradient_checkpointing_changes_nothing(name, tmp_path):
    case = build(name, tmp_path)
    plain, checkpointed = (lora_state(train(case, checkpointing=on, iterations=1)[0]) for on in (False, True))
    assert plain.keys() == checkpointed.keys()
    for name, value in plain.items():
        # AdamW's first step is +-lr where the gradient is more than rounding.
        assert ((value - checkpointed[name]).abs() > 1e-4).float().mean() < 0.01


QUANTISED = [pytest.param(n, marks=() if n == "sd3" else pytest.mark.slow) for n in SMALL_MODELS]


@pytest.mark.parametrize("name", QUANTISED)
def test_a_quantised_base_trains(name, tmp_path):
    """In 8 bit, which runs on a CPU: nearly the same velocity, and the same LoRA to train, on weights that stay."""
    pytest.importorskip("torchao")
    case = build(name, tmp_path)
    family = case.family()
    quantised, noise = case.family(parts="denoiser", quantize="int8"), case.noise(family)
    weights = [m.weight for m in quantised.transformer.modules() if isinstance(m, torch.nn.Linear)]
    assert sum(type(w.data) is not torch.Tensor for w in weights) > 0.8 * len(weights)
    got, expected = velocities_of(quantised, family.encode(TEXTS), noise), velocities(family, noise)
    assert torch.nn.functional.cosine_similarity(got.flatten(), expected.flatten(), dim=0) > 0.99
    assert (got - expected).abs().max() > 1e-5
    trained, everything, changed, metrics = train(case, quantize="int8", iterations=1)
    assert changed and all(everything[n].requires_grad for n in changed)
    assert metrics[0]["updates"] == 1 and metrics[0]["grad_norm"] > 0 and metrics[0]["ratio/mean"] == 1
    plain, eight_bit = lora_state(train(case, iterations=1)[0]), lora_state(trained)
    assert plain.keys() == eight_bit.keys()
    moved = [torch.cat([s[k].flatten() for k in plain if "lora_B" in k]) for s in (plain, eight_bit)]
    assert torch.nn.functional.cosine_similarity(*moved, dim=0) > 0.8


def test_loading_in_parts(case, family):
    """Encoders alone, then the denoiser alone: the same velocities as the whole model."""
    encoded = case.family(parts="encoders")
    transformer = encoded.pipeline.transformer
    assert encoded.pipeline.vae is None and (transformer is None or transformer.device.type == "meta")
    conditioning = encoded.encode(TEXTS)
    denoiser = case.family(parts="denoiser")
    assert all(getattr(denoiser.pipeline, name) is None for name in denoiser.ENCODERS)
    noise = case.noise(family)
    cond = conditioning.rows(torch.tensor([1]), CPU, torch.float32)
    with torch.no_grad():
        v = denoiser.velocity(noise[1:2], SIGMAS[1:2], cond)
    close(v, velocities(family, noise)[1:2], 1e-6)
    close(denoiser.decode(noise), family.decode(noise), 1e-6)


def test_a_single_file_as_comfyui_has_it(case, family, tmp_path):
    if not case.row.single_file:
        pytest.skip("diffusers reads no single file of this family")
    file = tmp_path / "model.safetensors"
    save_file({f"model.diffusion_model.{k}": v.contiguous() for k, v in native(case, family).items()}, file)
    other = case.family(parts="denoiser", transformer_file=file)
    state, expected = other.transformer.state_dict(), family.transformer.state_dict()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=0)


def native(case: Case, family):
    return case.row.native(dict(family.transformer.state_dict()), family.transformer.config)


@pytest.mark.parametrize("targets", TARGETS)
def test_diffusers_loads_what_was_trained(case, family, targets, tmp_path):
    if not case.row.load_lora_weights:
        pytest.skip("the pipeline has no load_lora_weights")
    trained, noise = with_lora(case, targets), case.noise(family)
    save_lora(lora_state(trained), tmp_path / "lora.safetensors", {"format": "pt"})
    pipeline = case.pipeline()
    pipeline.load_lora_weights(str(tmp_path / "lora.safetensors"))
    other = type(trained)(pipeline, trained.options)
    got, expected = velocities(other, noise), velocities(trained, noise)
    close(got, expected, 1e-5)
    assert (expected - velocities(family, noise)).abs().max() > 0.05


# ----- ComfyUI


@pytest.fixture(scope="module")
def in_comfyui(request, tmp_path_factory):
    """Family name -> (report of ComfyUI, got, expected, layers), of all rows that are asked for in one process."""
    here = [i for i in request.session.items if i.module is request.module and "in_comfyui" in i.fixturenames]
    asked = {i.callspec.params["name"] for i in here}
    checkout, jobs, kept = comfyui(), [], {}
    for name in sorted(asked):
        case = build(name, tmp_path_factory.mktemp(name))
        jobs.append(job(case, tmp_path_factory.mktemp(f"{name}_comfy"), kept))
    process = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("families_in_comfyui.py")), str(ROOT), json.dumps(jobs)],
        cwd=checkout,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    report = json.loads(process.stdout.strip().splitlines()[-1])
    return {j["name"]: (report[j["name"]], load_file(j["outputs"]), *kept[j["name"]]) for j in jobs}


def job(case: Case, folder: Path, kept: dict) -> dict:
    """What ComfyUI is to run for a family, and into `kept` what diffusers gives and which layers the trainer trains."""
    family = case.family()
    config, noise = family.transformer.config, case.noise(family)
    save_file({k: v.contiguous() for k, v in native(case, family).items()}, folder / "weights.safetensors")
    encoded, rows = family.encode(TEXTS), []
    for i in range(len(TEXTS)):
        cond = case.row.comfy_inputs(encoded.rows(torch.tensor([i]), CPU, torch.float32), config)
        rows.append(str(folder / f"row{i}.safetensors"))
        inputs = {"x": noise[i : i + 1], "sigma": SIGMAS[i : i + 1], **cond}
        save_file({k: v.contiguous().clone() for k, v in inputs.items()}, rows[-1])
    expected, layers, loras = {"base": velocities(family, noise)}, {}, {}
    for targets in TARGETS:
        trained = with_lora(case, targets)
        loras[targets] = str(folder / f"{targets}.safetensors")
        save_lora(lora_state(trained), loras[targets], {"format": "pt"})
        expected[targets] = velocities(trained, noise)
        layers[targets] = sorted(family.export_name(n) for n in family.targets(targets))
    kept[case.name] = expected, layers
    return {
        "name": case.name,
        "class": case.row.comfy_class,
        "config": case.row.comfy_config(config) if case.row.comfy_config else None,
        "dims": case.row.comfy_dims,
        "weights": str(folder / "weights.safetensors"),
        "rows": rows,
        "loras": loras,
        "outputs": str(folder / "outputs.safetensors"),
    }


@pytest.mark.parametrize("name", ROWS)
def test_comfyui_gives_the_velocity_of_diffusers(in_comfyui, name):
    report, got, expected, _ = in_comfyui[name]
    assert report["odd"] == []
    for which, value in expected.items():
        close(got[which], value)
        assert which == "base" or (got[which] - got["base"]).abs().max() > 0.05


@pytest.mark.parametrize("name", ROWS)
def test_comfyui_loads_every_key(in_comfyui, name):
    bad = ("not loaded", "error", "shape", "missing")
    assert [line for line in in_comfyui[name][0]["log"] if any(word in line.lower() for word in bad)] == []


@pytest.mark.parametrize("name", ROWS)
def test_the_node_trains_the_same_layers(in_comfyui, name):
    report, _, _, layers = in_comfyui[name]
    assert report["layers"] == layers
