"""Z-Image's layout in small: captions in characters, some of more than the 32 tokens that they are padded to.

ComfyUI's time embedding has min(dim, 1024) units inside and diffusers' has 1024, so no smaller `dim` has both.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.small_models import SmallModel
from tests.small_models.parts import kl_vae, tokenizer_of

LENGTH = 64
"""Text tokens, of the template too."""
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)


def build(path: Path) -> None:
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        ZImagePipeline,
        ZImageTransformer2DModel,
    )
    from transformers import Qwen3Config, Qwen3Model

    tokenizer = character_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        text_encoder = Qwen3Model(
            Qwen3Config(
                vocab_size=len(tokenizer),
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=16,
                # Large, so that prompts differ although nothing was trained.
                initializer_range=0.3,
                bos_token_id=None,
                eos_token_id=None,
            )
        )
        transformer = ZImageTransformer2DModel(
            in_channels=16,
            dim=1024,
            n_layers=1,
            n_refiner_layers=1,
            n_heads=8,
            n_kv_heads=8,
            cap_feat_dim=32,
            axes_dims=[32, 48, 48],
            axes_lens=[1536, 512, 512],
        )
        for token in (transformer.x_pad_token, transformer.cap_pad_token):  # zeros otherwise
            nn.init.normal_(token)
        vae = kl_vae(0.3611, 0.1159)
    ZImagePipeline(
        transformer=transformer.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae.eval(),
        text_encoder=text_encoder.eval(),
        tokenizer=tokenizer,
    ).save_pretrained(path)


def character_tokenizer():
    """One token a character, with Qwen's chat template."""
    from tokenizers import Regex, pre_tokenizers

    return tokenizer_of(
        ["<pad>", "<unk>", "<|im_start|>", "<|im_end|>", "\n", *map(chr, range(32, 127))],
        pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated"),
        pad_token="<pad>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=TEMPLATE,
    )


def draw(output_type: str):
    """`stock` and `stock_images` of the row. The pipeline's guidance of 0 is none."""

    def run(pipeline, prompts: list[str], negatives: list[str], noise: Tensor, steps: int, guidance: float) -> Tensor:
        return pipeline(
            list(prompts),
            negative_prompt=list(negatives),
            num_inference_steps=steps,
            guidance_scale=guidance - 1,
            max_sequence_length=LENGTH,
            height=4 * noise.shape[-2],
            width=4 * noise.shape[-1],
            latents=noise,
            output_type=output_type,
        ).images

    return run


def native(state: dict[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The names of Lumina's NextDiT: fused qkv, one embedder and one last layer."""
    names = {
        "all_x_embedder.2-1.": "x_embedder.",
        "all_final_layer.2-1.": "final_layer.",
        ".to_out.0.": ".out.",
        ".norm_q.": ".q_norm.",
        ".norm_k.": ".k_norm.",
    }
    out: dict[str, Tensor] = {}
    for key, value in state.items():
        if ".to_k." in key or ".to_v." in key:
            continue
        if ".to_q." in key:
            value = torch.cat([state[key.replace(".to_q.", f".to_{part}.")] for part in "qkv"])
            key = key.replace(".to_q.", ".qkv.")
        for old, new in names.items():
            key = key.replace(old, new)
        out[key] = value
    return out


def comfy_inputs(cond: dict[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Of one row: ComfyUI has no mask for captions, and runs those of another length by themselves."""
    (length,) = cond["lengths"]
    return {"c_crossattn": cond["captions"][:, :length], "num_tokens": length}


def comfy_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """As ComfyUI finds it for the real model, and the sizes."""
    names = ("in_channels", "dim", "n_layers", "n_refiner_layers", "n_heads", "n_kv_heads", "cap_feat_dim")
    return {name: config[name] for name in (*names, "qk_norm", "axes_dims", "axes_lens", "rope_theta")} | {
        "image_model": "lumina2",
        "patch_size": 2,
        "multiple_of": 1,
        "ffn_dim_multiplier": 8.0 / 3.0,
        "z_image_modulation": True,
        "time_scale": config["t_scale"],
        "pad_tokens_multiple": 32,
    }


MODEL = SmallModel(
    build=build,
    stock=draw("latent"),
    stock_images=draw("pt"),
    native=native,
    comfy_inputs=comfy_inputs,
    comfy_class="ZImage",
    comfy_config=comfy_config,
    guidance=(1.0, 3.0),
    options={"max_sequence_length": LENGTH},
)
