"""What rewards that are models share: settings, loading at the first call, batches, devices, resting on the CPU.

A subclass gives `load` (the module, on the CPU), `score` (one batch) and, where it reads prompts, `open_tokenizer`.
Weights are read from safetensors files, or by torch.load(weights_only=True), which runs no code of the file.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..dtypes import DTYPES

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
HUB_FILE = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)/([\w.+-]+(?:/[\w.+-]+)*)")


@dataclass(frozen=True)
class Tokens:
    """How a model reads text."""

    tokenizer: Any
    limit: int
    """Most tokens of a prompt, the marks of start and end included."""


@dataclass(frozen=True, kw_only=True)
class RewardModel:
    """A reward that is a model, loaded at its first call."""

    device: str = "auto"
    """`auto` (CUDA where there is one, else the CPU), `cpu`, `cuda`, `cuda:1`, `mps`, ..."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Of the model's weights and forward passes; a head on top of it, and the scores, are always float32."""
    batch_size: int = 16
    """Images that pass the model at once."""
    offload: bool = False
    """The model rests on the CPU between calls."""
    _kept: dict = field(default_factory=dict, init=False, repr=False, compare=False)
    _lock: Any = field(default_factory=threading.RLock, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.batch_size < 1:
            raise ValueError("batch_size must be 1 or more")
        if self.device != "auto":
            try:
                torch.device(self.device)
            except RuntimeError as error:
                raise ValueError(f"device {self.device!r} is no device: {first_line(error)}") from None

    def load(self) -> nn.Module:
        """The module with its weights, float32, on the CPU. A part named `head` stays float32."""
        raise NotImplementedError

    def score(self, model: nn.Module, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Scores (b,) of one batch; images (b, 3, H, W) in [0, 1] on the model's device."""
        raise NotImplementedError

    def open_tokenizer(self) -> Tokens | None:
        """The tokenizer, or None for a reward that does not read prompts."""
        return None

    def check(self) -> None:
        """Raise ValueError where the device, the files or the tokenizer are not there; loads no weights."""
        pick_device(self.device)
        self.tokens  # noqa: B018

    def check_prompt(self, prompt: str, metadata: Mapping, size: tuple[int, int]) -> None:
        """Raise ValueError for a prompt that cannot be scored; size (height, width) of the images."""
        if self.tokens is not None:
            self.tokenize([prompt], "cpu")

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping] | None = None) -> Tensor:
        """Scores (B,) float32 on the CPU of (B, 3, H, W) images in [0, 1]."""
        if images.ndim != 4 or images.shape[1] != 3 or not images.is_floating_point():
            raise ValueError(
                f"images must be (B, 3, H, W) floating point in [0, 1], got {tuple(images.shape)} {images.dtype}"
            )
        if len(prompts) != len(images):
            raise ValueError(f"{len(images)} images need as many prompts, got {len(prompts)}")
        with self._lock, torch.no_grad():
            device, model = self._ready()
            try:
                scores = [
                    self.score(model, part.to(device), prompts[start : start + self.batch_size]).float()
                    for start, part in zip(
                        range(0, len(images), self.batch_size), images.detach().split(self.batch_size), strict=True
                    )
                ]
                return torch.cat(scores).cpu()
            finally:
                if self.offload:
                    model.to("cpu")

    def free(self) -> None:
        """Let the model go; the next call loads it again."""
        with self._lock:
            self._kept.clear()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _ready(self) -> tuple[torch.device, nn.Module]:
        """The device and the model on it."""
        device = pick_device(self.device)
        return device, self.module.to(device)

    @property
    def module(self) -> nn.Module:
        """The module, loaded once; on the CPU until it is first called, and then wherever it rests."""
        with self._lock:
            if "model" not in self._kept:
                model = self.load().requires_grad_(False).eval().to(DTYPES[self.dtype])
                if hasattr(model, "head"):
                    model.head.float()
                self._kept["model"] = model
            return self._kept["model"]

    @property
    def tokens(self) -> Tokens | None:
        """The tokenizer, opened once."""
        with self._lock:
            if "tokens" not in self._kept:
                self._kept["tokens"] = self.open_tokenizer()
            return self._kept["tokens"]

    def tokenize(self, prompts: Sequence[str], device: torch.device | str) -> dict[str, Tensor]:
        """input_ids and attention_mask (B, limit). Raises ValueError for a prompt that is too long."""
        tokenizer, limit = self.tokens.tokenizer, self.tokens.limit
        for prompt, ids in zip(prompts, tokenizer(list(prompts))["input_ids"], strict=True):
            if len(ids) > limit and not getattr(self, "truncate", True):
                shown = prompt if len(prompt) <= 80 else prompt[:80] + "..."
                raise ValueError(
                    f"the prompt {shown!r} has {len(ids)} tokens and the model reads {limit} at most; shorten it, or "
                    "set truncate to true, which cuts off its end"
                )
        out = tokenizer(list(prompts), padding="max_length", truncation=True, max_length=limit, return_tensors="pt")
        return {name: out[name].to(device) for name in ("input_ids", "attention_mask")}


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def pick_device(name: str) -> torch.device:
    """The device of this name. Raises ValueError for one that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device {name!r} cannot be used: {first_line(error)}") from None
    return device


def find_folder(setting: str, value: str) -> str:
    """A folder of a transformers model, or a hub id as it is. Raises ValueError for a folder that is none."""
    path = Path(value).expanduser()
    if path.is_dir():
        return str(path)
    if path.exists():
        raise ValueError(f"{setting} {value} is a file; give the folder of a transformers model, or a hub id")
    if not HUB_ID.fullmatch(value):
        raise ValueError(f"folder {value} ({setting}) does not exist")
    return value


def find_file(setting: str, value: str) -> Path | tuple[str, str]:
    """A file here, or (repository, file name) on the hub for "owner/name/file".

    Raises ValueError for what is neither.
    """
    path = Path(value).expanduser()
    if path.is_file():
        return path
    on_hub = HUB_FILE.fullmatch(value)
    if path.is_dir() or on_hub is None:
        raise ValueError(f"file {value} ({setting}) does not exist")
    return on_hub[1], on_hub[2]


def read_weights(setting: str, value: str) -> dict[str, Tensor]:
    """Name -> tensor of a .safetensors file, or of one that torch.save wrote.

    The tensors may lie under "state_dict", and their names begin with "module.". Raises ValueError where the file is
    not there or holds something else.
    """
    file = find_file(setting, value)
    if isinstance(file, tuple):
        from huggingface_hub import hf_hub_download

        try:
            file = Path(hf_hub_download(*file))
        except (OSError, ValueError) as error:
            raise ValueError(f"{setting} {value} cannot be had from the hub: {first_line(error)}") from None
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            state = load_file(file)
        else:
            state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # safetensors and pickle have errors of their own for a file that is none of theirs
        raise ValueError(f"file {value} ({setting}) holds no weights that can be read: {first_line(error)}") from None
    state = state.get("state_dict", state) if isinstance(state, dict) else {}
    state = {name.removeprefix("module."): t for name, t in state.items() if isinstance(t, Tensor)}
    if not state:
        raise ValueError(f"file {value} ({setting}) holds no weights")
    return state


def fill(module: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Copy weights of the same names into a module. Raises ValueError for one that is missing or of another shape."""
    for name, own in module.state_dict().items():
        if name not in state:
            raise ValueError(f"{source} lacks the weight {name}")
        if state[name].shape != own.shape:
            raise ValueError(
                f"{source} has {name} of shape {tuple(state[name].shape)}, where the model has {tuple(own.shape)}"
            )
    module.load_state_dict({name: state[name] for name in module.state_dict()})


def open_config(setting: str, value: str, kinds: Sequence[str]) -> Any:
    """The transformers config at a folder or hub id. Raises ValueError for a model of a kind not in `kinds`."""
    from transformers import AutoConfig

    folder = find_folder(setting, value)
    if Path(folder).is_dir() and not (Path(folder) / "config.json").is_file():
        raise ValueError(f"folder {value} ({setting}) has no config.json; give that of a transformers model")
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{setting} {value} is no transformers model that can be had: {first_line(error)}") from None
    if config.model_type not in kinds:
        raise ValueError(f"{setting} {value} is a model of type {config.model_type}; a {kinds[0]} model is needed")
    return config


def open_pretrained(cls: type, setting: str, value: str) -> nn.Module:
    """A transformers model in float32 on the CPU. Raises ValueError where weights are missing."""
    try:
        model, info = cls.from_pretrained(find_folder(setting, value), output_loading_info=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"the weights of {setting} {value} cannot be loaded: {first_line(error)}") from None
    if info["missing_keys"]:
        raise ValueError(f"{setting} {value} lacks the weight {sorted(info['missing_keys'])[0]}")
    return model.float()


def open_tokenizer(setting: str, value: str, limit: int) -> Tokens:
    """The tokenizer at a folder or hub id. Raises ValueError where there is none."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(find_folder(setting, value))
        # Without a vocabulary transformers makes an empty tokenizer, to which all words are unknown.
        if not set(tokenizer("a cat")["input_ids"]) - set(tokenizer.all_special_ids):
            raise ValueError("its vocabulary is empty")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{setting} {value} has no tokenizer that can be had: {first_line(error)}") from None
    return Tokens(tokenizer, limit)


def linear_head(width: int) -> nn.Sequential:
    """The head of LAION's aesthetic predictor and of ImageReward: five linear layers without activations.

    (B, width) -> (B, 1). The dropouts of training stand as `Identity`, so that the layers keep their numbers.
    """
    return nn.Sequential(
        nn.Linear(width, 1024),
        nn.Identity(),
        nn.Linear(1024, 128),
        nn.Identity(),
        nn.Linear(128, 64),
        nn.Identity(),
        nn.Linear(64, 16),
        nn.Linear(16, 1),
    )
