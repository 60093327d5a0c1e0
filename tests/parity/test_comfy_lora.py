"""LoRA files against ComfyUI's own loader at strength 1.0: the same velocity as diffusers with peft.

Needs a ComfyUI checkout at $COMFYUI_PATH or ~/comfy/ComfyUI; skipped where there is none. ComfyUI runs in a process of
its own, in its folder, without this repository on its path.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sfgrpo.export import save_lora
from sfgrpo_trainer.config import LoRAConfig
from sfgrpo_trainer.families import load_family
from sfgrpo_trainer.policy import add_lora, lora_state

IN_COMFYUI = """
import json, logging, os, sys

jobs = json.loads(sys.argv.pop())
sys.argv[1:] = ["--cpu"]
sys.path.insert(0, os.getcwd())
try:
    import comfy.options

    comfy.options.enable_args_parsing()
    import comfy.model_management
    import comfy.sd
except ImportError as error:
    print(json.dumps({"cannot_import": str(error)}))
    raise SystemExit
import torch
from safetensors.torch import load_file, save_file

lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger().addHandler(handler)


def velocity(patcher, inputs):
    comfy.model_management.load_models_gpu([patcher], force_full_load=True)
    with torch.no_grad():
        x, sigma = inputs["x"], inputs["sigma"]
        denoised = patcher.model.apply_model(x, sigma, c_crossattn=inputs["context"], y=inputs["pooled"])
    return (x - denoised) / sigma.view(-1, 1, 1, 1)


for job in jobs:
    inputs = load_file(job["inputs"])
    weights = {k: v.float().clone() for k, v in load_file(job["weights"]).items()}
    base = comfy.sd.load_diffusion_model_state_dict(weights, model_options={"dtype": torch.float32})
    out = {"base": velocity(base, inputs)}
    for name, file in job["loras"].items():
        patched, _ = comfy.sd.load_lora_for_models(base, None, load_file(file), 1.0, 0.0)
        out[name] = velocity(patched, inputs)
    out["base_again"] = velocity(base, inputs)
    save_file({k: v.contiguous() for k, v in out.items()}, job["outputs"])
ours = sorted(name for name in sys.modules if name.split(".")[0] in ("sfgrpo", "sfgrpo_trainer"))
log = list(lines)
# The opposite: a key that is of no module here is noticed.
unknown = {f"transformer.no_module.lora_{x}.weight": torch.zeros(4, 4) for x in "AB"}
comfy.sd.load_lora_for_models(base, None, unknown, 1.0, 0.0)
print(json.dumps({"log": log, "log_of_unknown": lines[len(log) :], "ours": ours}))
"""


def comfyui() -> Path:
    """The checkout, or a skip."""
    path = Path(os.environ.get("COMFYUI_PATH", "~/comfy/ComfyUI")).expanduser()
    if not (path / "comfy" / "sd.py").is_file():
        pytest.skip(f"no ComfyUI checkout at {path}; set COMFYUI_PATH")
    return path


def prepare_job(model, folder: Path) -> dict:
    """Random LoRA files for a model, and the velocity that diffusers gives with each."""
    generator = torch.Generator().manual_seed(1)
    weights = model.path / "transformer" / "diffusion_pytorch_model.safetensors"
    job = {"weights": str(weights), "inputs": str(folder / "inputs.safetensors"), "loras": {}}
    job["outputs"] = str(folder / "outputs.safetensors")
    expected, inputs = {}, None
    for targets in ("attention", "attention_mlp", "all"):
        family = load_family(str(model.path), torch.float32, torch.device("cpu"), max_sequence_length=0)
        config = family.transformer.config
        if inputs is None:
            inputs = {
                "x": torch.randn(3, 16, 8, 8, generator=generator),
                "sigma": torch.tensor([1.0, 0.6, 0.05]),
                "context": torch.randn(3, 12, config.joint_attention_dim, generator=generator),
                "pooled": torch.randn(3, config.pooled_projection_dim, generator=generator),
            }
            save_file(inputs, job["inputs"])
            expected["base"] = forward(family, inputs)
        add_lora(family, LoRAConfig(rank=4, alpha=12.0, targets=targets), seed=0)
        for name, parameter in family.transformer.named_parameters():
            if "lora_" in name:
                parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
        job["loras"][targets] = str(folder / f"{targets}.safetensors")
        save_lora(lora_state(family), job["loras"][targets], {"format": "pt"})
        expected[targets] = forward(family, inputs)
    save_file(expected, folder / "expected.safetensors")
    return job


@torch.no_grad()
def forward(family, inputs) -> torch.Tensor:
    """diffusers' transformer, with the LoRA where one is on it."""
    return family.transformer(
        hidden_states=inputs["x"],
        timestep=inputs["sigma"] * 1000,
        encoder_hidden_states=inputs["context"],
        pooled_projections=inputs["pooled"],
        return_dict=False,
    )[0].clone()


@pytest.fixture(scope="module")
def answers(embedded, random_sd3, tmp_path_factory):
    """What ComfyUI logged, and model name -> (expected, got), each a dict of velocities."""
    checkout = comfyui()
    folders = {name: tmp_path_factory.mktemp(name) for name in ("embedded", "random_sd3")}
    jobs = [prepare_job(m, folders[n]) for n, m in (("embedded", embedded), ("random_sd3", random_sd3))]
    process = subprocess.run(
        [sys.executable, "-c", IN_COMFYUI, json.dumps(jobs)],
        cwd=checkout,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert process.returncode == 0, process.stderr
    said = json.loads(process.stdout.strip().splitlines()[-1])
    if "cannot_import" in said:
        pytest.skip(f"ComfyUI at {checkout} cannot be imported here: {said['cannot_import']}")
    files = ("expected.safetensors", "outputs.safetensors")
    return said, {name: tuple(load_file(folder / f) for f in files) for name, folder in folders.items()}


@pytest.mark.parametrize("targets", ["base", "attention", "attention_mlp", "all"])
@pytest.mark.parametrize("name", ["embedded", "random_sd3"])
def test_comfyui_gives_the_velocity_of_diffusers(answers, name, targets):
    expected, got = answers[1][name]
    size = max(1.0, float(expected[targets].abs().max()))  # rounding grows with the velocity: up to 15 with a LoRA
    torch.testing.assert_close(got[targets], expected[targets], rtol=0, atol=1e-4 * size)
    if targets != "base":
        assert (got[targets] - got["base"]).abs().max() > 0.1


@pytest.mark.parametrize("name", ["embedded", "random_sd3"])
def test_comfyui_puts_the_base_weights_back(answers, name):
    _, got = answers[1][name]
    assert torch.equal(got["base_again"], got["base"])


def test_comfyui_loads_every_key(answers):
    said, _ = answers
    bad = ("not loaded", "error", "shape", "missing")
    assert [line for line in said["log"] if any(word in line.lower() for word in bad)] == []
    assert len(said["log_of_unknown"]) == 2 and all("not loaded" in line for line in said["log_of_unknown"])
    assert said["ours"] == []  # nothing of this repository was imported there
