"""`sfgrpo sample`: files, seeds, LoRA and guidance; the same image as an evaluation; mistakes in one line."""

import json
import re
import signal

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from sfgrpo.evaluate import evaluate
from sfgrpo.export import save_lora
from sfgrpo.pictures import tile
from sfgrpo.prompts import Prompt
from sfgrpo.rewards import Scores
from sfgrpo_trainer.cli import main
from sfgrpo_trainer.config import LoRAConfig
from sfgrpo_trainer.errors import UserError
from sfgrpo_trainer.families import load_family
from sfgrpo_trainer.policy import LoRAPolicy, add_lora, encode_prompts, load_lora, lora_state

STEPS = 4


@pytest.fixture
def sample(tmp_path):
    """`sample(folder, *arguments)`: run the command; file name -> pixels (H, W, 3) of the images in the folder."""

    def run(folder: str, *arguments: str) -> dict[str, torch.Tensor]:
        out = tmp_path / folder
        assert main(["sample", f"--steps={STEPS}", "--device=cpu", f"--out={out}", *arguments]) == 0
        return {path.name: read(path) for path in sorted(out.iterdir())}

    return run


def read(path) -> torch.Tensor:
    with Image.open(path) as image:
        assert image.mode == "RGB" and image.format == "PNG"
        return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(image.height, image.width, 3)


def apart(one: torch.Tensor, two: torch.Tensor) -> int:
    """Largest difference in grey levels."""
    return int((one.int() - two.int()).abs().max())


@pytest.fixture(scope="module")
def lora(embedded, tmp_path_factory):
    """A random LoRA file for the embedded model."""
    family = load_family(str(embedded.path), torch.float32, torch.device("cpu"), max_sequence_length=0)
    add_lora(family, LoRAConfig(rank=2), seed=0)
    for name, parameter in family.transformer.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(0))
    path = tmp_path_factory.mktemp("lora") / "lora.safetensors"
    save_lora(lora_state(family), path, {"format": "pt"})
    return path


def test_files_of_prompts_and_seeds(sample, tmp_path, capsys):
    (tmp_path / "more.jsonl").write_text('{"prompt": "two red circles"}\n')
    arguments = ["--prompt", "a circle", "--prompt", "a cross", f"--prompts={tmp_path / 'more.jsonl'}", "--seeds=2"]
    images = sample("one", *arguments)
    names = [f"{i:03d}_{seed:03d}.png" for i in range(3) for seed in range(2)]
    assert list(images) == sorted([*names, "grid.png"])
    assert all(images[name].shape == (32, 32, 3) for name in names)
    assert all(apart(images[a], images[b]) > 10 for i, a in enumerate(names) for b in names[:i])
    assert capsys.readouterr().out == f"6 images and grid.png in {tmp_path / 'one'}\n"
    # The grid has a row for each prompt, a column for each seed, and the captions of the prompts.
    captions = ["a circle", "a circle", "a cross", "a cross", "two red circles", "two red circles"]
    stack = torch.stack([images[name] for name in names]).movedim(-1, 1) / 255
    tile(stack, captions, columns=2).save(tmp_path / "grid.png")
    assert torch.equal(read(tmp_path / "grid.png"), images["grid.png"])
    # Same command, same files; in other batches the same up to a grey level.
    again = sample("two", *arguments)
    assert all(torch.equal(images[name], again[name]) for name in images)
    apiece = sample("three", *arguments, "--batch=1")
    assert all(apart(images[name], apiece[name]) <= 1 for name in names)


def test_a_prompt_draws_the_same_in_any_company(sample):
    alone = sample("one", "--prompt", "a cross")
    among = sample("two", "--prompt", "a circle", "--prompt", "a cross", "--seeds=2")
    assert apart(alone["000_000.png"], among["001_000.png"]) <= 1


def test_a_lora_changes_the_images(sample, lora):
    plain = sample("one", "--prompt", "a circle")
    changed = sample("two", "--prompt", "a circle", f"--lora={lora}")
    assert apart(plain["000_000.png"], changed["000_000.png"]) > 10


def test_guidance_and_the_negative_prompt(sample):
    plain = sample("one", "--prompt", "a circle")["000_000.png"]
    unguided = sample("two", "--prompt", "a circle", "--negative", "a cross")["000_000.png"]
    assert torch.equal(plain, unguided)
    guided = sample("three", "--prompt", "a circle", "--guidance=4")["000_000.png"]
    against = sample("four", "--prompt", "a circle", "--guidance=4", "--negative", "a cross")["000_000.png"]
    assert apart(plain, guided) > 10 and apart(guided, against) > 10


def test_sizes(sample):
    images = sample("one", "--prompt", "a circle", "--height=48", "--width=24")
    assert images["000_000.png"].shape == (48, 24, 3)


def test_another_model_with_its_t5(sample, random_sd3):
    arguments = ["--prompt", "a circle", f"--model={random_sd3.path}"]
    short = sample("one", *arguments, "--max-sequence-length=24")["000_000.png"]
    without = sample("two", *arguments, "--max-sequence-length=0")["000_000.png"]
    assert short.shape == (32, 32, 3) and apart(short, without) > 0


@pytest.mark.parametrize("with_lora", [False, True])
def test_the_images_are_those_of_an_evaluation(sample, embedded, lora, with_lora):
    texts, seeds = ["a circle", "three blue crosses"], 2
    family = load_family(str(embedded.path), torch.float32, torch.device("cpu"), max_sequence_length=0)
    if with_lora:
        add_lora(family, LoRAConfig(rank=2, continue_from=lora), seed=1)
    prompts = [Prompt("a square"), *(Prompt(text) for text in texts)]
    policy = LoRAPolicy(family, encode_prompts(family, prompts, {1, 2}, False), guidance=1.0, dtype=torch.float32)
    result = evaluate(
        policy,
        prompts,
        [1, 2],
        lambda images, prompts, metadata: Scores(images.mean((1, 2, 3)), {}),
        sigmas=family.sigmas(STEPS, 32, 32),
        latent_shape=(16, 8, 8),
        images_per_prompt=seeds,
        grid=4,
        batch=4,
        device=torch.device("cpu"),
    )
    arguments = [part for text in texts for part in ("--prompt", text)]
    images = sample("one", *arguments, f"--seeds={seeds}", *([f"--lora={lora}"] if with_lora else []))
    levels = (result.images * 255).round().byte().movedim(1, -1)
    for n, (i, seed) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1)]):
        assert apart(images[f"{i:03d}_{seed:03d}.png"], levels[n]) <= 1


CIRCLE = ["--prompt", "a circle"]
MISTAKES = {
    "no prompt": ([], "give at least one --prompt TEXT or --prompts FILE"),
    "missing prompt file": (["--prompts", "no.txt"], "prompt file no.txt does not exist"),
    "empty prompt file": (["--prompts", "empty.txt"], "prompt file empty.txt is empty"),
    "missing LoRA": ([*CIRCLE, "--lora", "no.safetensors"], "LoRA file no.safetensors does not exist"),
    "damaged LoRA": ([*CIRCLE, "--lora", "empty.txt"], "LoRA file empty.txt cannot be read"),
    "guidance": ([*CIRCLE, "--guidance", "0.5"], "--guidance must be 1 (off) or more"),
    "guidance as text": ([*CIRCLE, "--guidance", "high"], "argument --guidance: invalid float value: 'high'"),
    "guidance nan": ([*CIRCLE, "--guidance", "nan"], "--guidance"),
    "seeds": ([*CIRCLE, "--seeds", "0"], "--seeds must be 1 or more"),
    "steps": ([*CIRCLE, "--steps", "0"], "--steps must be 1 or more"),
    "batch": ([*CIRCLE, "--batch", "0"], "--batch must be 1 or more"),
    "T5 tokens": ([*CIRCLE, "--max-sequence-length", "-1"], "max_sequence_length must be from 0 to 512"),
    "dtype": ([*CIRCLE, "--dtype", "fp8"], "argument --dtype: invalid choice: 'fp8'"),
    "device": ([*CIRCLE, "--device", "abacus"], "device 'abacus' cannot be used"),
    "size": ([*CIRCLE, "--height", "30"], "height"),
    "too large": ([*CIRCLE, "--width", "4096"], "width"),
    "model": ([*CIRCLE, "--model", "./none"], "model ./none does not exist"),
    "out below a file": ([*CIRCLE, "--out", "empty.txt/x"], "cannot write to the folder empty.txt/x"),
    "out is a file": ([*CIRCLE, "--out", "empty.txt"], "cannot write to the folder empty.txt"),
}


@pytest.mark.parametrize(("arguments", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_told_in_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("")
    assert main(["sample", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("sfgrpo: error: ") and said.err.count("\n") == 1
    assert message in said.err
    assert list(tmp_path.rglob("*.png")) == []


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="this system has no limit on the size of files")
def test_a_full_disk_is_told_in_one_line(tmp_path, monkeypatch, capsys):
    """Files may have 100 bytes."""
    import resource

    monkeypatch.chdir(tmp_path)
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        code = main(["sample", "--prompt", "a circle", "--steps=1", "--device=cpu", "--out=new"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    errors = capsys.readouterr().err
    assert code == 1 and errors == "sfgrpo: error: cannot write new/000_000.png: File too large\n"
    assert not list((tmp_path / "new").iterdir())


def test_what_it_prints_and_where_it_writes(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert main(["sample", "--prompt", "a circle", "--steps", "2", "--seeds", "2"]) == 0
    assert capfd.readouterr() == ("2 images and grid.png in samples\n", "")
    assert sorted(p.name for p in (tmp_path / "samples").iterdir()) == ["000_000.png", "000_001.png", "grid.png"]


def test_a_folder_of_peft_draws_what_its_file_draws(sample, embedded, lora, tmp_path):
    # With the names that PeftModel.save_pretrained writes.
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    state = {f"base_model.model.{k.removeprefix('transformer.')}": v for k, v in load_file(lora).items()}
    save_file(state, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["to_q"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    one = sample("one", "--prompt", "a cross", f"--lora={lora}")
    two = sample("two", "--prompt", "a cross", f"--lora={folder}")
    plain = sample("three", "--prompt", "a cross")
    assert apart(one["000_000.png"], two["000_000.png"]) <= 1 < apart(one["000_000.png"], plain["000_000.png"])
    fresh = load_family(str(embedded.path), torch.float32, torch.device("cpu"), max_sequence_length=0)
    add_lora(fresh, LoRAConfig(rank=2, continue_from=folder), seed=1)
    for key, value in lora_state(fresh).items():
        torch.testing.assert_close(value, load_file(lora)[key])


def test_a_lora_of_another_width_is_refused_with_its_layer_and_shapes(embedded, lora, tmp_path):
    state = load_file(lora)
    key = next(k for k in state if k.endswith(".lora_A.weight"))
    name, (rank, width) = key.removesuffix(".lora_A.weight"), state[key].shape
    outputs = len(state[f"{name}.lora_B.weight"])
    state[key] = torch.zeros(rank, width + 8)
    save_file(state, tmp_path / "wide.safetensors")
    shapes = f"({outputs}, {width + 8}) in the file (outputs, inputs) and ({outputs}, {width})"
    words = re.escape(f"layer {name} has the shape {shapes}")

    def load():
        return load_family(str(embedded.path), torch.float32, torch.device("cpu"), max_sequence_length=0)

    with pytest.raises(UserError, match=words):
        load_lora(load(), tmp_path / "wide.safetensors")
    with pytest.raises(UserError, match=words):
        add_lora(load(), LoRAConfig(rank=2, continue_from=tmp_path / "wide.safetensors"), seed=0)
