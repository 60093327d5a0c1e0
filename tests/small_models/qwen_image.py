"""Qwen-Image's layout in small: its chat template, whose first 34 tokens are dropped, and a VAE of two halvings.

The scheduler has no terminal, with which one step is no grid; test_qwen_image.py has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.small_models import SmallModel
from tests.small_models.parts import tokenizer_of, words

LENGTH = 16
"""Text tokens, of the template's end too."""


def build(path: Path) -> None:
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tokenizer = chat_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        special = ("image", "video", "vision_start", "vision_end")
        text_encoder = Qwen2_5_VLForConditionalGeneration(
            Qwen2_5_VLConfig(
                text_config={
                    "vocab_size": len(tokenizer) + len(special),
                    "hidden_size": 48,
                    "intermediate_size": 64,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 2,
                    "num_key_value_heads": 1,
                    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 4, 4]},
                    # Large, so that prompts differ although nothing was trained.
                    "initializer_range": 0.3,
                    "bos_token_id": None,
                    "eos_token_id": None,
                },
                vision_config={
                    "depth": 1,
                    "hidden_size": 16,
                    "intermediate_size": 16,
                    "num_heads": 1,
                    "out_hidden_size": 48,
                    "fullatt_block_indexes": [0],
                },
                **{f"{name}_token_id": len(tokenizer) + i for i, name in enumerate(special)},
            )
        )
        transformer = QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=64,
            out_channels=16,
            num_layers=2,
            attention_head_dim=32,
            num_attention_heads=2,
            joint_attention_dim=48,
            axes_dims_rope=(8, 12, 12),
        )
        vae = AutoencoderKLQwenImage(
            base_dim=8, dim_mult=[1, 2, 2], num_res_blocks=1, temperal_downsample=[False, True]
        )
    QwenImagePipeline(
        transformer=transformer.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True,
            base_image_seq_len=256,
            max_image_seq_len=8192,
            base_shift=0.5,
            max_shift=0.9,
        ),
        vae=vae.eval(),
        text_encoder=text_encoder.eval(),
        tokenizer=tokenizer,
    ).save_pretrained(path)


def chat_tokenizer():
    """One token a word, a mark or a line's end, as many as Qwen's own has in the pipeline's template."""
    from tokenizers import Regex, pre_tokenizers

    template = "system user assistant Describe the image by detailing color shape size texture quantity text spatial "
    template += "relationships of objects and background \n , :"
    return tokenizer_of(
        ["<pad>", "<unk>", "<|im_start|>", "<|im_end|>", *words(*template.split(" "))],
        pre_tokenizers.Split(Regex(r"\w+|\n|[^\w\s]"), behavior="removed", invert=True),
        pad_token="<pad>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )


def draw(output_type: str):
    """`stock` and `stock_images` of the row."""

    def run(pipeline, prompts: list[str], negatives: list[str], noise: Tensor, steps: int, guidance: float) -> Tensor:
        tokens = F.pixel_unshuffle(noise, 2)
        out = pipeline(
            prompts,
            negative_prompt=negatives,
            num_inference_steps=steps,
            true_cfg_scale=guidance,
            max_sequence_length=LENGTH,
            height=4 * noise.shape[-2],
            width=4 * noise.shape[-1],
            latents=tokens.flatten(2).mT,
            output_type=output_type,
        ).images
        return F.pixel_shuffle(out.mT.unflatten(2, tokens.shape[2:]), 2) if output_type == "latent" else out

    return run


def native(state: dict[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """ComfyUI's files have diffusers' names."""
    return dict(state)


def comfy_inputs(cond: dict[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    return {"c_crossattn": cond["encoder_hidden_states"], "attention_mask": cond["encoder_hidden_states_mask"]}


def comfy_config(config: Mapping[str, Any]) -> dict[str, Any]:
    names = ("in_channels", "out_channels", "num_layers", "attention_head_dim", "num_attention_heads")
    return {"image_model": "qwen_image"} | {
        name: config[name] for name in (*names, "joint_attention_dim", "axes_dims_rope")
    }


MODEL = SmallModel(
    build=build,
    stock=draw("latent"),
    stock_images=draw("pt"),
    native=native,
    comfy_inputs=comfy_inputs,
    comfy_class="QwenImage",
    comfy_config=comfy_config,
    comfy_dims=5,
    guidance=(1.0, 4.0),
    options={"max_sequence_length": LENGTH},
)
