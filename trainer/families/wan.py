"""Wan: text to video, and to an image with frames = 1. One transformer (2.1, 2.2 5B) or two by noise (2.2 A14B).

The pipeline's own solver is UniPC of order 2; a rollout takes Euler steps on the same times. The two are one and the
same for UniPC with solver_order = 1 and no corrector, but for what the transformer is told of the time: sigma * 1000
here and in ComfyUI, which UniPC's timesteps round down to whole numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UserError
from .base import Family, check_sides
from .loading import LoadOptions

NATIVE = (
    ("condition_embedder.time_embedder.linear_1", "time_embedding.0"),
    ("condition_embedder.time_embedder.linear_2", "time_embedding.2"),
    ("condition_embedder.text_embedder.linear_1", "text_embedding.0"),
    ("condition_embedder.text_embedder.linear_2", "text_embedding.2"),
    ("condition_embedder.time_proj", "time_projection.1"),
    ("attn1.", "self_attn."),
    ("attn2.", "cross_attn."),
    (".to_out.0", ".o"),
    (".to_", "."),
    ("ffn.net.0.proj", "ffn.0"),
    ("ffn.net.2", "ffn.2"),
    ("proj_out", "head.head"),
)
"""diffusers' names of linear modules -> Wan's own, replaced in this order."""


class Wan(Family):
    """A loaded WanPipeline.

    Of two transformers, `transformer` takes the rows whose sigma is boundary_ratio or more and `transformer_2` the
    others. options.expert says which one carries the LoRA; the other is asked in rollouts and stays as it is. Guidance
    is the same for both, as it is in the pipeline unless it is given a guidance_scale_2.

    The 5B pipeline expands a timestep to all tokens. They are equal where no image is given, and one does the same.
    """

    PIPELINE = "WanPipeline"
    TRANSFORMER = "WanTransformer3DModel"
    VAE_DTYPE = torch.float32
    EXPERTS = True
    VIDEO = True

    def __init__(self, pipeline: Any, options: LoadOptions) -> None:
        super().__init__(pipeline, options)
        if options.expert is not None and self.boundary is None:
            raise UserError("model.expert is for a model of two transformers (Wan 2.2 A14B); leave it out for this one")

    @classmethod
    def load_transformer(cls, path: str, options: LoadOptions) -> dict[str, Any]:
        """One or two, options.transformer_file in place of the one that is trained; and the VAE.

        The pipeline would load the VAE in the dtype of the rest, which rounds its weights.
        """
        from diffusers import AutoencoderKLWan, WanTransformer3DModel

        from . import read_json

        names = ["transformer"]
        if read_json(path, "model_index.json").get("boundary_ratio") is not None:
            names.append("transformer_2")
        its_own = replace(options, transformer_file=None)
        loaded = {
            name: cls.load_one(WanTransformer3DModel, path, name, options if name == trained_name(options) else its_own)
            for name in names
        }
        vae = AutoencoderKLWan.from_pretrained(path, subfolder="vae", torch_dtype=cls.VAE_DTYPE, use_safetensors=True)
        return loaded | {"vae": vae}

    @classmethod
    def without_transformer(cls, path: str) -> dict[str, Any]:
        return super().without_transformer(path) | {"transformer_2": None}

    def count_tokens(self, tokenizer: str, text: str) -> int:
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean

        return super().count_tokens(tokenizer, prompt_clean(text))

    def encode_texts(self, texts: list[str]) -> dict[str, Tensor]:
        embeds, _ = self.pipeline.encode_prompt(
            texts, do_classifier_free_guidance=False, max_sequence_length=self.max_sequence_length
        )
        # Zeros up to max_sequence_length follow, which `ask` puts back.
        words = int(embeds.any(-1).nonzero()[:, 1].max()) + 1
        return {"encoder_hidden_states": embeds[:, :words]}

    def example_cond(self, rows: int) -> dict[str, Tensor]:
        shape = (rows, self.max_sequence_length, self.transformer.config.text_dim)
        return {"encoder_hidden_states": torch.empty(shape, dtype=self.dtype, device="meta")}

    def sigmas(self, steps: int, height: int, width: int) -> Tensor:
        """The pipeline's times, with the flow_shift of its scheduler's config whatever the size.

        UniPC starts at 1 - 1e-6 for the sake of a logarithm of its own. Here that is 1, of which kernels know what to
        do: a = eta sqrt(t / (1 - t)) would be 700.
        """
        scheduler = type(self.pipeline.scheduler).from_config(self.pipeline.scheduler.config)
        scheduler.set_timesteps(steps)
        sigmas = scheduler.sigmas.float().cpu()
        return torch.where(sigmas > 1 - 2e-6, 1.0, sigmas)

    @classmethod
    def size_for(cls, transformer: Mapping[str, Any], vae: Mapping[str, Any]) -> tuple[int, int]:
        return (480, 832) if scales(vae)[1] == 8 else (704, 1280)

    @classmethod
    def shape_for(
        cls, transformer: Mapping[str, Any], vae: Mapping[str, Any], height: int, width: int, frames: int = 1
    ) -> tuple[int, ...]:
        temporal, scale = scales(vae)
        unit = scale * transformer["patch_size"][1]
        check_sides(height, width, unit, unit * transformer.get("rope_max_seq_len", 1024))
        if frames < 1 or (frames - 1) % temporal:
            raise UserError(
                f"frames must be 1 or {temporal} k + 1 for this model: 1, {temporal + 1}, {2 * temporal + 1} ...; "
                f"got {frames}"
            )
        return transformer["in_channels"], (frames - 1) // temporal + 1, height // scale, width // scale

    # ----- the model

    @property
    def boundary(self) -> float | None:
        """The least sigma of the high-noise transformer; None for a model of one."""
        return getattr(self.pipeline.config, "boundary_ratio", None)

    @property
    def transformer(self) -> nn.Module:
        """The one that carries the LoRA."""
        return getattr(self.pipeline, trained_name(self.options))

    def is_high(self, sigma: Tensor) -> Tensor:
        """Which of the sigmas are the high-noise transformer's."""
        return sigma * 1000 >= self.boundary * 1000

    def trained_steps(self, sigmas: Tensor) -> Tensor:
        if self.boundary is None:
            return super().trained_steps(sigmas)
        return self.is_high(sigmas[:-1]) == (self.options.expert != "low")

    def velocity(self, x: Tensor, sigma: Tensor, cond: dict[str, Tensor]) -> Tensor:
        # An estimate of memory (meta) is of an update, where all rows are of the trained one.
        if self.boundary is None or x.is_meta:
            return self.ask(self.transformer, x, sigma, cond)
        v, high = torch.empty_like(x, dtype=torch.float32), self.is_high(sigma)
        for rows, transformer in ((high, self.pipeline.transformer), (~high, self.pipeline.transformer_2)):
            if bool(rows.any()):
                of_rows = {name: value[rows] for name, value in cond.items()}
                v[rows] = self.ask(transformer, x[rows], sigma[rows], of_rows).float()
        return v

    def ask(self, transformer: nn.Module, x: Tensor, sigma: Tensor, cond: dict[str, Tensor]) -> Tensor:
        """Velocity by one of the transformers. It has no mask: texts have zeros up to max_sequence_length."""
        text = cond["encoder_hidden_states"]
        return transformer(
            hidden_states=x.to(self.dtype),
            timestep=sigma * 1000,
            encoder_hidden_states=F.pad(text, (0, 0, 0, self.max_sequence_length - text.shape[1])),
            return_dict=False,
        )[0]

    def decode_latents(self, latents: Tensor) -> Tensor:
        vae = self.pipeline.vae
        mean, std = (
            latents.new_tensor(values).view(1, -1, 1, 1, 1)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        return vae.decode(latents * std + mean, return_dict=False)[0]

    def load_lora_weights(self, state: dict[str, Tensor], adapter: str) -> None:
        low = trained_name(self.options) == "transformer_2"
        self.pipeline.load_lora_weights(state, adapter_name=adapter, load_into_transformer_2=low)

    def export_name(self, module: str) -> str:
        """Wan's own names, which ComfyUI and diffusers' load_lora_weights take; ComfyUI knows no others.

        A file says not which of two transformers it is for: ComfyUI loads each as a model of its own, diffusers takes
        load_into_transformer_2 = True for the low-noise one.
        """
        for name, native in NATIVE:
            module = module.replace(name, native)
        return f"diffusion_model.{module}"


def trained_name(options: LoadOptions) -> str:
    """The component that carries the LoRA."""
    return "transformer_2" if options.expert == "low" else "transformer"


def scales(vae: Mapping[str, Any]) -> tuple[int, int]:
    """Frames and pixels to a latent; the config files of Wan 2.1 leave them out."""
    return vae.get("scale_factor_temporal", 4), vae.get("scale_factor_spatial", 8)
