"""What Z-Image alone has: guidance that counts from 0 in its pipeline, captions of any length, refiners."""

import diffusers
import pytest
import torch

from sfgrpo.schedule import FAMILIES, family_sigmas
from sfgrpo_trainer.errors import UserError
from sfgrpo_trainer.families import load_family
from tests.small_models import small_model

ROW = small_model("z_image")
TEXTS = ["", "a circle", "a circle and a square"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("z_image")
    ROW.build(folder)
    return folder


@pytest.fixture(scope="module")
def family(path):
    return load_family(str(path), torch.float32, torch.device("cpu"), **ROW.options)


def test_guidance_is_that_of_the_pipeline_less_one(path, family):
    """One step of guidance_scale 2 there is the velocity of guidance 3 here; 0 there is none, 1 here."""
    pipeline = diffusers.ZImagePipeline.from_pretrained(path)
    pipeline.set_progress_bar_config(disable=True)
    noise = torch.randn(1, 16, 8, 8, generator=torch.Generator().manual_seed(0))
    encoded, sigma = family.encode(TEXTS), torch.ones(1)
    rows = [encoded.rows(torch.tensor([i]), torch.device("cpu"), torch.float32) for i in (1, 2)]
    with torch.no_grad():
        negative, positive = (family.velocity(noise, sigma, row) for row in rows)
    for scale in (0.0, 2.0):
        theirs = pipeline(
            [TEXTS[2]],
            negative_prompt=[TEXTS[1]],
            num_inference_steps=1,
            guidance_scale=scale,
            max_sequence_length=ROW.options["max_sequence_length"],
            height=32,
            width=32,
            latents=noise,
            output_type="latent",
        ).images
        torch.testing.assert_close(noise - family.guide(negative, positive, scale + 1), theirs, rtol=0, atol=1e-4)


def test_texts_are_encoded_without_being_changed(family):
    texts = list(TEXTS)
    encoded = family.encode(texts)
    assert texts == TEXTS
    lengths = encoded.tensors["lengths"].tolist()
    assert lengths == [18 + len(text) for text in TEXTS]
    assert lengths[0] <= 32 < lengths[2]  # one block of tokens, and two
    captions = encoded.tensors["captions"]
    assert captions.shape == (3, max(lengths), 32)
    assert all(not row[n:].any() and row[:n].any(-1).all() for row, n in zip(captions, lengths, strict=True))


def test_sigmas_are_those_of_the_published_schedulers(family):
    """Shift 3 for Turbo; the base model's is 6."""
    torch.testing.assert_close(family.sigmas(8, 32, 32), family_sigmas(FAMILIES["z-image"], 8))
    assert torch.equal(family.sigmas(1, 32, 32), torch.tensor([1.0, 0.0]))


def test_the_refiners_carry_a_lora_too(family):
    attention, both, everything = (set(family.targets(choice)) for choice in ("attention", "attention_mlp", "all"))
    blocks = ("layers.0", "noise_refiner.0", "context_refiner.0")
    projections = ("to_q", "to_k", "to_v", "to_out.0")
    assert attention == {f"{block}.attention.{name}" for block in blocks for name in projections}
    assert both - attention == {f"{block}.feed_forward.w{i}" for block in blocks for i in (1, 2, 3)}
    assert everything > both


def test_sizes_that_are_no_whole_tokens_or_too_large_are_refused(family):
    for size in ((32, 36), (0, 32), (32, 4104)):
        with pytest.raises(UserError, match=f"multiples of 8, at most 4096, for this model; got {size[0]} x {size[1]}"):
            family.latent_shape(*size)
    assert family.latent_shape(4096, 8) == (16, 1024, 2)
