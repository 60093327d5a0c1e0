"""FLUX.2 klein's layout in small: a Qwen 3, and true guidance in place of an embedded one."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.small_models import SmallModel
from tests.small_models.flux2 import WIDTH, chat_tokenizer, comfy_inputs, native, transformer_and_vae

LENGTH = 24
TEMPLATE = (
    "{% for m in messages %}<start>{{ m.role }} {{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant{% if not enable_thinking %}<end>{% endif %}{% endif %}"
)


def build(path: Path, distilled: bool = False) -> None:
    from diffusers import Flux2KleinPipeline
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        tokenizer = chat_tokenizer(TEMPLATE)
        encoder = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=len(tokenizer),
                hidden_size=WIDTH,
                intermediate_size=24,
                num_hidden_layers=28,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=8,
                initializer_range=0.3,
                pad_token_id=tokenizer.pad_token_id,
            )
        )
        parts = transformer_and_vae(guidance_embeds=False)
    Flux2KleinPipeline(
        text_encoder=encoder.eval(), tokenizer=tokenizer, is_distilled=distilled, **parts
    ).save_pretrained(path)


def draw(output_type: str):
    """`stock` and `stock_images`. The pipeline gives the VAE's latents, and takes negative prompts as embeddings."""

    def run(pipeline, prompts: list[str], negatives: list[str], noise: Tensor, steps: int, guidance: float) -> Tensor:
        images = pipeline(
            prompt=prompts,
            negative_prompt_embeds=pipeline.encode_prompt(negatives, max_sequence_length=LENGTH)[0],
            num_inference_steps=steps,
            guidance_scale=guidance,
            max_sequence_length=LENGTH,
            height=8 * noise.shape[2],
            width=8 * noise.shape[3],
            latents=noise,
            output_type=output_type,
        ).images
        if output_type != "latent":
            return images
        norm = pipeline.vae.bn
        std = (norm.running_var + pipeline.vae.config.batch_norm_eps).sqrt()
        return (F.pixel_unshuffle(images, 2) - norm.running_mean.view(-1, 1, 1)) / std.view(-1, 1, 1)

    return run


MODEL = SmallModel(
    build=build,
    stock=draw("latent"),
    stock_images=draw("pt"),
    native=native,
    comfy_inputs=comfy_inputs,
    size=(32, 48),
    guidance=(1.0, 4.0),
    options={"max_sequence_length": LENGTH},
)
