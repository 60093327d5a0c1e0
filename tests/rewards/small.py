"""Small random models of the classes that the rewards load, saved as the public ones are."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

WORDS = ["a", "red", "blue", "cat", "dog", "on", "the", "green", "hill", "two"]
PROMPTS = ["a red cat", "two blue dogs on the hill", "a red cat", "green", "the cat, a dog"]
IMAGE = 28
TEXT_TOKENS = 24


def randomise(model: nn.Module, seed: int, std: float = 0.2) -> nn.Module:
    """Weights large enough that different inputs come out differently; norms and logit_scale stay as they are."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" not in name.lower() and name != "logit_scale":
                value.copy_(torch.randn(value.shape, generator=generator) * std)
    return model.eval()


def images(*size: int, count: int = len(PROMPTS), seed: int = 0, steps: int = 255) -> torch.Tensor:
    """Smooth pictures (count, 3, *size) in [0, 1] with `steps` + 1 levels; 0 for no rounding."""
    noise = torch.rand(count, 3, 6, 6, generator=torch.Generator().manual_seed(seed))
    out = nn.functional.interpolate(noise, size, mode="bilinear")
    return (out * steps).round() / steps if steps else out


def save_clip_tokenizer(folder: Path) -> dict[str, int]:
    """CLIP's byte-pair tokenizer with letters and a few merges; returns the ids of its marks."""
    letters = list("abcdefghijklmnopqrstuvwxyz,.")
    merges = ["r e", "re d</w>", "c a", "ca t</w>", "t h", "th e</w>"]
    tokens = letters + [f"{letter}</w>" for letter in letters] + [merge.replace(" ", "") for merge in merges]
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    marks = {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>"}
    marks |= {"unk_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "CLIPTokenizer"} | marks))
    return {"vocab_size": len(tokens), "bos_token_id": len(tokens) - 2, "eos_token_id": len(tokens) - 1}


def save_clip(folder: Path, *, seed: int = 0, projection: int = 24, vision_width: int = 32, act: str = "gelu"):
    """A CLIPModel with tokenizer in a folder; returns the model."""
    from transformers import CLIPConfig, CLIPModel

    ids = save_clip_tokenizer(folder)
    layers = {"num_hidden_layers": 2, "hidden_act": act}
    config = CLIPConfig(
        text_config=layers
        | ids
        | {
            "hidden_size": 48,
            "num_attention_heads": 3,
            "intermediate_size": 56,
            "max_position_embeddings": TEXT_TOKENS,
            "pad_token_id": ids["eos_token_id"],
        },
        vision_config=layers
        | {
            "hidden_size": vision_width,
            "num_attention_heads": 4,
            "intermediate_size": 40,
            "image_size": IMAGE,
            "patch_size": 7,
        },
        projection_dim=projection,
    )
    model = randomise(CLIPModel(config), seed)
    with torch.no_grad():
        model.logit_scale.fill_(3.0)
    model.save_pretrained(folder)
    return model


def save_bert_tokenizer(folder: Path) -> int:
    """BERT's word-piece tokenizer; returns the size of its vocabulary."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ",", *WORDS, *letters[1:], *(f"##{x}" for x in letters)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "BertTokenizer", "do_lower_case": True})
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))
    return len(tokens)


def layers_head(width: int, seed: int) -> dict[str, torch.Tensor]:
    """Weights of the linear head, with the public names' numbers."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [(0, width, 1024), (2, 1024, 128), (4, 128, 64), (6, 64, 16), (7, 16, 1)]
    out = {}
    for number, wide, narrow in sizes:
        out[f"layers.{number}.weight"] = torch.randn(narrow, wide, generator=generator) / wide**0.5
        out[f"layers.{number}.bias"] = torch.randn(narrow, generator=generator) * 0.1
    return out


def apply_head(state: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The head written out: five matrix products."""
    for number in (0, 2, 4, 6, 7):
        x = x @ state[f"layers.{number}.weight"].T + state[f"layers.{number}.bias"]
    return x.squeeze(-1)
