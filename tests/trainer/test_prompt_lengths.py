"""Prompts that are longer than the text encoders read, against what the encoders make of them."""

import pytest
import torch

from sfgrpo.prompts import Prompt
from sfgrpo_trainer.families import load_family
from sfgrpo_trainer.prompt_lengths import cut_prompts
from tests.small_models import SMALL_MODELS, small_model

CPU = torch.device("cpu")


def load(path, parts="tokenizers", **options):
    return load_family(str(path), torch.float32, CPU, parts, **options)


def of_length(family, tokenizer: str, length: int) -> tuple[str, str]:
    """Two texts of so many tokens that differ in the last of them alone."""
    for space, first, last in ((" ", "red", "blue"), ("", "r", "b")):  # tokenizers of words and of characters
        for n in range(1, length + 1):
            texts = tuple(space.join([first] * (n - 1) + [end]) for end in (first, last))
            if {family.count_tokens(tokenizer, text) for text in texts} == {length}:
                return texts
    raise AssertionError(f"no text of {length} tokens")


@pytest.mark.parametrize("name", [name for name in SMALL_MODELS if name != "wan22_a14b"])
def test_what_is_beyond_the_limit_changes_nothing(name, tmp_path):
    """The conditioning of two texts is the same where the token in which they differ is beyond all limits."""
    row = small_model(name)
    row.build(tmp_path)
    family = load(tmp_path, "encoders", **row.options)
    tokenizer, limit = max(family.text_limits.items(), key=lambda item: item[1])
    for length, read in ((limit - 1, True), (limit, True), (limit + 1, False)):
        texts = of_length(family, tokenizer, length)
        encoded = family.encode(list(texts)).tensors
        same = all(torch.equal(value[0], value[1]) for value in encoded.values())
        assert same is not read, (length, limit)
        cut = [w for w in cut_prompts(family, [Prompt(t) for t in texts], False) if f"of {tokenizer} " in w]
        assert len(cut) == (not read)


def test_a_clip_cuts_where_its_pooled_text_no_longer_changes(random_sd3):
    family = load(random_sd3.path, "encoders", max_sequence_length=random_sd3.max_sequence_length)
    for length, read in ((family.text_limits["tokenizer"], True), (family.text_limits["tokenizer"] + 1, False)):
        pooled = family.encode(list(of_length(family, "tokenizer", length))).tensors["pooled_projections"]
        assert torch.equal(pooled[0], pooled[1]) is not read


def test_each_encoder_that_cuts_is_told_with_how_many_and_the_longest(random_sd3):
    family = load(random_sd3.path, max_sequence_length=random_sd3.max_sequence_length)
    prompts = [
        Prompt("a circle"),
        Prompt("a circle"),
        Prompt("red " * 200 + "square"),
        Prompt("red " * 300, where="here"),
    ]
    words = cut_prompts(family, prompts, False)
    assert [w.split("encoder of ")[1].split()[0] for w in words] == ["tokenizer", "tokenizer_2", "tokenizer_3"]
    assert all(w.startswith("2 of 3 prompts are longer than the ") and "begins 'red red" in w for w in words)
    assert all("the longest, here, has 302 tokens" in w for w in words)
    assert "max_sequence_length (to 512 at most)" in words[2] and "max_sequence_length" not in words[0]
    assert cut_prompts(family, prompts[:2], False) == []
    assert all("the longest, prompt 1, has" in w for w in cut_prompts(family, prompts[2:3], False))


def test_negative_prompts_count_where_they_are_encoded(random_sd3):
    family = load(random_sd3.path, max_sequence_length=random_sd3.max_sequence_length)
    prompts = [Prompt("a circle", "red " * 300, where="a.jsonl, line 7"), Prompt("a square", " ")]
    assert cut_prompts(family, prompts, False) == []
    words = cut_prompts(family, prompts, True)
    assert len(words) == 3
    assert all(w.startswith("1 of 3 ") and "a.jsonl, line 7 (its negative prompt)" in w for w in words)


def test_without_t5_its_tokenizer_is_not_asked(embedded):
    words = cut_prompts(load(embedded.path, max_sequence_length=0), [Prompt("red " * 300)], False)
    assert words and not any("tokenizer_3" in w or "max_sequence_length" in w for w in words)
