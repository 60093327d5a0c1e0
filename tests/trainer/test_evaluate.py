"""Evaluation against a second computation with diffusers' own pipeline."""

import math

import pytest
import torch
from diffusers import StableDiffusion3Pipeline

from sfgrpo.evaluate import eval_noise, evaluate, sample_latents
from sfgrpo.prompts import Prompt
from sfgrpo.rewards import Scores, mix
from sfgrpo_trainer.families import load_family
from sfgrpo_trainer.policy import LoRAPolicy, encode_prompts

CPU = torch.device("cpu")
PROMPTS = [
    Prompt("a blue square", metadata={"tag": "unused"}),
    Prompt("a circle", metadata={"tag": "one"}),
    Prompt("two red circles", metadata={"tag": "two"}),
    Prompt("a circle and a square"),
    Prompt("a red circle", metadata={"tag": "one"}),
]
INDEX, IMAGES, STEPS = range(1, 5), 2, 3


@pytest.fixture(scope="module")
def policy(embedded):
    family = load_family(str(embedded.path), torch.float32, CPU, max_sequence_length=0)
    conditioning = encode_prompts(family, PROMPTS, set(range(len(PROMPTS))), False)
    return LoRAPolicy(family, conditioning, guidance=1.0, dtype=torch.float32)


def red_and_dark(images, prompts, metadata) -> Scores:
    """Two smooth scores; the second also depends on the prompt's text and on what the line of its file holds."""
    red = (images[:, 0] - images[:, 1:].mean(1)).flatten(1).mean(1)
    words = torch.tensor([len(p.split()) + len(m.get("tag", "")) for p, m in zip(prompts, metadata, strict=True)])
    dark = (1 - images.flatten(1).mean(1)) * words
    return Scores(2 * red - dark, {"red": red, "dark": dark})


def run(policy, score=red_and_dark, batch=32, grid=6, images_per_prompt=IMAGES, **options):
    family = policy.family
    return evaluate(
        policy,
        PROMPTS,
        INDEX,
        score,
        sigmas=family.sigmas(STEPS, 32, 32),
        latent_shape=family.latent_shape(32, 32),
        images_per_prompt=images_per_prompt,
        grid=grid,
        batch=batch,
        device=CPU,
        **options,
    )


@pytest.fixture(scope="module")
def direct(embedded) -> dict[tuple[int, int], torch.Tensor]:
    """(prompt, seed) -> image (1, 3, 32, 32), one at a time through the stock pipeline."""
    pipe = StableDiffusion3Pipeline.from_pretrained(
        embedded.path, torch_dtype=torch.float32, text_encoder_3=None, tokenizer_3=None
    )
    pipe.set_progress_bar_config(disable=True)
    return {
        (i, seed): pipe(
            PROMPTS[i].text,
            num_inference_steps=STEPS,
            guidance_scale=1.0,
            max_sequence_length=0,
            latents=eval_noise(PROMPTS[i].text, seed, (16, 8, 8)).unsqueeze(0),
            output_type="pt",
        ).images
        for i in INDEX
        for seed in range(IMAGES)
    }


def test_scores_are_those_of_a_direct_computation(policy, direct):
    result = run(policy)
    sums: dict[str, list[float]] = {}
    for (i, _), image in direct.items():
        tag = PROMPTS[i].metadata.get("tag")
        scores = red_and_dark(image, [PROMPTS[i].text], [PROMPTS[i].metadata])
        for name, value in {"total": scores.total, **scores.parts}.items():
            for key in [name] + ([f"{name}/{tag}"] if tag else []):
                sums.setdefault(key, []).append(value.item())
    assert result.scores == pytest.approx({k: sum(v) / len(v) for k, v in sums.items()}, abs=1e-5)
    assert result.counts == {k: len(v) for k, v in sums.items()}
    assert result.counts["total"] == 8 and result.counts["red/one"] == 4 and result.counts["dark/two"] == 2


def test_the_grid_shows_the_first_image_of_each_prompt_first(policy, direct):
    result = run(policy, grid=6)
    order = [(1, 0), (2, 0), (3, 0), (4, 0), (1, 1), (2, 1)]
    assert result.captions == [PROMPTS[i].text for i, _ in order]
    torch.testing.assert_close(result.images, torch.cat([direct[key] for key in order]), rtol=0, atol=1e-5)
    small = run(policy, grid=100)
    assert len(small.images) == len(small.captions) == 8


def test_results_do_not_depend_on_the_batch(policy):
    whole = run(policy, batch=100)
    for batch in (1, 3, 8):
        part = run(policy, batch=batch)
        assert part.scores == pytest.approx(whole.scores, abs=1e-5) and part.counts == whole.counts
        torch.testing.assert_close(part.images, whole.images, rtol=0, atol=1e-5)
        assert part.captions == whole.captions


def test_scores_that_are_not_finite_are_left_out(policy):
    def score(images, prompts, metadata) -> Scores:
        values = [math.nan if p == "a red circle" else math.inf if p == "a circle" else float(len(p)) for p in prompts]
        return Scores(torch.tensor(values), {"length": torch.tensor(values)})

    result = run(policy, score)
    finite = {"total": 4, "length": 4, "total/two": 2, "length/two": 2}
    assert result.counts == finite | {"total/one": 0, "length/one": 0}
    assert math.isnan(result.scores["length/one"])
    expected = (len("two red circles") + len("a circle and a square")) / 2
    assert result.scores["total"] == expected and result.scores["length/two"] == len("two red circles")


def test_the_real_rewards_are_weighted(policy, direct):
    result = run(policy, mix({"jpeg_size": -1.0, "shapes": 0.5}))
    assert result.scores["total"] == pytest.approx(
        -result.scores["jpeg_size"] + 0.5 * result.scores["shapes"], rel=1e-5
    )
    images = torch.cat([direct[i, seed] for seed in range(IMAGES) for i in INDEX])
    texts = [PROMPTS[i].text for _ in range(IMAGES) for i in INDEX]
    again = mix({"jpeg_size": -1.0, "shapes": 0.5})(images, texts, [{}] * 8)
    # A JPEG's size jumps by some bytes where rounding moves a pixel by a grey level.
    assert result.scores["jpeg_size"] == pytest.approx(again.parts["jpeg_size"].mean().item(), abs=0.01)
    assert result.scores["shapes"] == pytest.approx(again.parts["shapes"].mean().item(), abs=1e-3)


def test_noise_depends_on_text_and_seed_alone(policy):
    shape = (16, 8, 8)
    assert torch.equal(eval_noise("a circle", 0, shape), eval_noise("a circle", 0, shape))
    noises = [eval_noise(text, seed, shape) for text in ("a circle", "a cross") for seed in (0, 1)]
    for i, one in enumerate(noises):
        assert abs(one.mean()) < 0.15 and abs(one.std() - 1) < 0.1
        for other in noises[:i]:
            assert abs((one * other).mean()) < 0.15  # independent: 1 / sqrt(1024) is a standard deviation
    grid = {"sigmas": policy.family.sigmas(STEPS, 32, 32), "latent_shape": shape, "device": CPU}
    alone = sample_latents(policy, PROMPTS, [2], [1], **grid)
    among = sample_latents(policy, PROMPTS, [4, 2, 1], [0, 1, 1], **grid)
    torch.testing.assert_close(alone[0], among[1], rtol=0, atol=1e-5)


def test_samples_are_decoded_and_scored_in_parts(policy, monkeypatch):
    whole = run(policy, batch=5)
    decoded, scored, decode = [], [], policy.decode
    monkeypatch.setattr(policy, "decode", lambda latents: decoded.append(len(latents)) or decode(latents))

    def score(images, prompts, metadata) -> Scores:
        scored.append((len(images), len(prompts), len(metadata)))
        return red_and_dark(images, prompts, metadata)

    parts = run(policy, score, batch=5, decode_batch=2)
    assert decoded == [2, 2, 1, 2, 1] and scored == [(n, n, n) for n in decoded]
    assert parts.scores == pytest.approx(whole.scores, abs=1e-5) and parts.counts == whole.counts
    assert parts.captions == whole.captions and parts.rewards == pytest.approx(whole.rewards, abs=1e-5)
    torch.testing.assert_close(parts.images, whole.images, rtol=0, atol=1e-5)


def test_a_grid_below_1_starts_from_less_noise(policy):
    """As ComfyUI has it for an empty latent: (1 - t) 0 + t noise; here two Euler steps by hand."""
    sigmas, text = torch.tensor([0.5, 0.2, 0.0]), PROMPTS[2].text
    (found,) = sample_latents(policy, PROMPTS, [2], [3], sigmas=sigmas, latent_shape=(16, 8, 8), device=CPU)
    x, cond = 0.5 * eval_noise(text, 3, (16, 8, 8)).unsqueeze(0), torch.tensor([2])
    with torch.no_grad():
        for t, s in ((0.5, 0.2), (0.2, 0.0)):
            x = x + (s - t) * policy.velocity(x, torch.tensor([t]), cond)
    torch.testing.assert_close(found, x[0], rtol=0, atol=1e-5)


def test_progress_is_told(policy):
    told = []
    family = policy.family
    evaluate(
        policy,
        PROMPTS,
        INDEX,
        red_and_dark,
        sigmas=family.sigmas(2, 32, 32),
        latent_shape=(16, 8, 8),
        images_per_prompt=1,
        grid=1,
        batch=3,
        device=CPU,
        on_progress=lambda done, total: told.append((done, total)),
    )
    assert told == [(0, 4), (3, 4)]
