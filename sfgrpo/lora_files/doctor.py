"""The LoRA doctor: what a LoRA file is, what ComfyUI and diffusers make of it at strength 1.0, and what to do."""

from __future__ import annotations

from dataclasses import dataclass, field

from .convert import warnings
from .diffusers_loader import in_diffusers
from .file import LoRAFile
from .loaders import Verdict, in_comfyui
from .understand import Read, as_family, understand

SHOWN = 3
"""Layers of a kind that are named; all are counted."""


@dataclass
class Report:
    """What the doctor says of a file."""

    name: str
    family: str
    """Title of the model family."""
    key: str
    """Key of the model family."""
    also: list[str]
    """Families whose LoRAs look the same."""
    dialect: str
    """Who writes such files."""
    ranks: list[int]
    layers: int
    alpha: str
    """Where alpha stands."""
    scales: list[float]
    """What B A is multiplied by, each once."""
    comfyui: Verdict
    diffusers: Verdict
    left_out: list[str]
    """What a conversion leaves out, and what not every model of the family has, a sentence each."""
    loses: bool = False
    """Whether a conversion leaves something out."""
    unproven: str = ""
    """The other reading of its scale, a sentence, where there is one."""
    doubt: str = ""
    """Why it may be of another model than `family`; a clause, empty where nothing says so."""
    total: int = 0
    """Layers in the file, those of no layer of the family among them."""
    for_others: dict[str, tuple[Verdict, Verdict]] = field(default_factory=dict)
    """Title of a family of `also` -> what ComfyUI and diffusers make of the file for it."""

    @property
    def healthy(self) -> bool:
        """Both load all of it at its true strength."""
        return (
            not self.doubt
            and self.layers == self.total
            and all(
                not v.fails and all(_is_one(r) for r in v.ratios)
                for pair in ((self.comfyui, self.diffusers), *self.for_others.values())
                for v in pair
            )
        )

    def text(self) -> str:
        """The report in plain words."""
        also = f" (or {', '.join(self.also)}: the names are the same, and so is the file)" if self.also else ""
        ranks = "-".join(str(r) for r in dict.fromkeys((self.ranks[0], self.ranks[-1])))
        scales = " to ".join(f"{s:g}" for s in dict.fromkeys((self.scales[0], self.scales[-1])))
        lines = [
            f"{self.name}",
            f"model: {self.family}{also}",
            *([f"in doubt: {self.doubt}; what follows is for {self.family}"] if self.doubt else []),
            f"written as: {self.dialect}",
            f"layers: {self.layers}{f' of {self.total}' if self.total != self.layers else ''}, rank {ranks}",
            f"alpha: {self.alpha}; its trainer meant B A times {scales}",
            *self._verdicts(),
            *([self.unproven] if self.unproven else []),
            *self.left_out,
        ]
        if self.dialect.startswith("raw peft without"):
            lines.append("if it was trained with another alpha than the rank, put its adapter_config.json beside it")
        if self.doubt:
            lines.append(
                "to do: find out what model it is of; it is converted where you say so "
                f"(--model {self.key}; `model` of the node)"
            )
        elif self.healthy:
            loss = "; a conversion would lose what is named above" if self.loses else ""
            lines.append(f"to do: nothing{loss}")
        else:
            lines.append("to do: convert it; the result loads in both at 1.0")
        return "\n".join(lines)

    def _verdicts(self) -> list[str]:
        """What the two loaders do, for each family where that differs."""
        pairs = {self.family: (self.comfyui, self.diffusers), **self.for_others}
        lines = []
        for i, loader in enumerate(("ComfyUI", "diffusers")):
            said: dict[str, list[str]] = {}
            for title, pair in pairs.items():
                said.setdefault(_in_words(pair[i]), []).append(title)
            for words, titles in said.items():
                of = f", if it is of {' or '.join(titles)}" if len(said) > 1 else ""
                lines.append(f"{loader} at strength 1.0{of}: {words}")
        return lines


def report(file: LoRAFile, *, alpha: float | None = None, model: str | None = None) -> Report:
    """Examine a file.

    alpha, model: see `convert.understand`. Raises ValueError, in a sentence, for what is no LoRA of a known model.
    """
    read = understand(file, alpha=alpha, model=model)
    layers = [layer for layer, _ in read.layers]
    others = [as_family(read, family) for family in read.also]
    return Report(
        name=file.name,
        family=read.family.title,
        key=read.family.key,
        also=[family.title for family in read.also],
        dialect=dialect(read),
        ranks=sorted({layer.rank for layer in layers}),
        layers=len(layers),
        total=len(read.parsed.layers),
        alpha=read.scale.where,
        scales=sorted({round(read.scale.of(layer), 6) for layer in layers}),
        comfyui=in_comfyui(read),
        diffusers=in_diffusers(read),
        left_out=warnings(read),
        loses=bool(read.left_out or read.lacking),
        unproven=read.scale.doubt,
        doubt=read.doubt,
        for_others={other.family.title: (in_comfyui(other), in_diffusers(other)) for other in others},
    )


def dialect(read: Read) -> str:
    """Who writes such a file, in words."""
    layer, place = read.layers[0]
    software = read.file.metadata.get("software", "")
    if software.startswith("stepwise-grpo"):
        return f"this project's ({software})"
    if any(la.style == "xlabs" for la, _ in read.layers):
        return "XLabs, native blocks with processors' names"
    native = any(p.native and not p.name(p.entries[0].diffusers) == la.name for la, p in read.layers)
    names = "native names" if native else "diffusers' names"
    if layer.prefix.startswith("base_model."):
        where = "with its adapter_config.json" if read.file.config else "without its adapter_config.json"
        return f"raw peft {where}, as Flow-GRPO saves it, {names}"
    if layer.prefix.startswith("lora_unet_"):
        return f"kohya (sd-scripts, musubi-tuner), {names} with underscores"
    if layer.prefix == "lora_transformer_":
        return f"OneTrainer, {names} with underscores"
    if layer.prefix == "lycoris_":
        return f"SimpleTuner or LyCORIS, {names} with underscores"
    if layer.prefix in ("diffusion_model.", "model.diffusion_model."):
        return f"ComfyUI or ai-toolkit, {names} behind {layer.prefix}"
    if layer.prefix == "transformer.":
        return f"diffusers, {names}, factors called {layer.style}"
    return f"{names} without a prefix, factors called {layer.style}"


def _is_one(ratio: float) -> bool:
    return abs(ratio - 1) < 1e-4


def _in_words(verdict: Verdict) -> str:
    total = len(verdict.loads) + len(verdict.fails)
    if not verdict.loads:
        return f"nothing is loaded: {next(iter(verdict.fails.values()))}"
    low, high = min(verdict.ratios), max(verdict.ratios)
    if _is_one(low) and _is_one(high):
        strength = "at its true strength"
    else:
        strength = f"at {low:.3g}{'' if _is_one(low / high) else f' to {high:.3g}'} times its true strength"
    words = f"{len(verdict.loads)} of {total} layers are loaded, {strength}"
    reasons: dict[str, list[str]] = {}
    for layer, why in verdict.fails.items():
        reasons.setdefault(why, []).append(layer)
    for why, layers in reasons.items():
        more = f" and {len(layers) - SHOWN} more" if len(layers) > SHOWN else ""
        words += f"; not {', '.join(layers[:SHOWN])}{more}: {why}"
    return words
