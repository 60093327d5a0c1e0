"""What all model families share beside their loading: encoding, latents and their sizes, guidance, LoRA targets.

A family is a subclass in a file of its own that says what its diffusers pipeline does differently.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sfgrpo.lora import choose_targets

from ..errors import UserError
from .loading import Loading
from .tokens import token_count


@dataclass
class Encoded:
    """Conditioning of P texts, row by row; every tensor has P rows."""

    tensors: dict[str, Tensor]

    def rows(self, index: Tensor, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """The rows of `index` (B,) on the device; floating ones in the dtype."""
        found = {k: v[index.to(v.device)].to(device) for k, v in self.tensors.items()}
        return {k: v.to(dtype) if v.is_floating_point() else v for k, v in found.items()}


class Family(Loading, ABC):
    """A loaded model of one family. Latents x are (B, C, H, W), or (B, C, F, H, W) for video; sigma is (B,)."""

    MAX_LENGTH: ClassVar[int] = 512
    """The pipeline's default of max_sequence_length."""
    TEXTS_AT_ONCE: ClassVar[int] = 8
    EMBEDDED_GUIDANCE: ClassVar[float | None] = None
    """The pipeline's default of the guidance that the transformer takes as an input; None where no model takes one."""
    VIDEO: ClassVar[bool] = False
    """Whether it can make more than one frame."""
    UNTRAINED: ClassVar[Sequence[str]] = ()
    """Beginnings of the names of linear modules that never carry a LoRA: those that ComfyUI cannot map."""

    # ----- text

    @property
    def max_sequence_length(self) -> int:
        length = self.options.max_sequence_length
        return self.MAX_LENGTH if length is None else length

    @property
    def _tokenizers(self) -> list[str]:
        """Their names; the last is that of max_sequence_length."""
        return [name for name in self.ENCODERS if name.startswith("tokenizer")]

    @property
    def text_limits(self) -> dict[str, int]:
        """Tokenizer's name -> tokens of `count_tokens` that its encoder reads.

        The last tokenizer's is max_sequence_length, which is 0 where its encoder is left out; others are CLIPs.
        """
        *clips, last = self._tokenizers
        limits = {name: self.pipeline.tokenizer_max_length for name in clips}
        return limits | ({last: self.max_sequence_length} if self.max_sequence_length else {})

    def has_raisable_limit(self, tokenizer: str) -> bool:
        """Whether max_sequence_length is that tokenizer's limit."""
        return tokenizer == self._tokenizers[-1]

    def count_tokens(self, tokenizer: str, text: str) -> int:
        """Tokens up to the end of a text as the pipeline gives it to that tokenizer, not cut.

        Special tokens are counted, and what a chat template puts before the text; what it puts after is not, for that
        is cut first.
        """
        return token_count(getattr(self.pipeline, tokenizer), text)

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

    @classmethod
    def takes_guidance(cls, transformer: Mapping[str, Any]) -> bool:
        """Whether a transformer of this config has guidance as an input."""
        return cls.EMBEDDED_GUIDANCE is not None and bool(transformer.get("guidance_embeds", False))

    def embedded_guidance(self, x: Tensor) -> Tensor | None:
        """(B,) float32 guidance as the transformer takes it; None for one without that input."""
        if not self.takes_guidance(self.transformer.config):
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


def check_sides(height: int, width: int, unit: int, most: int | None = None) -> None:
    """Raise UserError for sides in pixels that are no multiples of `unit`, or more than `most`."""
    if all(side > 0 and side % unit == 0 and (most is None or side <= most) for side in (height, width)):
        return
    limit = "" if most is None else f", at most {most},"
    raise UserError(f"height and width must be multiples of {unit}{limit} for this model; got {height} x {width}")


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
