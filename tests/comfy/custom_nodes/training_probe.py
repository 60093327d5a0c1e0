"""Nodes for the tests of training only: what a MODEL looks like, rewards, VAEs and models that fail, recordings."""

import copy
import hashlib
import json
import os
import time
from dataclasses import dataclass

import comfy.model_management
import folder_paths
import torch
from safetensors.torch import save_file

NEVER = float("nan")


class Fresh:
    """Computed anew in every prompt, and so is all that follows it."""

    @classmethod
    def IS_CHANGED(cls, **inputs):
        return NEVER


class Look(Fresh):
    """Which object a MODEL is, a hash of its weights, and whatever does not belong on a model at rest.

    at_rest: take it out of memory first, so that its weights are without the patches of a LoRA. The MODEL is given on,
    for nodes that are to run later.
    """

    RETURN_TYPES = ("MODEL",)
    OUTPUT_NODE = True
    FUNCTION = "look"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "at_rest": ("BOOLEAN",)}, "optional": {"after": ("*",)}}

    def look(self, model, at_rest, after=None):
        left = [
            name
            for name, module in model.model.named_modules()
            if "forward" in module.__dict__
            or module._forward_hooks
            or module._forward_pre_hooks
            or module._backward_hooks
            or getattr(module, "weight_function", None)
            or getattr(module, "bias_function", None)
        ]
        trained = [name for name, p in model.model.named_parameters() if p.requires_grad or p.grad is not None]
        if at_rest:
            comfy.model_management.unload_all_models()
        found = {
            "object": id(model.model),
            "hash": hash_of(model.model.state_dict()),
            "left": left,
            "requires_grad": trained,
            "injections": sorted(model.injections),
            "patches": len(model.patches),
            "in_training": comfy.model_management.in_training,
            "inference_mode": torch.is_inference_mode_enabled(),
        }
        return {"ui": {"text": [json.dumps(found)]}, "result": (model,)}


def hash_of(state):
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name]
        # A quantised tensor has its numbers inside.
        parts = [tensor._qdata] if hasattr(tensor, "_qdata") else [tensor]
        for part in parts:
            digest.update(f"{name} {part.dtype} {tuple(part.shape)}".encode())
            digest.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Term:
    name: str
    fn: object
    weight: float = 1.0
    normalise: bool = False


class Reward(Fresh):
    """How red an image is, a smooth function of it. Writes the metadata that reach it to a file, and can fail."""

    RETURN_TYPES = ("SFGRPO_REWARD",)
    FUNCTION = "make"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"fail_at": ("INT", {"default": 0}), "record": ("STRING", {"default": ""})}}

    def make(self, fail_at=0, record=""):
        seen = []

        def red(images, prompts, metadata):
            seen.append([list(prompts), [dict(m) for m in metadata]])
            if record:
                with open(os.path.join(folder_paths.get_output_directory(), record), "w") as file:
                    json.dump(seen, file)
            if len(seen) == fail_at:
                raise RuntimeError("this reward is broken")
            return images[:, 0].mean((1, 2)) - images[:, 1:].mean((1, 2, 3))

        return ((Term("red", red),),)


class PickyReward(Fresh):
    """A reward that reads prompts about circles only."""

    RETURN_TYPES = ("SFGRPO_REWARD",)
    FUNCTION = "make"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {}}

    def make(self):
        def picky(images, prompts, metadata):
            for prompt in prompts:
                if "circle" not in prompt:
                    raise ValueError(f"the prompt {prompt!r} has no circle; this reward needs one")
            return torch.zeros(len(images))

        return ((Term("picky", picky),),)


class FailingVAE(Fresh):
    """A VAE whose decode fails at the n-th call."""

    RETURN_TYPES = ("VAE",)
    FUNCTION = "make"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"vae": ("VAE",), "fail_at": ("INT", {})}}

    def make(self, vae, fail_at):
        failing, calls = copy.copy(vae), [0]

        def decode(latents, *args, **options):
            calls[0] += 1
            if calls[0] == fail_at:
                raise RuntimeError("this VAE is broken")
            return vae.decode(latents, *args, **options)

        failing.decode = decode
        return (failing,)


class _FailInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, calls):
        ctx.calls = calls
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.calls[0] += 1
        if ctx.calls[0] >= ctx.calls[1]:  # again with half the batch, as where memory is really short
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return gradient, None


class FailInBackward(Fresh):
    """A MODEL that runs out of memory in its n-th backward pass and in all after it."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "make"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "fail_at": ("INT", {})}}

    def make(self, model, fail_at):
        model, calls = model.clone(), [0, fail_at]

        def wrapper(apply, options):
            return _FailInBackward.apply(apply(options["input"], options["timestep"], **options["c"]), calls)

        model.set_model_unet_function_wrapper(wrapper)
        return (model,)


class Again(Fresh):
    """A LATENT as it is, so that what follows is computed anew."""

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "same"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"latent": ("LATENT",)}, "optional": {"after": ("*",)}}

    def same(self, latent, after=None):
        return (latent,)


class Any:
    """A text that fits every input, as no list of choices is checked for a link."""

    RETURN_TYPES = ("*",)
    FUNCTION = "give"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"text": ("STRING", {})}}

    def give(self, text):
        return (text,)


class SaveConditioning:
    """Write the tensors of a CONDITIONING to a file."""

    RETURN_TYPES = ()
    OUTPUT_NODE = True
    FUNCTION = "save"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"conditioning": ("CONDITIONING",), "name": ("STRING", {})}}

    def save(self, conditioning, name):
        ((context, extra),) = conditioning
        tensors = {"context": context.clone().contiguous(), "pooled": extra["pooled_output"].clone().contiguous()}
        save_file(tensors, os.path.join(folder_paths.get_output_directory(), f"{name}.safetensors"))
        return {}


class SlowSaves(Fresh):
    """From here on, writing a file to the end takes a while, and the server tells that it does."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "make"
    fsync = staticmethod(os.fsync)

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "seconds": ("FLOAT", {})}}

    def make(self, model, seconds):
        from server import PromptServer

        def fsync(file):
            PromptServer.instance.send_progress_text("saving", "0")
            time.sleep(seconds)
            SlowSaves.fsync(file)

        os.fsync = fsync if seconds else SlowSaves.fsync
        return (model,)


NODE_CLASS_MAPPINGS = {
    "Probe_Look": Look,
    "Probe_Reward": Reward,
    "Probe_PickyReward": PickyReward,
    "Probe_FailingVAE": FailingVAE,
    "Probe_FailInBackward": FailInBackward,
    "Probe_Again": Again,
    "Probe_Any": Any,
    "Probe_SaveConditioning": SaveConditioning,
    "Probe_SlowSaves": SlowSaves,
}
