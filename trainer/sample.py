"""`sfgrpo sample`: deterministic ODE samples of fixed seeds, with or without a LoRA, as single files and a grid."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image

from sfgrpo.dtypes import DTYPES
from sfgrpo.prompts import Prompt, read_prompts
from sfgrpo.shapes import MODEL_DIR

from .config import EMBEDDED
from .disk import write_png, writing
from .errors import UserError, out_folder
from .families.loading import QUANTISATIONS


class Parser(argparse.ArgumentParser):
    """argparse whose errors are UserErrors: one line, exit code 2."""

    def error(self, message: str) -> None:
        raise UserError(f"{self.prog}: {message}")


def parser() -> Parser:
    """The arguments of `sfgrpo sample`."""
    p = Parser(prog="sfgrpo sample", description=__doc__)
    p.add_argument("--model", default=EMBEDDED, help="diffusers folder, hub id, or `shapes` (default)")
    p.add_argument("--lora", type=Path, help="LoRA file or folder of peft's, at strength 1.0")
    p.add_argument("--prompt", action="append", help="a prompt; may be given several times")
    p.add_argument("--prompts", type=Path, help="prompt file, .txt or .jsonl")
    p.add_argument("--negative", default="", help="negative prompt, where guidance is above 1")
    p.add_argument("--seeds", type=int, default=1, help="images of each prompt, seeds 0, 1, ...")
    p.add_argument("--steps", type=int, default=20, help="ODE steps")
    p.add_argument("--guidance", type=float, default=1.0, help="classifier-free guidance; 1 is off")
    p.add_argument("--height", type=int, help="pixels; default: the model's own")
    p.add_argument("--width", type=int, help="pixels; default: the model's own")
    p.add_argument("--max-sequence-length", type=int, help="text tokens; default: the pipeline's, `shapes` 0")
    p.add_argument("--embedded-guidance", type=float, help="guidance that FLUX.1-dev and FLUX.2-dev take as an input")
    p.add_argument("--frames", type=int, default=1, help="frames of a video (Wan): 1, 5, 9, ...; shows the middle one")
    p.add_argument("--expert", choices=("high", "low"), help="which of two transformers --lora is for (Wan 2.2 A14B)")
    p.add_argument("--quantize", choices=QUANTISATIONS, default="none", help="base weights in 8 or 4 bit")
    p.add_argument("--dtype", choices=tuple(DTYPES), help="default: bf16 on a GPU, else fp32")
    p.add_argument("--device", default="auto")
    p.add_argument("--batch", type=int, default=16, help="images made at once")
    p.add_argument("--out", type=out_folder, default=Path("samples"), help="folder of the images")
    return p


def main(arguments: list[str]) -> int:
    """Make the images; returns the exit code."""
    args = parser().parse_args(arguments)
    prompts = _prompts(args)
    for name in ("seeds", "steps", "batch"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} must be 1 or more")
    if not 1 <= args.guidance < float("inf"):
        raise UserError("--guidance must be 1 (off) or more")
    if args.lora is not None and not args.lora.exists():
        raise UserError(f"LoRA file {args.lora} does not exist")
    embedded = args.model == EMBEDDED
    model = str(MODEL_DIR) if embedded else args.model
    from .families import LoadOptions, check_embedded_guidance, check_size, family_class, load_model
    from .prepare import check_writable, pick_device, quiet

    shape = check_size(model, args.height, args.width, args.frames)
    check_embedded_guidance(model, args.embedded_guidance)
    check_writable(args.out)
    device = pick_device(args.device)
    quiet()
    from sfgrpo.evaluate import sample_latents
    from sfgrpo.pictures import tile

    from .policy import LoRAPolicy, encode_prompts, load_lora

    dtype = DTYPES[args.dtype or ("fp32" if device.type == "cpu" else "bf16")]
    options = LoadOptions(
        dtype=dtype,
        device=device,
        quantize=args.quantize,
        max_sequence_length=0 if embedded and args.max_sequence_length is None else args.max_sequence_length,
        embedded_guidance=args.embedded_guidance,
        expert=args.expert,
    )
    family_class(model).check_options(options)
    family = load_model(model, options, "encoders")
    family.check_guidance(args.guidance)
    conditioning = encode_prompts(family, prompts, set(range(len(prompts))), args.guidance > 1)
    del family
    family = load_model(model, options, "denoiser")
    height, width = (given or own for given, own in zip((args.height, args.width), family.native_size, strict=True))
    if args.lora is not None:
        for words in load_lora(family, args.lora):
            print(f"sfgrpo: warning: {words}", file=sys.stderr)
    policy = LoRAPolicy(family, conditioning, guidance=args.guidance, dtype=dtype)
    jobs = [(i, seed) for i in range(len(prompts)) for seed in range(args.seeds)]
    images = torch.cat(
        [
            policy.decode(
                sample_latents(
                    policy,
                    prompts,
                    [i for i, _ in jobs[start : start + args.batch]],
                    [seed for _, seed in jobs[start : start + args.batch]],
                    sigmas=family.sigmas(args.steps, height, width),
                    latent_shape=shape,
                    device=device,
                )
            ).cpu()
            for start in range(0, len(jobs), args.batch)
        ]
    )
    for (i, seed), image in zip(jobs, images, strict=True):
        array = (image * 255).round().byte().movedim(0, -1).numpy()
        path = args.out / f"{i:03d}_{seed:03d}.png"
        with writing(path):
            write_png(path, Image.fromarray(array))
    captions = [prompts[i].text for i, _ in jobs]
    with writing(args.out / "grid.png"):
        write_png(args.out / "grid.png", tile(images, captions, columns=args.seeds if args.seeds > 1 else 4))
    print(f"{len(images)} images and grid.png in {args.out}")
    return 0


def _prompts(args: argparse.Namespace) -> list[Prompt]:
    prompts = [Prompt(text, args.negative) for text in args.prompt or ()]
    if args.prompts is not None:
        try:
            prompts += [replace(p, negative=p.negative or args.negative) for p in read_prompts(args.prompts)]
        except ValueError as error:
            raise UserError(str(error)) from None
    if not prompts:
        raise UserError("give at least one --prompt TEXT or --prompts FILE")
    return prompts
