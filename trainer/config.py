"""The settings of a run: a TOML file, one table for each class here, and overrides from the command line.

`[grpo]` and `[grpo.kernel]` are the core's own `GRPOConfig` and `Kernel`.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from sfgrpo.alarms import AlarmConfig
from sfgrpo.config import GRPOConfig
from sfgrpo.rewards import PATH_SETTINGS, FailurePolicy, mix
from sfgrpo.rewards.custom import is_custom, locate, split
from sfgrpo.rewards.tables import with_own_code, with_paths
from sfgrpo.shapes import MODEL_DIR

from .errors import UserError
from .hints import hint

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

STRICT = {"extra": "forbid"}
EMBEDDED = "shapes"
REWARD_TABLES = ("rewards.", "eval.rewards.", "watch.")
NOT_TOML = (".yaml", ".yml", ".json", ".py")
"""Run files of other trainers, by their names."""
PATHS = ("prompts.file", "eval.file", "lora.continue_from", "model.transformer_file")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What is trained, `[model]`."""

    __pydantic_config__ = STRICT

    path: str
    """Diffusers folder, hub id, or `shapes` for the model that comes with the project."""
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Of the base weights and the forward passes. The LoRA, latents and log-probabilities are always float32."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:1`, `mps`, ..."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time in the update."""
    max_sequence_length: int | None = None
    """Text tokens; None takes the pipeline's default. For SD3, 0 leaves the T5 encoder out, which saves its memory and
    costs understanding of prompts."""
    transformer_file: Path | None = None
    """A single .safetensors file with the transformer's weights, as ComfyUI has it, in place of those of `path`, which
    still gives the configs, the text encoders and the VAE. Relative to the run file."""
    quantize: Literal["none", "int8", "nf4"] = "none"
    """Base weights of transformer and text encoders in 8 bit (torchao, any device) or 4 bit (bitsandbytes, CUDA)."""
    offload_vae: bool = False
    """The VAE rests on the CPU while it does not decode."""
    expert: Literal["high", "low"] | None = None
    """Which of two transformers carries the LoRA, where the model has one for high and one for low noise (Wan 2.2
    A14B); None takes `high`. The stochastic window must lie in its steps."""

    def __post_init__(self) -> None:
        if self.max_sequence_length is not None and self.max_sequence_length < 0:
            raise ValueError("max_sequence_length must be 0 or more")


@dataclass(frozen=True, kw_only=True)
class PromptsConfig:
    """Training prompts, `[prompts]`."""

    __pydantic_config__ = STRICT

    file: Path
    """A .txt file, one prompt a line without comments or options, or a .jsonl file of objects with `prompt`,
    optionally `negative_prompt`, and whatever the reward needs. Relative to the run file."""
    per_iteration: int = 8
    """Prompts, and so groups, in one iteration."""

    def __post_init__(self) -> None:
        if self.per_iteration < 1:
            raise ValueError("per_iteration must be 1 or more")


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How images are made in training, `[sampling]`."""

    __pydantic_config__ = STRICT

    height: int = 512
    """Pixels."""
    width: int = 512
    """Pixels."""
    steps: int = 10
    """Steps of a rollout, T. The paper trains with 10."""
    guidance: float = 1.0
    """Classifier-free guidance in rollout and update, v = negative + guidance (positive - negative); 1 is off and
    halves the work. (Z-Image's pipeline counts its guidance_scale from 0: ours is that plus 1.)"""
    embedded_guidance: float | None = None
    """Guidance that the transformer takes as an input (FLUX.1-dev, FLUX.2-dev); None takes the pipeline's default. Not
    read for other models."""
    frames: int = 1
    """Frames of a video (Wan): 1, 5, 9, ... The reward sees the middle one."""

    def __post_init__(self) -> None:
        if self.steps < 2:
            raise ValueError("steps must be 2 or more")
        if not 1 <= self.guidance < math.inf:
            raise ValueError("guidance must be 1 (off) or more")
        if self.embedded_guidance is not None and not 0 <= self.embedded_guidance < math.inf:
            raise ValueError("embedded_guidance must be 0 or more")
        if self.frames < 1:
            raise ValueError("frames must be 1 or more")


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """The adapter, `[lora]`."""

    __pydantic_config__ = STRICT

    rank: int = 32
    """Rank, 1 or more."""
    alpha: float | None = None
    """The weight change is alpha / rank * B A; None takes alpha = rank."""
    targets: Literal["attention", "attention_mlp", "all"] = "attention"
    """Which linear modules carry it: of the attention, also of the MLPs, or every one of the transformer."""
    ema_decay: float = 0.0
    """Decay an update of an exponential moving average of the adapter, which is then what is evaluated and saved;
    0 is off. The average warms up, so that the start does not weigh on it."""
    continue_from: Path | None = None
    """A LoRA file of the same layers and rank to go on from, in any format that `sfgrpo lora inspect` knows. Relative
    to the run file."""
    save_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Of the factors in the LoRA files."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError("rank must be 1 or more")
        if self.alpha is not None and not self.alpha > 0:
            raise ValueError("alpha must be above 0")
        if not 0 <= self.ema_decay < 1:
            raise ValueError("ema_decay must be from 0 to below 1")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW, `[optimizer]`."""

    __pydantic_config__ = STRICT

    lr: float = 3e-4
    """Learning rate."""
    beta1: float = 0.9
    """Decay of the mean of the gradient."""
    beta2: float = 0.999
    """Decay of the mean of its square."""
    eps: float = 1e-8
    """Added to the denominator."""
    weight_decay: float = 1e-4
    """Decoupled weight decay."""
    warmup: int = 0
    """Iterations over which the learning rate rises linearly to `lr`."""
    final_lr: float = 1.0
    """Share of `lr` that is left in the last iteration, 0 to 1; it falls linearly from the end of the warm-up."""

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ValueError("lr must be above 0 and finite")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be from 0 to below 1")
        for name in ("eps", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be 0 or more")
        if self.warmup < 0:
            raise ValueError("warmup must be 0 or more")
        if not 0 <= self.final_lr <= 1:
            raise ValueError("final_lr must be from 0 to 1")


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation with deterministic ODE samples of fixed seeds, `[eval]`."""

    __pydantic_config__ = STRICT

    file: Path | None = None
    """Prompt file of held-out prompts; None evaluates on the first training prompts. Scores are also reported by the
    field `tag` of a .jsonl file. Relative to the run file."""
    rewards: dict | None = None
    """The rewards to evaluate, as in `[rewards]`; None takes the trained ones. Their weighted sum chooses `best`."""
    every: int = 20
    """Iterations between evaluations; there is also one at the start and one at the end."""
    images_per_prompt: int = 1
    """Images of each prompt, each with a seed of its own."""
    max_prompts: int = 64
    """Only so many prompts from the start of the file."""
    steps: int | None = None
    """ODE steps; None takes those of the training. The paper evaluates with 40."""
    guidance: float | None = None
    """Guidance; None takes that of the training."""
    grid: int = 16
    """Images in the sample grids."""
    batch: int = 32
    """Images made at once."""

    def __post_init__(self) -> None:
        for name in ("every", "images_per_prompt", "max_prompts", "grid", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more")
        if self.steps is not None and self.steps < 1:
            raise ValueError("steps must be 1 or more")
        if self.guidance is not None and not 1 <= self.guidance < math.inf:
            raise ValueError("guidance must be 1 (off) or more")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run; the top level of the file."""

    __pydantic_config__ = STRICT

    model: ModelConfig
    prompts: PromptsConfig
    rewards: dict
    """`[rewards]`: name -> weight, or name -> table of `weight`, settings of the reward, and `kind` where the name is
    another than the reward's. What is trained is the weighted sum."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    grpo: GRPOConfig = field(default_factory=GRPOConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    watch: dict | None = None
    """`[watch]`: held-out rewards, as in `[rewards]`, that are reported at evaluations and never trained; of the weight
    only the sign matters: negative where less is better."""
    alarms: AlarmConfig = field(default_factory=AlarmConfig)
    failures: FailurePolicy = field(default_factory=FailurePolicy)
    iterations: int = 1000
    """Iterations of the run."""
    max_minutes: float | None = None
    """Wall-clock limit of the training; it stops after the iteration that reaches it. None is no limit."""
    seed: int = 0
    """Of all noise, the order of prompts and the LoRA's initial values."""
    save_every: int = 20
    """Iterations between writes of `last.safetensors`."""
    tensorboard: bool = False
    """Also write TensorBoard events (needs the package tensorboard)."""

    @property
    def is_guided(self) -> bool:
        """Whether training or evaluation encodes negative prompts."""
        return max(self.sampling.guidance, self.eval.guidance or 1.0) > 1

    def __post_init__(self) -> None:
        for name in ("iterations", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more")
        if self.max_minutes is not None and not self.max_minutes > 0:
            raise ValueError("max_minutes must be above 0")
        for table, names in (("rewards", self.rewards), ("eval.rewards", self.eval.rewards), ("watch", self.watch)):
            if names is not None and not names:
                raise ValueError(f"{table} names no reward")
            for name, value in (names or {}).items():
                try:
                    mix({name: value})
                except ValueError as error:
                    raise ValueError(f"{table}.{name}: {error}") from None
            if table != "watch" and names and not any(term.weight for term in mix(names).terms):
                aim = "trained" if table == "rewards" else "chosen as best"
                raise ValueError(
                    f"{table}: every weight is 0, so nothing would be {aim}; give one reward another weight, and put "
                    "what is only to be reported into [watch]"
                )
        updates, prompts = self.grpo.updates, self.prompts.per_iteration
        if updates > prompts:
            raise ValueError(
                f"grpo.updates {updates} is more than prompts.per_iteration {prompts}, but each update takes its own "
                "share of the prompts; lower one or raise the other"
            )
        # Any grid from 1 to 0 tells whether the window lies in it and injects noise.
        self.grpo.check_windows(torch.linspace(1, 0, self.sampling.steps + 1))

    @property
    def model_path(self) -> str:
        """Path or hub id of the model."""
        return str(MODEL_DIR) if self.model.path == EMBEDDED else self.model.path


def field_names(cls: type, prefix: str = "") -> list[str]:
    """Dotted names of all settings below a config class."""
    names = []
    for f in dataclasses.fields(cls):
        nested = _nested(cls, f.name)
        names += field_names(nested, f"{prefix}{f.name}.") if nested else [f"{prefix}{f.name}"]
    return names


def _nested(cls: type, name: str) -> type | None:
    from typing import get_type_hints

    hint = get_type_hints(cls)[name]
    return hint if dataclasses.is_dataclass(hint) else None


def load_config(path: str | Path, overrides: list[str] = ()) -> RunConfig:
    """Read a run file and apply overrides like `--grpo.clip-range 1e-4`; relative paths become absolute.

    A path in the file is relative to the file, one on the command line to the working directory. Raises UserError, one
    line naming the field, for whatever is wrong with either.
    """
    path = Path(path)
    given = parse_overrides(overrides)
    data = _overridden(path, given)
    try:
        config = validate(data, str(path))
    except UserError as error:
        words = str(error).removeprefix(str(path))
        raise UserError(_blamed(path, given, words) + words) from None
    return _resolve(config, path.parent)


def _overridden(path: Path, overrides: dict[str, Any]) -> dict[str, Any]:
    """The run file's tables with the overrides of `parse_overrides` in them."""
    data = _read(path)
    for name, value in overrides.items():
        table = data
        *tables, last = name.split(".")
        reward = name.startswith(REWARD_TABLES)
        for key in tables:
            inner = table.setdefault(key, {})
            if reward and isinstance(inner, (int, float)):
                inner = table[key] = {"weight": inner}
            table = inner
            if not isinstance(table, dict):
                raise UserError(f"{path}: {key} must be a table")
        if reward and isinstance(table.get(last), dict) and not isinstance(value, dict):
            table, last = table[last], "weight"
        if reward:
            value = with_paths(value, Path.cwd(), last)
            if last == "kind" and isinstance(value, str) and is_custom(value):
                value = locate(value, Path.cwd())
        table[last] = os.path.abspath(Path(value).expanduser()) if name in PATHS and value else value
    # Before the settings are checked, for checking them imports rewards of the user's own.
    for table in (data, data.get("eval")):
        if isinstance(table, dict):
            for name in ("rewards", "watch"):
                if isinstance(table.get(name), dict):
                    table[name] = with_own_code(table[name], path.parent)
    return data


def _blamed(path: Path, overrides: dict[str, Any], words: str) -> str:
    """What a mistake is in: the run file where it has it by itself, else the override that brings it, else both."""

    def told(some: dict[str, Any]) -> str:
        try:
            validate(_overridden(path, some), "")
        except UserError as error:
            return str(error)
        return ""

    if not overrides or told({}) == words:
        return str(path)
    for name, value in overrides.items():
        if told({name: value}) == words:
            return f"--{name} {value}"
    return f"{path} with {' '.join(f'--{name} {value}' for name, value in overrides.items())}"


def load_rewards(path: str | Path) -> dict[str, Any]:
    """The table `[rewards]` of a run file, or of a TOML file that has nothing else, as `load_config` resolves it.

    Raises UserError where there is none.
    """
    path = Path(path)
    rewards = _read(path).get("rewards")
    if not isinstance(rewards, dict) or not rewards:
        raise UserError(f"{path} has no table [rewards]")
    return with_paths(with_own_code(rewards, path.parent), path.parent)


def _read(path: Path) -> dict[str, Any]:
    if path.suffix.lower() in NOT_TOML and path.is_file():
        raise UserError(
            f"run file {path}: a run file is TOML, not {path.suffix[1:]}; start from one of configs/, and see "
            "`sfgrpo train --help` for the settings"
        )
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"run file {path} does not exist") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"run file {path} cannot be read: {error}") from None


def parse_overrides(arguments: list[str]) -> dict[str, Any]:
    """`--a.b-c VALUE` or `--a.b-c=VALUE` pairs to {"a.b_c": value}; values are TOML, or else plain strings."""
    known = field_names(RunConfig)
    out: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--"):
            raise UserError(f"unexpected argument {flag!r}; settings are given like --grpo.clip-range 1e-4")
        name, equals, value = flag[2:].partition("=")
        name = name.replace("-", "_")
        if name not in known and not name.startswith(REWARD_TABLES):
            raise UserError(f"unknown setting --{name}{hint(name, known)}")
        if not equals:
            if not rest:
                raise UserError(f"--{name} needs a value")
            value = rest.pop(0)
        try:
            out[name] = value if name in PATHS else tomllib.loads(f"v = {value}")["v"]
        except tomllib.TOMLDecodeError:
            out[name] = value
    return out


def validate(data: dict[str, Any], where: str) -> RunConfig:
    """Check types, names and ranges. Raises UserError with the first thing that is wrong."""
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(RunConfig).validate_python(data)
    except ValidationError as error:
        errors = error.errors()
        unknown = [_name(e) for e in errors if e["type"] in ("extra_forbidden", "unexpected_keyword_argument")]
        first, name = errors[0], _name(errors[0])
        known = field_names(RunConfig)
        if name in unknown:
            raise UserError(f"{where}: unknown field {name}{hint(name, known)}") from None
        if first["type"] in ("missing", "missing_keyword_only_argument"):
            others = "; ".join(f"unknown field {n}{hint(n, known)}" for n in unknown[:1])
            more = f"; also unknown: {', '.join(unknown[1:6])}" if unknown[1:] else ""
            raise UserError(f"{where}: field {name} is missing{'; ' if others else ''}{others}{more}") from None
        if first["type"] == "dict_type" and name in ("rewards", "eval.rewards", "watch"):
            kind = type(first["input"]).__name__
            raise UserError(f"{where}: {name} must be a table, name = weight; got a {kind}") from None
        message = first["msg"].removeprefix("Value error, ")
        got = f" (got {first['input']!r})" if first["type"] != "value_error" else ""
        raise UserError(f"{where}: {name + ': ' if name else ''}{message}{got}") from None


def _name(error: Any) -> str:
    """Dotted name of the field of one of pydantic's errors."""
    return ".".join(map(str, error["loc"]))


def _resolve(config: RunConfig, folder: Path) -> RunConfig:
    """Make relative paths absolute: files relative to the run file; the model too, where such a folder is there."""

    def absolute(path: Path | None) -> Path | None:
        return None if path is None else Path(os.path.abspath(folder / path.expanduser()))

    model = config.model
    if model.path != EMBEDDED and (folder / model.path).is_dir():
        model = dataclasses.replace(model, path=os.path.abspath(folder / model.path))
    model = dataclasses.replace(model, transformer_file=absolute(model.transformer_file))
    return dataclasses.replace(
        config,
        model=model,
        prompts=dataclasses.replace(config.prompts, file=absolute(config.prompts.file)),
        rewards=with_paths(config.rewards, folder),
        watch=with_paths(config.watch, folder),
        lora=dataclasses.replace(config.lora, continue_from=absolute(config.lora.continue_from)),
        eval=dataclasses.replace(
            config.eval, file=absolute(config.eval.file), rewards=with_paths(config.eval.rewards, folder)
        ),
    )


def to_toml(config: RunConfig | dict[str, Any]) -> str:
    """Settings as a run file, the resolved ones of a RunConfig as one that `load_config` reads back.

    Unset ones are left out.
    """
    import tomli_w

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items() if v is not None}
        return str(value) if isinstance(value, Path) else value

    return tomli_w.dumps(plain(config if isinstance(config, dict) else dataclasses.asdict(config)))


def without_folders(config: RunConfig) -> dict[str, Any]:
    """The settings as nested dicts, with file names alone where they name files here: what may be passed on."""

    def rewards(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {k: rewards(v, k) for k, v in value.items()}
        if key == "kind" and isinstance(value, str) and is_custom(value):
            place, function = split(value)
            return f"{Path(place).name}:{function}"
        if key == "url":
            return "http://server"
        is_path = key in PATH_SETTINGS and isinstance(value, str) and Path(value).exists()
        return Path(value).name if is_path else value

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        return value.name if isinstance(value, Path) else value

    out = plain(dataclasses.asdict(config))
    for table in (out, out["eval"]):
        table |= {name: rewards(table[name]) for name in ("rewards", "watch") if table.get(name) is not None}
    if Path(config.model.path).exists():
        out["model"]["path"] = Path(config.model.path).name
    return out
