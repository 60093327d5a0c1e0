"""One training inside ComfyUI: the core's loop around a MODEL, with evaluations, checkpoints and progress.

The headless counterpart is trainer/run.py; both run sfgrpo.loop.StepwiseGRPO on the same seeds, prompts and factors, so
that equal settings give equal LoRAs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import comfy.model_management
import torch
from torch import Tensor

from ..sfgrpo import __version__
from ..sfgrpo.config import GRPOConfig
from ..sfgrpo.ema import EMA
from ..sfgrpo.evaluate import Evaluation, evaluate
from ..sfgrpo.export import fold
from ..sfgrpo.loop import StepwiseGRPO
from ..sfgrpo.lora import TARGETS, choose_targets
from ..sfgrpo.lora_files.convert import doubts, factors_named
from ..sfgrpo.lora_files.file import LoRAFile
from ..sfgrpo.pictures import tile
from ..sfgrpo.prompts import Prompt, pick_prompts
from ..sfgrpo.update import set_learning_rate
from .comfy_model import ComfyPolicy, open_model
from .comfy_patch import LoRA, lora_places, make_lora
from .files import Checkpoints

SHOWN = 16
"""Most samples that are kept and drawn."""

LIVE_SIZE = 256
"""Longest side of one image in the live preview, pixels."""

PHASE_SHARES = {"sample": 0.3, "estimate": 0.1, "score": 0.1, "update": 0.5}
"""Rough shares of an iteration, for the progress bar."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a training that are not the algorithm's."""

    iterations: int
    prompts_per_iteration: int
    learning_rate: float
    final_lr: float
    """Share of it that is left in the last iteration."""
    rank: int
    alpha: float
    """0 takes the rank."""
    layers: str
    """One of sfgrpo.lora.TARGETS."""
    ema_decay: float
    guidance: float
    seed: int
    adapter: str
    """One of nodes.comfy_patch.ADAPTERS."""
    gradient_checkpointing: bool
    eval_every: int
    """Iterations between evaluations."""
    eval_prompts: int
    """Prompts of an evaluation, from the start of the list."""
    eval_images: int
    """Images a prompt."""


@dataclass
class Trained:
    """What a training leaves."""

    state: dict[str, Tensor]
    """The LoRA, as in a LoRA file."""
    start: Evaluation
    end: Evaluation
    rows: list[dict]
    """Metrics of each iteration."""
    evaluations: list[dict]
    saved: dict[str, str]
    """best, last -> where they lie."""


@dataclass
class Watcher:
    """Where progress goes."""

    progress: Callable[[float, float], None] = lambda done, total: None
    """progress(done, total)."""
    text: Callable[[str], None] = lambda text: None
    picture: Callable[[Any], None] = lambda picture: None
    """picture(PIL image)."""


@dataclass
class Training:
    """A training that is under way."""

    model: Any
    vae: Any
    lora: LoRA
    """Of `training_lora`."""
    score: Callable
    prompts: Sequence[Prompt]
    positive: Sequence
    """A CONDITIONING for each prompt."""
    negative: Sequence | None
    sigmas: Tensor
    latent_shape: tuple[int, ...]
    config: GRPOConfig
    settings: Settings
    checkpoints: Checkpoints
    watcher: Watcher

    rows: list[dict] = field(default_factory=list)
    evaluations: list[dict] = field(default_factory=list)
    saved: dict[str, str] = field(default_factory=dict)
    best: float = -math.inf

    def run(self) -> Trained:
        """Train to the end. Whatever stops it, the LoRA of the last whole iteration is in a file by then."""
        settings, lora = self.settings, self.lora
        with open_model(
            self.model,
            positive=self.positive,
            negative=self.negative,
            guidance=settings.guidance,
            vae=self.vae,
            latent_shape=self.latent_shape,
            lora=lora,
            gradient_checkpointing=settings.gradient_checkpointing,
        ) as policy:
            optimizer = torch.optim.AdamW(lora.parameters(), lr=settings.learning_rate, weight_decay=1e-4)
            ema = EMA(lora.parameters(), settings.ema_decay)
            loop = StepwiseGRPO(
                policy,
                self.score,
                optimizer,
                sigmas=self.sigmas.clone(),
                latent_shape=self.latent_shape,
                config=self.config,
                seed=settings.seed,
                device=policy.device,
                on_progress=self._on_progress,
                after_update=ema.update,
                scaler=policy.scaler(),
            )
            try:
                start = end = self._evaluate(0, policy, lora, ema)
                for iteration in range(settings.iterations):
                    set_learning_rate(
                        optimizer, settings.learning_rate, iteration, settings.iterations, final=settings.final_lr
                    )
                    index = pick_prompts(len(self.prompts), settings.prompts_per_iteration, iteration, settings.seed)
                    # Not kept: an iteration holds all latents of its rollout.
                    metrics = loop.iterate(iteration, self.prompts, index).metrics
                    if metrics["updates"] and not metrics["grad_norm"]:
                        raise RuntimeError(
                            "no gradient reaches the LoRA; try adapter `weight`, or report this model's name"
                        )
                    self.rows.append({"iteration": iteration + 1, **metrics})
                    self._save("last", lora, ema)
                    last = iteration + 1 == settings.iterations
                    if last or (iteration + 1) % settings.eval_every == 0:
                        end = self._evaluate(iteration + 1, policy, lora, ema)
            except BaseException:
                # Cancel among others, which is no Exception.
                self.watcher.text(self._stopped())
                raise
            state = self._state(lora, ema)
        return Trained(state, start, end, self.rows, self.evaluations, self.saved)

    def _stopped(self) -> str:
        if "last" not in self.saved:
            return "stopped before the first iteration was done; there is no LoRA yet"
        return f"stopped; the LoRA of iteration {len(self.rows)} is in {self.saved['last']}"

    def _on_progress(self, phase: str, done: int, total: int) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()
        share, iterations = done / max(total, 1), self.settings.iterations
        before = sum(
            s for p, s in PHASE_SHARES.items() if list(PHASE_SHARES).index(p) < list(PHASE_SHARES).index(phase)
        )
        self.watcher.progress(len(self.rows) + before + PHASE_SHARES[phase] * share, iterations)
        self.watcher.text(f"iteration {len(self.rows) + 1} of {iterations}: {phase} {share:.0%}\n{self._so_far()}")

    def _so_far(self) -> str:
        """Reward so far in a line, which is all that the node has room for, and the file in another."""
        parts = []
        if self.rows:
            recent = [row["reward"] for row in self.rows[-5:]]
            parts.append(f"reward while training {sum(recent) / len(recent):.3f}")
        if self.evaluations:
            first, last = (self.evaluations[i]["scores"]["total"] for i in (0, -1))
            parts.append(f"samples {first:.3f}" + (f" -> {last:.3f}" if len(self.evaluations) > 1 else ""))
        lines = [", ".join(parts)]
        idle = sum(not (row["updates"] or row["updates_skipped"]) for row in self.rows)
        if idle:
            lines.append(f"{idle} of {len(self.rows)} iterations taught nothing: rewards of a prompt were equal")
        if "last" in self.saved:
            lines.append(f"saved: {self.saved['last']}")
        return "\n".join(lines)

    def _evaluate(self, iteration: int, policy: ComfyPolicy, lora: LoRA, ema: EMA) -> Evaluation:
        """ODE samples of fixed prompts and seeds; saves `best` where their reward is the highest yet."""
        settings = self.settings
        count = min(settings.eval_prompts, len(self.prompts))

        def on_progress(done: int, total: int) -> None:
            comfy.model_management.throw_exception_if_processing_interrupted()
            self.watcher.text(f"samples after iteration {iteration}: {done} of {total}\n{self._so_far()}")

        with ema.swapped_in(), torch.no_grad():
            result = evaluate(
                policy,
                self.prompts,
                range(count),
                self.score,
                sigmas=self.sigmas.clone(),
                latent_shape=self.latent_shape,
                images_per_prompt=settings.eval_images,
                grid=min(count, SHOWN),
                batch=self.config.rollout_batch,
                device=policy.device,
                decode_batch=self.config.decode_batch,
                on_progress=on_progress,
            )
        self.evaluations.append({"iteration": iteration, "scores": result.scores})
        self.watcher.picture(tile(result.images, result.captions, largest=LIVE_SIZE))
        if result.scores["total"] > self.best:
            self.best = result.scores["total"]
            if iteration:
                self._save("best", lora, ema)
        return result

    def _state(self, lora: LoRA, ema: EMA) -> dict[str, Tensor]:
        with ema.swapped_in():
            return fold(lora.factors(), lora.scale, torch.float32)

    def _save(self, kind: str, lora: LoRA, ema: EMA) -> str:
        settings = self.settings
        metadata = {
            "format": "pt",
            "software": f"stepwise-grpo {__version__} (ComfyUI node)",
            "base_model": type(self.model.model).__name__,
            "rank": str(settings.rank),
            "alpha": "folded into lora_B",
            "iteration": str(len(self.rows)),
            "guidance": str(settings.guidance),
        }
        self.saved[kind] = self.checkpoints.save(kind, self._state(lora, ema), metadata)
        return self.saved[kind]


def training_lora(model, settings: Settings, continue_from: LoRAFile | None = None) -> LoRA:
    """The LoRA to train on a MODEL: fresh, or with the factors of a LoRA file of any dialect.

    Raises ValueError for a model without layers of the chosen kind, and for a file that does not fit.
    """
    rank, alpha = settings.rank, settings.alpha or settings.rank
    lora = make_lora(model, settings.layers, rank, alpha, settings.seed, settings.adapter, model.load_device)
    if continue_from is not None:
        wanted = lora.factors().keys()
        given = factors_named(continue_from, wanted)
        if given.keys() != wanted:
            odd = sorted(given.keys() ^ wanted)[0]
            places = lora_places(model)
            fitting = [choice for choice in TARGETS if set(choose_targets(places, choice)) == given.keys()]
            do = f"set layers to {fitting[0]}" if fitting else "choose one that was trained on this model"
            raise ValueError(
                f"the LoRA to continue from is for other layers than layers = {settings.layers} (first difference: "
                f"{odd}); {do}"
            )
        load_factors(lora, given)
        for words in doubts(continue_from):
            logging.warning(words)
    return lora


def load_factors(lora: LoRA, given: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Copy factors of the same layers, with their scale folded in, onto a LoRA.

    Raises ValueError for those of another rank or width.
    """
    with torch.no_grad():
        for name, (a, b) in lora.factors().items():
            down, up = given[name]
            if down.shape[1:] != a.shape[1:] or up.shape[:1] != b.shape[:1]:
                raise ValueError(f"the LoRA to continue from is for a model of another width than {name} has")
            if down.shape != a.shape or up.shape != b.shape:
                raise ValueError(f"the LoRA to continue from has rank {len(down)}; set rank to {len(down)}")
            a.copy_(down)
            b.copy_(up / lora.scale)
