"""Model families, one file each.

A family knows how its pipeline is loaded, how prompts are encoded, which times and latent shape belong to a
resolution, what the transformer takes, how latents are decoded, which modules carry a LoRA and how a LoRA file names
them (`base.Family`). Nothing of a family stands elsewhere: a new one is a file here and a row in FAMILIES.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from ..errors import UserError
from .base import Encoded, Family
from .loading import QUANTISATIONS, LoadOptions

__all__ = ["FAMILIES", "QUANTISATIONS", "Encoded", "Family", "LoadOptions"]

FAMILIES = {
    "Flux2KleinPipeline": ("flux2", "Flux2Klein"),
    "Flux2Pipeline": ("flux2", "Flux2"),
    "FluxPipeline": ("flux", "Flux1"),
    "StableDiffusion3Pipeline": ("sd3", "SD3"),
    "QwenImagePipeline": ("qwen_image", "QwenImage"),
    "WanPipeline": ("wan", "Wan"),
    "ZImagePipeline": ("z_image", "ZImage"),
}
"""Pipeline class -> module of this package and class in it, imported when needed."""


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
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

        try:
            source = Path(hf_hub_download(path, file))
        except GatedRepoError:
            raise UserError(
                f"model {path} asks for its licence to be accepted: do so at https://huggingface.co/{path}, then run "
                "`hf auth login`"
            ) from None
        except RepositoryNotFoundError:
            raise UserError(
                f"model {path} is no folder here, and the hub has no such model, or a private one; check the name, or "
                "run `hf auth login`"
            ) from None
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


def family_of(path: str) -> tuple[str, str]:
    """Entry of FAMILIES for a model. Raises UserError, before any weight is loaded, for a model of none of them."""
    name = pipeline_class_of(path)
    if name not in FAMILIES:
        raise UserError(
            f"model {path} is a {name}, not a flow-matching model that is supported here; "
            f"these are: {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[name]


def family_class(path: str) -> type[Family]:
    """The class of a model's family; importing it loads no weights and no diffusers."""
    module, name = family_of(path)
    return getattr(import_module(f".{module}", __name__), name)


def load_family(path: str, dtype: torch.dtype, device: torch.device, parts: str = "all", **options: Any) -> Family:
    """`load_model` with the options of LoadOptions by name."""
    return load_model(path, LoadOptions(dtype=dtype, device=device, **options), parts)


def load_model(path: str, options: LoadOptions, parts: str = "all") -> Family:
    """Load a model by path or hub id, frozen: `all` of it or one of the `parts` of `Loading.load`.

    Raises UserError for a model that is not of a supported family.
    """
    family = family_class(path)
    try:
        return family.load(path, options, parts)
    except (OSError, ValueError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UserError(f"model {path} cannot be loaded: {reason}") from None


def check_embedded_guidance(path: str, guidance: float | None) -> None:
    """Raise UserError, before any weight is loaded, for embedded guidance of a model without that input."""
    if guidance is not None and not family_class(path).takes_guidance(read_json(path, "transformer/config.json")):
        raise UserError(
            "this model has no input for embedded guidance (FLUX.1-dev and FLUX.2-dev have one); leave "
            "sampling.embedded_guidance or --embedded-guidance out, and see guidance for classifier-free guidance"
        )


def check_size(path: str, height: int | None, width: int | None, frames: int = 1) -> tuple[int, ...]:
    """The latent shape of a size in pixels, None being the model's own, before any weight is loaded.

    Raises UserError for a size that the model cannot make.
    """
    transformer, vae = (read_json(path, f"{part}/config.json") for part in ("transformer", "vae"))
    family = family_class(path)
    try:
        if frames != 1 and not family.VIDEO:
            raise UserError(f"this model makes single images; set sampling.frames to 1 (got {frames})")
        own = family.size_for(transformer, vae)
        height, width = (mine if given is None else given for given, mine in zip((height, width), own, strict=True))
        return family.shape_for(transformer, vae, height, width, frames)
    except KeyError as error:
        raise UserError(f"a config.json of model {path} lacks the field {error}; the model folder is damaged") from None
