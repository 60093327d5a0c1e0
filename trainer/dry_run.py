"""`sfgrpo train RUN.toml --dry-run`: what a run would load and do, and how much memory that takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from sfgrpo.prompts import Prompt

from .config import RunConfig
from .errors import UserError
from .families import load_model, pipeline_class_of
from .memory import Component, measure, without_weights
from .prepare import check_sampling, load_options
from .prompt_lengths import cut_prompts


def describe(config: RunConfig, prompts: int, eval_prompts: int) -> str:
    """The report. Reads the model's configs alone. Raises UserError for a model or size that cannot be trained."""
    family, encoders = without_weights(config)
    # The machine that will train may have the packages and the device that this one lacks.
    family.check_options(replace(family.options, quantize="none"))
    check_sampling(config, family)
    memory = measure(config, family, encoders)
    s, grpo = config.sampling, config.grpo
    shape = family.latent_shape(s.height, s.width, s.frames)
    sigmas = family.sigmas(s.steps, s.height, s.width)
    windows = grpo.check_windows(sigmas)
    work = iteration_work(config, sigmas, windows[0])
    rewards = {**config.rewards, **(config.eval.rewards or {})}
    frames = f" x {s.frames} frames" if s.frames > 1 else ""
    lines = [
        ("model", f"{config.model.path} ({pipeline_class_of(config.model_path)}), {config.model.dtype}"),
        ("quantised", config.model.quantize) if config.model.quantize != "none" else None,
        ("file", f"{config.model.transformer_file} for the transformer") if config.model.transformer_file else None,
        *named("first loads", memory.encoders),
        *named("then loads", memory.denoiser),
        (
            "LoRA",
            f"rank {config.lora.rank} on {memory.lora_layers} layers ({config.lora.targets}), "
            f"{count(memory.lora_parameters)} parameters",
        ),
        ("images", f"{s.width} x {s.height} pixels{frames}, latents {' x '.join(map(str, shape))}"),
        ("sigmas", " ".join(f"{v:.4f}" for v in sigmas.tolist())),
        ("prompts", f"{prompts} to train on, {eval_prompts} to evaluate"),
        (
            "iteration",
            f"{config.prompts.per_iteration} prompts x {grpo.group_size} images; forward rows: "
            f"{work['sample']} to sample, {work['estimate']} to estimate; {work['score']} images to decode and score; "
            f"at most {work['update']} rows forward and backward, {grpo.updates} optimizer steps",
        ),
        ("run", f"{config.iterations} iterations, an evaluation every {config.eval.every}"),
        ("memory", ", ".join(f"{name} {size(need)}" for name, need in memory.phases.items())),
        ("", f"peak {size(memory.peak)} by calculation; leave 2 GB more for the device itself"),
        (
            "",
            f"models of rewards ({', '.join(rewards)}) are not counted; they come on top where they lie here",
        ),
    ]
    return "\n".join(f"{name:12s}{text}" for name, text in filter(None, lines))


def describe_lengths(config: RunConfig, prompts: Sequence[Prompt]) -> str:
    """Lines that warn of prompts that the text encoders cut, each after a line break; reads the tokenizers alone."""
    options = replace(load_options(config, torch.device("cpu")), quantize="none")
    try:
        family = load_model(config.model_path, options, "tokenizers")
    except UserError as error:
        return f"\nprompts     how long they are was not looked at: {str(error).splitlines()[0]}"
    return "".join(f"\nwarning     {words}" for words in cut_prompts(family, prompts, config.is_guided))


def size(number: float) -> str:
    """Bytes in words."""
    return f"{number / 1e9:.1f} GB" if number >= 1e8 else f"{number / 1e6:.1f} MB"


def count(number: float) -> str:
    """Parameters in words."""
    return f"{number / 1e9:.2f} B" if number >= 1e8 else f"{number / 1e6:.2f} M"


def named(title: str, components: list[Component]) -> list[tuple[str, str]]:
    """A line for each component."""
    return [
        (title if i == 0 else "", f"{c.name} {c.kind}, {count(c.parameters)} parameters, {size(c.bytes)}")
        for i, c in enumerate(components)
    ]


def iteration_work(config: RunConfig, sigmas: torch.Tensor, window: torch.Tensor) -> dict[str, int]:
    """Rows of work in each phase of one iteration; guidance doubles those of the model."""
    from sfgrpo.rollout import shared_states

    grpo, steps = config.grpo, len(sigmas) - 1
    groups, members = config.prompts.per_iteration, grpo.group_size
    stds = torch.where(window, grpo.kernel.std(sigmas[:-1], sigmas[1:]), 0.0)
    shared = shared_states(stds)
    rows = [groups * (1 if k < shared else members) for k in range(steps + 1)]
    twice = 2 if config.sampling.guidance > 1 else 1
    uniform = grpo.credit == "uniform"
    refined = sum(r * (min(grpo.substeps, steps - k) - 1) for k, r in enumerate(rows[:-1]))
    return {
        "sample": twice * sum(rows[:-1]),
        "estimate": 0 if uniform else twice * refined,
        "score": groups * members if uniform else sum(rows),
        "update": twice * groups * members * int((stds > 0).sum()),
    }
