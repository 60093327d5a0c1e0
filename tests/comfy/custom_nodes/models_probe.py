"""Nodes for the tests of training on other models than the demo: a text of any length, a video VAE, other patchers."""

import comfy.model_patcher
import comfy.sd
import folder_paths
import torch

CPU = torch.device("cpu")


class Text:
    """Random text embeddings of some tokens."""

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "make"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"seed": ("INT", {}), "tokens": ("INT", {}), "width": ("INT", {})}}

    def make(self, seed, tokens, width):
        return ([[torch.randn(1, tokens, width, generator=torch.Generator().manual_seed(seed)), {}]],)


class VideoVAE:
    """Three channels of a video latent as pixels, 8 times as large; a real one would be 250 MB."""

    RETURN_TYPES = ("VAE",)
    FUNCTION = "make"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {}}

    def make(self):
        return (self,)

    def spacial_compression_encode(self):
        return 8

    def decode(self, samples):
        pixels = torch.sigmoid(samples[:, :3]).movedim(1, -1)
        return pixels.repeat_interleave(8, 2).repeat_interleave(8, 3)


class InDtype:
    """A diffusion model of the models folder that computes in some dtype."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "make"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"file": ("STRING", {}), "dtype": ("STRING", {})}}

    def make(self, file, dtype):
        path = folder_paths.get_full_path_or_raise("diffusion_models", file)
        model = comfy.sd.load_diffusion_model(path)
        # A dtype given to the loader is cast to float32 on a CPU.
        model.set_model_compute_dtype(getattr(torch, dtype))
        return (model,)


class DynamicPatcher(comfy.model_patcher.ModelPatcher):
    """A patcher that says of itself what those of ComfyUI's dynamic VRAM say."""

    def is_dynamic(self):
        return True

    def set_in_use_by_current_prompt(self, in_use):
        pass


class Dynamic:
    """A MODEL under such a patcher, with or without the means to read its file again."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "make"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "from_file": ("BOOLEAN",)}}

    def make(self, model, from_file):
        dynamic = DynamicPatcher(model.model, model.load_device, model.offload_device)
        dynamic.cached_patcher_init = model.cached_patcher_init if from_file else None
        return (dynamic,)


NODE_CLASS_MAPPINGS = {f"Probe_{node.__name__}": node for node in (Text, VideoVAE, InDtype, Dynamic)}
