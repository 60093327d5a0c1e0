"""HPSv2.1: a small CLIP saved with open_clip's names, and what an image that is not square looks like."""

import pytest
import torch

from sfgrpo.rewards import get_reward
from sfgrpo.rewards.pixels import padded
from tests.rewards.small import IMAGE, PROMPTS, images, save_clip

# The names of open_clip, by those of transformers. Written down by hand, apart from the code under test.
OUTSIDE = {
    "logit_scale": "logit_scale",
    "text_model.embeddings.token_embedding.weight": "token_embedding.weight",
    "text_model.embeddings.position_embedding.weight": "positional_embedding",
    "text_model.final_layer_norm.weight": "ln_final.weight",
    "text_model.final_layer_norm.bias": "ln_final.bias",
    "vision_model.embeddings.class_embedding": "visual.class_embedding",
    "vision_model.embeddings.patch_embedding.weight": "visual.conv1.weight",
    "vision_model.embeddings.position_embedding.weight": "visual.positional_embedding",
    "vision_model.pre_layrnorm.weight": "visual.ln_pre.weight",
    "vision_model.pre_layrnorm.bias": "visual.ln_pre.bias",
    "vision_model.post_layernorm.weight": "visual.ln_post.weight",
    "vision_model.post_layernorm.bias": "visual.ln_post.bias",
}
INSIDE = {
    "layer_norm1.weight": "ln_1.weight",
    "layer_norm1.bias": "ln_1.bias",
    "self_attn.out_proj.weight": "attn.out_proj.weight",
    "self_attn.out_proj.bias": "attn.out_proj.bias",
    "layer_norm2.weight": "ln_2.weight",
    "layer_norm2.bias": "ln_2.bias",
    "mlp.fc1.weight": "mlp.c_fc.weight",
    "mlp.fc1.bias": "mlp.c_fc.bias",
    "mlp.fc2.weight": "mlp.c_proj.weight",
    "mlp.fc2.bias": "mlp.c_proj.bias",
}


def open_clip_names(model):
    """The state dict of a CLIPModel as open_clip would have it."""
    state = model.state_dict()
    out = {new: state.pop(old) for old, new in OUTSIDE.items()}
    out["visual.proj"] = state.pop("visual_projection.weight").T.contiguous()
    out["text_projection"] = state.pop("text_projection.weight").T.contiguous()
    for tower, prefix in (("text_model", "transformer"), ("vision_model", "visual.transformer")):
        for n in range(2):
            old, new = f"{tower}.encoder.layers.{n}.", f"{prefix}.resblocks.{n}."
            for kind in ("weight", "bias"):
                parts = [state.pop(f"{old}self_attn.{p}_proj.{kind}") for p in ("q", "k", "v")]
                out[f"{new}attn.in_proj_{kind}"] = torch.cat(parts)
            out |= {new + name: state.pop(old + theirs) for theirs, name in INSIDE.items()}
    assert not state
    return out


@pytest.fixture
def model(tmp_path):
    return save_clip(tmp_path / "trained", seed=1)


def from_folder(folder, batch):
    return get_reward("hps_v2", model=str(folder), weights="")(batch, PROMPTS)


@pytest.mark.parametrize("form", ["pt", "safetensors", "module", "plain"])
def test_open_clips_names_score_as_transformers_folder(model, tmp_path, form):
    from safetensors.torch import save_file

    state = open_clip_names(model)
    file = tmp_path / ("w.safetensors" if form == "safetensors" else "w.pt")
    if form == "safetensors":
        save_file(state, file)
    elif form == "module":
        torch.save({"epoch": 3, "state_dict": {f"module.{k}": v for k, v in state.items()}}, file)
    else:
        torch.save(state if form == "plain" else {"state_dict": state}, file)
    # Sizes and tokenizer come from a CLIP of the same shape with other weights.
    save_clip(tmp_path / "base", seed=2)
    batch = images(IMAGE, IMAGE)
    reward = get_reward("hps_v2", model=str(tmp_path / "base"), weights=str(file))
    ours = reward(batch, PROMPTS)
    assert not reward._ready()[1].training
    torch.testing.assert_close(ours, from_folder(tmp_path / "trained", batch), rtol=0, atol=1e-5)
    assert float((ours - from_folder(tmp_path / "base", batch)).abs().max()) > 0.1


def test_score_is_the_cosine_of_padded_images(model, tmp_path):
    from transformers import AutoTokenizer

    batch = images(40, 25)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "trained")
    expected = []
    with torch.no_grad():
        for pixels, prompt in zip(padded(batch, IMAGE), PROMPTS, strict=True):
            out = model(pixel_values=pixels[None], **tokenizer([prompt], return_tensors="pt"))
            expected.append(float(out.text_embeds[0] @ out.image_embeds[0]))
    ours = from_folder(tmp_path / "trained", batch)
    torch.testing.assert_close(ours, torch.tensor(expected), rtol=0, atol=1e-5)
    cut = get_reward("clip_score", model=str(tmp_path / "trained"))(batch, PROMPTS)
    assert float((ours - cut).abs().max()) > 1e-3


def test_weights_that_do_not_fit_are_refused(model, tmp_path):
    save_clip(tmp_path / "wide", vision_width=64)
    torch.save(open_clip_names(model), tmp_path / "w.pt")
    reward = get_reward("hps_v2", model=str(tmp_path / "wide"), weights=str(tmp_path / "w.pt"))
    with pytest.raises(ValueError, match=r"w\.pt has vision_model.* of shape \(32,.*\), where the model has \(64,"):
        reward(images(IMAGE, IMAGE), PROMPTS)
    state = open_clip_names(model)
    del state["visual.transformer.resblocks.1.mlp.c_fc.bias"]
    torch.save(state, tmp_path / "w.pt")
    reward = get_reward("hps_v2", model=str(tmp_path / "trained"), weights=str(tmp_path / "w.pt"))
    with pytest.raises(ValueError, match=r"w\.pt lacks the weight vision_model.encoder.layers.1.mlp.fc1.bias"):
        reward(images(IMAGE, IMAGE), PROMPTS)
