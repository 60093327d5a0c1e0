"""`sfgrpo lora inspect | convert | merge`: the LoRA doctor on the command line. Needs torch and safetensors only."""

from __future__ import annotations

import argparse
from pathlib import Path

from sfgrpo.dtypes import DTYPES
from sfgrpo.export import save_lora
from sfgrpo.lora_files.convert import warnings, written
from sfgrpo.lora_files.doctor import report
from sfgrpo.lora_files.families import FAMILIES
from sfgrpo.lora_files.file import read_lora
from sfgrpo.lora_files.merge import merge_read
from sfgrpo.lora_files.understand import understand

from .disk import writing
from .errors import UserError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UserError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="sfgrpo lora", description="What a LoRA file is, and how it loads everywhere at 1.0.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="inspect | convert | merge")
    inspect = commands.add_parser("inspect", help="say what a file is and what ComfyUI and diffusers make of it")
    inspect.add_argument("file", type=Path, metavar="FILE", help="a .safetensors file, or a folder that peft saved")
    into = commands.add_parser("convert", help="write it so that ComfyUI and diffusers both load it at strength 1.0")
    into.add_argument("file", type=Path, metavar="FILE")
    into.add_argument("out", type=Path, metavar="OUT")
    both = commands.add_parser("merge", help="write the sum of several LoRAs of one model")
    both.add_argument("out", type=Path, metavar="OUT")
    both.add_argument("files", nargs="+", metavar="FILE[:WEIGHT]", help="WEIGHT is 1 where it is left out")
    both.add_argument("--rank", type=int, help="cut each layer to this rank, by singular values")
    for command in (inspect, into):
        command.add_argument(
            "--alpha", type=float, help="that it was trained with, where you know better than the file"
        )
    for command in (inspect, into, both):
        command.add_argument("--model", choices=FAMILIES, help="that it is of, where the file leaves it in doubt")
    for command in (into, both):
        command.add_argument("--dtype", choices=DTYPES, help="of the new file; that of the (first) file where left out")
        command.add_argument("--force", action="store_true", help="overwrite OUT")
    return parser


def main(arguments: list[str]) -> int:
    """Run one command. Raises UserError."""
    try:
        options = _parser().parse_args(arguments)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    try:
        if options.command == "inspect":
            print(report(read_lora(options.file), alpha=options.alpha, model=options.model).text())
            return 0
        return _write(options)
    except ValueError as error:
        raise UserError(str(error)) from None


def _write(options: argparse.Namespace) -> int:
    out, dtype = options.out, DTYPES.get(options.dtype)
    if out.suffix != ".safetensors":
        raise UserError(f"OUT must end in .safetensors, got {out}")
    if out.exists() and not options.force:
        raise UserError(f"{out} exists; choose another name, or give --force to overwrite it")
    if options.command == "convert":
        reads = [understand(read_lora(options.file), alpha=options.alpha, model=options.model)]
        state, metadata = written(reads[0], dtype)
    else:
        paths, weights = zip(*(_weighted(text) for text in options.files), strict=True)
        reads = [understand(read_lora(path), model=options.model) for path in paths]
        state, metadata = merge_read(reads, weights, rank=options.rank, dtype=dtype)
    for read in reads:
        for line in [*warnings(read), *([read.scale.doubt] if read.scale.doubt else [])]:
            print(f"{read.file.name}: {line}")
    with writing(out):
        save_lora(state, out, metadata)
    print(f"{out}: {len(state) // 2} layers, rank {metadata['rank']}; loads in ComfyUI and diffusers at strength 1.0")
    return 0


def _weighted(text: str) -> tuple[Path, float]:
    """FILE[:WEIGHT]; a colon that no number follows belongs to the name."""
    name, colon, weight = text.rpartition(":")
    if colon and not Path(text).exists():
        try:
            number = float(weight)
        except ValueError:
            return Path(text), 1.0
        if not abs(number) < float("inf"):
            raise UserError(f"the weight of {name} must be a number, got {weight}")
        return Path(name), number
    return Path(text), 1.0
