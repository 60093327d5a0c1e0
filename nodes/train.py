"""Stepwise GRPO Train LoRA: reinforcement learning of a LoRA inside ComfyUI."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import comfy.utils
from comfy_api.latest import io, ui

from ..sfgrpo.config import GRPOConfig
from ..sfgrpo.credit import CREDITS
from ..sfgrpo.evaluate import Evaluation
from ..sfgrpo.kernels import KERNELS, SCHEDULES, Kernel
from ..sfgrpo.lora import TARGETS
from ..sfgrpo.metrics import plain
from ..sfgrpo.objective import STEP_WEIGHTS
from ..sfgrpo.pictures import before_after, tile
from ..sfgrpo.plot import Series, plot
from ..sfgrpo.prompts import Prompt, pick_prompts
from ..sfgrpo.rewards import check_prompts, combine
from ..sfgrpo.schedule import check_sigmas
from .comfy_model import check_flow_model, encode_prompts, latent_shape, split_conditioning
from .comfy_patch import ADAPTERS
from .compat import make
from .files import NONE, Checkpoints, lora_files, prompt_files, prompts_of, read_lora_file
from .pictures import show_text, to_image
from .rewards import RewardType
from .sigmas import flow_sigmas
from .training import Settings, Trained, Training, Watcher

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
            inputs=[*_sockets(), *_main_settings(), *_advanced_settings()],
            outputs=[
                io.Custom("LORA_MODEL").Output(
                    "lora", display_name="lora", tooltip="The LoRA, for Save LoRA Weights and Load LoRA Model."
                ),
                io.Model.Output(
                    "trained", display_name="model", tooltip="The MODEL with the LoRA on it at strength 1."
                ),
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
    def execute(cls, model, vae, reward, **inputs) -> io.NodeOutput:
        # comfy.sd would be imported in vain by a mere listing of nodes.
        import comfy.sd

        check_flow_model(model)
        config = _config(inputs)
        prompts, conditioned = _prompts(inputs)
        width, height = inputs["width"], inputs["height"]
        shape = latent_shape(model, vae, width, height)
        sigmas = inputs.get("sigmas")
        if sigmas is None:
            sigmas = flow_sigmas("auto", inputs["steps"], width=width, height=height, model=model)
        sigmas = check_sigmas(sigmas)
        config.check_windows(sigmas)
        score = combine(reward)
        check_prompts(score, prompts, (height, width))
        settings = _settings(inputs)
        continued = None if inputs["continue_from"] == NONE else read_lora_file(inputs["continue_from"])
        checkpoints = Checkpoints(inputs["name"])
        positive, negative = _conditioning(inputs, prompts, conditioned, settings)
        training = Training(
            model=model,
            vae=vae,
            score=score,
            prompts=prompts,
            positive=positive,
            negative=negative,
            sigmas=sigmas,
            latent_shape=shape,
            config=config,
            settings=settings,
            checkpoints=checkpoints,
            watcher=_watcher(cls),
            continue_from=continued,
        )
        trained = training.run()
        patched, _ = comfy.sd.load_lora_for_models(model, None, trained.state, 1.0, 0.0)
        pairs, metrics = to_image(_pairs(trained)), _metrics(trained, config, settings)
        return io.NodeOutput(
            trained.state,
            patched,
            to_image(_plot(trained)),
            pairs,
            json.dumps(metrics),
            ui={**ui.PreviewImage(pairs, cls=cls).as_dict(), **ui.PreviewText(_summary(trained)).as_dict()},
        )


def _sockets() -> list:
    return [
        io.Model.Input("model", tooltip="A flow model: SD3.5, FLUX, Qwen-Image, Z-Image, Wan, or the demo model."),
        io.Vae.Input("vae", tooltip="Decodes images for the reward."),
        RewardType.Input("reward", tooltip="What makes an image good, from a reward node."),
        io.Clip.Input("clip", optional=True, tooltip="Encodes the prompts. Not needed where positive is connected."),
        io.Conditioning.Input(
            "positive",
            optional=True,
            tooltip="Ready conditioning in place of a CLIP, one entry a prompt (Conditioning Combine joins several); "
            "the prompts are then still what the reward reads.",
        ),
        io.Conditioning.Input(
            "negative", optional=True, tooltip="Ready negative conditioning, used where guidance is above 1."
        ),
        io.Sigmas.Input(
            "sigmas", optional=True, tooltip="Noise levels to train at, ending in 0; replaces steps. Use few: 8 to 16."
        ),
    ]


def _main_settings() -> list:
    return [
        io.String.Input(
            "prompts",
            multiline=True,
            default="",
            tooltip="Prompts to train on, one a line. Many generalise better than few.",
        ),
        io.Combo.Input(
            "prompt_file",
            options=[NONE, *prompt_files()],
            default=NONE,
            tooltip="A .txt file (one prompt a line) or .jsonl file (objects with prompt, negative_prompt and whatever "
            "the reward reads) of ComfyUI's input folder, in place of the text.",
        ),
        io.String.Input(
            "negative_prompt", default="", tooltip="Negative prompt for all prompts; used where guidance is above 1."
        ),
        io.Int.Input("width", default=512, min=8, max=16384, step=8, tooltip="Width of the images in pixels."),
        io.Int.Input("height", default=512, min=8, max=16384, step=8, tooltip="Height of the images in pixels."),
        io.Int.Input(
            "steps", default=10, min=1, max=1000, tooltip="Denoising steps while training. 8 to 16 are enough."
        ),
        io.Float.Input(
            "guidance",
            default=1.0,
            min=1.0,
            max=100.0,
            step=0.1,
            tooltip="CFG while training: that with which you will sample. 1 is off and twice as fast.",
        ),
        io.Int.Input("iterations", default=60, min=1, max=100000, tooltip="Rounds of drawing, judging and learning."),
        io.Int.Input(
            "prompts_per_iteration", default=4, min=1, max=1024, tooltip="Prompts of one round, drawn in turn from all."
        ),
        io.Int.Input(
            "group_size",
            default=12,
            min=2,
            max=1024,
            tooltip="Images of one prompt that are compared with each other. More give a steadier signal.",
        ),
        io.Float.Input(
            "learning_rate", default=3e-4, min=1e-7, max=1.0, step=1e-5, round=False, tooltip="Learning rate of AdamW."
        ),
        io.Int.Input("rank", default=32, min=1, max=1024, tooltip="Rank of the LoRA."),
        io.Combo.Input(
            "layers", options=list(TARGETS), default="attention", tooltip="Which layers of the model carry the LoRA."
        ),
        io.Int.Input(
            "seed",
            default=0,
            min=0,
            max=0xFFFFFFFFFFFFFFFF,
            control_after_generate=True,
            tooltip="Seed of all noise, of the order of prompts and of the LoRA's start.",
        ),
        io.String.Input(
            "name",
            default="stepwise_grpo",
            tooltip="The LoRA is saved as it is trained as output/loras/<name>_<number>_best and _last.safetensors.",
        ),
        io.Combo.Input(
            "continue_from",
            options=[NONE, *lora_files()],
            default=NONE,
            tooltip="A LoRA of this node or the headless trainer to go on from; rank and layers must be its own.",
        ),
    ]


def _advanced_settings() -> list:
    def advanced(kind, *args, **keywords):
        return make(kind, *args, advanced=True, **keywords)

    return [
        advanced(
            io.Combo.Input,
            "credit",
            options=list(CREDITS),
            default="gain_centred",
            tooltip="How a step is credited: by its gain in reward (gain: the paper; gain_centred: less the mean gain "
            "of that step), or all steps alike by the last reward (uniform: Flow-GRPO).",
        ),
        advanced(
            io.Int.Input,
            "substeps",
            default=1,
            min=1,
            max=100,
            tooltip="Steps of a clean estimate (T'). 1 is free; the paper takes 5.",
        ),
        advanced(
            io.Combo.Input, "kernel", options=_kernels(), default="ddim", tooltip="SDE that adds noise in sampling."
        ),
        advanced(
            io.Float.Input,
            "eta",
            default=0.7,
            min=0.0,
            max=10.0,
            step=0.05,
            tooltip="Strength of that noise: up to 1 for ddim; 0.7 is usual for ddim and flow_grpo, 0.3 for dance.",
        ),
        advanced(
            io.Combo.Input,
            "schedule",
            options=list(SCHEDULES),
            default="annealed",
            tooltip="How the noise of ddim falls over the steps.",
        ),
        advanced(
            io.Int.Input,
            "window_start",
            default=0,
            min=0,
            max=1000,
            tooltip="First step that adds noise and is trained.",
        ),
        advanced(
            io.Int.Input,
            "window_stop",
            default=0,
            min=0,
            max=1000,
            tooltip="Step before which the noise ends; 0 is after the last.",
        ),
        advanced(
            io.Int.Input,
            "window_size",
            default=0,
            min=0,
            max=1000,
            tooltip="Only so many steps in a row, at a place drawn for each round, add noise and train; 0 is all.",
        ),
        advanced(
            io.Combo.Input,
            "step_weight",
            options=list(STEP_WEIGHTS),
            default="std",
            tooltip="Weight of a step in the loss: all alike, or by its noise.",
        ),
        advanced(
            io.Float.Input,
            "clip_range",
            default=1e-3,
            min=1e-6,
            max=0.99,
            step=1e-4,
            round=False,
            tooltip="Clipping of the ratio of probabilities; acts only where updates is above 1.",
        ),
        advanced(
            io.Float.Input,
            "kl_weight",
            default=0.0,
            min=0.0,
            max=1000.0,
            step=0.001,
            round=False,
            tooltip="Pull towards the model without the LoRA; costs a forward pass where it is above 0.",
        ),
        advanced(io.Int.Input, "updates", default=1, min=1, max=1024, tooltip="Optimizer steps a round."),
        advanced(io.Float.Input, "max_grad_norm", default=1.0, min=1e-6, max=1e6, tooltip="Gradient clipping."),
        advanced(
            io.Float.Input,
            "alpha",
            default=0.0,
            min=0.0,
            max=4096.0,
            tooltip="The change is alpha / rank times the LoRA; 0 takes alpha = rank. It is folded into the file.",
        ),
        advanced(
            io.Float.Input,
            "ema_decay",
            default=0.9,
            min=0.0,
            max=0.9999,
            step=0.01,
            round=False,
            tooltip="Moving average of the LoRA, which is what is sampled and saved; 0 is off.",
        ),
        advanced(
            io.Int.Input, "rollout_batch", default=8, min=1, max=1024, tooltip="Images drawn at once. Memory only."
        ),
        advanced(
            io.Int.Input, "update_batch", default=4, min=1, max=1024, tooltip="Steps trained at once. Memory only."
        ),
        advanced(
            io.Int.Input,
            "decode_batch",
            default=8,
            min=1,
            max=1024,
            tooltip="Images decoded and judged at once. Memory only.",
        ),
        advanced(
            io.Boolean.Input,
            "gradient_checkpointing",
            default=True,
            tooltip="Computes each block twice to need far less memory. The result is the same.",
        ),
        advanced(
            io.Combo.Input,
            "adapter",
            options=list(ADAPTERS),
            default="hook",
            tooltip="How the LoRA stands on the model while it trains: beside each layer (hook; for quantised weights "
            "too), or in its weight as when a LoRA is loaded (weight).",
        ),
        advanced(
            io.Int.Input, "eval_every", default=10, min=1, max=100000, tooltip="Rounds between samples and saves."
        ),
        advanced(
            io.Int.Input,
            "eval_prompts",
            default=8,
            min=1,
            max=1024,
            tooltip="Prompts that are sampled, from the first on.",
        ),
        advanced(io.Int.Input, "eval_images", default=1, min=1, max=1024, tooltip="Images of each of them."),
    ]


def _kernels() -> list[str]:
    return [name for name in KERNELS if name != "ode"]


def _config(inputs: dict) -> GRPOConfig:
    return GRPOConfig(
        group_size=inputs["group_size"],
        kernel=Kernel(name=inputs["kernel"], eta=inputs["eta"], schedule=inputs["schedule"]),
        window_start=inputs["window_start"],
        window_stop=inputs["window_stop"] or None,
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
    names = [name for name in Settings.__dataclass_fields__ if name != "guidance"]
    return Settings(guidance=inputs["guidance"], **{name: inputs[name] for name in names})


def _prompts(inputs: dict) -> tuple[list[Prompt], list | None]:
    """The prompts, and their ready conditioning if it is connected."""
    prompts = prompts_of(inputs["prompts"], inputs["prompt_file"], inputs["negative_prompt"])
    positive = inputs.get("positive")
    if positive is None:
        return prompts, None
    ready = split_conditioning(positive)
    if len(ready) != len(prompts):
        raise ValueError(
            f"positive holds {len(ready)} prompts and there are {len(prompts)} in the text; make them as many"
        )
    return prompts, ready


def _conditioning(inputs: dict, prompts: Sequence[Prompt], ready: list | None, settings: Settings) -> tuple:
    """(positive, negative): a CONDITIONING for each prompt that this training will use."""
    clip, cache = inputs.get("clip"), {}

    def encode(text: str):
        if text not in cache:
            cache[text] = encode_prompts(clip, [text])[0]
        return cache[text]

    used = set(range(min(settings.eval_prompts, len(prompts))))
    for iteration in range(settings.iterations):
        used.update(pick_prompts(len(prompts), settings.prompts_per_iteration, iteration, settings.seed))
        if len(used) == len(prompts):
            break
    first = min(used)
    chosen = [prompts[i if i in used else first] for i in range(len(prompts))]
    positive = ready or [encode(p.text) for p in chosen]
    if settings.guidance <= 1:
        return positive, None
    if inputs.get("negative") is not None:
        return positive, split_conditioning(inputs["negative"])[:1]
    if clip is None:
        raise ValueError("guidance above 1 needs a CLIP or negative conditioning; connect one, or set guidance to 1")
    return positive, [encode(p.negative) for p in chosen]


def _watcher(node: type[io.ComfyNode]) -> Watcher:
    bar, shown = comfy.utils.ProgressBar(1000), {}

    def text(words: str) -> None:
        # The same words many times a second would flood the connection.
        if shown.get("text") != words:
            shown["text"] = words
            show_text(node, words)

    def progress(done: float, total: float) -> None:
        bar.update_absolute(int(1000 * done / total), 1000)

    def samples(evaluation: Evaluation) -> None:
        picture = tile(evaluation.images, evaluation.captions, largest=SHOWN // 2)
        bar.update_absolute(bar.current, 1000, ("JPEG", picture, max(picture.size)))

    return Watcher(progress=progress, text=text, samples=samples)


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
    places = "\n".join(f"{kind}: {place}" for kind, place in trained.saved.items())
    return f"reward of the samples: {start:.3f} -> {end:.3f} in {len(trained.rows)} iterations\n{places}"
