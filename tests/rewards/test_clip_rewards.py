"""PickScore and CLIP score of a small CLIP model, against transformers' own processor and forward pass."""

import numpy as np
import pytest
import torch
from PIL import Image

from sfgrpo.rewards import get_reward
from tests.rewards.small import IMAGE, PROMPTS, TEXT_TOKENS, images, save_clip


def logits(folder, batch):
    """exp(logit_scale) cos of each image with its prompt: CLIPModel's own logits, one image at a time, no padding."""
    from transformers import AutoTokenizer, CLIPImageProcessor, CLIPModel

    model, tokenizer = CLIPModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    processor = CLIPImageProcessor(size={"shortest_edge": IMAGE}, crop_size={"height": IMAGE, "width": IMAGE})
    out = []
    for x, prompt in zip(batch, PROMPTS, strict=True):
        picture = Image.fromarray((x * 255).round().byte().movedim(0, -1).numpy())
        pixels = np.asarray(processor([picture], return_tensors="np")["pixel_values"])
        with torch.no_grad():
            text = tokenizer([prompt], return_tensors="pt")
            assert text["input_ids"].shape[1] < TEXT_TOKENS
            out.append(model(pixel_values=torch.as_tensor(pixels), **text).logits_per_image[0, 0])
    return torch.stack(out)


@pytest.mark.parametrize("size", [(IMAGE, IMAGE), (61, 45), (20, 30)])
@pytest.mark.parametrize("act", ["gelu", "quick_gelu"])
def test_scores_are_those_of_transformers(tmp_path, size, act):
    save_clip(tmp_path, act=act)
    batch = images(*size)
    expected = logits(tmp_path, batch)
    # Where nothing is resized all pixels are equal; else some are off by a level.
    tolerance = 1e-5 if size == (IMAGE, IMAGE) else 5e-3
    settings = {"model": str(tmp_path), "batch_size": 2}
    cosine = get_reward("clip_score", **settings)(batch, PROMPTS, [{}] * 5)
    torch.testing.assert_close(cosine, expected / torch.tensor(3.0).exp(), rtol=0, atol=tolerance)
    pick = get_reward("pickscore", **settings)(batch, PROMPTS, [{}] * 5)
    torch.testing.assert_close(pick, expected / 26, rtol=0, atol=tolerance)
    assert cosine.shape == (5,) and cosine.dtype == torch.float32 and not cosine.requires_grad
    assert float(cosine.std()) > 10 * tolerance


def test_scales(clip_folder):
    batch = images(IMAGE, IMAGE)
    for kind, usual in (("pickscore", 1 / 26), ("clip_score", 1.0)):
        one = get_reward(kind, model=str(clip_folder), scale=1.0)(batch, PROMPTS)
        ten = get_reward(kind, model=str(clip_folder), scale=10)(batch, PROMPTS)
        plain = get_reward(kind, model=str(clip_folder))(batch, PROMPTS)
        torch.testing.assert_close(ten, 10 * one)
        torch.testing.assert_close(plain, usual * one)


def test_the_prompt_and_the_image_both_matter(clip_folder):
    reward = get_reward("clip_score", model=str(clip_folder))
    batch = images(IMAGE, IMAGE)
    straight, swapped = reward(batch, PROMPTS), reward(batch, PROMPTS[1:] + PROMPTS[:1])
    same = [i for i in range(5) if PROMPTS[i] == (PROMPTS[1:] + PROMPTS[:1])[i]]
    assert not same and float((straight - swapped).abs().min()) > 1e-3
    assert straight[0] != straight[2] and PROMPTS[0] == PROMPTS[2]
