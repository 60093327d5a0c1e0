"""What Qwen-Image alone has: a terminal of its times, guidance with a limited norm, files with and without prefix."""

import diffusers
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from sfgrpo.kernels import Kernel
from sfgrpo.prompts import Prompt
from sfgrpo.rollout import rollout
from sfgrpo.schedule import FAMILIES, family_sigmas
from sfgrpo_trainer.errors import UserError
from sfgrpo_trainer.families import load_family
from sfgrpo_trainer.policy import LoRAPolicy, encode_prompts
from tests.small_models import small_model

ROW = small_model("qwen_image")
TEXTS, NEGATIVES = ["a circle", "two red circles"], ["a blue square", ""]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen_image")
    ROW.build(folder)
    return folder


@pytest.fixture
def family(path):
    return load_family(str(path), torch.float32, torch.device("cpu"), **ROW.options)


@pytest.fixture
def pipeline(path):
    pipeline = diffusers.QwenImagePipeline.from_pretrained(path)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def with_terminal(pipeline) -> None:
    """The scheduler of the published model."""
    config = dict(pipeline.scheduler.config) | {"shift_terminal": 0.02}
    pipeline.scheduler = type(pipeline.scheduler).from_config(config)


def test_times_end_at_the_terminal(family):
    with_terminal(family.pipeline)
    for steps, size in ((2, (32, 32)), (10, (64, 32)), (50, (512, 512))):
        tokens = size[0] * size[1] // 64  # a token is 8 x 8 pixels in this model
        sigmas = family.sigmas(steps, *size)
        torch.testing.assert_close(sigmas, family_sigmas(FAMILIES["qwen-image"], steps, tokens=tokens))
        assert sigmas[0] == 1 and sigmas[-1] == 0
        torch.testing.assert_close(sigmas[-2], torch.tensor(0.02))
    with pytest.raises(UserError, match="2 steps or more"):
        family.sigmas(1, 32, 32)


@pytest.mark.parametrize("size", [(32, 32), (24, 56)])
def test_latents_with_a_terminal_at_other_sizes_are_those_of_the_pipeline(family, pipeline, size):
    """An odd number of tokens to a side too."""
    with_terminal(family.pipeline)
    with_terminal(pipeline)
    noise = torch.randn(2, *family.latent_shape(*size), generator=torch.Generator().manual_seed(3))
    prompts = [Prompt(t, n) for t, n in zip(TEXTS, NEGATIVES, strict=True)]
    policy = LoRAPolicy(family, encode_prompts(family, prompts, {0, 1}, True), guidance=4.0, dtype=torch.float32)
    sigmas, ode = family.sigmas(3, *size), Kernel(name="ode")
    ours = rollout(policy.velocity, noise, sigmas, torch.arange(2), kernel=ode, generators=[]).final
    theirs = ROW.stock(pipeline, list(TEXTS), list(NEGATIVES), noise, 3, 4.0)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    images = ROW.stock_images(pipeline, list(TEXTS), list(NEGATIVES), noise, 3, 4.0)
    torch.testing.assert_close(policy.decode(ours), images, rtol=0, atol=1e-4)


def test_guidance_keeps_the_norm_of_each_token(family, pipeline):
    negative, positive = torch.randn(2, 3, 16, 8, 12, generator=torch.Generator().manual_seed(0))
    guided = family.guide(negative, positive, 4.0)
    theirs, neg, pos = (pipeline._pack_latents(v, 3, 16, 8, 12) for v in (guided, negative, positive))
    combined = neg + 4.0 * (pos - neg)
    expected = combined * (pos.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True))
    torch.testing.assert_close(theirs, expected)
    torch.testing.assert_close(theirs.norm(dim=-1), pos.norm(dim=-1))


def test_tokens_are_those_of_the_pipeline(pipeline):
    x = torch.randn(2, 16, 6, 10, generator=torch.Generator().manual_seed(0))
    assert torch.equal(F.pixel_unshuffle(x, 2).flatten(2).mT, pipeline._pack_latents(x, 2, 16, 6, 10))


def test_sizes_that_are_no_whole_tokens_are_refused(family):
    for size in ((32, 36), (12, 32), (0, 32), (32, -8)):
        with pytest.raises(UserError, match=f"multiples of 8 for this model; got {size[0]} x {size[1]}"):
            family.latent_shape(*size)


def test_files_with_and_without_prefix_and_with_other_models(path, family, tmp_path):
    state = dict(family.transformer.state_dict())
    whole = {f"model.diffusion_model.{k}": v for k, v in state.items()} | {"vae.conv1.weight": torch.zeros(1)}
    for content in (state, whole):
        save_file(content, tmp_path / "model.safetensors")
        other = load_family(
            str(path), torch.float32, torch.device("cpu"), "denoiser", transformer_file=tmp_path / "model.safetensors"
        )
        assert all(torch.equal(v, state[k]) for k, v in other.transformer.state_dict().items())
    save_file({"something.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="no transformer of this model"):
        load_family(
            str(path), torch.float32, torch.device("cpu"), "denoiser", transformer_file=tmp_path / "model.safetensors"
        )
