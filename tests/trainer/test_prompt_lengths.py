"""Prompts that are longer than the text encoders read, counted by the tokenizers of real model folders."""

import torch

from sfgrpo_trainer.families import LoadOptions, family_class
from sfgrpo_trainer.prompt_lengths import cut_prompts, load_tokenizers


def told(path: str, texts: list[str], length: int) -> list[str]:
    options = LoadOptions(dtype=torch.float32, device=torch.device("cpu"), max_sequence_length=length)
    limits = family_class(path).text_limits(options)
    return cut_prompts(load_tokenizers(path, limits), limits, texts)


def test_each_encoder_that_cuts_is_told_with_how_many_and_the_longest(random_sd3):
    path, texts = str(random_sd3.path), ["a circle", "a circle", "red " * 200 + "square", "red " * 300]
    words = told(path, texts, random_sd3.max_sequence_length)
    assert [w.split("encoder of ")[1].split()[0] for w in words] == ["tokenizer", "tokenizer_2", "tokenizer_3"]
    assert all(w.startswith("2 of 3 prompts are longer than the ") and "begins 'red red" in w for w in words)
    assert "max_sequence_length" in words[2] and "max_sequence_length" not in words[0]
    assert told(path, ["a circle"], random_sd3.max_sequence_length) == []


def test_without_t5_its_tokenizer_is_not_asked(embedded):
    words = told(str(embedded.path), ["red " * 300], 0)
    assert words and not any("tokenizer_3" in w or "max_sequence_length" in w for w in words)
