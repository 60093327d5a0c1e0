"""What a setting is called here that is not known by the name given: other trainers' names, else one spelled alike."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

LIKE = 0.75
"""Names are alike from this ratio of difflib on, of 0 to 1."""

OURS = {
    "grpo.kl_weight": ("beta", "kl_beta", "kl_coef", "kl_coeff"),
    "grpo.kernel.eta": ("noise_level", "noise_scale"),
    "grpo.group_size": (
        "num_image_per_prompt",
        "num_images_per_prompt",
        "num_generations",
        "num_samples_per_prompt",
        "samples_per_prompt",
    ),
    "grpo.clip_range": ("epsilon", "clip_epsilon", "cliprange"),
    "sampling.height and sampling.width": ("resolution", "image_size"),
    "sampling.steps": ("num_steps", "num_inference_steps", "sample_steps", "sampling_steps"),
    "sampling.guidance": ("guidance_scale", "cfg_scale", "cfg"),
    "eval.every": ("eval_freq", "eval_every", "eval_steps_interval"),
    "eval.steps": ("eval_num_steps",),
    "model.path": ("model_name_or_path", "pretrained_model_name_or_path", "pretrained.model", "pretrained"),
    "model.dtype": ("mixed_precision", "precision"),
    "grpo.window_size": ("sde_window_size",),
    "grpo.window_start and grpo.window_stop": ("sde_window_range", "window_range"),
    "prompts.file": ("dataset", "dataset_dir", "dataset_path", "prompt_file", "prompts_file"),
    "rewards": ("reward_fn", "reward", "reward_model", "reward_funcs"),
    "optimizer.lr": ("learning_rate",),
    "lora.rank": ("lora_rank", "lora_r", "network_dim"),
    "lora.alpha": ("lora_alpha", "network_alpha"),
    "iterations": ("num_epochs", "max_epochs", "epochs", "max_train_steps"),
    "save_every": ("save_freq", "save_steps", "checkpointing_steps"),
    "optimizer.warmup": ("lr_warmup_steps", "warmup_steps"),
}
"""Settings -> what other trainers call them. A name of theirs counts with its tables and without."""

THEIRS = {name: ours for ours, names in OURS.items() for name in names}


def hint(name: str, known: Sequence[str]) -> str:
    """What to add to "unknown field NAME": the setting that is meant, or those of its table where none is like it.

    name: dotted, as it was given. known: dotted names of all settings.
    """
    table, _, last = name.rpartition(".")
    if name in THEIRS:
        return f"; here it is {THEIRS[name]}"
    close = _alike(last, {k.rpartition(".")[2]: k for k in known if table and k.rpartition(".")[0] == table})
    if not close and last in THEIRS:
        return f"; here it is {THEIRS[last]}"
    close = close or _alike(name, {k: k for k in known})
    close = close or next((k for k in known if k.rpartition(".")[2] == last), "")
    if not close and not table:
        close = _alike(name, {t: t for t in sorted({k.partition(".")[0] for k in known if "." in k})})
    if close:
        return f"; did you mean {close}?"
    beside = [k for k in known if table and k.rpartition(".")[0] == table]
    top = sorted({k.partition(".")[0] for k in known})
    what = f"the settings of {table} are {', '.join(beside)}" if beside else f"the top level has {', '.join(top)}"
    return f"; {what}; `sfgrpo train --help` has all"


def _alike(name: str, names: dict[str, str]) -> str:
    """The value whose key is spelled most like a name, or nothing where none is LIKE it."""
    found = difflib.get_close_matches(name, list(names), n=1, cutoff=LIKE)
    return names[found[0]] if found else ""
