"""The inputs of Stepwise GRPO Train LoRA: sockets, settings, and settings for those who know the method."""

from __future__ import annotations

from comfy_api.latest import io

from ..sfgrpo.credit import CREDITS
from ..sfgrpo.kernels import KERNELS, SCHEDULES
from ..sfgrpo.lora import TARGETS
from ..sfgrpo.objective import STEP_WEIGHTS
from .comfy_patch import ADAPTERS
from .compat import advanced, fixed
from .files import NONE, lora_files, prompt_files
from .rewards import RewardType


def all_inputs() -> list:
    """In the order in which the node shows them."""
    return [*_sockets(), *_main_settings(), *_advanced_settings()]


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
            placeholder="one prompt a line",
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
            round=False,
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
            control_after_generate=fixed(),
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
    return [
        advanced(
            io.Combo.Input,
            "credit",
            options=list(CREDITS),
            default="gain_centred",
            tooltip="How a step is credited: by its gain in reward (gain: the paper; gain_centred: less the mean gain "
            "of that step), or all steps alike by the last reward (uniform: Flow-GRPO). The others are the paper's "
            "ablations: gain_per_step divides each step by its own spread, gain_ema takes off a running mean of the "
            "gains (decay 0.9), gain_gae adds the gains of later steps, each 0.9 times the one before.",
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
            round=False,
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
            "window_end",
            default=10000,
            min=1,
            max=10000,
            tooltip="Step before which the noise ends; 10000 is after the last.",
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
            step=1e-5,
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
        advanced(
            io.Int.Input,
            "updates",
            default=1,
            min=1,
            max=1024,
            tooltip="Optimizer steps a round. Each learns from its own share of the round's prompts, so that there are "
            "at most prompts_per_iteration of them.",
        ),
        advanced(
            io.Float.Input,
            "max_grad_norm",
            default=1.0,
            min=1e-6,
            max=1e6,
            step=0.1,
            round=False,
            tooltip="Gradient clipping.",
        ),
        advanced(
            io.Float.Input,
            "final_lr",
            default=1.0,
            min=0.0,
            max=1.0,
            step=0.05,
            round=False,
            tooltip="Share of learning_rate that is left in the last iteration; it falls evenly. 1 keeps it.",
        ),
        advanced(
            io.Float.Input,
            "alpha",
            default=0.0,
            min=0.0,
            max=4096.0,
            step=1.0,
            round=False,
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
