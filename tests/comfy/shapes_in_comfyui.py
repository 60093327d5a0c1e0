"""Runs in ComfyUI's folder, in a process without diffusers: what Load Shapes Demo Model gives, as a file.

Arguments: the pack's folder, a safetensors file of inputs, a JSON list of texts, the safetensors file to write. Prints
one JSON line: what was logged, which forbidden packages were imported, and what this ComfyUI can do.
"""

import importlib.util
import json
import logging
import os
import sys

pack, inputs_file, texts, outputs_file = sys.argv[1:]
sys.argv[1:] = ["--cpu", "--preview-method", "latent2rgb"]
sys.path.insert(0, os.getcwd())
sys.path[:] = [p for p in sys.path if os.path.realpath(p or ".") != os.path.dirname(os.path.realpath(__file__))]

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()
import comfy.cli_args  # noqa: E402
import comfy.latent_formats  # noqa: E402
import comfy.model_management  # noqa: E402
import latent_preview  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from comfy_extras.nodes_sd3 import CLIPTextEncodeSD3  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append([record.levelname, record.getMessage()])
logging.getLogger().addHandler(handler)

spec = importlib.util.spec_from_file_location("pack", f"{pack}/__init__.py", submodule_search_locations=[pack])
sys.modules["pack"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
node = importlib.import_module("pack.nodes.shapes_demo").LoadShapesDemo

inputs, out = load_file(inputs_file), {}


def velocity(model):
    comfy.model_management.load_models_gpu([model], force_full_load=True)
    x, sigma = inputs["x"], inputs["sigma"]
    denoised = model.model.apply_model(x, sigma, c_crossattn=inputs["context"], y=inputs["pooled"])
    return (x - denoised) / sigma.view(-1, 1, 1, 1)


def keep(name, conditioning):
    ((context, extra),) = conditioning
    out[f"{name}.context"], out[f"{name}.pooled"] = context, extra["pooled_output"]


with torch.inference_mode():
    model, clip, vae, latent = node.execute().args
    out["empty"] = latent["samples"]
    out["velocity"] = velocity(model)
    for i, text in enumerate(json.loads(texts)):
        keep(f"text{i}", clip.encode_from_tokens_scheduled(clip.tokenize(text)))
    for name, padding in (("sd3_none", "none"), ("sd3_empty", "empty_prompt")):
        keep(name, CLIPTextEncodeSD3.execute(clip, "", "", "", padding).args[0])
    keep("sd3_both", CLIPTextEncodeSD3.execute(clip, "a red circle", "a red circle", "a", "none").args[0])
    keep("sd3_one", CLIPTextEncodeSD3.execute(clip, "", "a red circle", "", "none").args[0])
    last = clip.clone()
    last.clip_layer(-1)
    keep("last_layer", last.encode_from_tokens_scheduled(last.tokenize("a red circle")))
    keep("after_last_layer", clip.encode_from_tokens_scheduled(clip.tokenize("a red circle")))

    # ComfyUI's latents are those of the transformer, moved and scaled.
    out["decoded"] = vae.decode(model.model.process_latent_out(inputs["latents"]))
    out["decoded_tiled"] = vae.decode_tiled(
        model.model.process_latent_out(inputs["latents"]), tile_x=16, tile_y=16, overlap=4
    )
    out["encoded"] = model.model.process_latent_in(vae.encode(inputs["images"]))
    out["encoded_tiled"] = model.model.process_latent_in(vae.encode_tiled(inputs["images"], tile_x=64, tile_y=64))
    previewer = latent_preview.get_previewer(torch.device("cpu"), model.model.latent_format)
    if previewer is not None:
        pictures = [previewer.decode_latent_to_preview(x[None]) for x in inputs["latents"]]
        out["previews"] = torch.stack([torch.from_numpy(np.array(picture)) for picture in pictures])
    log = list(lines)
    # What ComfyUI does where it needs a second copy of a part, in versions that do.
    dynamic = {"disable_dynamic": True} if hasattr(model, "is_dynamic") else {}
    for name, patcher in (("model", model), ("clip", clip.patcher), ("vae", vae.patcher)):
        function, arguments = patcher.cached_patcher_init
        again = function(*arguments, **dynamic)
        assert again.model is not patcher.model
        pairs = zip(again.model.state_dict().items(), patcher.model.state_dict().items(), strict=True)
        assert all(k == j and torch.equal(v, w) for (k, v), (j, w) in pairs)
        if name == "model":
            out["velocity_again"] = velocity(again)
            assert vars(again.model.latent_format).keys() == vars(model.model.latent_format).keys()

save_file({k: v.detach().clone().contiguous() for k, v in out.items()}, outputs_file)
forbidden = [name for name in ("diffusers", "peft", "accelerate", "sfgrpo", "trainer") if name in sys.modules]
# What came after ComfyUI 0.3.64.
later = {
    "previews": hasattr(comfy.latent_formats.LatentFormat, "latent_rgb_factors_reshape"),
    "resizes": hasattr(comfy.latent_formats.LatentFormat, "spacial_downscale_ratio"),
}
print(json.dumps({"log": log, "forbidden": forbidden, "later": later}))
