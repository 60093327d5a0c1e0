"""The text encoders of the shipped shapes model (docs/shapes.md) as ComfyUI's CLIP.

ComfyUI's own CLIP text models, of the sizes in the folder's config files, and the folder's word-level tokenizer. The
conditioning is that of diffusers' `encode_prompt` without T5 tokens.
"""

from __future__ import annotations

import inspect
import json
import logging
from pathlib import Path
from typing import Any

import comfy.clip_model
import comfy.model_management
import comfy.sd
import comfy.sd1_clip
import comfy.supported_models_base
import comfy.utils
import folder_paths
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

ENCODERS = {"l": "text_encoder", "g": "text_encoder_2"}
"""ComfyUI's names of SD3's two CLIP encoders -> their folders. The T5 of the folder is silent and left out."""

TOKENIZERS = {"l": "tokenizer", "g": "tokenizer_2"}

NO_LIMIT = 1 << 30


def read_config(folder: Path, part: str, name: str = "config.json") -> dict[str, Any]:
    """A config file of the model folder."""
    return json.loads((folder / part / name).read_text(encoding="utf-8"))


class TextModel(comfy.clip_model.CLIPTextModel):
    """ComfyUI's CLIP text model with vocabulary and projection of other sizes than CLIP's."""

    def __init__(self, config: dict[str, Any], dtype, device, operations) -> None:
        super().__init__(config, dtype, device, operations)
        width, places = config["hidden_size"], {"dtype": dtype, "device": device}
        self.set_input_embeddings(operations.Embedding(config["vocab_size"], width, **places))
        self.text_projection = operations.Linear(width, config["projection_dim"], bias=False, **places)


class TextEncoders(nn.Module):
    """Both text encoders, as SD3 combines them: side by side, filled up with zeros to the width of the context.

    configs: "l" and "g" -> config of the encoder; width: channels of the context.
    """

    def __init__(self, configs: dict[str, dict], width: int, device="cpu", dtype=None, model_options=None) -> None:
        super().__init__()
        for name, config in configs.items():
            tokens = {"start": "bos_token_id", "end": "eos_token_id", "pad": "pad_token_id"}
            encoder = comfy.sd1_clip.SDClipModel(
                device=device,
                dtype=dtype,
                max_length=config["max_position_embeddings"],
                layer="hidden",
                layer_idx=-2,
                layer_norm_hidden_state=False,
                textmodel_json_config=dict(config),
                model_class=TextModel,
                special_tokens={kind: config[key] for kind, key in tokens.items()},
                model_options=model_options or {},
            )
            self.add_module(f"clip_{name}", encoder)
        self.encoders = [(name, f"clip_{name}") for name in configs]
        self.length = max(config["max_position_embeddings"] for config in configs.values())
        self.pooled_width = sum(config["projection_dim"] for config in configs.values())
        self.width = width
        self.dtypes = {dtype}

    def encode_token_weights(self, tokens: dict[str, list]) -> tuple[Tensor, Tensor]:
        """Context (1, L, width) and pooled output (1, sum of the projections) of weighted tokens.

        All zeros where there are no tokens at all, not even those of an empty text.
        """
        if not any(tokens[name] for name, _ in self.encoders):
            device = comfy.model_management.intermediate_device()
            return (
                torch.zeros(1, self.length, self.width, device=device),
                torch.zeros(1, self.pooled_width, device=device),
            )
        parts = [getattr(self, module).encode_token_weights(tokens[name]) for name, module in self.encoders]
        length = min(hidden.shape[1] for hidden, _ in parts)
        context = torch.cat([hidden[:, :length] for hidden, _ in parts], dim=-1)
        pooled = torch.cat([pooled for _, pooled in parts], dim=-1)
        return F.pad(context, (0, self.width - context.shape[-1])), pooled

    def set_clip_options(self, options: dict) -> None:
        for _, module in self.encoders:
            getattr(self, module).set_clip_options(options)

    def reset_clip_options(self) -> None:
        for _, module in self.encoders:
            getattr(self, module).reset_clip_options()


class WordTokenizer(comfy.sd1_clip.SDTokenizer):
    """The shipped word-level tokenizer, with ComfyUI's (word:1.2) weights and embeddings.

    Text beyond the context is cut off, as diffusers does, and not carried on in a second context: the model was
    trained on one.
    """

    def __init__(self, path: Path, context: int, **options) -> None:
        super().__init__(
            tokenizer_path=str(path),
            tokenizer_class=PreTrainedTokenizerFast,
            max_length=NO_LIMIT,
            pad_to_max_length=False,
            **options,
        )
        self.tokenizer.model_max_length = NO_LIMIT  # what is too long is said below, in one place
        self.context = context

    def tokenize_with_weights(self, text: str, return_word_ids: bool = False, **options) -> list[list[tuple]]:
        """One list of `context` tuples (token, weight) or (token, weight, word)."""
        (tokens,) = super().tokenize_with_weights(text, True, **options)
        if len(tokens) > self.context:
            if self.embedding_key == "clip_l":  # once, not for each encoder
                logging.warning("the shapes model reads %d words; the rest is left out: %s", self.context - 2, text)
            tokens = [*tokens[: self.context - 1], tokens[-1]]
        tokens += [(self.pad_token, 1.0, 0)] * (self.context - len(tokens))
        return [tokens if return_word_ids else [token[:2] for token in tokens]]


class Tokenizers:
    """A tokenizer for each encoder, in the form that ComfyUI's SD3 nodes expect."""

    def __init__(self, tokenizers: dict[str, WordTokenizer]) -> None:
        self.tokenizers = tokenizers

    def tokenize_with_weights(self, text: str, return_word_ids: bool = False, **options) -> dict[str, list]:
        out = {k: t.tokenize_with_weights(text, return_word_ids, **options) for k, t in self.tokenizers.items()}
        return out | {"t5xxl": []}

    def untokenize(self, tokens: list[tuple]) -> list[tuple]:
        return self.tokenizers["l"].untokenize(tokens)

    def decode(self, token_ids, skip_special_tokens: bool = True) -> str:
        return self.tokenizers["l"].decode(token_ids, skip_special_tokens=skip_special_tokens)

    def state_dict(self) -> dict:
        return {}


def load_clip(folder: Path, disable_dynamic: bool = False) -> comfy.sd.CLIP:
    """The two text encoders as a CLIP; disable_dynamic as in `load_model`."""
    configs = {name: read_config(folder, part) for name, part in ENCODERS.items()}
    weights = {}
    for name, part in ENCODERS.items():
        state = comfy.utils.load_torch_file(str(folder / part / "model.safetensors"), safe_load=True)
        weights |= {f"clip_{name}.transformer.{k}": v for k, v in state.items()}

    def tokenizers(embedding_directory=None, tokenizer_data=None) -> Tokenizers:
        return Tokenizers(
            {
                name: WordTokenizer(
                    folder / part,
                    configs[name]["max_position_embeddings"],
                    embedding_directory=embedding_directory,
                    embedding_size=configs[name]["hidden_size"],
                    embedding_key=f"clip_{name}",
                )
                for name, part in TOKENIZERS.items()
            }
        )

    target = comfy.supported_models_base.ClipTarget(tokenizers, TextEncoders)
    target.params = {"configs": configs, "width": read_config(folder, "transformer")["joint_attention_dim"]}
    options: dict[str, Any] = {"disable_dynamic": True} if disable_dynamic else {}
    # ComfyUI 0.3 loads the weights after the constructor, later versions within.
    within = "state_dict" in inspect.signature(comfy.sd.CLIP.__init__).parameters
    if within:
        options["state_dict"] = weights
    clip = comfy.sd.CLIP(
        target,
        embedding_directory=folder_paths.get_folder_paths("embeddings"),
        parameters=comfy.utils.calculate_parameters(weights),
        **options,
    )
    if not within:
        clip.load_sd(weights, full_model=True)
    clip.patcher.cached_patcher_init = (_clip_patcher, (folder,))
    return clip


def _clip_patcher(folder: Path, disable_dynamic: bool = False):
    return load_clip(folder, disable_dynamic).patcher
