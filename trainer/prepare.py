"""What is known, and checked, of a run before its model loads."""

from __future__ import annotations

import logging
import math
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch

from sfgrpo.dtypes import DTYPES
from sfgrpo.export import file_hash
from sfgrpo.processes import Processes
from sfgrpo.prompts import Prompt, read_prompts
from sfgrpo.rewards import Guard, Mix, Term, check_prompts, check_rewards, mix, number_names

from .config import RunConfig
from .errors import UserError
from .families import (
    Family,
    LoadOptions,
    check_embedded_guidance,
    check_size,
    family_class,
    family_of,
)

FREE_BYTES = 500_000_000


@dataclass
class Prepared:
    """What is known of a run before its model is loaded."""

    config: RunConfig
    out: Path
    prompts: list[Prompt]
    eval_prompts: list[Prompt]
    device: torch.device
    prompts_sha256: str


def check_inputs(config: RunConfig) -> tuple[list[Prompt], list[Prompt]]:
    """Check settings and files; returns the prompts and the evaluation's. Raises UserError."""
    family_of(config.model_path)
    try:
        prompts = read_prompts(config.prompts.file)
        eval_prompts = read_prompts(config.eval.file) if config.eval.file else prompts
    except ValueError as error:
        raise UserError(str(error)) from None
    file = config.model.transformer_file
    if file is not None and not file.is_file():
        raise UserError(f"file {file} (model.transformer_file) does not exist")
    if config.lora.continue_from is not None and not config.lora.continue_from.exists():
        raise UserError(f"LoRA file {config.lora.continue_from} (lora.continue_from) does not exist")
    if config.tensorboard and find_spec("tensorboard") is None:
        raise UserError("tensorboard = true needs the package tensorboard: pip install tensorboard")
    check_size(config.model_path, config.sampling.height, config.sampling.width, config.sampling.frames)
    check_embedded_guidance(config.model_path, config.sampling.embedded_guidance)
    return prompts, eval_prompts[: config.eval.max_prompts]


def check_scoring(config: RunConfig, prompts: list[Prompt], eval_prompts: list[Prompt]) -> None:
    """Raise UserError where a reward lacks its files or packages, or cannot score a prompt; loads no weights."""
    size = (config.sampling.height, config.sampling.width)
    for rewards, asked, file in (
        (config.rewards, prompts, config.prompts.file),
        (config.eval.rewards or config.rewards, eval_prompts, config.eval.file or config.prompts.file),
        (config.watch, eval_prompts, config.eval.file or config.prompts.file),
    ):
        if rewards is None:
            continue
        score = mix(rewards)
        try:
            check_rewards(score)
        except ValueError as error:
            raise UserError(str(error)) from None
        try:
            check_prompts(score, asked, size)
        except ValueError as error:
            raise UserError(f"{file}: {error}") from None


def prepare(config: RunConfig, out: Path, claim: Callable[[], None] = lambda: None) -> Prepared:
    """Check settings, files, device and disk. Raises UserError, before anything heavy is loaded.

    Of several processes the main one checks, so that a mistake is told once, and hands on what it found;
    it calls `claim` before it looks into the run folder.
    """
    processes = start_processes(config.model.device)
    found: Prepared | str | None = None
    if processes.is_main:
        try:
            prompts, eval_prompts = check_inputs(config)
            check_scoring(config, prompts, eval_prompts)
            device = pick_device(config.model.device)
            family_class(config.model_path).check_options(load_options(config, device))
            claim()
            check_folder(out)
            found = Prepared(config, out, prompts, eval_prompts, device, file_hash(config.prompts.file))
        except UserError as error:
            found = str(error)
    found = processes.gather(found)[0]
    if isinstance(found, str):
        raise UserError(found, of_all=True)
    return found if processes.is_main else replace(found, device=pick_device(config.model.device))


def start_processes(device: str) -> Processes:
    """Join the other processes of `accelerate launch`, where there are any."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from accelerate import PartialState

        PartialState(cpu=device == "cpu")
    return Processes.current()


def eval_rewards(config: RunConfig) -> tuple[Mix, dict[str, float]]:
    """What evaluations score with, and the rewards whose fall is an alarm, with the sign of what is better.

    Those are all that are reported, but the ones that the policy is rewarded for making small.
    """
    terms = mix(config.eval.rewards or config.rewards).terms
    watched = [
        Term(t.name, t.fn, math.copysign(1.0, t.weight)) for t in (mix(config.watch).terms if config.watch else ())
    ]
    signs = [t.weight for t in watched]
    terms = number_names([*terms, *(Term(t.name, t.fn, 0.0) for t in watched)])
    directions = {t.name: 1.0 for t in terms[: len(terms) - len(signs)] if t.weight > 0}
    directions |= {t.name: sign for t, sign in zip(terms[len(terms) - len(signs) :], signs, strict=True)}
    return Mix(tuple(terms), Guard(config.failures)), directions


def check_sampling(config: RunConfig, family: Family) -> None:
    """Raise UserError for guidance that the model does not take, and for a window with steps of the other expert."""
    s = config.sampling
    for guidance in (s.guidance, config.eval.guidance or 1.0):
        family.check_guidance(guidance)
    trained = family.trained_steps(family.sigmas(s.steps, s.height, s.width))
    for window in config.grpo.windows(len(trained)):
        if bool((window & ~trained).any()):
            steps = trained.nonzero().flatten().tolist()
            span = f"window_start {steps[0]} or more, window_stop {steps[-1] + 1} or less" if steps else "more steps"
            raise UserError(f"the stochastic window has steps of the expert that is not trained; set {span}")


def load_options(config: RunConfig, device: torch.device) -> LoadOptions:
    """How the model of a run is loaded."""
    model = config.model
    return LoadOptions(
        dtype=DTYPES[model.dtype],
        device=device,
        quantize=model.quantize,
        transformer_file=model.transformer_file,
        max_sequence_length=model.max_sequence_length,
        embedded_guidance=config.sampling.embedded_guidance,
        offload_vae=model.offload_vae,
        expert=model.expert,
    )


def check_writable(out: Path) -> None:
    """Make a folder. Raises UserError where it cannot be written or the disk is full."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
        free = shutil.disk_usage(out).free
    except OSError as error:
        raise UserError(f"cannot write to the folder {out}: {error.strerror or error}; choose another --out") from None
    if free < FREE_BYTES:
        raise UserError(
            f"only {free // 1_000_000} MB are free where {out} lies; a run needs {FREE_BYTES // 1_000_000} MB"
        )


def check_folder(out: Path) -> None:
    """Make the run folder. Raises UserError where it holds another run or cannot be written."""
    check_writable(out)
    if (out / "metrics.jsonl").exists():
        raise UserError(f"{out} already holds a run; choose another --out or remove it")


def pick_device(name: str) -> torch.device:
    """The device of this name, or accelerate's choice for `auto`. Raises UserError for one that is not there."""
    if name == "auto":
        from accelerate import PartialState

        name = str(PartialState().device)
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # bitsandbytes puts its weights on the current device
        if device.type == "meta":
            raise RuntimeError("it holds no numbers")
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from None
    return device


def quiet() -> None:
    """Silence what libraries print of their own; the progress bar and errors are what a user reads."""
    warnings.filterwarnings("ignore")
    for name in ("diffusers", "transformers", "accelerate", "torch"):
        logging.getLogger(name).setLevel(logging.CRITICAL if name == "diffusers" else logging.ERROR)
    import diffusers
    import transformers

    # What goes wrong is raised as well, and told in one line.
    diffusers.utils.logging.set_verbosity(logging.CRITICAL)
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
