"""The estimate of memory, and --dry-run, against real tensors and published sizes."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.published_models import PUBLISHED, write
from sfgrpo.dtypes import DTYPES
from sfgrpo_trainer import activations, memory
from sfgrpo_trainer.config import load_config
from sfgrpo_trainer.errors import UserError
from sfgrpo_trainer.families import load_family
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


@pytest.fixture(scope="module", params=ROWS)
def small(request, tmp_path_factory):
    """Row, folder, and function from a dtype to the configuration of a run."""
    row, folder = small_model(request.param), tmp_path_factory.mktemp(request.param)
    row.build(folder / "model")
    (folder / "p.txt").write_text("a circle\n")
    height, width = row.size
    (folder / "run.toml").write_text(
        f'[model]\npath = "{folder / "model"}"\n[prompts]\nfile = "p.txt"\nper_iteration = 1\n'
        f"[rewards]\njpeg_size = 1.0\n[sampling]\nheight = {height}\nwidth = {width}\nframes = {row.frames}\n"
    )
    tables = {"embedded_guidance": "sampling"}
    options = [f"--{tables.get(k, 'model')}.{k.replace('_', '-')}={v}" for k, v in row.options.items()]

    def config_of(dtype):
        return load_config(folder / "run.toml", [*options, f"--model.dtype={dtype}"])

    return row, str(folder / "model"), config_of


@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
def test_what_autograd_keeps_is_what_it_keeps_of_real_tensors(small, dtype):
    """In bf16 under autocast, with float32 factors of the LoRA."""
    row, path, config_of = small
    config, cpu, rows = config_of(dtype), torch.device("cpu"), 3
    shapes, _ = memory.without_weights(config, encoders=False)
    real = load_family(path, DTYPES[dtype], cpu, "denoiser", **row.options)
    shape, cond = real.latent_shape(*row.size, row.frames), shapes.example_cond(rows)
    ones = {k: torch.ones(v.shape, dtype=v.dtype) if v.is_meta else v for k, v in cond.items()}
    for checkpointing in (False, True):
        kept = []
        for family, tensors, device in ((shapes, cond, activations.META), (real, ones, cpu)):
            if checkpointing:
                family.transformer.enable_gradient_checkpointing()
                family.transformer.train()
            else:
                memory.attach_factors(family, config)
            kept.append(activations.saved_bytes(family, rows, False, shape, tensors, device, gpu=False))
        assert kept[0] == pytest.approx(kept[1], rel=0.01)


AUTOCAST = {
    "linear": lambda x, w: F.linear(x, w),
    "__matmul__": lambda x, w: x @ w,
    "conv2d": lambda x, w: F.conv2d(x[None], w[:, :, None, None]),
    "einsum": lambda x, w: torch.einsum("bij,jk->bik", x, w),
    "layer_norm": lambda x, w: F.layer_norm(x, w.shape[:1], w[0], w[1]),
    "rms_norm": lambda x, w: F.rms_norm(x, w.shape[:1], w[0]),
    "group_norm": lambda x, w: F.group_norm(x, 2),
    "softmax": lambda x, w: x.softmax(-1),
    "pow": lambda x, w: x.pow(2),
    "__pow__": lambda x, w: x**2,
    "rsqrt": lambda x, w: torch.rsqrt(x),
    "sum": lambda x, w: x.sum(-1),
    "norm": lambda x, w: x.norm(dim=-1),
    "exp": lambda x, w: x.exp(),
    # These it leaves alone.
    "gelu": lambda x, w: F.gelu(x),
    "silu": lambda x, w: F.silu(x),
    "mean": lambda x, w: x.mean(-1),
    "mul": lambda x, w: x * w,
    "cat": lambda x, w: torch.cat([x, x]),
}


@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast_on_meta_is_that_of_a_gpu(name):
    """Against torch's own dispatch for CUDA, which fake tensors have on a machine without a GPU too."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    for dtype in (torch.float32, torch.bfloat16):
        with activations.Autocast(torch.bfloat16):
            x, w = (torch.empty(s, dtype=dtype, device="meta") for s in ((8, 8, 8), (8, 8)))
            ours = AUTOCAST[name](x, w)
        before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        try:
            torch.set_autocast_enabled("cuda", True)
            torch.set_autocast_dtype("cuda", torch.bfloat16)
            with FakeTensorMode():
                x, w = (torch.empty(s, dtype=dtype, device="cuda") for s in ((8, 8, 8), (8, 8)))
                theirs = AUTOCAST[name](x, w)
        finally:
            torch.set_autocast_enabled("cuda", before[0])
            torch.set_autocast_dtype("cuda", before[1])
            torch.clear_autocast_cache()
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)


@pytest.fixture(scope="session")
def published(tmp_path_factory):
    """Hub id -> a folder of its config files."""
    folder = tmp_path_factory.mktemp("published")
    return {name: write(name, folder) for name in PUBLISHED}


@pytest.mark.parametrize("file", CONFIGS, ids=lambda f: f.stem)
def test_a_run_file_of_configs_resolves(file, published):
    from sfgrpo_trainer.prepare import check_inputs

    config = load_config(file)
    model = dataclasses.replace(config.model, path=str(published[config.model.path]))
    prompts, eval_prompts = check_inputs(dataclasses.replace(config, model=model))
    assert len(prompts) >= config.prompts.per_iteration and eval_prompts


def test_a_window_keeps_its_distance_from_the_other_expert(published):
    """The steps of the run file for Wan 2.2 A14B, as --dry-run checks them, and not for want of a digit."""
    from sfgrpo_trainer.run import check_sampling

    config = load_config(next(f for f in CONFIGS if f.stem == "wan22_a14b"))
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, path=str(published[config.model.path]))
    )
    family, s = memory.without_weights(config, encoders=False)[0], config.sampling
    check_sampling(config, family)
    sigmas = family.sigmas(s.steps, s.height, s.width)
    (window,) = config.grpo.windows(s.steps)
    assert int(window.sum()) == 3 and (sigmas[:-1][window] - family.boundary).min() > 0.02
    past = dataclasses.replace(config, grpo=dataclasses.replace(config.grpo, window_stop=5))
    with pytest.raises(UserError, match="window_stop 4 or less"):
        check_sampling(past, family)


def test_every_family_has_a_run_file(published):
    from sfgrpo_trainer.families import FAMILIES

    kinds = {
        json.loads((published[load_config(f).model.path] / "model_index.json").read_text())["_class_name"]
        for f in CONFIGS
    }
    assert kinds == set(FAMILIES)


def test_dry_run(cli, published, tmp_path, monkeypatch):
    """FLUX.1-dev in 4 bit: what its run file loads, does and needs."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # the hub client asks again for half a minute where there is no network
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
    assert "models of rewards (pickscore) are not counted" in process.stdout
    # The reward's weights are not here; the rest is said all the same.
    assert lines["rewards"].startswith("not ready: reward pickscore: model ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stem", ("flux2_klein", "sd35_medium_24gb", "qwen_image"))
def test_embedded_guidance_is_refused_where_no_model_takes_it(stem, published):
    """Before any weight is loaded. The run files of FLUX.1-dev and FLUX.2-dev have it."""
    from sfgrpo_trainer.prepare import check_inputs

    config = load_config(next(f for f in CONFIGS if f.stem == stem), ["--sampling.embedded-guidance=3.5"])
    model = dataclasses.replace(config.model, path=str(published[config.model.path]))
    with pytest.raises(UserError, match="no input for embedded guidance .* leave sampling.embedded_guidance"):
        check_inputs(dataclasses.replace(config, model=model))


def test_dry_run_of_a_size_that_cannot_be_made(cli, published, tmp_path):
    file = next(f for f in CONFIGS if f.stem == "flux1_dev")
    model = published["black-forest-labs/FLUX.1-dev"]
    process = cli("train", file, "--dry-run", "--model.path", model, "--sampling.height", 500, cwd=tmp_path)
    assert process.returncode == 2 and process.stdout == ""
    assert "height and width must be multiples of 16 for this model; got 500 x 512" in process.stderr
