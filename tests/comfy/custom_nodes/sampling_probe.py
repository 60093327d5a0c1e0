"""Nodes for the tests of samplers and sigmas only: conditioning without a text model, tiny models, recordings."""

import os

import comfy.model_base
import comfy.model_patcher
import comfy.ops
import comfy.samplers
import comfy.sd
import comfy.supported_models
import folder_paths
import torch
from safetensors.torch import save_file

CPU = torch.device("cpu")


def output_file(name):
    return os.path.join(folder_paths.get_output_directory(), f"{name}.safetensors")


class Conditioning:
    """Random text embeddings."""

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "make"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"seed": ("INT", {}), "width": ("INT", {}), "pooled": ("INT", {})}}

    def make(self, seed, width, pooled):
        generator = torch.Generator().manual_seed(seed)
        embeddings = torch.randn(1, 12, width, generator=generator)
        return ([[embeddings, {"pooled_output": torch.randn(1, pooled, generator=generator)}]],)


class RandomLatent:
    """A LATENT of any shape, and a MASK of its left half."""

    RETURN_TYPES = ("LATENT", "MASK")
    FUNCTION = "make"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"shape": ("STRING", {}), "seed": ("INT", {})}}

    def make(self, shape, seed):
        sizes = [int(n) for n in shape.split(",")]
        samples = torch.randn(sizes, generator=torch.Generator().manual_seed(seed))
        mask = torch.zeros(1, sizes[-2], sizes[-1])
        mask[:, :, : sizes[-1] // 2] = 1
        return ({"samples": samples}, mask)


class TinyWan:
    """A Wan video model of one narrow block with random weights."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "make"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {}}

    def make(self):
        from comfy.ldm.wan.model import WanModel

        model = WanModel(
            dim=128,
            ffn_dim=128,
            num_heads=1,
            num_layers=1,
            dtype=torch.float32,
            operations=comfy.ops.disable_weight_init,
        )
        generator = torch.Generator().manual_seed(0)
        state = {k: 0.05 * torch.randn(v.shape, generator=generator) for k, v in model.state_dict().items()}
        return (comfy.sd.load_diffusion_model_state_dict(state, model_options={"dtype": torch.float32}),)


class BareModel:
    """A MODEL without a network, of one of ComfyUI's configurations."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "make"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"config": ([name for name in dir(comfy.supported_models) if name[0].isupper()],)}}

    def make(self, config):
        sizes = {"hidden_size": 128, "in_channels": 4, "dim": 128}
        found = getattr(comfy.supported_models, config)(sizes | {"disable_unet_model_creation": True})
        model = found.get_model({}, device=CPU)
        return (comfy.model_patcher.ModelPatcher(model, load_device=CPU, offload_device=CPU),)


class Record:
    """A SAMPLER that does what the given one does, and writes what it was given, predicted and returned to a file."""

    RETURN_TYPES = ("SAMPLER",)
    FUNCTION = "wrap"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"sampler": ("SAMPLER",), "name": ("STRING", {})}}

    def wrap(self, sampler, name):
        def recorded(model, x, sigmas, extra_args=None, callback=None, disable=None, **options):
            states, denoised, steps = [], [], []

            def keep(step):
                states.append(step["x"].clone())
                denoised.append(step["denoised"].clone())
                steps.append(step["i"])
                callback(step)

            final = sampler.sampler_function(model, x, sigmas, extra_args, keep, disable, **options)
            data = {"sigmas": sigmas, "noise": model.noise, "final": final, "steps": torch.tensor(steps)}
            if states:
                data |= {"states": torch.stack([*states, final]), "denoised": torch.stack(denoised)}
            save_file({k: v.detach().cpu().clone().contiguous() for k, v in data.items()}, output_file(name))
            return final

        return (comfy.samplers.KSAMPLER(recorded, sampler.extra_options, sampler.inpaint_options),)


class ManualSigmas:
    """SIGMAS from numbers."""

    RETURN_TYPES = ("SIGMAS",)
    FUNCTION = "make"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"sigmas": ("STRING", {})}}

    def make(self, sigmas):
        return (torch.tensor([float(number) for number in sigmas.split(",") if number]),)


class SaveSigmas:
    """Write SIGMAS to a file."""

    RETURN_TYPES = ()
    OUTPUT_NODE = True
    FUNCTION = "save"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"sigmas": ("SIGMAS",), "name": ("STRING", {})}}

    def save(self, sigmas, name):
        save_file({"sigmas": sigmas.clone().contiguous()}, output_file(name))
        return {}


NODE_CLASS_MAPPINGS = {
    "Probe_Conditioning": Conditioning,
    "Probe_RandomLatent": RandomLatent,
    "Probe_TinyWan": TinyWan,
    "Probe_BareModel": BareModel,
    "Probe_Record": Record,
    "Probe_ManualSigmas": ManualSigmas,
    "Probe_SaveSigmas": SaveSigmas,
}
