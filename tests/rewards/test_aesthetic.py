"""The aesthetic predictor: CLIP's image embedding from transformers, and the head written out."""

import numpy as np
import pytest
import torch
from PIL import Image

from sfgrpo.rewards import get_reward
from tests.rewards.small import IMAGE, PROMPTS, apply_head, images, layers_head, save_clip


@pytest.fixture
def folder(tmp_path):
    save_clip(tmp_path / "clip", projection=32)
    return tmp_path / "clip"


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("size", [(IMAGE, IMAGE), (70, 44)])
def test_scores_are_the_head_of_the_embedding(folder, tmp_path, suffix, size):
    from safetensors.torch import save_file
    from transformers import CLIPImageProcessor, CLIPModel

    state = layers_head(32, seed=5)
    file = tmp_path / f"head{suffix}"
    save_file(state, file) if suffix == ".safetensors" else torch.save(state, file)
    batch = images(*size)
    pictures = [Image.fromarray((x * 255).round().byte().movedim(0, -1).numpy()) for x in batch]
    processor = CLIPImageProcessor(size={"shortest_edge": IMAGE}, crop_size={"height": IMAGE, "width": IMAGE})
    pixels = torch.as_tensor(np.asarray(processor(pictures, return_tensors="np")["pixel_values"]))
    with torch.no_grad():
        out = CLIPModel.from_pretrained(folder).eval()(pixel_values=pixels, input_ids=torch.tensor([[60, 1, 61]]))
    embeds = 7 * out.image_embeds  # of any length
    expected = apply_head(state, embeds / embeds.square().sum(-1, keepdim=True).sqrt())
    ours = get_reward("aesthetic", head=str(file), model=str(folder), batch_size=2)(batch, PROMPTS)
    tolerance = 1e-5 if size == (IMAGE, IMAGE) else 1e-2
    torch.testing.assert_close(ours, expected, rtol=0, atol=tolerance)
    assert float(ours.std()) > 5 * tolerance


def test_prompts_are_not_read(folder, tmp_path):
    torch.save(layers_head(32, seed=5), tmp_path / "head.pth")
    reward = get_reward("aesthetic", head=str(tmp_path / "head.pth"), model=str(folder))
    reward.check_prompt("word " * 500, {}, (32, 32))
    batch = images(IMAGE, IMAGE)
    assert torch.equal(reward(batch, PROMPTS), reward(batch, ["word " * 500] * 5))


def test_the_head_is_needed_and_must_fit(folder, tmp_path):
    with pytest.raises(ValueError, match="aesthetic needs the setting head"):
        get_reward("aesthetic")
    missing = get_reward("aesthetic", head=str(tmp_path / "no.pth"), model=str(folder))
    for call in (missing.check, lambda: missing(images(IMAGE, IMAGE), PROMPTS)):
        with pytest.raises(ValueError, match=r"file .*no\.pth \(head\) does not exist"):
            call()
    torch.save(layers_head(24, seed=5), tmp_path / "narrow.pth")
    narrow = get_reward("aesthetic", head=str(tmp_path / "narrow.pth"), model=str(folder))
    with pytest.raises(ValueError, match=r"narrow\.pth has 0\.weight of shape \(1024, 24\), .* has \(1024, 32\)"):
        narrow(images(IMAGE, IMAGE), PROMPTS)
