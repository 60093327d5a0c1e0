"""Which model the metadata of a LoRA file name, in the words of the trainers that write them.

`base_model_family` (this project), `ss_base_model_version` (kohya, musubi-tuner, ai-toolkit) and
`modelspec.architecture` (kohya, musubi-tuner, OneTrainer, SimpleTuner) come from a list in each trainer, and so does
`modelspec.implementation`, the address of the model's code. `base_model` is free text, the name of a folder or a
repository.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

LISTED = ("base_model_family", "ss_base_model_version", "modelspec.architecture", "modelspec.implementation")
FREE = ("base_model",)

SEP = "[-_. ]?"
FAMILY_WORDS = {
    "sd3": rf"sd{SEP}3|stable{SEP}diffusion{SEP}v?{SEP}3|^(5-)?(medium|large)$",
    "flux1": rf"flux(?!{SEP}[23])|flex{SEP}[12]",
    "flux2": rf"flux{SEP}2|klein",
    "qwen_image": "qwen",
    "z_image": rf"z{SEP}image",
    "wan": r"wan(?![a-z])",
    "chroma": rf"(?<!zeta[-_ ])chroma(?!{SEP}radiance)",
    "lumina2": "lumina",
}
"""Key of a family -> what its name looks like, in small letters, where no letter stands before it."""

OTHER_MODELS = {
    "Stable Diffusion 1 or 2": rf"sd{SEP}v?[12](?!\d)|stable{SEP}diffusion{SEP}v?{SEP}[12](?!\d)",
    "Stable Diffusion XL": rf"sdxl|stable{SEP}diffusion{SEP}xl|ssd|vega",
    "HunyuanVideo": rf"hunyuan{SEP}video",
    "FramePack": rf"frame{SEP}pack",
    "HunyuanImage": rf"hunyuan{SEP}image",
    "HiDream": "hidream",
    "LTX-Video": "ltx",
    "CogVideoX": "cogvideo",
    "CogView": "cogview",
    "Mochi": "mochi",
    "PixArt": "pixart",
    "Sana": "sana",
    "AuraFlow": rf"aura{SEP}flow",
    "OmniGen": "omnigen",
    "LongCat": "longcat",
    "Kandinsky": "kandinsky",
    "Krea 2": rf"krea{SEP}2",
    "Ideogram": "ideogram",
    "Anima": "anima(?![a-z])",
    "Ernie-Image": "ernie",
    "Cosmos": "cosmos",
    "Kolors": "kolors",
    "Stable Cascade": rf"stable{SEP}cascade|wuerstchen",
    "Chroma Radiance": rf"chroma{SEP}radiance",
    "Zeta-Chroma": rf"zeta{SEP}chroma",
    "Bria": "bria",
    "Ovis-Image": "ovis",
    "Boogu-Image": "boogu",
    "MageFlow": rf"mage{SEP}flow",
    "MiniMax": "minimax",
    "PRX": "prx",
    "F-Lite": rf"f{SEP}lite",
}
"""Title of a model that is none of ours -> what its name looks like."""


@dataclass(frozen=True)
class Named:
    """What metadata say of the model."""

    families: frozenset[str] = frozenset()
    """Keys of families whose names stand there."""
    other: str = ""
    """Title of another model."""
    where: str = ""
    """The entry that says so, in words; empty where only free text does."""


def model_of(metadata: Mapping[str, str]) -> Named:
    """The model that a file's metadata name; what comes from a list counts before free text."""
    for key in (*LISTED, *FREE):
        value = metadata.get(key, "")
        text, where = value.lower(), f"{key} = {value[:60]}" if key in LISTED else ""
        families = frozenset(family for family, words in FAMILY_WORDS.items() if _stands(words, text))
        if families:
            return Named(families, where=where)
        other = next((title for title, words in OTHER_MODELS.items() if _stands(words, text)), "")
        if other and where:
            return Named(other=other, where=where)
    return Named()


def _stands(words: str, text: str) -> bool:
    return re.search(rf"(?<![a-z])(?:{words})", text) is not None
