"""Model families, one file each.

A family knows how its pipeline is loaded, how prompts are encoded, which times and latent shape belong to a
resolution, what the transformer takes, how latents are decoded, which modules carry a LoRA and how a LoRA file names
them. Nothing of a family stands elsewhere: a new one is a file here and a row in FAMILIES.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..errors import UserError


@dataclass
class Encoded:
    """Conditioning of P texts, row by row; every tensor has P rows."""

    tensors: dict[str, Tensor]

    def rows(self, index: Tensor, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """The rows of `index` (B,), on the device in the dtype."""
        return {k: v[index.to(v.device)].to(device, dtype) for k, v in self.tensors.items()}


def room_for(rows: int, part: Tensor) -> Tensor:
    """An empty CPU tensor of `rows` rows like those of `part`. Raises UserError where memory has no room for it."""
    import psutil

    size, free = rows * part[0].numel() * part.element_size(), psutil.virtual_memory().available
    if size > 0.8 * free:
        raise UserError(
            f"the embeddings of {rows} prompts need {size / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free; "
            "use fewer prompts or iterations, or a smaller model.max_sequence_length"
        )
    return torch.empty(rows, *part.shape[1:], dtype=part.dtype)


class Family(Protocol):
    """A loaded model of one family."""

    pipeline: Any
    """The diffusers pipeline."""
    transformer: nn.Module
    """The denoiser; carries the LoRA."""
    native_size: tuple[int, int]
    """Height and width in pixels that the model was made for."""

    def encode(self, texts: list[str]) -> Encoded:
        """Conditioning of texts; needs the encoders."""
        ...

    def free_encoders(self) -> None:
        """Drop the text encoders."""
        ...

    def sigmas(self, steps: int, height: int, width: int) -> Tensor:
        """The family's own time grid, (steps + 1,) float32 down to 0."""
        ...

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """Shape of one latent. Raises UserError for a size that the model cannot make."""
        ...

    def velocity(self, x: Tensor, sigma: Tensor, cond: dict[str, Tensor]) -> Tensor:
        """Velocity of latents x (B, ...) at sigma (B,), without guidance."""
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Images (B, 3, H, W) in [0, 1]."""
        ...

    def targets(self, choice: str) -> list[str]:
        """Names of the linear modules of `attention`, `attention_mlp` or `all` that carry a LoRA."""
        ...

    def export_name(self, module: str) -> str:
        """Name of a module in a LoRA file."""
        ...


def pipeline_class_of(path: str) -> str:
    """Class name of the pipeline in a diffusers folder or hub repository.

    Raises UserError where there is none.
    """
    name = read_json(path, "model_index.json").get("_class_name")
    if not isinstance(name, str):
        raise UserError(f"the model_index.json of model {path} names no pipeline class; the model folder is damaged")
    return name


def read_json(path: str, file: str) -> dict[str, Any]:
    """A .json file of a diffusers folder or hub repository. Raises UserError where it is not to be had."""
    folder = Path(path)
    if folder.exists():
        source = folder / file
        if not source.is_file():
            raise UserError(f"model {path} is no diffusers folder: it has no {file}")
    else:
        if path.startswith((".", "/", "~")) or path.count("/") != 1:
            raise UserError(f"model {path} does not exist; give a diffusers folder or a hub id like 'owner/name'")
        from huggingface_hub import hf_hub_download

        try:
            source = Path(hf_hub_download(path, file))
        except Exception as error:  # the hub client raises many unrelated types
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(f"model {path} is no folder here and cannot be had from the hub: {reason}") from None
    try:
        data = json.loads(source.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        data = None
    if not isinstance(data, dict):
        raise UserError(f"{source} is no JSON object; the model folder is damaged")
    return data


FAMILIES = {"StableDiffusion3Pipeline": ("sd3", "SD3")}
"""Pipeline class -> module of this package and class in it, imported when needed."""


def family_of(path: str) -> tuple[str, str]:
    """Entry of FAMILIES for a model. Raises UserError, before any weight is loaded, for a model of none of them."""
    name = pipeline_class_of(path)
    if name not in FAMILIES:
        raise UserError(
            f"model {path} is a {name}, not a flow-matching model that is supported here; "
            f"these are: {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[name]


def family_class(path: str) -> Any:
    """The class of a model's family; importing it loads no weights and no diffusers."""
    module, name = family_of(path)
    return getattr(import_module(f".{module}", __name__), name)


def load_family(path: str, dtype: torch.dtype, device: torch.device, **options: Any) -> Family:
    """Load a model by path or hub id, frozen. Raises UserError for a model that is not of a supported family."""
    family = family_class(path)
    try:
        return family.load(path, dtype, device, **options)
    except (OSError, ValueError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UserError(f"model {path} cannot be loaded: {reason}") from None


def check_size(path: str, height: int | None, width: int | None) -> None:
    """Raise UserError, before any weight is loaded, for a size in pixels that the model cannot make; None: its own."""
    transformer, vae = (read_json(path, f"{part}/config.json") for part in ("transformer", "vae"))
    try:
        family_class(path).shape_for(transformer, vae, height, width)
    except KeyError as error:
        raise UserError(f"a config.json of model {path} lacks the field {error}; the model folder is damaged") from None
