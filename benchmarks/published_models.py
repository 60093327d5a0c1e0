"""The configs of the models that people use, as published: enough to count weights and memory, without the weights.

`write(name, folder)` makes a diffusers folder of config files, which `sfgrpo train --dry-run` takes for the model.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

CLIP_L = {
    "vocab_size": 49408,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "projection_dim": 768,
}
CLIP_G = {
    "vocab_size": 49408,
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "projection_dim": 1280,
}
T5_XXL = {
    "vocab_size": 32128,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}
UMT5_XXL = T5_XXL | {"vocab_size": 256384}
QWEN3_4B = {
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
QWEN3_8B = QWEN3_4B | {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False}
QWEN25_VL_7B = {
    "text_config": {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1000000.0},
        "tie_word_embeddings": False,
    },
    "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584},
    "tie_word_embeddings": False,
}
MISTRAL_SMALL_24B = {
    "text_config": {
        "model_type": "mistral",
        "vocab_size": 131072,
        "hidden_size": 5120,
        "intermediate_size": 32768,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "vision_config": {
        "model_type": "pixtral",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 1540,
        "patch_size": 14,
    },
}
VAE_16 = {
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [128, 256, 512, 512],
    "layers_per_block": 2,
    "latent_channels": 16,
    "sample_size": 1024,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
VAE_SD3 = VAE_16 | {"scaling_factor": 1.5305, "shift_factor": 0.0609}
VAE_FLUX = VAE_16 | {"scaling_factor": 0.3611, "shift_factor": 0.1159}
EULER = "FlowMatchEulerDiscreteScheduler"
FLUX_SHIFT = {
    "use_dynamic_shifting": True,
    "shift": 3.0,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
}
UNIPC = ("UniPCMultistepScheduler", {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0})


def _sd3(pipeline_vae: dict, transformer: dict) -> dict:
    return {
        "_class_name": "StableDiffusion3Pipeline",
        "scheduler": (EULER, {"shift": 3.0}),
        "text_encoder": ("CLIPTextModelWithProjection", CLIP_L),
        "text_encoder_2": ("CLIPTextModelWithProjection", CLIP_G),
        "text_encoder_3": ("T5EncoderModel", T5_XXL),
        "transformer": ("SD3Transformer2DModel", transformer),
        "vae": ("AutoencoderKL", pipeline_vae),
    }


def _wan(transformer: dict, vae: dict, **more: Any) -> dict:
    return {
        "_class_name": "WanPipeline",
        "scheduler": UNIPC,
        "text_encoder": ("UMT5EncoderModel", UMT5_XXL),
        "transformer": ("WanTransformer3DModel", transformer),
        "vae": ("AutoencoderKLWan", vae),
        **more,
    }


WAN_22_VAE = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "scale_factor_temporal": 4,
    "temperal_downsample": [False, True, True],
    "latents_mean": [0.0] * 48,
    "latents_std": [1.0] * 48,
}
SD3_COMMON = {
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "attention_head_dim": 64,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 2048,
    "qk_norm": "rms_norm",
}
PUBLISHED: dict[str, dict] = {
    "stabilityai/stable-diffusion-3.5-medium": _sd3(
        VAE_SD3,
        SD3_COMMON
        | {
            "num_layers": 24,
            "num_attention_heads": 24,
            "caption_projection_dim": 1536,
            "pos_embed_max_size": 384,
            "dual_attention_layers": list(range(13)),
        },
    ),
    "stabilityai/stable-diffusion-3.5-large": _sd3(
        VAE_SD3,
        SD3_COMMON
        | {
            "num_layers": 38,
            "num_attention_heads": 38,
            "caption_projection_dim": 2432,
            "pos_embed_max_size": 192,
        },
    ),
    "black-forest-labs/FLUX.1-dev": {
        "_class_name": "FluxPipeline",
        "scheduler": (EULER, FLUX_SHIFT),
        "text_encoder": ("CLIPTextModel", CLIP_L),
        "text_encoder_2": ("T5EncoderModel", T5_XXL),
        "transformer": ("FluxTransformer2DModel", {"guidance_embeds": True}),
        "vae": ("AutoencoderKL", VAE_FLUX),
    },
    "black-forest-labs/FLUX.2-klein-base-4B": {
        "_class_name": "Flux2KleinPipeline",
        "is_distilled": False,
        "scheduler": (EULER, FLUX_SHIFT),
        "text_encoder": ("Qwen3ForCausalLM", QWEN3_4B),
        "transformer": (
            "Flux2Transformer2DModel",
            {
                "num_layers": 5,
                "num_single_layers": 20,
                "num_attention_heads": 24,
                "joint_attention_dim": 7680,
                "guidance_embeds": False,
            },
        ),
        "vae": ("AutoencoderKLFlux2", {}),
    },
    "black-forest-labs/FLUX.2-dev": {
        "_class_name": "Flux2Pipeline",
        "scheduler": (EULER, FLUX_SHIFT),
        "text_encoder": ("Mistral3ForConditionalGeneration", MISTRAL_SMALL_24B),
        "transformer": ("Flux2Transformer2DModel", {}),
        "vae": ("AutoencoderKLFlux2", {}),
    },
    "Qwen/Qwen-Image": {
        "_class_name": "QwenImagePipeline",
        "scheduler": (EULER, FLUX_SHIFT | {"max_shift": 0.9, "max_image_seq_len": 8192, "shift_terminal": 0.02}),
        "text_encoder": ("Qwen2_5_VLForConditionalGeneration", QWEN25_VL_7B),
        "transformer": ("QwenImageTransformer2DModel", {}),
        "vae": ("AutoencoderKLQwenImage", {}),
    },
    "Tongyi-MAI/Z-Image-Turbo": {
        "_class_name": "ZImagePipeline",
        "scheduler": (EULER, {"shift": 3.0, "use_dynamic_shifting": False}),
        "text_encoder": ("Qwen3Model", QWEN3_4B),
        "transformer": ("ZImageTransformer2DModel", {}),
        "vae": ("AutoencoderKL", VAE_FLUX),
    },
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": _wan(
        {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
        {},
    ),
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": _wan({}, {}),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": _wan(
        {"num_attention_heads": 24, "ffn_dim": 14336, "num_layers": 30, "in_channels": 48, "out_channels": 48},
        WAN_22_VAE,
        expand_timesteps=True,
    ),
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": _wan(
        {},
        {},
        transformer_2=("WanTransformer3DModel", {}),
        boundary_ratio=0.875,
    ),
}
"""Hub id -> component -> (class, what departs from the class's defaults); the rest are settings of the pipeline."""


def write(name: str, folder: Path) -> Path:
    """Write the config files of a published model below `folder`; returns the model's folder."""
    import diffusers
    import transformers

    out = folder / name.replace("/", "--")
    index: dict[str, Any] = {}
    for part, of in PUBLISHED[name].items():
        if not isinstance(of, tuple):
            index[part] = of
            continue
        kind, settings = of
        library = "diffusers" if hasattr(diffusers, kind) else "transformers"
        index[part] = [library, kind]
        (out / part).mkdir(parents=True, exist_ok=True)
        if kind.endswith("Scheduler"):
            data, file = dict(getattr(diffusers, kind)(**settings).config), "scheduler_config.json"
        elif library == "diffusers":
            defaults = inspect.signature(getattr(diffusers, kind).__init__).parameters.values()
            data = {p.name: p.default for p in defaults if p.name != "self"} | settings
            file = "config.json"
        else:
            data, file = getattr(transformers, kind).config_class(**settings).to_dict(), "config.json"
        (out / part / file).write_text(json.dumps(data | {"_class_name": kind}, default=str))
    (out / "model_index.json").write_text(json.dumps(index))
    return out
