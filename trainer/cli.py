"""The command line: `sfgrpo demo | train | sample | lora | selftest | reward`."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from sfgrpo import __version__

from .errors import UserError, out_folder
from .output import lasting_output
from .signals import Stopped, stop_on_signals

USAGE = """usage: sfgrpo COMMAND ...

  sfgrpo demo [--out DIR]                  train the embedded model on counting, on a CPU, in about five minutes
  sfgrpo train RUN.toml [--out DIR] [...]  train by a run file; `sfgrpo train --help` lists all settings
  sfgrpo train RUN.toml --dry-run          what would be loaded and done, and the memory it needs
  sfgrpo sample --model M [...]            make images, with or without a LoRA; `sfgrpo sample --help`
  sfgrpo lora inspect FILE                 what a LoRA file is, and what ComfyUI and diffusers make of it
  sfgrpo lora convert FILE OUT [...]       write it so that both load it at strength 1.0; `sfgrpo lora --help`
  sfgrpo lora merge OUT FILE[:WEIGHT] ...  the sum of several LoRAs of one model
  sfgrpo selftest [--model M]              check the mathematics on this machine, green or red
  sfgrpo reward serve --reward NAME [...]  rewards behind HTTP, for runs elsewhere; `sfgrpo reward serve --help`
  sfgrpo --version
"""


def main(given: list[str] | None = None) -> int:
    """Run one command; returns the exit code.

    0; 2 for a mistake of the user's; 1 for a file that cannot be written; 130 for Ctrl-C, 143 for SIGTERM, 129 for
    SIGHUP.
    """
    # What libraries warn of when they are imported (torchao, bitsandbytes) is not for who trains.
    logging.disable(logging.WARNING)
    arguments = sys.argv[1:] if given is None else given
    with lasting_output():
        code = _main(arguments, given is None)
        sys.stdout.flush()
        # What a run prints is beside its work; what the other commands print is their work.
        if not code and sys.stdout.error is not None and arguments[:1] not in (["train"], ["demo"]):
            why = sys.stdout.error.strerror or sys.stdout.error
            print(f"sfgrpo: error: cannot write the output: {why}", file=sys.stderr)
            return 1
        return code


def _main(arguments: list[str], of_process: bool) -> int:
    commands = {"demo": demo, "train": train, "sample": sample, "lora": lora, "selftest": selftest, "reward": reward}
    try:
        if not arguments or arguments[0] in ("-h", "--help"):
            print(USAGE, end="")
            return 0 if arguments else 2
        if arguments[0] == "--version":
            print(f"sfgrpo {__version__}")
            return 0
        if arguments[0] not in commands:
            raise UserError(f"unknown command {arguments[0]!r}; commands are {', '.join(commands)}")
        return commands[arguments[0]](arguments[1:])
    except UserError as error:
        _tell_error(error)
        return error.code
    except Stopped as stop:
        if os.environ.get("RANK", "0") == "0":
            print(f"sfgrpo: {stop.words}", file=sys.stderr)
        if of_process:
            # The interpreter's own end would wait for a reward that hangs in a thread.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(stop.code)
        return stop.code
    except KeyboardInterrupt:
        print("sfgrpo: interrupted", file=sys.stderr)
        return 130


def _tell_error(error: UserError) -> None:
    """Print an error; of several processes that met the same one, only the main one does."""
    rank = os.environ.get("RANK", "0")
    if rank == "0" or not error.of_all:
        where = f" (process {rank})" if "RANK" in os.environ else ""
        print(f"sfgrpo: error{where}: {error}", file=sys.stderr)


def _take_out(arguments: list[str], default: Path) -> tuple[Path, list[str]]:
    """Split `--out DIR` off the arguments."""
    rest, out = [], default
    iterator = iter(arguments)
    for argument in iterator:
        if argument == "--out":
            out = out_folder(next(iterator, ""))
        elif argument.startswith("--out="):
            out = out_folder(argument[6:])
        else:
            rest.append(argument)
    return out, rest


def train(arguments: list[str]) -> int:
    """`sfgrpo train RUN.toml [--out DIR] [--dry-run] [--section.setting VALUE ...]`."""
    from .config import load_config

    if not arguments or any(a in ("-h", "--help") for a in arguments):
        return _train_help(0 if arguments else 2)
    if arguments[0].startswith("--"):
        raise UserError("the run file comes first: sfgrpo train RUN.toml [--out DIR] [--section.setting VALUE ...]")
    file = Path(arguments[0])
    dry = "--dry-run" in arguments
    out, overrides = _take_out([a for a in arguments[1:] if a != "--dry-run"], Path("runs") / file.stem)
    if dry:
        return _dry_run(load_config(file, overrides))
    return _run(load_config(file, overrides), out)


def demo(arguments: list[str]) -> int:
    """`sfgrpo demo [--out DIR] [--section.setting VALUE ...]`: the run file runs/demo.toml of this package."""
    from .config import load_config

    if arguments and arguments[0] in ("-h", "--help"):
        print("usage: sfgrpo demo [--out DIR] [--section.setting VALUE ...]   (settings: sfgrpo train --help)")
        return 0
    out, overrides = _take_out(arguments, Path("runs/demo"))
    return _run(load_config(Path(__file__).parent / "runs" / "demo.toml", overrides), out)


def _dry_run(config) -> int:
    from .dry_run import describe, describe_lengths
    from .prepare import check_inputs, check_scoring, quiet

    quiet()
    prompts, eval_prompts = check_inputs(config)
    report = describe(config, len(prompts), len(eval_prompts))
    report += describe_lengths(config, prompts + eval_prompts)
    try:
        check_scoring(config, prompts, eval_prompts)
    except UserError as error:
        # The rest is worth knowing before a reward's weights are fetched.
        report += f"\nrewards     not ready: {error}"
    print(report)
    return 0


def _run(config, out: Path) -> int:
    import torch

    from .run import train as run_training

    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    try:
        with stop_on_signals():
            result = run_training(config, out)
    except torch.OutOfMemoryError:
        raise UserError(
            "the device is out of memory; make grpo.rollout_batch, grpo.estimate_batch, grpo.decode_batch or "
            "grpo.update_batch smaller, or set model.gradient_checkpointing = true"
        ) from None
    except RuntimeError as error:
        # What torch.distributed raises where its other end is gone; there is no class for it.
        if several and any(word in str(error) for word in ("gloo", "Connection closed", "Connection reset", "NCCL")):
            raise UserError("another process of this run has ended; what it said stands above") from None
        raise
    if os.environ.get("RANK", "0") != "0":
        return 0
    minutes, seconds = divmod(round(result.seconds), 60)
    print(f"\n{result.iterations} iterations in {minutes} min {seconds} s")
    for name, before in result.start.scores.items():
        if name.split("/")[0] != "total" or len(result.start.scores) == 1:
            after, n = result.end.scores[name], result.start.counts[name]
            print(f"  {name:32s} {before:.3f} -> {after:.3f}  ({n} images)")
    print(f"report   {result.out / 'report.html'}")
    if result.best_iteration is None:
        print(f"LoRA     {result.out / 'last.safetensors'}")
        print("         no evaluation was better than the one at the start, so there is no best.safetensors")
    else:
        print(f"LoRA     {result.out / 'best.safetensors'} (best, iteration {result.best_iteration}), last.safetensors")
    return 0


def _train_help(code: int) -> int:
    """All settings with their types, defaults and documentation."""
    import tyro

    from .config import RunConfig

    print("usage: sfgrpo train RUN.toml [--out DIR] [--section.setting VALUE ...]\n")
    print("The settings below are tables and fields of the run file; each can be overridden on the command line.")
    try:
        tyro.cli(RunConfig, args=["--help"], prog="sfgrpo train RUN.toml", config=(tyro.conf.FlagConversionOff,))
    except SystemExit:
        pass
    return code


def sample(arguments: list[str]) -> int:
    """`sfgrpo sample`: ODE samples as a grid."""
    from .sample import main as sample_main

    return sample_main(arguments)


def lora(arguments: list[str]) -> int:
    """`sfgrpo lora inspect | convert | merge`."""
    from .lora import main as lora_main

    return lora_main(arguments)


def selftest(arguments: list[str]) -> int:
    """`sfgrpo selftest`: green or red, with the number."""
    from .selftest import main as selftest_main

    return selftest_main(arguments)


def reward(arguments: list[str]) -> int:
    """`sfgrpo reward serve`."""
    from .reward import main as reward_main

    return reward_main(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
