"""FLUX.2's layout in small, as dev: a Mistral 3 with its processor, one double block and two single ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.small_models import SmallModel
from tests.small_models.parts import image_vae, renamer, tokenizer_of, words

LENGTH = 64
"""Text tokens; the system message takes half of them."""
EMBEDDED_GUIDANCE = 2.5
WIDTH = 16
"""Of the text encoders, of which three layers make the embedding."""


def build(path: Path) -> None:
    from diffusers import Flux2Pipeline
    from transformers import (
        Mistral3Config,
        Mistral3ForConditionalGeneration,
        MistralConfig,
        PixtralImageProcessor,
        PixtralProcessor,
        PixtralVisionConfig,
    )

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        tokenizer = chat_tokenizer(
            "{% for m in messages %}<start>{{ m.role }} {% for c in m.content %}{{ c.text }}{% endfor %}<end>"
            "{% endfor %}",
            padding_side="left",
        )
        processor = PixtralProcessor(
            image_processor=PixtralImageProcessor(), tokenizer=tokenizer, chat_template=tokenizer.chat_template
        )
        encoder = Mistral3ForConditionalGeneration(
            Mistral3Config(
                text_config=MistralConfig(
                    vocab_size=len(tokenizer),
                    hidden_size=WIDTH,
                    intermediate_size=24,
                    num_hidden_layers=31,
                    num_attention_heads=2,
                    num_key_value_heads=1,
                    head_dim=8,
                    initializer_range=0.3,
                    pad_token_id=tokenizer.pad_token_id,
                ).to_dict(),
                vision_config=PixtralVisionConfig(
                    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28
                ).to_dict(),
                image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
            )
        )
        parts = transformer_and_vae(guidance_embeds=True)
    Flux2Pipeline(text_encoder=encoder.eval(), tokenizer=processor, **parts).save_pretrained(path)


def transformer_and_vae(guidance_embeds: bool) -> dict[str, Any]:
    """Transformer, VAE and scheduler, which dev and klein have in common."""
    from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2Transformer2DModel

    transformer = Flux2Transformer2DModel(
        num_layers=1,
        num_single_layers=2,
        num_attention_heads=1,
        joint_attention_dim=3 * WIDTH,
        guidance_embeds=guidance_embeds,
    )
    vae = image_vae(AutoencoderKLFlux2)
    vae.bn.running_mean.normal_(0, 0.5)
    vae.bn.running_var.uniform_(0.5, 4)
    scheduler = FlowMatchEulerDiscreteScheduler(
        shift=3.0,
        use_dynamic_shifting=True,
        base_image_seq_len=256,
        max_image_seq_len=4096,
        base_shift=0.5,
        max_shift=1.15,
    )
    return {"transformer": transformer.eval(), "vae": vae.eval(), "scheduler": scheduler}


def chat_tokenizer(template: str, **options):
    """One token a word, and a chat template."""
    from tokenizers import pre_tokenizers

    special = ["<pad>", "<unk>", "<start>", "<end>", "[IMG]", "[IMG_BREAK]", "[IMG_END]"]
    return tokenizer_of(
        [*special, *words("system", "user", "assistant")],
        pre_tokenizers.Whitespace(),
        bos_token="<start>",
        eos_token="<end>",
        pad_token="<pad>",
        additional_special_tokens=special[4:],
        model_max_length=512,
        chat_template=template,
        **options,
    )


def draw(output_type: str):
    """`stock` and `stock_images`. The pipeline has no negative prompt."""

    def run(pipeline, prompts: list[str], negatives: list[str], noise: Tensor, steps: int, guidance: float) -> Tensor:
        height, width = noise.shape[2:]
        images = pipeline(
            prompt=prompts,
            num_inference_steps=steps,
            guidance_scale=EMBEDDED_GUIDANCE,
            max_sequence_length=LENGTH,
            height=8 * height,
            width=8 * width,
            latents=noise,
            output_type=output_type,
        ).images
        return images.mT.unflatten(2, (height, width)) if output_type == "latent" else images

    return run


def native(state: dict[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The names of ComfyUI's model: fused qkv, and shift before scale in the last norm."""
    out: dict[str, Tensor] = {}
    put = renamer(state, out)
    embedders = [("time_in", "timestep"), ("guidance_in", "guidance")]
    for new, old in embedders if config["guidance_embeds"] else embedders[:1]:
        for layer, number in (("in_layer", 1), ("out_layer", 2)):
            put(f"{new}.{layer}", f"time_guidance_embed.{old}_embedder.linear_{number}")
    for name in ("double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation"):
        put(f"{name}.lin", f"{name}.linear")
    put("img_in", "x_embedder")
    put("txt_in", "context_embedder")
    put("final_layer.linear", "proj_out")
    put("final_layer.adaLN_modulation.1", "norm_out.linear", swap=True)
    for i in range(config["num_layers"]):
        old, new = f"transformer_blocks.{i}", f"double_blocks.{i}"
        put(f"{new}.img_attn.qkv", *(f"{old}.attn.to_{p}" for p in "qkv"))
        put(f"{new}.txt_attn.qkv", *(f"{old}.attn.add_{p}_proj" for p in "qkv"))
        for name, part in (
            ("img_attn.norm.query_norm", "attn.norm_q"),
            ("img_attn.norm.key_norm", "attn.norm_k"),
            ("txt_attn.norm.query_norm", "attn.norm_added_q"),
            ("txt_attn.norm.key_norm", "attn.norm_added_k"),
            ("img_attn.proj", "attn.to_out.0"),
            ("txt_attn.proj", "attn.to_add_out"),
            ("img_mlp.0", "ff.linear_in"),
            ("img_mlp.2", "ff.linear_out"),
            ("txt_mlp.0", "ff_context.linear_in"),
            ("txt_mlp.2", "ff_context.linear_out"),
        ):
            put(f"{new}.{name}", f"{old}.{part}")
    for i in range(config["num_single_layers"]):
        old, new = f"single_transformer_blocks.{i}.attn", f"single_blocks.{i}"
        put(f"{new}.linear1", f"{old}.to_qkv_mlp_proj")
        put(f"{new}.linear2", f"{old}.to_out")
        put(f"{new}.norm.query_norm", f"{old}.norm_q")
        put(f"{new}.norm.key_norm", f"{old}.norm_k")
    return out


def comfy_inputs(cond: dict[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    return {"c_crossattn": cond["encoder_hidden_states"], "guidance": torch.tensor([EMBEDDED_GUIDANCE])}


MODEL = SmallModel(
    build=build,
    stock=draw("latent"),
    stock_images=draw("pt"),
    native=native,
    comfy_inputs=comfy_inputs,
    size=(32, 48),
    options={"max_sequence_length": LENGTH, "embedded_guidance": EMBEDDED_GUIDANCE},
)
