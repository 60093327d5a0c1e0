"""ImageReward: a small BLIP from transformers, saved with the public weights' names by tables written here."""

import pytest
import torch
from PIL import Image

from sfgrpo.rewards import get_reward
from tests.rewards.small import PROMPTS, apply_head, images, layers_head, randomise, save_bert_tokenizer

SIZE = 32
# The names of BLIP's own code, by those of transformers. Written down by hand, apart from the code under test.
VISION = {
    "embeddings.class_embedding": "cls_token",
    "embeddings.position_embedding": "pos_embed",
    "embeddings.patch_embedding.weight": "patch_embed.proj.weight",
    "embeddings.patch_embedding.bias": "patch_embed.proj.bias",
    "post_layernorm.weight": "norm.weight",
    "post_layernorm.bias": "norm.bias",
}
BLOCK = {
    "layer_norm1": "norm1",
    "self_attn.qkv": "attn.qkv",
    "self_attn.projection": "attn.proj",
    "layer_norm2": "norm2",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder with `ImageReward.pt` and tokenizer, BlipForImageTextRetrieval, weights of the head)."""
    from transformers import BlipConfig, BlipForImageTextRetrieval

    folder = tmp_path_factory.mktemp("image_reward")
    words = save_bert_tokenizer(folder / "bert")
    layers = {"num_attention_heads": 2, "hidden_act": "gelu"}
    config = BlipConfig(
        text_config=layers
        | {
            "vocab_size": words,
            "hidden_size": 128,
            "num_hidden_layers": 2,
            "intermediate_size": 96,
            "max_position_embeddings": 40,
            "layer_norm_eps": 1e-12,
        },
        vision_config=layers
        | {
            "hidden_size": 192,
            "num_attention_heads": 3,
            "num_hidden_layers": 3,
            "intermediate_size": 80,
            "image_size": SIZE,
            "patch_size": 8,
            "layer_norm_eps": 1e-6,
        },
        image_text_hidden_size=16,
    )
    model = randomise(BlipForImageTextRetrieval(config), seed=3, std=0.1)
    vision = dict(model.vision_model.state_dict())
    state = {f"blip.visual_encoder.{new}": vision.pop(old) for old, new in VISION.items()}
    for n in range(3):
        for old, new in BLOCK.items():
            for kind in ("weight", "bias"):
                value = vision.pop(f"encoder.layers.{n}.{old}.{kind}")
                state[f"blip.visual_encoder.blocks.{n}.{new}.{kind}"] = value
    assert not vision
    state |= {f"blip.text_encoder.{name}": value for name, value in model.text_encoder.state_dict().items()}
    # What the public file has beside: buffers and the projections of BLIP's contrastive loss.
    state["blip.text_encoder.embeddings.position_ids"] = torch.arange(40)[None]
    state["blip.vision_proj.weight"] = torch.zeros(16, 192)
    head = layers_head(128, seed=7)
    state |= {f"mlp.{name}": value for name, value in head.items()}
    torch.save(state, folder / "ImageReward.pt")
    return folder, model, head


def reward_of(folder, **settings):
    files = {"weights": str(folder / "ImageReward.pt"), "tokenizer": str(folder / "bert")}
    return get_reward("image_reward", **files, **settings)


@pytest.mark.parametrize("size", [(SIZE, SIZE), (SIZE, SIZE + 3), (50, 71)])
def test_scores_are_the_head_of_blip(saved, size):
    """One at a time, without padding, through BlipForImageTextRetrieval's own forward pass; pixels by torchvision."""
    from torchvision import transforms as T
    from transformers import AutoTokenizer

    folder, model, head = saved
    tokenizer = AutoTokenizer.from_pretrained(folder / "bert")
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    steps = [T.Resize(SIZE, T.InterpolationMode.BICUBIC), T.CenterCrop(SIZE), T.ToTensor(), T.Normalize(mean, std)]
    batch, expected = images(*size), []
    for x, prompt in zip(batch, PROMPTS, strict=True):
        picture = Image.fromarray((x * 255).round().byte().movedim(0, -1).numpy())
        text = tokenizer([prompt], return_tensors="pt")
        with torch.no_grad():
            out = model(
                input_ids=text["input_ids"],
                attention_mask=text["attention_mask"],
                pixel_values=T.Compose(steps)(picture)[None],
            )
        expected.append(apply_head(head, out.question_embeds[0, 0]))
    expected = (torch.stack(expected) - 0.16717362830052426) / 1.0333394966054072
    reward = reward_of(folder, batch_size=2)
    ours = reward(batch, PROMPTS)
    assert not reward._ready()[1].training
    # Where the short side is not resized all pixels are equal; else some are off by a level.
    tolerance = 1e-5 if SIZE in size else 2e-2
    torch.testing.assert_close(ours, expected, rtol=0, atol=tolerance)
    assert float(ours.std()) > 5 * tolerance


def test_image_and_prompt_both_matter(saved):
    reward, batch = reward_of(saved[0]), images(SIZE, SIZE)
    same_text = reward(batch, ["a red cat"] * 5)
    same_image = reward(batch[:1].expand(5, -1, -1, -1), PROMPTS)
    assert float(same_text.std()) > 1e-3 and same_image[0] == same_image[2] and float(same_image.std()) > 1e-3


def test_long_prompts(saved):
    long = "a cat on the hill " * 10
    with pytest.raises(ValueError, match=r"has 52 tokens and the model reads 35 at most; shorten it, or set truncate"):
        reward_of(saved[0])(images(SIZE, SIZE, count=1), [long])
    cut = reward_of(saved[0], truncate=True)
    ends = [long, long + " blue dogs"]
    first, second = cut(images(SIZE, SIZE, count=1).expand(2, -1, -1, -1), ends).tolist()
    assert first == pytest.approx(second, abs=1e-6)


def test_a_file_of_something_else_is_refused(saved, tmp_path):
    folder, _, head = saved
    torch.save(head, tmp_path / "head.pt")
    reward = get_reward("image_reward", weights=str(tmp_path / "head.pt"), tokenizer=str(folder / "bert"))
    with pytest.raises(ValueError, match=r"head\.pt lacks blip\.visual_encoder\.pos_embed; the file of ImageReward"):
        reward(images(SIZE, SIZE), PROMPTS)
    state = torch.load(folder / "ImageReward.pt")
    del state["blip.text_encoder.encoder.layer.1.crossattention.self.key.bias"]
    torch.save(state, tmp_path / "part.pt")
    reward = get_reward("image_reward", weights=str(tmp_path / "part.pt"), tokenizer=str(folder / "bert"))
    with pytest.raises(
        ValueError, match=r"part\.pt lacks the weight encoder\.layer\.1\.crossattention\.self\.key\.bias"
    ):
        reward(images(SIZE, SIZE), PROMPTS)
