"""Stepwise GRPO Train LoRA: reinforcement learning of a LoRA inside ComfyUI."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import comfy.model_management
import comfy.sd
import comfy.utils
from comfy_api.latest import io, ui
from PIL import Image

from ..sfgrpo.config import GRPOConfig
from ..sfgrpo.kernels import Kernel
from ..sfgrpo.metrics import plain
from ..sfgrpo.pictures import before_after
from ..sfgrpo.plot import Series, plot
from ..sfgrpo.prompts import Prompt, pick_prompts
from ..sfgrpo.rewards import check_prompts, combine
from ..sfgrpo.schedule import check_sigmas
from .comfy_model import check_flow_model, latent_shape
from .compat import make
from .conditioning import conditioning_for
from .files import NONE, Checkpoints, prompts_of, read_lora_file, stamps
from .pictures import show_text, to_image
from .sigmas import flow_sigmas
from .train_inputs import all_inputs
from .training import Settings, Trained, Training, Watcher, training_lora

SHOWN = 512
"""Longest side of an image in previews and grids, pixels."""


class TrainLoRA(io.ComfyNode):
    """Trains a LoRA by Stepwise-Flow-GRPO."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return make(
            io.Schema,
            node_id="SFGRPO_TrainLoRA",
            display_name="Stepwise GRPO Train LoRA",
            category="model/training",
            search_aliases=["reinforcement learning", "GRPO", "RL LoRA", "reward training", "DDPO", "Flow-GRPO"],
            description="Trains a LoRA so that the images of a flow model get a higher reward. No pictures are needed: "
            "the model draws, the reward judges, and each denoising step is credited with what it added.",
            is_output_node=True,
            hidden=[io.Hidden.unique_id],
            inputs=all_inputs(),
            outputs=[
                io.Custom("LORA_MODEL").Output(
                    "lora", display_name="lora", tooltip="The LoRA after the last round, for Save LoRA Weights."
                ),
                io.Model.Output("trained", display_name="model", tooltip="The MODEL with that LoRA at strength 1."),
                io.Image.Output("plot", display_name="plot", tooltip="Reward while training and of the samples."),
                io.Image.Output(
                    "before_after",
                    display_name="before/after",
                    tooltip="Samples of the same prompts and seeds before and after, with their rewards.",
                ),
                io.String.Output("metrics", display_name="metrics", tooltip="All numbers of the training, as JSON."),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, prompt_file=NONE, continue_from=NONE, **inputs) -> str:
        """What the chosen files hold: ComfyUI itself would take a training as done where only their content changed."""
        return stamps(prompt_file, continue_from)

    @classmethod
    def execute(cls, model, vae, reward, **inputs) -> io.NodeOutput:
        check_flow_model(model)
        settings = _settings(inputs)
        width, height = inputs["width"], inputs["height"]
        shape = latent_shape(model, vae, width, height)
        sigmas = inputs.get("sigmas")
        if sigmas is None:
            sigmas = flow_sigmas("auto", inputs["steps"], width=width, height=height, model=model)
        sigmas = check_sigmas(sigmas.cpu())
        config = _config(inputs, len(sigmas) - 1)
        config.check_windows(sigmas)
        prompts = prompts_of(inputs["prompts"], inputs["prompt_file"], inputs["negative_prompt"])
        used = _used(prompts, settings)
        score = combine(reward)
        cancelled = comfy.model_management.throw_exception_if_processing_interrupted
        check_prompts(score, [prompts[i] for i in sorted(used)], (height, width), on_prompt=cancelled)
        continued = None if inputs["continue_from"] == NONE else read_lora_file(inputs["continue_from"])
        lora = training_lora(model, settings, continued)
        checkpoints = Checkpoints(inputs["name"])
        watcher = _watcher(cls)
        positive, negative = conditioning_for(
            prompts,
            inputs.get("clip"),
            inputs.get("positive"),
            inputs.get("negative"),
            settings.guidance,
            used=used,
            on_encode=lambda done: watcher.text(f"encoding prompts: {done} done"),
        )
        training = Training(
            model=model,
            vae=vae,
            lora=lora,
            score=score,
            prompts=prompts,
            positive=positive,
            negative=negative,
            sigmas=sigmas,
            latent_shape=shape,
            config=config,
            settings=settings,
            checkpoints=checkpoints,
            watcher=watcher,
        )
        trained = training.run()
        patched, _ = comfy.sd.load_lora_for_models(model, None, trained.state, 1.0, 0.0)
        pairs, summary = _pairs(trained), _summary(trained)
        # The frontend goes on showing the last preview and text instead of the node's own.
        watcher.picture(pairs)
        watcher.text(summary)
        return io.NodeOutput(
            trained.state,
            patched,
            to_image(_plot(trained)),
            to_image(pairs),
            json.dumps(_metrics(trained, config, settings)),
            ui={**ui.PreviewImage(to_image(pairs), cls=cls).as_dict(), **ui.PreviewText(summary).as_dict()},
        )


def _config(inputs: dict, steps: int) -> GRPOConfig:
    return GRPOConfig(
        group_size=inputs["group_size"],
        kernel=Kernel(name=inputs["kernel"], eta=inputs["eta"], schedule=inputs["schedule"]),
        window_start=inputs["window_start"],
        window_stop=min(inputs["window_end"], steps),
        window_size=inputs["window_size"] or None,
        substeps=inputs["substeps"],
        credit=inputs["credit"],
        step_weight=inputs["step_weight"],
        clip_range=inputs["clip_range"],
        kl_weight=inputs["kl_weight"],
        updates=inputs["updates"],
        max_grad_norm=inputs["max_grad_norm"],
        rollout_batch=inputs["rollout_batch"],
        estimate_batch=inputs["rollout_batch"],
        decode_batch=inputs["decode_batch"],
        update_batch=inputs["update_batch"],
    )


def _settings(inputs: dict) -> Settings:
    updates, prompts = inputs["updates"], inputs["prompts_per_iteration"]
    if updates > prompts:
        raise ValueError(
            f"updates {updates} is more than prompts_per_iteration {prompts}, and each update takes its own share of "
            "the prompts; lower updates or raise prompts_per_iteration"
        )
    names = [name for name in Settings.__dataclass_fields__ if name != "guidance"]
    return Settings(guidance=inputs["guidance"], **{name: inputs[name] for name in names})


def _used(prompts: Sequence[Prompt], settings: Settings) -> set[int]:
    """Indices of the prompts that this training will draw or sample."""
    used = set(range(min(settings.eval_prompts, len(prompts))))
    for iteration in range(settings.iterations):
        used.update(pick_prompts(len(prompts), settings.prompts_per_iteration, iteration, settings.seed))
        if len(used) == len(prompts):
            break
    return used


def _watcher(node: type[io.ComfyNode]) -> Watcher:
    bar, shown = comfy.utils.ProgressBar(1000), {}

    def text(words: str) -> None:
        # The same words many times a second would flood the connection.
        if shown.get("text") != words:
            shown["text"] = words
            show_text(node, words)

    def progress(done: float, total: float) -> None:
        bar.update_absolute(int(1000 * done / total), 1000)

    def picture(shown: Image.Image) -> None:
        bar.update_absolute(bar.current, 1000, ("JPEG", shown, max(shown.size)))

    return Watcher(progress=progress, text=text, picture=picture)


def _plot(trained: Trained):
    x = [row["iteration"] for row in trained.rows]
    evaluations = trained.evaluations
    return plot(
        [
            Series(y=[row["reward"] for row in trained.rows], x=x, label="while training, with noise", faint=True),
            Series(
                y=[e["scores"]["total"] for e in evaluations],
                x=[e["iteration"] for e in evaluations],
                label="samples of fixed prompts and seeds",
            ),
        ],
        title="Reward",
        x_label="iteration",
        y_label="reward",
    )


def _pairs(trained: Trained):
    before, after = trained.start, trained.end
    return before_after(
        before.images,
        after.images,
        before.captions,
        [(f"before {b:.2f}", f"after {a:.2f}") for b, a in zip(before.rewards, after.rewards, strict=True)],
        largest=SHOWN,
    )


def _metrics(trained: Trained, config: GRPOConfig, settings: Settings) -> dict:
    return plain(
        {
            "iterations": trained.rows,
            "samples": trained.evaluations,
            "saved": trained.saved,
            "settings": {**asdict(settings), "grpo": asdict(config)},
        }
    )


def _summary(trained: Trained) -> str:
    start, end = trained.start.scores["total"], trained.end.scores["total"]
    saved = trained.saved if "best" in trained.saved else trained.saved | {"best": "no samples beat those at the start"}
    places = "\n".join(f"{kind}: {place}" for kind, place in saved.items())
    return f"reward of the samples: {start:.3f} -> {end:.3f} in {len(trained.rows)} iterations\n{places}"
