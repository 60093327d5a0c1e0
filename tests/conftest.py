"""Shared fixtures: a small random SD3 model on disk, run files, the command line as a process, one finished run."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from sfgrpo.shapes import MODEL_DIR

PROMPTS = ("a circle", "two red circles", "a blue square", "a circle and a square")
CONTEXT_LENGTH = 12


@dataclass
class Model:
    """A model folder, and what it is run with."""

    path: Path
    max_sequence_length: int
    size: int = 32


@pytest.fixture(scope="session")
def embedded() -> Model:
    """The model that comes with the project, without T5, as run files use it."""
    return Model(MODEL_DIR, 0)


@pytest.fixture(scope="session")
def random_sd3(tmp_path_factory) -> Model:
    """SD3.5's layout in small, with random weights: two CLIPs of different widths, a T5, one dual-attention block."""
    import torch
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tokenizers = [word_tokenizer("<end>"), word_tokenizer("<end>"), word_tokenizer("<pad>")]
        clips = [
            CLIPTextModelWithProjection(
                CLIPTextConfig(
                    vocab_size=len(tokenizer),
                    hidden_size=width,
                    intermediate_size=2 * width,
                    num_hidden_layers=2,
                    num_attention_heads=4,
                    max_position_embeddings=CONTEXT_LENGTH,
                    projection_dim=projection,
                    bos_token_id=tokenizer.bos_token_id,
                    eos_token_id=tokenizer.eos_token_id,
                    pad_token_id=tokenizer.pad_token_id,
                    # Large, so that prompts differ although nothing was trained.
                    initializer_factor=20.0,
                )
            )
            for tokenizer, width, projection in zip(tokenizers, (32, 48), (24, 40), strict=False)
        ]
        t5 = T5EncoderModel(
            T5Config(
                vocab_size=len(tokenizers[2]),
                d_model=96,
                d_kv=16,
                d_ff=64,
                num_layers=1,
                num_heads=2,
                eos_token_id=tokenizers[2].eos_token_id,
                pad_token_id=tokenizers[2].pad_token_id,
            )
        )
        transformer = SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=16,
            num_layers=2,
            attention_head_dim=64,
            num_attention_heads=2,
            joint_attention_dim=96,
            caption_projection_dim=128,
            pooled_projection_dim=64,
            out_channels=16,
            pos_embed_max_size=16,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
        )
        vae = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 3,
            up_block_types=("UpDecoderBlock2D",) * 3,
            block_out_channels=(16, 16, 32),
            layers_per_block=1,
            latent_channels=16,
            norm_num_groups=8,
            sample_size=32,
            scaling_factor=1.5305,
            shift_factor=0.0609,
            use_quant_conv=False,
            use_post_quant_conv=False,
        )
    path = tmp_path_factory.mktemp("random_sd3")
    StableDiffusion3Pipeline(
        transformer=transformer.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae.eval(),
        text_encoder=clips[0].eval(),
        tokenizer=tokenizers[0],
        text_encoder_2=clips[1].eval(),
        tokenizer_2=tokenizers[1],
        text_encoder_3=t5.eval(),
        tokenizer_3=tokenizers[2],
    ).save_pretrained(path)
    return Model(path, 24)


def word_tokenizer(pad: str):
    """One token a word, between <start> and <end>; padded with `pad`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = sorted({word for prompt in (*PROMPTS, "a green cross") for word in prompt.split()})
    vocab = {token: i for i, token in enumerate(["<pad>", *words, "<unk>", "<start>", "<end>"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<start> $A <end>", special_tokens=[(t, vocab[t]) for t in ("<start>", "<end>")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<start>",
        eos_token="<end>",
        pad_token=pad,
        unk_token="<unk>",
        model_max_length=CONTEXT_LENGTH,
    )


@pytest.fixture(scope="session", params=["embedded", "random_sd3"])
def model(request) -> Model:
    """Each of the two models in turn."""
    return request.getfixturevalue(request.param)


Cli = Callable[..., subprocess.CompletedProcess]


@pytest.fixture(scope="session")
def cli() -> Cli:
    """`cli(*arguments, cwd=...)`: the command line as a process of its own, output captured."""

    def run(*arguments: object, cwd: Path) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-m", "sfgrpo_trainer.cli", *map(str, arguments)],
            cwd=cwd,
            env=os.environ | {"COLUMNS": "100"},
            capture_output=True,
            text=True,
            timeout=900,
        )

    return run


RUN_FILE = """
iterations = 2
save_every = 2

[model]
path = "shapes"
dtype = "fp32"
device = "cpu"
max_sequence_length = 0

[prompts]
file = "prompts.jsonl"
per_iteration = 2

[rewards]
jpeg_size = -1.0
shapes = 0.5

[sampling]
height = 32
width = 32
steps = 4

[grpo]
group_size = 3

[lora]
rank = 4
alpha = 12.0

[optimizer]
lr = 1e-3

[eval]
every = 2
grid = 4
"""


@pytest.fixture(scope="session")
def write_run() -> Callable[[Path], Path]:
    """`write_run(folder)`: a small run file and its four prompts; returns the run file.

    The JPEG size stands in it because its gains differ whatever the model can draw.
    """

    def write(folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        lines = [f'{{"prompt": "{prompt}", "tag": "tag{i % 2}"}}' for i, prompt in enumerate(PROMPTS)]
        (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
        (folder / "run.toml").write_text(RUN_FILE)
        return folder / "run.toml"

    return write


@dataclass
class Finished:
    """A run that the command line made."""

    file: Path
    """Its run file."""
    out: Path
    process: subprocess.CompletedProcess


@pytest.fixture(scope="session")
def finished(tmp_path_factory, write_run, cli) -> Finished:
    """Three iterations with two evaluations after the first, through the command line."""
    folder = tmp_path_factory.mktemp("finished")
    file = write_run(folder)
    process = cli("train", "run.toml", "--out", "a & b", "--iterations", 3, cwd=folder)
    assert process.returncode == 0, process.stderr
    return Finished(file, folder / "a & b", process)


def pytest_terminal_summary(terminalreporter):
    """Say how many of the tests that need a ComfyUI checkout ran."""
    stats = terminalreporter.stats
    ran, skipped = (
        sum(
            any(word in getattr(report, "nodeid", "") for word in ("comfy", "tests/browser"))
            for key in keys
            for report in stats.get(key, [])
        )
        for keys in (("passed", "failed"), ("skipped",))
    )
    terminalreporter.write_line(f"tests that need a ComfyUI checkout: {ran} ran, {skipped} skipped")
