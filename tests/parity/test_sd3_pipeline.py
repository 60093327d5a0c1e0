"""Our ODE rollouts against diffusers' own pipeline: same noise and prompts, same latents and images."""

import json

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

from sfgrpo.kernels import Kernel
from sfgrpo.prompts import Prompt
from sfgrpo.rollout import rollout
from sfgrpo.schedule import sd3_sigmas
from sfgrpo.shapes import MODEL_DIR
from sfgrpo_trainer.families import load_family
from sfgrpo_trainer.policy import LoRAPolicy, encode_prompts

POSITIVE = ("a circle", "two red circles", "a blue square")
NEGATIVE = ("", "a green cross", "a circle")


def stock(model, length: int) -> StableDiffusion3Pipeline:
    """The pipeline as anyone would load it; without T5 where the run has none."""
    without = {} if length else {"text_encoder_3": None, "tokenizer_3": None}
    pipe = StableDiffusion3Pipeline.from_pretrained(model.path, torch_dtype=torch.float32, **without)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def ours(model, length: int, noise, steps: int, guidance: float):
    """Latents of POSITIVE and NEGATIVE through the family, the policy and the rollout, and the policy."""
    family = load_family(str(model.path), torch.float32, torch.device("cpu"), max_sequence_length=length)
    prompts = [Prompt(p, n) for p, n in zip(POSITIVE, NEGATIVE, strict=True)]
    conditioning = encode_prompts(family, prompts, set(range(3)), guidance > 1)
    family.free_encoders()
    policy = LoRAPolicy(family, conditioning, guidance=guidance, dtype=torch.float32)
    sigmas = family.sigmas(steps, model.size, model.size)
    latents = rollout(
        policy.velocity, noise, sigmas, torch.arange(3), kernel=Kernel(name="ode"), generators=[], micro_batch=2
    ).final
    return latents, policy


def noise_for(model):
    side = model.size // 4
    return torch.randn(3, 16, side, side, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("guidance", [1.0, 4.5])
@pytest.mark.parametrize("steps", [1, 10])
def test_latents_and_images_are_those_of_the_pipeline(model, steps, guidance):
    length, noise = model.max_sequence_length, noise_for(model)
    pipe = stock(model, length)
    arguments = {
        "prompt": list(POSITIVE),
        "negative_prompt": list(NEGATIVE),
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "max_sequence_length": length,
        "height": model.size,
        "width": model.size,
        "latents": noise,
    }
    theirs = pipe(**arguments, output_type="latent").images
    their_images = pipe(**arguments, output_type="pt").images
    latents, policy = ours(model, length, noise, steps, guidance)
    torch.testing.assert_close(latents, theirs, rtol=0, atol=1e-4)
    torch.testing.assert_close(policy.decode(theirs), their_images, rtol=0, atol=1e-6)
    torch.testing.assert_close(policy.decode(latents), their_images, rtol=0, atol=1e-4)
    # What was compared depends on the prompt, and on the negative one where there is guidance.
    assert (theirs[0] - theirs[1]).abs().max() > 0.1
    other = pipe(**arguments | {"negative_prompt": ["a blue square"] * 3}, output_type="latent").images
    assert torch.equal(other, theirs) == (guidance == 1)


@pytest.mark.parametrize("size", [(16, 32), (64, 24)])
def test_other_sizes_are_those_of_the_pipeline(model, size):
    height, width = size
    length = model.max_sequence_length
    family = load_family(str(model.path), torch.float32, torch.device("cpu"), max_sequence_length=length)
    shape = family.latent_shape(height, width)
    assert shape == (16, height // 4, width // 4)
    noise = torch.randn(1, *shape, generator=torch.Generator().manual_seed(3))
    theirs = stock(model, length)(
        "a circle",
        num_inference_steps=3,
        guidance_scale=1.0,
        max_sequence_length=length,
        height=height,
        width=width,
        latents=noise,
        output_type="pt",
    ).images
    policy = LoRAPolicy(
        family, encode_prompts(family, [Prompt("a circle")], {0}, False), guidance=1.0, dtype=torch.float32
    )
    sigmas = family.sigmas(3, height, width)
    done = rollout(
        policy.velocity, noise, sigmas, torch.zeros(1, dtype=torch.long), kernel=Kernel(name="ode"), generators=[]
    )
    torch.testing.assert_close(policy.decode(done.final), theirs, rtol=0, atol=1e-5)


def test_sigmas_are_those_of_the_scheduler(model):
    family = load_family(str(model.path), torch.float32, torch.device("cpu"), max_sequence_length=0)
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(model.path, subfolder="scheduler")
    for steps in (1, 2, 4, 10, 28, 40):
        sigmas = family.sigmas(steps, model.size, model.size)
        scheduler.set_timesteps(steps)
        assert sigmas.dtype == torch.float32
        assert torch.equal(sigmas, scheduler.sigmas)
        torch.testing.assert_close(sigmas, sd3_sigmas(steps, 3.0), rtol=0, atol=1e-6)


def test_the_silent_t5_of_the_embedded_model_equals_none(embedded):
    """With T5 loaded, its tokens are zeros, as diffusers pads them where there is no T5."""
    with_t5 = stock(embedded, 16)
    without = stock(embedded, 0)
    one, _, pooled, _ = with_t5.encode_prompt("a circle", None, None, max_sequence_length=16)
    two, _, other_pooled, _ = without.encode_prompt("a circle", None, None, max_sequence_length=16)
    assert torch.equal(one, two) and torch.equal(pooled, other_pooled)
    assert one.shape == (1, 28, 128) and not one[:, 12:].any() and one[:, :12].any()
    noise = noise_for(embedded)
    latents, _ = ours(embedded, 16, noise, 2, 1.0)
    theirs = without(
        list(POSITIVE),
        num_inference_steps=2,
        guidance_scale=1.0,
        max_sequence_length=16,
        latents=noise,
        output_type="latent",
    ).images
    torch.testing.assert_close(latents, theirs, rtol=0, atol=1e-4)


def test_the_embedded_model_needs_nothing_of_ours(embedded):
    """Stock classes only, no code in the folder, and it draws without any option."""
    index = json.loads((MODEL_DIR / "model_index.json").read_text())
    assert {value[0] for value in index.values() if isinstance(value, list)} == {"diffusers", "transformers", None}
    assert index["_class_name"] == "StableDiffusion3Pipeline"
    assert not list(MODEL_DIR.rglob("*.py"))
    pipe = StableDiffusion3Pipeline.from_pretrained(MODEL_DIR)
    pipe.set_progress_bar_config(disable=True)
    image = pipe("a circle", num_inference_steps=2, guidance_scale=1.0).images[0]
    assert image.size == (32, 32)
