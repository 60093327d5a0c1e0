"""Runs in ComfyUI's folder: velocities of small models with and without LoRA files, and which layers the node trains.

Arguments: the pack's folder, a JSON list of jobs (see test_families.py). Prints one JSON line.
"""

import importlib
import importlib.util
import json
import logging
import os
import sys

pack, jobs = sys.argv[1], json.loads(sys.argv[2])
sys.argv[1:] = ["--cpu"]
sys.path[:] = [os.getcwd(), *(p for p in sys.path if os.path.realpath(p or ".") != os.path.dirname(__file__))]

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()
import comfy.model_management  # noqa: E402
import comfy.model_patcher  # noqa: E402
import comfy.sd  # noqa: E402
import comfy.supported_models  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger().addHandler(handler)

spec = importlib.util.spec_from_file_location("pack", f"{pack}/__init__.py", submodule_search_locations=[pack])
sys.modules["pack"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
comfy_patch = importlib.import_module("pack.nodes.comfy_patch")
lora = importlib.import_module("pack.sfgrpo.lora")


def load(job):
    """The model, by detection or by its class, and which of its weights the file lacks or has too many."""
    weights = load_file(job["weights"])
    if job["class"] is None:
        names = set(weights)
        patcher = comfy.sd.load_diffusion_model_state_dict(dict(weights), model_options={"dtype": torch.float32})
        return patcher, sorted(names ^ set(patcher.model.diffusion_model.state_dict()))
    config = getattr(comfy.supported_models, job["class"])(job["config"])
    config.set_inference_dtype(torch.float32, None)
    model = config.get_model(weights, "", device="cpu")
    odd = sorted(set(weights) ^ set(model.diffusion_model.state_dict()))
    model.load_model_weights(dict(weights), "")
    return comfy.model_patcher.ModelPatcher(model, torch.device("cpu"), torch.device("cpu")), odd


def velocity(patcher, rows, dims):
    comfy.model_management.load_models_gpu([patcher], force_full_load=True)
    out = []
    for row in rows:
        x, sigma = row.pop("x"), row.pop("sigma")
        shape = x.shape
        if dims == 5 and x.ndim == 4:
            x = x.unsqueeze(2)
        with torch.no_grad():
            denoised = patcher.model.apply_model(x, sigma, **row)
        out.append(((x - denoised) / sigma.view(-1, *[1] * (x.ndim - 1))).reshape(shape))
    return torch.cat(out)


report = {}
for job in jobs:
    lines.clear()
    base, odd = load(job)

    def run(patcher, job=job):
        return velocity(patcher, [load_file(file) for file in job["rows"]], job["dims"])

    out = {"base": run(base)}
    for name, file in job["loras"].items():
        patched, _ = comfy.sd.load_lora_for_models(base, None, load_file(file), 1.0, 0.0)
        out[name] = run(patched)
    save_file({k: v.contiguous() for k, v in out.items()}, job["outputs"])
    places = comfy_patch.lora_places(base)
    layers = {choice: sorted(lora.choose_targets(places, choice)) for choice in lora.TARGETS}
    report[job["name"]] = {"odd": odd, "log": list(lines), "layers": layers}
print(json.dumps(report))
