"""The estimate of memory, and --dry-run, against real tensors and published sizes."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.published_models import PUBLISHED, write
from sfgrpo_trainer import memory
from sfgrpo_trainer.config import load_config
from sfgrpo_trainer.families import load_family
from sfgrpo_trainer.policy import attach_lora
from tests.small_models import ROWS, small_model

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))

BILLIONS = {
    "stabilityai/stable-diffusion-3.5-medium": 2.5,
    "stabilityai/stable-diffusion-3.5-large": 8.1,
    "black-forest-labs/FLUX.1-dev": 12,
    "black-forest-labs/FLUX.2-klein-base-4B": 4,
    "black-forest-labs/FLUX.2-dev": 32,
    "Qwen/Qwen-Image": 20,
    "Tongyi-MAI/Z-Image-Turbo": 6,
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": 1.3,
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": 14,
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": 5,
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": 14,
}
"""Parameters of the transformers as their makers give them, rounded."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_have_the_published_size(name, tmp_path):
    path = str(write(name, tmp_path))
    of = memory.components_of(path)["transformer"]
    transformer = memory.build(path, "transformer", *of)
    tensors = [*transformer.parameters(), *transformer.buffers()]
    assert sum(t.numel() for t in tensors) / 1e9 == pytest.approx(BILLIONS[name], rel=0.1)


def test_bytes_of_quantised_weights():
    model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.Embedding(10, 128))
    model.register_buffer("places", torch.zeros(7))
    rest = 128 + 2 * 128 + 10 * 128 + 7
    assert memory.bytes_of(model, torch.bfloat16, "none") == 2 * (64 * 128 + rest)
    assert memory.bytes_of(model, torch.bfloat16, "int8") == 64 * 128 + 2 * rest
    assert memory.bytes_of(model, torch.float32, "nf4") == pytest.approx(64 * 128 * 4.127 / 8 + 4 * rest)


@pytest.mark.parametrize("checkpointing", (False, True))
@pytest.mark.parametrize("name", ROWS)
def test_what_autograd_keeps_is_what_it_keeps_of_real_tensors(name, checkpointing, tmp_path, monkeypatch):
    row = small_model(name)
    row.build(tmp_path / "model")
    run = tmp_path / "run.toml"
    (tmp_path / "p.txt").write_text("a circle\n")
    height, width = row.size
    run.write_text(
        f'[model]\npath = "{tmp_path / "model"}"\ndtype = "fp32"\n[prompts]\nfile = "p.txt"\nper_iteration = 1\n'
        f"[rewards]\njpeg_size = 1.0\n[sampling]\nheight = {height}\nwidth = {width}\nframes = {row.frames}\n"
    )
    tables = {"embedded_guidance": "sampling"}
    options = [f"--{tables.get(k, 'model')}.{k.replace('_', '-')}={v}" for k, v in row.options.items()]
    config = load_config(run, options)
    shapes, _ = memory.without_weights(config)
    real = load_family(str(tmp_path / "model"), torch.float32, torch.device("cpu"), **row.options)
    shape, rows = real.latent_shape(height, width, row.frames), 3
    cond = {k: torch.ones(v.shape, dtype=v.dtype) if v.is_meta else v for k, v in shapes.example_cond(rows).items()}
    kept = []
    for family, device in ((shapes, memory.META), (real, torch.device("cpu"))):
        attach_lora(family, config.lora)
        if checkpointing:
            family.transformer.enable_gradient_checkpointing()
            family.transformer.train()
        monkeypatch.setattr(memory, "META", device)
        kept.append(memory.saved_bytes(family, rows, False, shape, shapes.example_cond(rows) if not kept else cond))
    assert kept[0] == pytest.approx(kept[1], rel=0.1)


@pytest.fixture(scope="session")
def published(tmp_path_factory):
    """Hub id -> a folder of its config files."""
    folder = tmp_path_factory.mktemp("published")
    return {name: write(name, folder) for name in PUBLISHED}


@pytest.mark.parametrize("file", CONFIGS, ids=lambda f: f.stem)
def test_a_run_file_of_configs_resolves(file, published):
    from sfgrpo_trainer.run import check_inputs

    config = load_config(file)
    model = dataclasses.replace(config.model, path=str(published[config.model.path]))
    prompts, eval_prompts = check_inputs(dataclasses.replace(config, model=model))
    assert len(prompts) >= config.prompts.per_iteration and eval_prompts


def test_every_family_has_a_run_file(published):
    from sfgrpo_trainer.families import FAMILIES

    kinds = {
        json.loads((published[load_config(f).model.path] / "model_index.json").read_text())["_class_name"]
        for f in CONFIGS
    }
    assert kinds == set(FAMILIES)


def test_dry_run(cli, published, tmp_path):
    """FLUX.1-dev in 4 bit: what its run file loads, does and needs."""
    file = next(f for f in CONFIGS if f.stem == "flux1_dev")
    model = published["black-forest-labs/FLUX.1-dev"]
    process = cli("train", file, "--dry-run", "--model.path", model, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    lines = {line[:12].strip(): line[12:] for line in process.stdout.splitlines() if line[:12].strip()}
    assert lines["first loads"].startswith("text_encoder CLIPTextModel, 0.12 B parameters")
    assert lines["then loads"].startswith("transformer FluxTransformer2DModel, 11.90 B parameters, 6.1 GB")
    # 19 double blocks of 8 projections and 38 single ones of 3.
    assert "on 266 layers (attention)" in lines["LoRA"]
    assert lines["images"] == "512 x 512 pixels, latents 16 x 64 x 64"
    assert lines["iteration"].startswith(
        "4 prompts x 12 images; forward rows: 436 to sample, 0 to estimate; 484 images"
    )
    # The reward's weights are not here; the rest is said all the same.
    assert lines["rewards"].startswith("not ready: reward pickscore: model ")
    assert list(tmp_path.iterdir()) == []


def test_dry_run_of_a_size_that_cannot_be_made(cli, published, tmp_path):
    file = next(f for f in CONFIGS if f.stem == "flux1_dev")
    model = published["black-forest-labs/FLUX.1-dev"]
    process = cli("train", file, "--dry-run", "--model.path", model, "--sampling.height", 500, cwd=tmp_path)
    assert process.returncode == 2 and process.stdout == ""
    assert "height and width must be multiples of 16 for this model; got 500 x 512" in process.stderr
