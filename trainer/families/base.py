"""What all model families share: loading in parts, quantised or from a single file, encoding, decoding, LoRA targets.

A family is a subclass in a file of its own that says what its diffusers pipeline does differently.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sfgrpo.lora import choose_targets

from ..errors import UserError

QUANTISATIONS = ("none", "int8", "nf4")
"""Of the base weights: int8 by torchao (any device), nf4 by bitsandbytes (GPU only)."""

PARTS = ("all", "encoders", "denoiser")


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How a model is loaded."""

    dtype: torch.dtype = torch.float32
    """Of the weights, and of the computation on quantised ones."""
    device: torch.device = torch.device("cpu")
    quantize: str = "none"
    """One of QUANTISATIONS, for transformer and text encoders."""
    transformer_file: Path | None = None
    """Single .safetensors file with the transformer's weights, as ComfyUI has it, in place of the folder's own."""
    max_sequence_length: int | None = None
    """Text tokens; None takes the pipeline's."""
    embedded_guidance: float | None = None
    """Guidance that the transformer takes as an input, where it does; None takes the pipeline's."""
    expert: str | None = None
    """`high` or `low`: which of two transformers carries the LoRA (Wan 2.2 A14B); None is `high`."""
    offload_vae: bool = False
    """The VAE rests on the CPU while it does not decode."""


@dataclass
class Encoded:
    """Conditioning of P texts, row by row; every tensor has P rows."""

    tensors: dict[str, Tensor]

    def rows(self, index: Tensor, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """The rows of `index` (B,) on the device; floating ones in the dtype."""
        found = {k: v[index.to(v.device)].to(device) for k, v in self.tensors.items()}
        return {k: v.to(dtype) if v.is_floating_point() else v for k, v in found.items()}


class Family(ABC):
    """A loaded model of one family. Latents x are (B, C, H, W), or (B, C, F, H, W) for video; sigma is (B,)."""

    PIPELINE: ClassVar[str]
    """Name of the pipeline's class in diffusers."""
    TRANSFORMER: ClassVar[str]
    """Name of the transformer's class in diffusers."""
    ENCODERS: ClassVar[Sequence[str]] = ("text_encoder", "tokenizer")
    """Components that encoding needs and the rest does not."""
    MAX_LENGTH: ClassVar[int] = 512
    """The pipeline's default of max_sequence_length."""
    LONGEST: ClassVar[int] = 512
    """Most text tokens that the pipeline takes."""
    TEXTS_AT_ONCE: ClassVar[int] = 8
    VAE_DTYPE: ClassVar[torch.dtype | None] = None
    """Dtype of the VAE where it is not that of the rest."""
    EMBEDDED_GUIDANCE: ClassVar[float] = 1.0
    """The pipeline's default of embedded guidance, where the transformer takes one."""
    EXPERTS: ClassVar[bool] = False
    """Whether there are models of two transformers, of which options.expert names one."""
    VIDEO: ClassVar[bool] = False
    """Whether it can make more than one frame."""
    UNTRAINED: ClassVar[Sequence[str]] = ()
    """Beginnings of the names of linear modules that never carry a LoRA: those that ComfyUI cannot map."""

    def __init__(self, pipeline: Any, options: LoadOptions) -> None:
        self.pipeline, self.options = pipeline, options

    # ----- loading

    @classmethod
    def load(cls, path: str, options: LoadOptions, parts: str = "all") -> Family:
        """Load a diffusers folder or hub id, frozen: all of it, its `encoders`, or its `denoiser` (with the VAE).

        Weights are read from safetensors only, never from a pickle. Raises UserError for options that it has not.
        """
        import diffusers

        cls.check_options(options)
        given: dict[str, Any] = dict.fromkeys([*cls.unused(options), *(cls.ENCODERS if parts == "denoiser" else ())])
        given |= cls.without_transformer(path) if parts == "encoders" else cls.load_transformer(path, options)
        pipeline = getattr(diffusers, cls.PIPELINE).from_pretrained(
            path,
            torch_dtype=options.dtype,
            use_safetensors=True,
            **cls.encoder_options(options, given),
            **given,
        )
        family = cls(pipeline, options)
        for name, module in pipeline.components.items():
            if isinstance(module, nn.Module):
                module.requires_grad_(False).eval()
                if name == "vae" and cls.VAE_DTYPE is not None:
                    module.to(cls.VAE_DTYPE)
                # bitsandbytes has put its weights where they belong.
                placed = options.quantize == "nf4" and getattr(module, "is_quantized", False)
                rests = (name == "vae" and options.offload_vae) or placed
                if not (rests or module.device.type == "meta"):
                    module.to(options.device)
        return family

    @classmethod
    def check_options(cls, options: LoadOptions) -> None:
        """Raise UserError for options that this family, this machine or its packages do not have."""
        length, least, most = options.max_sequence_length, cls.least_length(), cls.LONGEST
        if length is not None and not least <= length <= most:
            raise UserError(f"model.max_sequence_length must be from {least} to {most} for this model, got {length}")
        if options.expert is not None and not cls.EXPERTS:
            raise UserError("model.expert is for a model of two transformers (Wan 2.2 A14B); leave it out for this one")
        check_quantisation(options.quantize, options.device)

    @classmethod
    def least_length(cls) -> int:
        """Fewest text tokens."""
        return 1

    @classmethod
    def unused(cls, options: LoadOptions) -> list[str]:
        """Components that these options make superfluous."""
        return []

    @classmethod
    def load_transformer(cls, path: str, options: LoadOptions) -> dict[str, Any]:
        """The transformer, as component name -> module."""
        import diffusers

        return {"transformer": cls.load_one(getattr(diffusers, cls.TRANSFORMER), path, "transformer", options)}

    @classmethod
    def without_transformer(cls, path: str) -> dict[str, Any]:
        """What stands in the pipeline for transformer and VAE while it encodes."""
        return {"transformer": None, "vae": None}

    @classmethod
    def load_one(cls, kind: Any, path: str, subfolder: str, options: LoadOptions) -> nn.Module:
        """A transformer of a subfolder, or of options.transformer_file with that subfolder's config."""
        settings = {"torch_dtype": options.dtype}
        if options.quantize != "none":
            settings["quantization_config"] = quantisation(options, "diffusers")
        if options.transformer_file is None:
            return on_device(kind.from_pretrained(path, subfolder=subfolder, use_safetensors=True, **settings), options)
        check_single_file(options.transformer_file)
        try:
            module = kind.from_single_file(str(options.transformer_file), config=path, subfolder=subfolder, **settings)
        except (ValueError, LookupError, RuntimeError, AttributeError, TypeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise UserError(
                f"model.transformer_file {options.transformer_file} is no transformer of this model: {reason}"
            ) from None
        return on_device(module, options)

    @classmethod
    def encoder_options(cls, options: LoadOptions, given: Mapping[str, Any]) -> dict[str, Any]:
        """Further arguments of from_pretrained: the quantisation of the text encoders that are loaded."""
        encoders = [name for name in cls.ENCODERS if name.startswith("text_encoder") and name not in given]
        if options.quantize == "none" or not encoders:
            return {}
        from diffusers import PipelineQuantizationConfig

        mapping = {name: quantisation(options, "transformers") for name in encoders}
        return {"quantization_config": PipelineQuantizationConfig(quant_mapping=mapping)}

    # ----- text

    @property
    def max_sequence_length(self) -> int:
        length = self.options.max_sequence_length
        return self.MAX_LENGTH if length is None else length

    @abstractmethod
    def encode_texts(self, texts: list[str]) -> dict[str, Tensor]:
        """Conditioning of a few texts by the pipeline's own encode_prompt; each tensor has a row for each text.

        Dimension 1 of a tensor of three dimensions, or of a mask of two, may differ from call to call.
        """

    @torch.no_grad()
    def encode(self, texts: list[str]) -> Encoded:
        """Conditioning of all texts, on the CPU. Sequences are padded with zeros to the longest.

        Raises UserError where memory has no room for it.
        """
        parts: list[dict[str, Tensor]] = []
        for start in range(0, len(texts), self.TEXTS_AT_ONCE):
            part = {k: v.cpu() for k, v in self.encode_texts(texts[start : start + self.TEXTS_AT_ONCE]).items()}
            if not parts:
                check_room(len(texts), part)
            parts.append(part)
        return Encoded({name: torch.cat(pad([part[name] for part in parts])) for name in parts[0]})

    def free_encoders(self) -> None:
        """Drop the text encoders."""
        for name in self.ENCODERS:
            if name.startswith("text_encoder"):
                setattr(self.pipeline, name, None)

    # ----- latents

    @abstractmethod
    def sigmas(self, steps: int, height: int, width: int) -> Tensor:
        """The pipeline's own time grid for an image of so many pixels, (steps + 1,) float32 down to 0."""

    @classmethod
    @abstractmethod
    def shape_for(
        cls, transformer: Mapping[str, Any], vae: Mapping[str, Any], height: int, width: int, frames: int = 1
    ) -> tuple[int, ...]:
        """Latent shape by the configs of transformer and VAE. Raises UserError for a size that cannot be made."""

    @classmethod
    @abstractmethod
    def size_for(cls, transformer: Mapping[str, Any], vae: Mapping[str, Any]) -> tuple[int, int]:
        """Height and width in pixels that the model was made for."""

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """Shape of one latent. Raises UserError for a size that the model cannot make."""
        return self.shape_for(self.transformer.config, self.pipeline.vae.config, height, width, frames)

    @property
    def native_size(self) -> tuple[int, int]:
        """Height and width in pixels that the model was made for."""
        return self.size_for(self.transformer.config, self.pipeline.vae.config)

    # ----- the model

    @property
    def dtype(self) -> torch.dtype:
        """Of the transformer's inputs."""
        return self.options.dtype

    @property
    def transformer(self) -> nn.Module:
        """The denoiser; carries the LoRA."""
        return self.pipeline.transformer

    @abstractmethod
    def velocity(self, x: Tensor, sigma: Tensor, cond: dict[str, Tensor]) -> Tensor:
        """Velocity like x, without classifier-free guidance."""

    def trained_steps(self, sigmas: Tensor) -> Tensor:
        """(T,) bool: the steps of a grid (T + 1,) at which the transformer with the LoRA is asked."""
        return torch.ones(len(sigmas) - 1, dtype=torch.bool)

    @abstractmethod
    def example_cond(self, rows: int) -> dict[str, Tensor]:
        """Conditioning of `rows` of the longest texts, on the meta device: shapes alone, for estimates of memory."""

    @property
    def is_distilled(self) -> bool:
        """Whether the pipeline passes classifier-free guidance by."""
        return False

    def check_guidance(self, guidance: float) -> None:
        """Raise UserError for classifier-free guidance of a model that does not take it."""
        if guidance > 1 and self.is_distilled:
            raise UserError("this model is distilled and takes no classifier-free guidance; set guidance to 1")

    def guide(self, negative: Tensor, positive: Tensor, guidance: float) -> Tensor:
        """Velocity under classifier-free guidance > 1, of the float32 ones for negative and positive prompt."""
        return negative + guidance * (positive - negative)

    def embedded_guidance(self, x: Tensor) -> Tensor | None:
        """(B,) float32 guidance as the transformer takes it; None for one without that input."""
        if not self.transformer.config.guidance_embeds:
            return None
        value = self.options.embedded_guidance
        value = self.EMBEDDED_GUIDANCE if value is None else value
        return torch.full((len(x),), value, device=x.device, dtype=torch.float32)

    def decode(self, latents: Tensor) -> Tensor:
        """Images (B, 3, H, W) float32 in [0, 1]; of a video the middle frame."""
        vae = self.pipeline.vae
        try:
            if self.options.offload_vae:
                vae.to(latents.device)
            images = self.decode_latents(latents.to(vae.dtype)).float()
        finally:
            if self.options.offload_vae:
                vae.to("cpu")
        if images.ndim == 5:
            images = images[:, :, images.shape[2] // 2]
        return (images / 2 + 0.5).clamp(0, 1)

    @abstractmethod
    def decode_latents(self, latents: Tensor) -> Tensor:
        """What the VAE makes of latents in its dtype: (B, 3, H, W) or (B, 3, F, H, W), in [-1, 1]."""

    # ----- LoRA

    def targets(self, choice: str) -> list[str]:
        """Names of the linear modules of `attention`, `attention_mlp` or `all` that carry a LoRA."""
        return choose_targets(linear_names(self.transformer, self.UNTRAINED), choice)

    def load_lora_weights(self, state: dict[str, Tensor], adapter: str) -> None:
        """Put a LoRA file's tensors on the transformer by the pipeline's own loader."""
        self.pipeline.load_lora_weights(state, adapter_name=adapter)

    def export_name(self, module: str) -> str:
        """Name of a module of the transformer in a LoRA file."""
        return f"transformer.{module}"


def linear_names(transformer: nn.Module, untrained: Sequence[str] = ()) -> list[str]:
    """Names of all linear modules but those that begin with one of `untrained`."""
    names = [n for n, m in transformer.named_modules() if hasattr(m, "in_features") and hasattr(m, "weight")]
    return [n for n in names if not n.startswith(tuple(untrained))]


def pad(tensors: list[Tensor]) -> list[Tensor]:
    """Tensors padded with zeros along dimension 1 to the longest; those of one dimension as they are."""
    if tensors[0].ndim < 2:
        return tensors
    longest = max(t.shape[1] for t in tensors)
    return [torch.cat([t, t.new_zeros(len(t), longest - t.shape[1], *t.shape[2:])], 1) for t in tensors]


def check_room(rows: int, part: Mapping[str, Tensor]) -> None:
    """Raise UserError where memory has no room for `rows` rows like those of `part`, twice."""
    import psutil

    size = 2 * rows * sum(v[0].numel() * v.element_size() for v in part.values())
    free = psutil.virtual_memory().available
    if size > 0.8 * free:
        raise UserError(
            f"the embeddings of {rows} prompts need {size / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free; "
            "use fewer prompts or iterations, or a smaller model.max_sequence_length"
        )


# ----- quantised and single files


def check_quantisation(name: str, device: torch.device) -> None:
    """Raise UserError for a quantisation that cannot be had here."""
    from importlib.util import find_spec

    package = {"int8": "torchao", "nf4": "bitsandbytes"}.get(name)
    if package is not None and find_spec(package) is None:
        raise UserError(f"model.quantize = {name!r} needs the package {package}: pip install {package}")
    if name == "nf4" and device.type != "cuda":
        raise UserError("model.quantize = 'nf4' needs a CUDA device; 'int8' works on every device")


def quantisation(options: LoadOptions, library: str) -> Any:
    """The quantisation config of `diffusers` or `transformers`."""
    if library == "diffusers":
        from diffusers import BitsAndBytesConfig, TorchAoConfig
    else:
        from transformers import BitsAndBytesConfig, TorchAoConfig
    if options.quantize == "int8":
        from torchao.quantization import Int8WeightOnlyConfig

        return TorchAoConfig(Int8WeightOnlyConfig())
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=options.dtype,
        bnb_4bit_use_double_quant=True,
    )


def on_device(module: nn.Module, options: LoadOptions) -> nn.Module:
    """bitsandbytes has put its weights where they belong; all else is moved."""
    if options.quantize != "nf4":
        module.to(options.device)
    return module


def check_single_file(path: Path) -> None:
    """Raise UserError for a file that is not there, no safetensors, or whose numbers are not plain weights."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise UserError(f"model.transformer_file {path} does not exist")
    try:
        with safe_open(path, "pt") as file:
            scaled = [
                k for k in file.keys() if k.endswith((".scale_weight", ".weight_scale", ".comfy_quant", "scaled_fp8"))
            ]
    except (SafetensorError, OSError) as error:
        raise UserError(f"model.transformer_file {path} is no safetensors file: {error}") from None
    if scaled:
        raise UserError(
            f"model.transformer_file {path} holds quantised weights with scales ({scaled[0]}), which diffusers would "
            "read as plain ones; take a bf16 or fp16 file, and model.quantize to save memory"
        )
