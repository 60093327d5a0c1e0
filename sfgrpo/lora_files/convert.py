"""Any LoRA file as the one form that ComfyUI and diffusers both load at strength 1.0.

The canonical form: `transformer.<name in diffusers>.lora_A.weight` and `.lora_B.weight`, the scale folded into B in
float32, no alpha anywhere. Wan and Lumina 2 go by native names, `diffusion_model.<native name>`, which is all that
ComfyUI knows of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ..export import fold
from .file import LoRAFile, common_dtype
from .keys import parse
from .names import Family
from .recognise import UnknownModel, recognise
from .scale import FOLDED, scale_of
from .understand import Pair, Read, understand


def factors(file: LoRAFile) -> dict[str, Pair]:
    """Canonical layer name -> (A (rank, in), B (out, rank)), float32: W + B A is what the file's trainer meant."""
    return understand(file).factors


def factors_named(file: LoRAFile, wanted: Iterable[str]) -> dict[str, Pair]:
    """`factors`, for a model whose layers are known: names that the file has as they are wanted need no family.

    Raises ValueError where `parse` does.
    """
    parsed = parse(file)
    scale = scale_of(file, parsed.layers)
    written = {layer.key: (layer.a.float(), layer.b.float() * scale.of(layer)) for layer in parsed.layers}
    if written.keys() == set(wanted):
        return written
    try:
        return understand(file).factors
    except UnknownModel:
        return written


ALPHA_KEYS = ("lora_adapter_metadata", "alpha", "lora_alpha", "network_alpha", "rank", "format")


def describe(file: LoRAFile, state: Mapping[str, Tensor], family: Family, what: str) -> dict[str, str]:
    """Metadata of a canonical file: the old ones, less those that tell another alpha or rank."""
    from .. import __version__

    kept = {k: v for k, v in file.metadata.items() if k not in ALPHA_KEYS and not k.startswith("ss_network_")}
    return kept | {
        "format": "pt",
        "software": f"stepwise-grpo {__version__} ({what})",
        "base_model_family": family.key,
        "rank": ranks_of(state),
        "alpha": FOLDED,
    }


def ranks_of(state: Mapping[str, Tensor]) -> str:
    """The rank of a canonical state dict, or the least and the largest."""
    ranks = sorted({len(v) for k, v in state.items() if k.endswith(".lora_A.weight")})
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def convert(
    file: LoRAFile, dtype: torch.dtype | None = None, *, alpha: float | None = None, model: str | None = None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(state dict, metadata) of the canonical file; `warnings` names what is not in it.

    dtype: that of most of the file's tensors without one; alpha, model: see `understand`. Raises ValueError where the
    model is in doubt, where nothing is left, or where the dtype has no room for a number.
    """
    return written(understand(file, alpha=alpha, model=model), dtype)


def written(read: Read, dtype: torch.dtype | None = None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """`convert` of a file that was read."""
    check_sure(read)
    state = fold(loadable(read), 1.0, dtype or common_dtype(read.file))
    check_finite(state, read.file.name)
    return state, describe(read.file, state, read.family, "LoRA doctor")


def doubts(file: LoRAFile) -> list[str]:
    """What is not proven of a file that is used as it stands, a sentence each: its model, and its scale."""
    layers = parse(file).layers
    try:
        model = recognise(file, layers).doubt
    except UnknownModel:
        return []
    scale = scale_of(file, layers).doubt
    lines = [f"LoRA file {file.name} may be of another model: {model}"] if model else []
    if scale:
        lines.append(f"LoRA file {file.name} is taken at scale 1: {scale}; `sfgrpo lora convert` writes it with it")
    return lines


def check_sure(read: Read) -> None:
    """Raise ValueError where the file may be of another model than its names say."""
    if read.doubt:
        raise ValueError(
            f"LoRA file {read.file.name} may be of another model: {read.doubt}; if you know that it is of "
            f"{read.family.title}, say so (--model {read.family.key}; `model` of the node)"
        )


def loadable(read: Read) -> dict[str, Pair]:
    found = {name: pair for name, pair in read.factors.items() if name not in read.lacking}
    if not found:
        raise ValueError(f"LoRA file {read.file.name} has only layers that ComfyUI cannot load ({read.lacking[0]} ...)")
    return found


def check_finite(state: Mapping[str, Tensor], name: str) -> None:
    for key, value in state.items():
        if not torch.isfinite(value).all():
            raise ValueError(f"{key} of LoRA file {name} is too large for {value.dtype}; choose bf16 or fp32")


def warnings(read: Read) -> list[str]:
    """What a conversion leaves out, and what not every model of the family has, a sentence each."""
    reasons: dict[str, list[str]] = {}
    for key, why in read.left_out.items():
        reasons.setdefault(why, []).append(key)
    lines = [f"a conversion leaves out what is {why}: {_some(keys)}" for why, keys in reasons.items()]
    images = [layer.key for layer, place in read.layers if place.entries[0].native.endswith(("k_img", "v_img"))]
    if read.family.key == "wan" and images:
        lines.append(
            f"{len(images)} layers are those of Wan 2.1's image inputs (k_img, v_img): other Wan models lack them"
        )
    if read.lacking:
        lines.append(f"a conversion leaves out what ComfyUI has no name for: {_some(read.lacking)}")
    return lines


def _some(keys: Sequence[str], most: int = 3) -> str:
    shown = ", ".join(keys[:most])
    return shown if len(keys) <= most else f"{shown} and {len(keys) - most} more"
