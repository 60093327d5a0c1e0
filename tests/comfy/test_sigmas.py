"""Flow Sigmas in a running ComfyUI: against diffusers' schedulers, and the family of every MODEL."""

import uuid

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from safetensors.torch import load_file

# Numbers of each scheduler_config.json as published; width x height 1024 x 768 are 3072 latent tokens.
FLUX_MU = 0.5 + (1.15 - 0.5) * (3072 - 256) / (4096 - 256)
QWEN_MU = 0.5 + (0.9 - 0.5) * (3072 - 256) / (8192 - 256)


def euler_sigmas(steps, mu=None, pipeline=True, **config):
    """diffusers' sigmas, asked for as its pipelines do (True) or by the number of steps (SD3)."""
    scheduler = FlowMatchEulerDiscreteScheduler(**config, use_dynamic_shifting=mu is not None)
    if pipeline:
        scheduler.set_timesteps(sigmas=np.linspace(1, 1 / steps, steps), mu=mu)
    else:
        scheduler.set_timesteps(steps)
    return scheduler.sigmas


def wan_sigmas(steps, shift):
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)
    scheduler.set_timesteps(steps)
    return scheduler.sigmas


def flux2_mu(tokens, steps):
    from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

    return compute_empirical_mu(tokens, steps)


def expected(family, steps):
    """Sigmas of a family for 1024 x 768."""
    return {
        "sd3": lambda: euler_sigmas(steps, shift=3.0, pipeline=False),
        "flux": lambda: euler_sigmas(steps, FLUX_MU),
        "flux-schnell": lambda: euler_sigmas(steps, shift=1.0),
        "flux2": lambda: euler_sigmas(steps, flux2_mu(3072, steps)),
        "qwen-image": lambda: euler_sigmas(steps, QWEN_MU, shift_terminal=0.02),
        "z-image": lambda: euler_sigmas(steps, shift=3.0),
        "wan": lambda: wan_sigmas(steps, 3.0),
        "plain": lambda: torch.linspace(1, 0, steps + 1),
    }[family]()


def run(server, asked, extra=None):
    """name -> sigmas, for name -> inputs of Flow Sigmas (or a link to other SIGMAS)."""
    mark = uuid.uuid4().hex
    nodes = dict(extra or {})
    for name, inputs in asked.items():
        link = inputs
        if isinstance(inputs, dict):
            defaults = {"steps": 10, "family": "auto", "shift": 0.0, "width": 1024, "height": 768, "denoise": 1.0}
            nodes[name] = {"class_type": "SFGRPO_FlowSigmas", "inputs": defaults | inputs}
            link = [name, 0]
        nodes[f"save {name}"] = {"class_type": "Probe_SaveSigmas", "inputs": {"sigmas": link, "name": f"{mark}_{name}"}}
    outcome = server.run(nodes)
    assert outcome.status == "success", outcome.error
    return {name: load_file(server.output / f"{mark}_{name}.safetensors")["sigmas"] for name in asked}


FAMILIES = ("sd3", "flux", "flux-schnell", "flux2", "qwen-image", "z-image", "wan", "plain")


def bare(config):
    return {"class_type": "Probe_BareModel", "inputs": {"config": config}}


def test_every_family_is_diffusers(server):
    choices = server.get("/object_info/SFGRPO_FlowSigmas")["SFGRPO_FlowSigmas"]["input"]["required"]["family"]
    options = choices[0] if isinstance(choices[0], list) else choices[1]["options"]
    assert set(options) == {"auto", *FAMILIES}
    asked = {f"{f} {n}": {"family": f, "steps": n} for f in FAMILIES for n in (4, 10, 28)}
    got = run(server, asked)
    for name, inputs in asked.items():
        want = expected(inputs["family"], inputs["steps"])
        torch.testing.assert_close(got[name], want, rtol=0, atol=2e-6, msg=lambda m, name=name: f"{name}: {m}")


def test_shift_and_size_are_read(server):
    asked = {
        "sd3": {"family": "sd3", "shift": 1.5},
        "plain": {"family": "plain", "shift": 6.0},
        "wan": {"family": "wan", "shift": 5.0},
        "mu": {"family": "flux", "shift": 0.7},
        "small": {"family": "flux", "width": 256, "height": 256},
        "large": {"family": "qwen-image", "width": 1664, "height": 928},
    }
    got = run(server, asked)
    want = {
        "sd3": euler_sigmas(10, shift=1.5, pipeline=False),
        "plain": euler_sigmas(10, shift=6.0),
        "wan": wan_sigmas(10, 5.0),
        "mu": euler_sigmas(10, 0.7),
        "small": euler_sigmas(10, 0.5),
        "large": euler_sigmas(10, 0.5 + 0.4 * (104 * 58 - 256) / (8192 - 256), shift_terminal=0.02),
    }
    for name in asked:
        torch.testing.assert_close(got[name], want[name], rtol=0, atol=2e-6)


def test_auto_finds_the_family_of_the_model(server):
    configs = {
        "SD3": "sd3",
        "Flux": "flux",
        "FluxInpaint": "flux",
        "FluxSchnell": "flux-schnell",
        "Flux2": "flux2",
        "QwenImage": "qwen-image",
        "ZImage": "z-image",
    }
    others = {
        "Lumina2": euler_sigmas(10, shift=6.0),
        "WAN21_T2V": wan_sigmas(10, 8.0),
        "Chroma": euler_sigmas(10, 1.15),
    }
    info = server.get("/object_info/Probe_BareModel")["Probe_BareModel"]
    known = info["input"]["required"]["config"][0]
    # An older ComfyUI does not know all of them.
    names = [name for name in (*configs, *others) if name in known]
    assert {"SD3", "Flux", "QwenImage", *others} <= set(names)
    got = run(server, {n: {"model": [f"model {n}", 0]} for n in names}, {f"model {n}": bare(n) for n in names})
    for name in names:
        want = expected(configs[name], 10) if name in configs else others[name]
        torch.testing.assert_close(got[name], want, rtol=0, atol=2e-6, msg=lambda m, name=name: f"{name}: {m}")


def test_auto_follows_a_shift_that_was_set_on_the_model(server):
    flux_at = {"max_shift": 1.0, "base_shift": 0.6, "width": 1024, "height": 1024}
    nodes = {
        "SD3": bare("SD3"),
        "Flux": bare("Flux"),
        "QwenImage": bare("QwenImage"),
        "sd3 2": {"class_type": "ModelSamplingSD3", "inputs": {"model": ["SD3", 0], "shift": 2.0}},
        "flux 1": {"class_type": "ModelSamplingFlux", "inputs": {"model": ["Flux", 0]} | flux_at},
        "flux static": {"class_type": "ModelSamplingAuraFlow", "inputs": {"model": ["Flux", 0], "shift": 2.5}},
        "qwen 1": {"class_type": "ModelSamplingFlux", "inputs": {"model": ["QwenImage", 0]} | flux_at},
        "sd3 mu": {"class_type": "ModelSamplingFlux", "inputs": {"model": ["SD3", 0]} | flux_at},
    }
    want = {
        "sd3 2": euler_sigmas(10, shift=2.0, pipeline=False),
        "flux 1": euler_sigmas(10, 1.0),
        "flux static": euler_sigmas(10, shift=2.5),
        "qwen 1": euler_sigmas(10, 1.0, shift_terminal=0.02),
        "sd3 mu": euler_sigmas(10, 1.0),
    }
    got = run(
        server,
        {f"of {name}": {"model": [name, 0]} for name in want} | {"own": {"model": ["sd3 2", 0], "shift": 4.0}},
        nodes,
    )
    for name in want:
        torch.testing.assert_close(
            got[f"of {name}"], want[name], rtol=0, atol=2e-6, msg=lambda m, name=name: f"{name}: {m}"
        )
    torch.testing.assert_close(got["own"], euler_sigmas(10, shift=4.0, pipeline=False), rtol=0, atol=2e-6)


def test_denoise_takes_the_end_of_a_longer_grid(server):
    asked = {f"{f} {d}": {"family": f, "denoise": d} for f in ("sd3", "flux2", "qwen-image") for d in (0.3, 0.5, 0.99)}
    asked["none"] = {"family": "sd3", "denoise": 0.0}
    basic = {
        "model": bare("FluxSchnell"),
        "basic": {
            "class_type": "BasicScheduler",
            "inputs": {"model": ["model", 0], "scheduler": "simple", "steps": 10, "denoise": 0.4},
        },
    }
    asked |= {"basic like": {"family": "plain", "denoise": 0.4}, "basic": ["basic", 0]}
    got = run(server, asked, basic)
    for name, inputs in asked.items():
        if "." in name:
            want = expected(inputs["family"], int(10 / inputs["denoise"]))[-11:]
            torch.testing.assert_close(got[name], want, rtol=0, atol=2e-6, msg=lambda m, name=name: f"{name}: {m}")
    assert got["none"].numel() == 0
    # ComfyUI's simple grid without a shift is even, up to the thousandths that it picks its times from.
    torch.testing.assert_close(got["basic like"], got["basic"], rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "inputs, model, words",
    (
        ({}, None, "family auto reads the model; connect one, or choose the family"),
        (
            {},
            "SDXL",
            "Flow Sigmas is for flow models, and this SDXL model is set up as another kind; "
            "use Basic Scheduler with it.",
        ),
        ({"family": "qwen-image", "steps": 1}, None, "a terminal time needs 2 or more steps"),
    ),
)
def test_what_does_not_fit_is_named(server, inputs, model, words):
    link = {"model": ["model", 0]} if model else {}
    nodes = {"model": bare(model)} if model else {}
    defaults = {"steps": 10, "family": "auto", "shift": 0.0, "width": 1024, "height": 768, "denoise": 1.0}
    nodes["sigmas"] = {"class_type": "SFGRPO_FlowSigmas", "inputs": defaults | inputs | link}
    nodes["save"] = {"class_type": "Probe_SaveSigmas", "inputs": {"sigmas": ["sigmas", 0], "name": "none"}}
    outcome = server.run(nodes)
    assert outcome.status == "error" and outcome.error == words
