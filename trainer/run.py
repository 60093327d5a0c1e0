"""A training run: set up, iterate, evaluate, write. `prepare` checks all that can be checked before weights load."""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from tqdm import tqdm

from sfgrpo import __version__
from sfgrpo.alarms import Alarm, find_alarms, rises
from sfgrpo.dtypes import DTYPES
from sfgrpo.ema import EMA
from sfgrpo.evaluate import Evaluation, evaluate
from sfgrpo.export import file_hash, save_lora
from sfgrpo.loop import StepwiseGRPO
from sfgrpo.metrics import plain
from sfgrpo.pictures import tile
from sfgrpo.prompts import Prompt, pick_prompts, read_prompts
from sfgrpo.rewards import Guard, Mix, RewardError, Term, check_prompts, check_rewards, mix, number_names
from sfgrpo.update import set_learning_rate

from .config import RunConfig, to_toml, without_folders
from .errors import UserError
from .families import (
    Family,
    LoadOptions,
    check_embedded_guidance,
    check_size,
    family_class,
    family_of,
    load_model,
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


@dataclass
class Result:
    """What a run leaves."""

    out: Path
    """The run folder."""
    start: Evaluation
    end: Evaluation
    iterations: int
    seconds: float
    """Of the whole run, loading and evaluation included."""
    best: float
    """Highest eval total."""


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
    if config.lora.continue_from is not None and not config.lora.continue_from.is_file():
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


def prepare(config: RunConfig, out: Path) -> Prepared:
    """Check settings, files, device and disk. Raises UserError, before anything heavy is loaded."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("this version trains in one process; start it with `sfgrpo train`, not `accelerate launch`")
    prompts, eval_prompts = check_inputs(config)
    check_scoring(config, prompts, eval_prompts)
    device = pick_device(config.model.device)
    family_class(config.model_path).check_options(load_options(config, device))
    check_folder(out)
    return Prepared(config, out, prompts, eval_prompts, device, file_hash(config.prompts.file))


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


class Run:
    """A run with its model loaded."""

    def __init__(self, prepared: Prepared) -> None:
        from .memory import without_weights
        from .policy import LoRAPolicy, add_lora

        config, self.prepared = prepared.config, prepared
        check_sampling(config, without_weights(config, encoders=False)[0])
        self.config, self.out, self.device = config, prepared.out, prepared.device
        self.started = time.time()
        dtype, s = DTYPES[config.model.dtype], config.sampling
        self.prompts = prepared.prompts + prepared.eval_prompts
        self.eval_index = range(len(prepared.prompts), len(self.prompts))
        # One after the other: encoders and transformer need not fit beside each other.
        conditioning = self._encode()
        self.family: Family = self._load("denoiser")
        self.latent_shape = self.family.latent_shape(s.height, s.width, s.frames)
        self.sigmas = self.family.sigmas(s.steps, s.height, s.width)
        self.eval_sigmas = self.family.sigmas(config.eval.steps or s.steps, s.height, s.width)
        self.policy = LoRAPolicy(self.family, conditioning, guidance=s.guidance, dtype=dtype)
        add_lora(self.family, config.lora, config.seed)
        if config.model.gradient_checkpointing:
            self.family.transformer.enable_gradient_checkpointing()
            # diffusers checkpoints only in train mode; these transformers have no dropout that it would switch on.
            self.family.transformer.train()
        parameters = self.policy.trainable_parameters()
        o = config.optimizer
        self.optimizer = torch.optim.AdamW(
            parameters, lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=o.weight_decay
        )
        self.ema = EMA(parameters, config.lora.ema_decay)
        self.eval_score, self.watched = eval_rewards(config)
        self.loop = StepwiseGRPO(
            self.policy,
            mix(config.rewards, config.failures),
            self.optimizer,
            sigmas=self.sigmas,
            latent_shape=self.latent_shape,
            config=config.grpo,
            seed=config.seed,
            device=self.device,
            on_progress=self._progress,
            after_update=self.ema.update,
            scaler=torch.amp.GradScaler(self.device.type) if config.model.dtype == "fp16" else None,
        )
        self.bar: tqdm | None = None
        self.reward = math.nan
        self.best = -math.inf
        self.evaluations: list[dict] = []
        self.rewards: list[float] = []
        self.start: Evaluation | None = None
        self.alarms: list[Alarm] = []
        self.iterations_done = 0

    def _load(self, parts: str) -> Family:
        return load_model(self.config.model_path, load_options(self.config, self.device), parts)

    def _encode(self):
        """Encode every prompt that this run will use, with encoders that are gone afterwards."""
        from .policy import encode_prompts

        config, count = self.config, len(self.prepared.prompts)
        needed = set(self.eval_index)
        for iteration in range(config.iterations):
            needed.update(pick_prompts(count, config.prompts.per_iteration, iteration, config.seed))
            if len(needed) == len(self.prompts):
                break
        guided = max(config.sampling.guidance, config.eval.guidance or 1.0) > 1
        family = self._load("encoders")
        conditioning = encode_prompts(family, self.prompts, needed, guided)
        family.free_encoders()
        del family
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return conditioning

    def _progress(self, phase: str, done: int, total: int) -> None:
        if self.bar is not None:
            share = f" {100 * done // total:2d}%" if total else ""
            reward = "" if math.isnan(self.reward) else f", reward {self.reward:.3f}"
            self.bar.set_description_str(f"{phase}{share}{reward}")

    def evaluate(self, iteration: int) -> Evaluation:
        """ODE samples of the averaged adapter; writes the grid and, where the score is the highest yet, `best`."""
        config = self.config
        guidance = config.eval.guidance or config.sampling.guidance
        with self.ema.swapped_in(), self.policy.guided(guidance):
            result = evaluate(
                self.policy,
                self.prompts,
                self.eval_index,
                self.eval_score,
                sigmas=self.eval_sigmas,
                latent_shape=self.latent_shape,
                images_per_prompt=config.eval.images_per_prompt,
                grid=config.eval.grid,
                batch=config.eval.batch,
                device=self.device,
                decode_batch=config.grpo.decode_batch,
                on_progress=lambda done, total: self._progress("evaluate", done, total),
            )
        tile(result.images, result.captions).save(self.out / "samples" / f"{iteration:05d}.png")
        self._tell(result.problems, f"evaluation after iteration {iteration}")
        self.start = self.start or result
        rising = rises(self.rewards) or result.scores["total"] > self.start.scores["total"]
        self.alarms = find_alarms(self.start, result, self.watched, config.alarms, rising=rising)
        for alarm in self.alarms:
            self._say(f"alarm after iteration {iteration}: {alarm.words}; look at samples/{iteration:05d}.png")
        row = {"iteration": iteration, "scores": result.scores, "counts": result.counts, "looks": result.looks}
        self._log("evals.jsonl", row | {"alarms": [{"name": a.name, "words": a.words} for a in self.alarms]})
        self.evaluations.append({"iteration": iteration, "scores": result.scores})
        stopped = config.alarms.stop and self.alarms
        if iteration and result.scores["total"] > self.best and not stopped:
            self.best = result.scores["total"]
            self.save("best", iteration)
        return result

    def _say(self, words: str) -> None:
        if self.bar is not None:
            self.bar.write(words)

    def _tell(self, problems: list[str], where: str) -> None:
        """Each different problem once, with how often it came."""
        for words, times in Counter(problems).items():
            self._say(f"warning: {where}: {words}" + (f" ({times} times)" if times > 1 else ""))

    def save(self, name: str, iteration: int) -> Path:
        """Write the averaged adapter as `<name>.safetensors`."""
        from .policy import lora_state

        path = self.out / f"{name}.safetensors"
        config = self.config
        with self.ema.swapped_in():
            state = lora_state(self.family, DTYPES[config.lora.save_dtype])
        metadata = {
            "format": "pt",
            "software": f"stepwise-grpo {__version__}",
            "base_model": without_folders(config)["model"]["path"],
            "rank": str(config.lora.rank),
            "alpha": "folded into lora_B",
            "iteration": str(iteration),
            "prompts_sha256": self.prepared.prompts_sha256,
            "config": to_toml(without_folders(config)),
        }
        save_lora(state, path, metadata)
        return path

    def _log(self, file: str, row: dict) -> None:
        with (self.out / file).open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(plain(row)) + "\n")

    def train(self) -> Result:
        """All iterations, with evaluations, saves and the report."""
        from .report import write_report

        config = self.config
        (self.out / "samples").mkdir(exist_ok=True)
        (self.out / "config.toml").write_text(to_toml(config), encoding="utf-8")
        (self.out / "evals.jsonl").unlink(missing_ok=True)  # of a run that ended before its first iteration did
        writer = None
        if config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(str(self.out))
        bar = self.bar = tqdm(
            total=config.iterations, unit="it", dynamic_ncols=True, smoothing=0.1, leave=True, file=sys.stderr
        )
        try:
            start = end = self.evaluate(0)
            begun = time.time()
            for iteration in range(config.iterations):
                self._set_lr(iteration)
                index = pick_prompts(len(self.prepared.prompts), config.prompts.per_iteration, iteration, config.seed)
                done = self.loop.iterate(iteration, self.prompts, index)
                self.reward = done.metrics["reward"]
                self.rewards.append(self.reward)
                self._tell(done.problems, f"iteration {iteration}")
                if iteration == 0 and config.grpo.updates == 1:
                    bar.write(
                        "with grpo.updates = 1 the ratio is always 1 and nothing is clipped; rollout and update agree "
                        f"to {done.metrics['ratio/rounding']:.1e} in log-probability"
                    )
                if not (done.metrics["updates"] or done.metrics["updates_skipped"]):
                    bar.write(f"warning: iteration {iteration} taught nothing: rewards of a prompt were equal")
                rounding, clip = done.metrics["ratio/rounding"], config.grpo.clip_range
                if config.grpo.updates > 1 and rounding > clip / 2:
                    bar.write(
                        f"warning: rollout and update differ by {rounding:.1e} from rounding alone, with a clip range "
                        f"of {clip:.1e}; use model.dtype fp32 or grpo.updates 1"
                    )
                row = {"iteration": iteration, "lr": self.optimizer.param_groups[0]["lr"], **done.metrics}
                self._log("metrics.jsonl", row)
                if writer is not None:
                    for name, value in row.items():
                        if isinstance(value, (int, float)):
                            writer.add_scalar(name, value, iteration)
                bar.update()
                last = iteration + 1 == config.iterations
                if config.max_minutes is not None and time.time() - begun > 60 * config.max_minutes:
                    last = True
                self.iterations_done = iteration + 1
                if last or (iteration + 1) % config.save_every == 0:
                    self.save("last", iteration + 1)
                if last or (iteration + 1) % config.eval.every == 0:
                    tile(done.images[: config.eval.grid]).save(
                        self.out / "samples" / f"{iteration + 1:05d}_rollout.png"
                    )
                    end = self.evaluate(iteration + 1)
                    write_report(self.out)
                    if config.alarms.stop and self.alarms:
                        kept = (
                            "best.safetensors is from before it"
                            if self.best > -math.inf
                            else "nothing before it was better than the start"
                        )
                        self._say(f"stopped by an alarm (alarms.stop); {kept}")
                        self.save("last", iteration + 1)
                        last = True
                if last:
                    break
        except BaseException as error:
            self._save_what_there_is(bar)
            if isinstance(error, RewardError):
                raise UserError(str(error)) from None
            raise
        finally:
            bar.close()
            self.bar = None
            if writer is not None:
                writer.close()
        return Result(self.out, start, end, self.iterations_done, time.time() - self.started, self.best)

    def _save_what_there_is(self, bar: tqdm) -> None:
        """After an error or Ctrl-C; whatever goes wrong here must not hide what stopped the run."""
        from .report import write_report

        if not self.iterations_done:
            return
        try:
            bar.write(f"stopped; the LoRA so far is in {self.save('last', self.iterations_done)}")
            write_report(self.out)
        except Exception as error:
            bar.write(f"stopped; the LoRA so far could not be saved: {error}")

    def _set_lr(self, iteration: int) -> None:
        rate = self.config.optimizer
        set_learning_rate(
            self.optimizer, rate.lr, iteration, self.config.iterations, warmup=rate.warmup, final=rate.final_lr
        )


def train(config: RunConfig, out: Path) -> Result:
    """Prepare and run. Raises UserError for what the user can mend."""
    prepared = prepare(config, out)
    quiet()
    run = Run(prepared)
    return run.train()
