"""A training run: set up, iterate, evaluate, write."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from sfgrpo import __version__
from sfgrpo.alarms import Alarm, find_alarms, rises
from sfgrpo.dtypes import DTYPES
from sfgrpo.ema import EMA
from sfgrpo.evaluate import Evaluation, evaluate
from sfgrpo.export import save_lora
from sfgrpo.loop import GradientError, StepwiseGRPO
from sfgrpo.metrics import plain
from sfgrpo.pictures import tile
from sfgrpo.processes import Processes
from sfgrpo.prompts import pick_prompts
from sfgrpo.rewards import RewardError, mix
from sfgrpo.update import set_learning_rate

from .config import RunConfig, to_toml, without_folders
from .disk import WriteError, append_line, events_writer, write_png, write_whole, writing
from .errors import UserError
from .families import Family, load_model
from .lock import FolderLock
from .prepare import Prepared, check_sampling, eval_rewards, load_options, prepare, quiet

EVENTS = "events.out.tfevents"
NOTHING = "stopped before the first iteration ended; there is nothing to save"


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
    best_iteration: int | None
    """After which best.safetensors was written; None where no evaluation was better than the one at the start."""


class Run:
    """A run with its model loaded."""

    def __init__(self, prepared: Prepared) -> None:
        from .memory import without_weights
        from .policy import LoRAPolicy, add_lora

        config, self.prepared, self.processes = prepared.config, prepared, Processes.current()
        check_sampling(config, without_weights(config, encoders=False)[0])
        self.config, self.out, self.device = config, prepared.out, prepared.device
        self.started = time.time()
        dtype, s = DTYPES[config.model.dtype], config.sampling
        self.prompts = prepared.prompts + prepared.eval_prompts
        self.eval_index = range(len(prepared.prompts), len(self.prompts))
        self.remarks: list[str] = []
        """What the user is told before the first iteration."""
        # One after the other: encoders and transformer need not fit beside each other.
        conditioning = self._encode()
        self.family: Family = self._load("denoiser")
        self.latent_shape = self.family.latent_shape(s.height, s.width, s.frames)
        self.sigmas = self.family.sigmas(s.steps, s.height, s.width)
        self.eval_sigmas = self.family.sigmas(config.eval.steps or s.steps, s.height, s.width)
        self.policy = LoRAPolicy(self.family, conditioning, guidance=s.guidance, dtype=dtype)
        self.remarks += add_lora(self.family, config.lora, config.seed)
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
            processes=self.processes,
        )
        self.bar: tqdm | None = None
        self.reward = math.nan
        self.best = -math.inf
        """Highest total of an evaluation, that at the start included."""
        self.best_iteration: int | None = None
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
        from .prompt_lengths import cut_prompts

        config, count = self.config, len(self.prepared.prompts)
        needed = set(self.eval_index)
        for iteration in range(config.iterations):
            needed.update(pick_prompts(count, config.prompts.per_iteration, iteration, config.seed))
            if len(needed) == len(self.prompts):
                break
        guided = config.is_guided
        family = self._load("encoders")
        if self.processes.is_main:
            self.remarks += cut_prompts(family, self.prompts, guided)
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
        """ODE samples of the averaged adapter; writes the grid and, where it beats the start and all since, `best`."""
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
                processes=self.processes,
                on_progress=lambda done, total: self._progress("evaluate", done, total),
            )
        self._save_picture(f"{iteration:05d}.png", result.images, result.captions)
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
        if result.scores["total"] > self.best and not stopped:
            self.best = result.scores["total"]
            if iteration:
                self.best_iteration = iteration
                self.save("best", iteration)
        return result

    def _say(self, words: str) -> None:
        if self.bar is not None and self.processes.is_main:
            self.bar.write(words)

    def _save_picture(self, name: str, images: torch.Tensor, captions: Sequence[str] = ()) -> None:
        if self.processes.is_main:
            path = self.out / "samples" / name
            with writing(path):
                write_png(path, tile(images, captions))

    def _tell(self, problems: list[str], where: str) -> None:
        """Each different problem once, with how often it came."""
        for words, times in Counter(problems).items():
            self._say(f"warning: {where}: {words}" + (f" ({times} times)" if times > 1 else ""))

    def save(self, name: str, iteration: int) -> Path:
        """Write the averaged adapter as `<name>.safetensors`."""
        from .policy import lora_state

        path = self.out / f"{name}.safetensors"
        if not self.processes.is_main:
            return path
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
        with writing(path):
            save_lora(state, path, metadata)
        return path

    def _log(self, file: str, row: dict) -> None:
        if not self.processes.is_main:
            return
        with writing(self.out / file):
            append_line(self.out / file, json.dumps(plain(row)))

    def _open_folder(self):
        """Lay out the run folder; returns the writer of TensorBoard events, or None."""
        if not self.processes.is_main:
            return None
        with writing(self.out / "config.toml"):
            (self.out / "samples").mkdir(exist_ok=True)
            write_whole(self.out / "config.toml", to_toml(self.config))
            (self.out / "evals.jsonl").unlink(missing_ok=True)  # of a run that ended before its first iteration did
        if not self.config.tensorboard:
            return None
        with writing(self.out / EVENTS):
            return events_writer(self.out)

    def _report(self) -> None:
        from .report import write_report

        if self.processes.is_main:
            with writing(self.out / "report.html"):
                write_report(self.out)

    def train(self) -> Result:
        """All iterations, with evaluations, saves and the report."""
        config = self.config
        writer = self._open_folder()
        bar = self.bar = tqdm(
            total=config.iterations,
            unit="it",
            dynamic_ncols=True,
            smoothing=0.1,
            leave=True,
            file=sys.stderr,
            disable=not self.processes.is_main,
        )
        try:
            for words in self.remarks:
                self._say(f"warning: {words}")
            start = end = self.evaluate(0)
            begun = time.time()
            for iteration in range(config.iterations):
                self._set_lr(iteration)
                index = pick_prompts(len(self.prepared.prompts), config.prompts.per_iteration, iteration, config.seed)
                done = self.loop.iterate(iteration, self.prompts, index)
                self.iterations_done = iteration + 1  # of the weights, whatever of it can still be written
                self.reward = done.metrics["reward"]
                self.rewards.append(self.reward)
                self._tell(done.problems, f"iteration {iteration}")
                for note in done.notes:
                    self._say(f"iteration {iteration}: {note}")
                if iteration == 0 and config.grpo.updates == 1:
                    self._say(
                        "with grpo.updates = 1 the ratio is always 1 and nothing is clipped; rollout and update agree "
                        f"to {done.metrics['ratio/rounding']:.1e} in log-probability"
                    )
                if not (done.metrics["updates"] or done.metrics["updates_skipped"]):
                    self._say(f"warning: iteration {iteration} taught nothing: rewards of a prompt were equal")
                rounding, clip = done.metrics["ratio/rounding"], config.grpo.clip_range
                if config.grpo.updates > 1 and rounding > clip / 2:
                    self._say(
                        f"warning: rollout and update differ by {rounding:.1e} from rounding alone, with a clip range "
                        f"of {clip:.1e}; use model.dtype fp32 or grpo.updates 1"
                    )
                row = {"iteration": iteration, "lr": self.optimizer.param_groups[0]["lr"], **done.metrics}
                self._log("metrics.jsonl", row)
                if writer is not None:
                    with writing(self.out / EVENTS):
                        for name, value in row.items():
                            if isinstance(value, (int, float)):
                                writer.add_scalar(name, value, iteration)
                bar.update()
                last = iteration + 1 == config.iterations
                late = config.max_minutes is not None and time.time() - begun > 60 * config.max_minutes
                last = self.processes.any(late) or last
                if last or (iteration + 1) % config.save_every == 0:
                    self.save("last", iteration + 1)
                if last or (iteration + 1) % config.eval.every == 0:
                    self._save_picture(f"{iteration + 1:05d}_rollout.png", done.images[: config.eval.grid])
                    end = self.evaluate(iteration + 1)
                    self._report()
                    if config.alarms.stop and self.alarms:
                        kept = (
                            "best.safetensors is from before it"
                            if self.best_iteration is not None
                            else "nothing before it was better than the start"
                        )
                        self._say(f"stopped by an alarm (alarms.stop); {kept}")
                        self.save("last", iteration + 1)
                        last = True
                if last:
                    break
            if writer is not None:
                with writing(self.out / EVENTS):
                    writer.close()
        except BaseException as error:
            self._save_what_there_is(error)
            if isinstance(error, WriteError):
                raise error.with_safe(self._safe()) from None
            if isinstance(error, (RewardError, GradientError)):
                raise UserError(str(error), of_all=True) from None
            raise
        finally:
            bar.close()
            self.bar = None
            if writer is not None:
                with contextlib.suppress(OSError):  # told above, where it is the first error
                    writer.close()
        return Result(self.out, start, end, self.iterations_done, time.time() - self.started, self.best_iteration)

    def _save_what_there_is(self, why: BaseException) -> None:
        """After an error or Ctrl-C; whatever goes wrong here must not hide what stopped the run."""
        if not self.iterations_done:
            if isinstance(why, KeyboardInterrupt):
                self._say(NOTHING)
            return
        try:
            self._say(f"stopped; the LoRA so far is in {self.save('last', self.iterations_done)}")
        except Exception as error:
            self._say(f"stopped; the LoRA so far could not be saved: {error}")
        try:
            self._report()
        except Exception as error:
            self._say(f"the report could not be written: {error}")

    def _safe(self) -> str:
        """What the run folder still holds, in words."""
        kept = [n for n in ("last.safetensors", "best.safetensors") if (self.out / n).exists()]
        files = f"{' and '.join(kept)} and the rows" if kept else "no LoRA was saved; the rows"
        return f"{files} written before are whole" if self.out.exists() else "the folder is gone"

    def _set_lr(self, iteration: int) -> None:
        rate = self.config.optimizer
        set_learning_rate(
            self.optimizer, rate.lr, iteration, self.config.iterations, warmup=rate.warmup, final=rate.final_lr
        )


def train(config: RunConfig, out: Path) -> Result:
    """Prepare and run. Raises UserError for what the user can mend."""
    with FolderLock(out) as lock:
        try:
            prepared = prepare(config, out, lock.take)
            quiet()
            run = Run(prepared)
        except KeyboardInterrupt:
            if Processes.current().is_main:
                print(NOTHING)
            raise
        return run.train()
