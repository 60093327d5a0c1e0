"""Runs in ComfyUI's folder, without this repository on its path: loads LoRA files onto small models of zeros.

Argument: JSON, family -> [class of comfy.supported_models, config]. Prints the linear layers of each, then for each
line [family, LoRA file, output file] of the input writes the patched weights, and prints what ComfyUI logged.
"""

import json
import logging
import os
import sys

configs = json.loads(sys.argv.pop())
sys.argv[1:] = ["--cpu"]
sys.path[0] = os.getcwd()
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


def say(answer):
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


try:
    import comfy.options

    comfy.options.enable_args_parsing()
    import comfy.model_patcher
    import comfy.sd
    import comfy.supported_models
    import comfy.utils
except ImportError as error:
    say({"cannot_import": str(error)})
    raise SystemExit from None
import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger().addHandler(handler)
CPU = torch.device("cpu")
models = {}
for key, (name, config) in configs.items():
    found = getattr(comfy.supported_models, name)(config)
    found.set_inference_dtype(torch.float32, None)
    models[key] = found.get_model({}, "", device=CPU)
    for parameter in models[key].parameters():
        parameter.data = torch.zeros_like(parameter.data)
        parameter.requires_grad = False

say(
    {
        key: {
            n: (m.in_features, m.out_features)
            for n, m in model.diffusion_model.named_modules()
            if isinstance(m, torch.nn.Linear)
        }
        for key, model in models.items()
    }
)
for line in sys.stdin:
    key, path, out = json.loads(line)
    lines.clear()
    patcher = comfy.model_patcher.ModelPatcher(models[key], CPU, CPU)
    lora = comfy.utils.load_torch_file(path, safe_load=True)
    patched, _ = comfy.sd.load_lora_for_models(patcher, None, lora, 1.0, 0.0)
    with torch.no_grad():
        patched.patch_model(CPU)
        state = {k: v.clone() for k, v in models[key].diffusion_model.state_dict().items()}
        patched.unpatch_model(CPU)
    save_file(state, out)
    say({"lines": list(lines)})
