"""FLUX.1 schnell, the distilled FLUX.2 klein, time grids and sizes: what test_families.py does not see of FLUX."""

from types import SimpleNamespace

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline
from safetensors.torch import save_file

from sfgrpo.kernels import Kernel
from sfgrpo.prompts import Prompt
from sfgrpo.rollout import rollout
from sfgrpo.schedule import FAMILIES, family_sigmas
from sfgrpo_trainer.errors import UserError
from sfgrpo_trainer.families import LoadOptions, load_family
from sfgrpo_trainer.families.flux import Flux1
from sfgrpo_trainer.families.flux2 import Flux2, Flux2Klein
from sfgrpo_trainer.families.loading import read_weights
from sfgrpo_trainer.policy import LoRAPolicy, encode_prompts
from tests.small_models import flux, flux2, flux2_klein

CPU = torch.device("cpu")
TEXTS = ["a circle", "two red circles"]
VAE = {"block_out_channels": (128, 256, 512, 512)}


def latents(family, noise, guidance, steps, size):
    conditioning = encode_prompts(family, [Prompt(t, "a green cross") for t in TEXTS], {0, 1}, guidance > 1)
    policy = LoRAPolicy(family, conditioning, guidance=guidance, dtype=torch.float32)
    ode = Kernel(name="ode")
    return rollout(
        policy.velocity, noise, family.sigmas(steps, *size), torch.arange(2), kernel=ode, generators=[]
    ).final


@pytest.mark.parametrize("guidance", (1.0, 3.0))
def test_schnell(tmp_path, guidance):
    """No guidance embedding and its own scheduler config; embedded guidance means nothing to it."""
    flux.build(tmp_path, schnell=True)
    family = load_family(str(tmp_path), torch.float32, CPU, max_sequence_length=flux.LENGTH, embedded_guidance=7.0)
    noise = torch.randn(2, *family.latent_shape(32, 48), generator=torch.Generator().manual_seed(7))
    assert family.embedded_guidance(noise) is None
    pipeline = FluxPipeline.from_pretrained(tmp_path, torch_dtype=torch.float32)
    theirs = flux.draw("latent")(pipeline, TEXTS, ["a green cross"] * 2, noise, 4, guidance)
    torch.testing.assert_close(latents(family, noise, guidance, 4, (32, 48)), theirs, rtol=0, atol=1e-4)
    names = family.targets("all")
    assert "time_text_embed.timestep_embedder.linear_1" in names and not any("guidance" in n for n in names)
    config, state = family.transformer.config, family.transformer.state_dict()
    assert not any(n.startswith("guidance") for n in flux.native(dict(state), config))


def test_distilled_klein_refuses_guidance(tmp_path):
    flux2_klein.build(tmp_path, distilled=True)
    family = load_family(str(tmp_path), torch.float32, CPU, max_sequence_length=flux2_klein.LENGTH)
    noise = torch.randn(2, *family.latent_shape(32, 32), generator=torch.Generator().manual_seed(7))
    assert latents(family, noise, 1.0, 2, (32, 32)).isfinite().all()
    family.check_guidance(1.0)
    with pytest.raises(UserError, match="is distilled .* set guidance to 1"):
        family.check_guidance(3.0)


def test_embedded_guidance_is_the_pipelines_or_the_given(tmp_path):
    flux2.build(tmp_path)
    x = torch.zeros(2, 128, 4, 4)
    for given, expected in ((None, 4.0), (2.5, 2.5), (0.0, 0.0)):
        family = load_family(str(tmp_path), torch.float32, CPU, parts="denoiser", embedded_guidance=given)
        assert family.embedded_guidance(x).tolist() == [expected] * 2
    assert Flux1.EMBEDDED_GUIDANCE == 3.5
    assert Flux2Klein(family.pipeline, family.options).embedded_guidance(x) is None


def test_too_few_tokens_for_the_system_message():
    with pytest.raises(UserError, match="max_sequence_length must be from 64 to 512"):
        Flux2.check_options(LoadOptions(max_sequence_length=32))


def without_weights(cls, scheduler, in_channels):
    config = SimpleNamespace(config={"in_channels": in_channels})
    parts = {"transformer": config, "vae": SimpleNamespace(config=VAE), "scheduler": scheduler}
    return cls(SimpleNamespace(**parts), LoadOptions())


@pytest.mark.parametrize("name", ("flux", "flux-schnell", "flux2"))
@pytest.mark.parametrize("size", ((1024, 1024), (512, 768), (1536, 1024)))
@pytest.mark.parametrize("steps", (1, 4, 28))
def test_sigmas_are_those_of_the_core(name, size, steps):
    """sfgrpo.schedule's grids, which are made without diffusers; the second call is like the first."""
    dynamic = name != "flux-schnell"
    scheduler = FlowMatchEulerDiscreteScheduler(
        shift=3.0 if dynamic else 1.0, use_dynamic_shifting=dynamic, **flux.DYNAMIC
    )
    family = without_weights(Flux2, scheduler, 128) if name == "flux2" else without_weights(Flux1, scheduler, 64)
    expected = family_sigmas(FAMILIES[name], steps, tokens=size[0] * size[1] // 256)
    for _ in range(2):
        torch.testing.assert_close(family.sigmas(steps, *size), expected, rtol=0, atol=1e-6)
    assert family.latent_shape(*size)[1:] == tuple(s // (16 if name == "flux2" else 8) for s in size)


@pytest.mark.parametrize("cls", (Flux1, Flux2, Flux2Klein))
def test_sizes(cls):
    transformer = {"in_channels": 64 if cls is Flux1 else 128}
    assert cls.size_for(transformer, VAE) == (1024, 1024)
    shape = cls.shape_for(transformer, VAE, 512, 1040)
    assert shape == ((16, 64, 130) if cls is Flux1 else (128, 32, 65))
    for size in ((1000, 1024), (1024, 1032), (0, 16), (-16, 16)):
        with pytest.raises(UserError, match="multiples of 16"):
            cls.shape_for(transformer, VAE, *size)


@pytest.mark.parametrize("prefix", ("", "model.diffusion_model."))
def test_names_of_a_single_file(tmp_path, prefix):
    """Whole checkpoints and what ComfyUI saved, by the names that diffusers' converters know."""
    names = ("img_in.weight", "single_blocks.0.norm.query_norm.weight", "double_blocks.0.img_attn.norm.key_norm.scale")
    weights = {f"{prefix}{name}": torch.full((1,), float(i)) for i, name in enumerate(names)}
    if prefix:
        weights["vae.decoder.conv_in.bias"] = torch.zeros(1)
    save_file(weights, tmp_path / "model.safetensors")
    read = Flux1.native_weights(read_weights(tmp_path / "model.safetensors"))
    assert {name: value.item() for name, value in read.items()} == {
        "img_in.weight": 0.0,
        "single_blocks.0.norm.query_norm.scale": 1.0,
        "double_blocks.0.img_attn.norm.key_norm.scale": 2.0,
    }
