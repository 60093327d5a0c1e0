"""Small models of each family for the tests of LoRA files: in diffusers, and in a ComfyUI process of their own.

Weights are zero, so that what a loaded LoRA leaves in them is its effect and nothing else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.comfyui import comfyui

ROPE = (8, 12, 12)


@dataclass(frozen=True)
class Small:
    """One family."""

    pipeline: str
    transformer: str
    config: dict
    comfy: str
    """Class of comfy.supported_models."""
    comfy_config: dict
    converter: str = ""
    """Of diffusers.loaders.single_file_utils: native state dict -> diffusers'; none where the names are the same."""
    extra: dict = field(default_factory=dict)
    """Arguments of the pipeline that are no components."""


SMALL = {
    "sd3": Small(
        "StableDiffusion3Pipeline",
        "SD3Transformer2DModel",
        {
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 16,
            "num_layers": 2,
            "attention_head_dim": 64,
            "num_attention_heads": 2,
            "joint_attention_dim": 96,
            "caption_projection_dim": 128,
            "pooled_projection_dim": 64,
            "out_channels": 16,
            "pos_embed_max_size": 16,
            "dual_attention_layers": (0,),
            "qk_norm": "rms_norm",
        },
        "SD3",
        {
            "in_channels": 16,
            "out_channels": 16,
            "depth": 2,
            "patch_size": 2,
            "input_size": None,
            "adm_in_channels": 64,
            "context_embedder_config": {
                "target": "torch.nn.Linear",
                "params": {"in_features": 96, "out_features": 128},
            },
            "x_block_self_attn_layers": [0],
            "qk_norm": "rms",
            "num_patches": 256,
            "pos_embed_max_size": 16,
            "pos_embed_scaling_factor": None,
        },
        "convert_sd3_transformer_checkpoint_to_diffusers",
    ),
    "flux1": Small(
        "FluxPipeline",
        "FluxTransformer2DModel",
        {
            "in_channels": 64,
            "num_layers": 2,
            "num_single_layers": 2,
            "attention_head_dim": 32,
            "num_attention_heads": 4,
            "joint_attention_dim": 48,
            "pooled_projection_dim": 40,
            "guidance_embeds": True,
            "axes_dims_rope": ROPE,
        },
        "Flux",
        {
            "image_model": "flux",
            "in_channels": 16,
            "out_channels": 16,
            "patch_size": 2,
            "vec_in_dim": 40,
            "context_in_dim": 48,
            "hidden_size": 128,
            "mlp_ratio": 4.0,
            "num_heads": 4,
            "depth": 2,
            "depth_single_blocks": 2,
            "axes_dim": list(ROPE),
            "theta": 10000,
            "qkv_bias": True,
            "guidance_embed": True,
            "txt_ids_dims": [],
        },
        "convert_flux_transformer_checkpoint_to_diffusers",
    ),
    "flux2": Small(
        "Flux2Pipeline",
        "Flux2Transformer2DModel",
        {
            "in_channels": 16,
            "num_layers": 2,
            "num_single_layers": 2,
            "attention_head_dim": 32,
            "num_attention_heads": 4,
            "joint_attention_dim": 48,
            "axes_dims_rope": (8, 8, 8, 8),
        },
        "Flux2",
        {
            "image_model": "flux2",
            "in_channels": 16,
            "out_channels": 16,
            "patch_size": 1,
            "vec_in_dim": None,
            "context_in_dim": 48,
            "hidden_size": 128,
            "mlp_ratio": 3.0,
            "num_heads": 4,
            "depth": 2,
            "depth_single_blocks": 2,
            "axes_dim": [8, 8, 8, 8],
            "theta": 2000,
            "qkv_bias": False,
            "ops_bias": False,
            "global_modulation": True,
            "mlp_silu_act": True,
            "guidance_embed": True,
            "txt_ids_dims": [3],
        },
        "convert_flux2_transformer_checkpoint_to_diffusers",
    ),
    "qwen_image": Small(
        "QwenImagePipeline",
        "QwenImageTransformer2DModel",
        {
            "in_channels": 64,
            "num_layers": 2,
            "attention_head_dim": 32,
            "num_attention_heads": 4,
            "joint_attention_dim": 48,
            "axes_dims_rope": ROPE,
        },
        "QwenImage",
        {
            "image_model": "qwen_image",
            "in_channels": 64,
            "num_layers": 2,
            "attention_head_dim": 32,
            "num_attention_heads": 4,
            "joint_attention_dim": 48,
            "axes_dims_rope": ROPE,
        },
    ),
    "z_image": Small(
        "ZImagePipeline",
        "ZImageTransformer2DModel",
        {
            "in_channels": 16,
            "dim": 96,
            "n_layers": 2,
            "n_refiner_layers": 1,
            "n_heads": 3,
            "n_kv_heads": 3,
            "cap_feat_dim": 48,
            "axes_dims": list(ROPE),
            "axes_lens": [64, 64, 64],
        },
        "Lumina2",
        {
            "image_model": "lumina2",
            "in_channels": 16,
            "patch_size": 2,
            "dim": 96,
            "n_layers": 2,
            "n_refiner_layers": 1,
            "n_heads": 3,
            "n_kv_heads": 3,
            "cap_feat_dim": 48,
            "axes_dims": list(ROPE),
            "axes_lens": [64, 64, 64],
            "qk_norm": True,
            "ffn_dim_multiplier": 8 / 3,
            "multiple_of": 1,
            "z_image_modulation": True,
            "pad_tokens_multiple": 32,
        },
        "convert_z_image_transformer_checkpoint_to_diffusers",
    ),
    "wan": Small(
        "WanPipeline",
        "WanTransformer3DModel",
        {
            "num_attention_heads": 1,
            "attention_head_dim": 128,
            "in_channels": 16,
            "out_channels": 16,
            "text_dim": 48,
            "freq_dim": 256,
            "ffn_dim": 192,
            "num_layers": 2,
            "image_dim": 1280,
            "added_kv_proj_dim": 128,
        },
        "WAN21_I2V",
        {
            "image_model": "wan2.1",
            "model_type": "i2v",
            "dim": 128,
            "in_dim": 16,
            "out_dim": 16,
            "text_dim": 48,
            "freq_dim": 256,
            "ffn_dim": 192,
            "num_heads": 1,
            "num_layers": 2,
        },
        "convert_wan_transformer_to_diffusers",
    ),
    "chroma": Small(
        "ChromaPipeline",
        "ChromaTransformer2DModel",
        {
            "in_channels": 64,
            "num_layers": 2,
            "num_single_layers": 2,
            "attention_head_dim": 32,
            "num_attention_heads": 4,
            "joint_attention_dim": 48,
            "axes_dims_rope": ROPE,
            "approximator_hidden_dim": 64,
            "approximator_layers": 1,
        },
        "Chroma",
        {
            "image_model": "chroma",
            "in_channels": 64,
            "out_channels": 64,
            "patch_size": 2,
            "in_dim": 64,
            "out_dim": 128,
            "hidden_dim": 64,
            "n_layers": 1,
            "vec_in_dim": 0,
            "context_in_dim": 48,
            "hidden_size": 128,
            "mlp_ratio": 4.0,
            "num_heads": 4,
            "depth": 2,
            "depth_single_blocks": 2,
            "axes_dim": list(ROPE),
            "theta": 10000,
            "qkv_bias": True,
            "txt_ids_dims": [],
        },
        "convert_chroma_transformer_checkpoint_to_diffusers",
    ),
}


def make_transformer(key: str) -> torch.nn.Module:
    """diffusers' transformer, all zero."""
    import diffusers

    small = SMALL[key]
    module = getattr(diffusers, small.transformer)(**small.config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    return module.requires_grad_(False)


def _clip() -> torch.nn.Module:
    from transformers import CLIPTextConfig, CLIPTextModel

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return CLIPTextModel(CLIPTextConfig(vocab_size=8, max_position_embeddings=8, **sizes))


def _t5() -> torch.nn.Module:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config(vocab_size=8, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))


ENCODERS = {
    "sd3": {"text_encoder": _clip, "text_encoder_2": _clip},
    "flux1": {"text_encoder": _clip},
    "chroma": {"text_encoder": _t5},
}
"""Family -> text encoders that its loader of LoRAs puts a LoRA on."""


def make_pipeline(key: str):
    """diffusers' pipeline with the transformer, and the text encoders of ENCODERS."""
    import inspect

    import diffusers

    kind = getattr(diffusers, SMALL[key].pipeline)
    names = inspect.signature(kind.__init__).parameters
    parts = {name: None for name, p in names.items() if name != "self" and p.default is inspect.Parameter.empty}
    encoders = {name: make() for name, make in ENCODERS.get(key, {}).items()}
    return kind(**parts | encoders | {"transformer": make_transformer(key)})


@cache
def diffusers_linears(key: str) -> dict[str, tuple[int, int]]:
    """Name -> (in, out) of each linear layer in diffusers."""
    modules = make_transformer(key).named_modules()
    return {n: (m.in_features, m.out_features) for n, m in modules if isinstance(m, torch.nn.Linear)}


def loaded_in_diffusers(key: str, path: Path | dict) -> dict[str, Tensor]:
    """Change of each weight after `load_lora_weights` at strength 1, by module name; without those that stay."""
    from peft.tuners.lora import LoraLayer

    pipeline = make_pipeline(key)
    pipeline.load_lora_weights(path if isinstance(path, dict) else str(path), adapter_name="x")
    layers = {n: m for n, m in pipeline.transformer.named_modules() if isinstance(m, LoraLayer)}
    return {n: m.get_delta_weight("x").detach() for n, m in layers.items() if m.lora_B["x"].weight.any()}


def in_diffusers_names(key: str, native: dict[str, Tensor]) -> dict[str, Tensor]:
    """Native weights (all of a model's) as diffusers' own converter of checkpoints gives them, by module name."""
    from diffusers.loaders import single_file_utils

    small = SMALL[key]
    state = {k: v.clone() for k, v in native.items()}
    split = {}
    if key in ("flux1", "chroma"):
        # The converter has the width of the large model in it. Its order of the rows of linear1 is q, k, v, mlp.
        width = small.comfy_config["hidden_size"]
        state = {n.replace("_norm.weight", "_norm.scale"): v for n, v in state.items()}
        state = {k.replace("norms.0.weight", "norms.0.scale"): v for k, v in state.items()}
        for name in [n for n in state if "single_blocks" in n and n.endswith(("linear1.weight", "linear1.bias"))]:
            number, kind = name.split(".")[1], name.rsplit(".", 1)[1]
            rows = state[name].split([width, width, width, 4 * width])
            for part, value in zip(("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"), rows, strict=True):
                split[f"single_transformer_blocks.{number}.{part}.{kind}"] = value
            state[name] = torch.zeros(7 * 3072, *state[name].shape[1:])
    if small.converter:
        state = getattr(single_file_utils, small.converter)(state)
    state |= split
    return {n.removesuffix(".weight"): v for n, v in state.items() if n.endswith(".weight")}


class Comfy:
    """A ComfyUI process that holds the small models and loads LoRA files onto them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        configs = {key: [small.comfy, small.comfy_config] for key, small in SMALL.items()}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("lora_in_comfyui.py")), json.dumps(configs)],
            cwd=comfyui(),
            env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "comfyui.log").open("w"),
            text=True,
        )
        self.linears: dict[str, dict[str, tuple[int, int]]] = self._ask()

    def _ask(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError((self.folder / "comfyui.log").read_text()[-3000:])
        answer = json.loads(line)
        if "cannot_import" in answer:
            pytest.skip(f"ComfyUI cannot be imported here: {answer['cannot_import']}")
        return answer

    def load(self, key: str, path: Path) -> tuple[dict[str, Tensor], list[str]]:
        """All weights after a LoRA file was loaded onto a model of zeros at strength 1, and what ComfyUI logged."""
        self.count += 1
        out = self.folder / f"{self.count}.safetensors"
        self.process.stdin.write(json.dumps([key, str(path), str(out)]) + "\n")
        self.process.stdin.flush()
        lines = self._ask()["lines"]
        weights = load_file(out)
        out.unlink()
        return weights, lines

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(30)
