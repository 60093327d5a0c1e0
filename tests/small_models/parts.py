"""What small models of several families have in common: tokenizers, text encoders, a VAE, and renamed weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.small_models import WORDS

CONTEXT_LENGTH = 12
"""Places of a CLIP, and what tokenizers of words say is the longest."""
LARGE = 20.0
"""Factor of initial weights, so that prompts differ although nothing was trained."""


def words(*further: str) -> list[str]:
    """All words of the prompts, and others."""
    return sorted({word for prompt in WORDS for word in prompt.split()} | set(further))


def tokenizer_of(tokens: Sequence[str], split: Any, post: Any = None, **options: Any):
    """A token for each of `tokens`, numbered in their order; `split` is the pre-tokenizer, `post` the processor."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    inner.pre_tokenizer = split
    if post is not None:
        inner.post_processor = post
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", **options)


def word_tokenizer(pad: str):
    """One token a word, between <start> and <end>; padded with `pad`."""
    from tokenizers import pre_tokenizers, processors

    tokens = ["<pad>", *words(), "<unk>", "<start>", "<end>"]
    ends = [(token, tokens.index(token)) for token in ("<start>", "<end>")]
    return tokenizer_of(
        tokens,
        pre_tokenizers.Whitespace(),
        processors.TemplateProcessing(single="<start> $A <end>", special_tokens=ends),
        bos_token="<start>",
        eos_token="<end>",
        pad_token=pad,
        model_max_length=CONTEXT_LENGTH,
    )


def clip(kind: Any, tokenizer: Any, width: int, **options: Any):
    """A CLIP text encoder of class `kind`."""
    from transformers import CLIPTextConfig

    return kind(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=CONTEXT_LENGTH,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            initializer_factor=LARGE,
            **options,
        )
    )


def t5(tokenizer: Any, width: int):
    """A T5 encoder of one layer."""
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(
        T5Config(
            vocab_size=len(tokenizer),
            d_model=width,
            d_kv=16,
            d_ff=64,
            num_layers=1,
            num_heads=2,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def image_vae(kind: Any, **options: Any):
    """A VAE of class `kind` with 4 x 4 pixels to a latent."""
    return kind(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        sample_size=32,
        **options,
    )


def kl_vae(scaling_factor: float, shift_factor: float):
    """The VAE of SD3, FLUX.1 and Z-Image: 16 channels, no quantisation layers."""
    from diffusers import AutoencoderKL

    return image_vae(
        AutoencoderKL,
        latent_channels=16,
        scaling_factor=scaling_factor,
        shift_factor=shift_factor,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def renamer(state: dict[str, Tensor], out: dict[str, Tensor]) -> Callable[..., None]:
    """put(new, *olds, swap=False): weight and bias of layers of `state` that are there, fused, into `out`.

    swap: shift and scale change places.
    """

    def put(new: str, *olds: str, swap: bool = False) -> None:
        for end in ("weight", "bias"):
            if f"{olds[0]}.{end}" in state:
                value = torch.cat([state[f"{old}.{end}"] for old in olds])
                out[f"{new}.{end}"] = torch.cat(value.chunk(2)[::-1]) if swap else value

    return put
