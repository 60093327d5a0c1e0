"""How a model is loaded: whole or in parts, quantised, with the transformer from a single file as ComfyUI has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from ..errors import UserError

if TYPE_CHECKING:
    from .base import Family

PREFIX = "model.diffusion_model."
"""Of the transformer's names in a file that holds other models too."""

QUANTISATIONS = ("none", "int8", "nf4")
"""Of the base weights: int8 by torchao (any device), nf4 by bitsandbytes (GPU only)."""


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


class Loading:
    """The half of a `Family` that loads its pipeline."""

    PIPELINE: ClassVar[str]
    """Name of the pipeline's class in diffusers."""
    TRANSFORMER: ClassVar[str]
    """Name of the transformer's class in diffusers."""
    ENCODERS: ClassVar[Sequence[str]] = ("text_encoder", "tokenizer")
    """Components that encoding needs and the rest does not."""
    LONGEST: ClassVar[int] = 512
    """Most text tokens that the pipeline takes."""
    VAE_DTYPE: ClassVar[torch.dtype | None] = None
    """Dtype of the VAE where it is not that of the rest."""
    EXPERTS: ClassVar[bool] = False
    """Whether there are models of two transformers, of which options.expert names one."""

    def __init__(self, pipeline: Any, options: LoadOptions) -> None:
        self.pipeline, self.options = pipeline, options

    @classmethod
    def load(cls, path: str, options: LoadOptions, parts: str = "all") -> Family:
        """Load a diffusers folder or hub id, frozen: all of it, or a part.

        parts: `all`, `encoders` (with tokenizers), `denoiser` (with the VAE), or `tokenizers`, which has no weights.
        Weights are read from safetensors only, never from a pickle. Raises UserError for options that it has not.
        """
        import diffusers

        cls.check_options(options)
        left_out = {
            "denoiser": cls.ENCODERS,
            "tokenizers": [name for name in cls.ENCODERS if name.startswith("text_encoder")],
        }
        given: dict[str, Any] = dict.fromkeys([*cls.unused(options), *left_out.get(parts, ())])
        whole = parts in ("all", "denoiser")
        given |= cls.load_transformer(path, options) if whole else cls.without_transformer(path)
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
        weights = cls.native_weights(read_weights(options.transformer_file))
        try:
            module = kind.from_single_file(weights, config=path, subfolder=subfolder, **settings)
        except (ValueError, LookupError, RuntimeError, AttributeError, TypeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise UserError(
                f"model.transformer_file {options.transformer_file} is no transformer of this model: {reason}"
            ) from None
        return on_device(module, options)

    @classmethod
    def native_weights(cls, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """A single file's weights by names that diffusers' converter knows, where those of ComfyUI are others."""
        return weights

    @classmethod
    def encoder_options(cls, options: LoadOptions, given: Mapping[str, Any]) -> dict[str, Any]:
        """Further arguments of from_pretrained: the quantisation of the text encoders that are loaded."""
        encoders = [name for name in cls.ENCODERS if name.startswith("text_encoder") and name not in given]
        if options.quantize == "none" or not encoders:
            return {}
        from diffusers import PipelineQuantizationConfig

        mapping = {name: quantisation(options, "transformers") for name in encoders}
        return {"quantization_config": PipelineQuantizationConfig(quant_mapping=mapping)}


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


def read_weights(path: Path) -> dict[str, Tensor]:
    """The transformer's weights of a file that has them alone, or under a prefix beside other models.

    Raises UserError for a file that is not there, no safetensors, or whose numbers are not plain weights.
    """
    from safetensors.torch import load_file

    check_single_file(path)
    weights = load_file(path)
    return {name.removeprefix(PREFIX): w for name, w in weights.items() if name.startswith(PREFIX)} or weights


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
