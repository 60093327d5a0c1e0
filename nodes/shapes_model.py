"""The shipped shapes model (docs/shapes.md), a diffusers SD3 folder, as ComfyUI's MODEL and VAE.

The transformer goes through ComfyUI's own detection. The autoencoder is built of ComfyUI's TAESD blocks in the sizes
of the folder's config file, for ComfyUI itself knows one size only. The text encoders are in `shapes_text`.

A LATENT is scaled as those of any SD3 model in ComfyUI; the first stage of the VAE converts between that and the
autoencoder's own latents. So a MODEL that was saved and loaded by stock nodes still fits this VAE.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import comfy.latent_formats
import comfy.model_management
import comfy.sd
import comfy.taesd.taesd
import comfy.utils
import torch
from torch import Tensor, nn

from .shapes_text import read_config


def load_model(folder: Path, disable_dynamic: bool = False):
    """The transformer as a MODEL (ModelPatcher).

    disable_dynamic: without ComfyUI's dynamic VRAM; ComfyUI asks for it where it needs a second copy of the model.
    """
    options = {"disable_dynamic": True} if disable_dynamic else {}
    model = comfy.sd.load_diffusion_model(
        str(folder / "transformer" / "diffusion_pytorch_model.safetensors"), **options
    )
    model.model.model_sampling.set_parameters(shift=read_config(folder, "scheduler", "scheduler_config.json")["shift"])
    form = model.model.latent_format
    # Lets stock empty latents, made for 8x, come out at the size in pixels that was asked for.
    form.spacial_downscale_ratio = downscale(read_config(folder, "vae"))
    show_previews(form, load_autoencoder(folder))
    model.cached_patcher_init = (load_model, (folder,))
    return model


def show_previews(form: comfy.latent_formats.SD3, autoencoder: TinyAutoencoder) -> None:
    """Have ComfyUI's live previews decoded, for SD3's colours mean nothing here; none in versions without the means."""
    form.taesd_decoder_name = form.latent_rgb_factors = form.latent_rgb_factors_bias = None
    if not hasattr(form, "latent_rgb_factors_reshape"):
        return
    form.latent_rgb_factors = torch.eye(3).tolist()

    @torch.no_grad()
    def decode(latents: Tensor) -> Tensor:
        return autoencoder.decode(form.process_out(latents[:1].float().cpu()))

    form.latent_rgb_factors_reshape = decode


class TinyAutoencoder(nn.Module):
    """diffusers' AutoencoderTiny between images in [-1, 1] and latents as ComfyUI holds SD3's.

    With diffusers' x = (own - shift) * scale for the transformer's latents and the same of ComfyUI's SD3,
    own = ratio * z + offset. Raises ValueError for another activation than relu.
    """

    def __init__(self, config: dict[str, Any], form: comfy.latent_formats.SD3) -> None:
        super().__init__()
        if config["act_fn"] != "relu":
            raise ValueError(f"the autoencoder's act_fn must be relu, got {config['act_fn']}")
        conv, block = comfy.taesd.taesd.conv, comfy.taesd.taesd.Block
        self.ratio = form.scale_factor / config["scaling_factor"]
        self.offset = config["shift_factor"] - form.shift_factor * self.ratio
        layers: list[nn.Module] = []
        for i, (blocks, width) in enumerate(
            zip(config["num_encoder_blocks"], config["encoder_block_out_channels"], strict=True)
        ):
            layers.append(conv(width, width, stride=2, bias=False) if i else conv(config["in_channels"], width))
            layers += [block(width, width) for _ in range(blocks)]
        layers.append(conv(width, config["latent_channels"]))
        self.encoder = nn.ModuleDict({"layers": nn.Sequential(*layers)})

        widths = config["decoder_block_out_channels"]
        layers = [conv(config["latent_channels"], widths[0]), nn.ReLU()]
        for i, (blocks, width) in enumerate(zip(config["num_decoder_blocks"], widths, strict=True)):
            layers += [block(width, width) for _ in range(blocks)]
            if i + 1 < len(widths):
                layers.append(nn.Upsample(scale_factor=config["upsampling_scaling_factor"], mode=config["upsample_fn"]))
                layers.append(conv(width, width, bias=False))
        layers.append(conv(width, config["out_channels"]))
        self.decoder = nn.ModuleDict({"layers": nn.Sequential(*layers)})
        self.clamp = comfy.taesd.taesd.Clamp()

    def encode(self, images: Tensor) -> Tensor:
        """Images (B, 3, H, W) in [-1, 1] -> latents (B, C, H / downscale, W / downscale)."""
        return (self.encoder["layers"](images * 0.5 + 0.5) - self.offset) / self.ratio

    def decode(self, latents: Tensor) -> Tensor:
        """The reverse; the images are not clamped."""
        return self.decoder["layers"](self.clamp(latents * self.ratio + self.offset)) * 2 - 1


def downscale(config: dict[str, Any]) -> int:
    """Pixels along a side for each latent, from the autoencoder's config."""
    return 2 ** (len(config["encoder_block_out_channels"]) - 1)


def load_autoencoder(folder: Path) -> TinyAutoencoder:
    """The autoencoder with its weights, float32 on the CPU."""
    autoencoder = TinyAutoencoder(read_config(folder, "vae"), comfy.latent_formats.SD3())
    autoencoder.load_state_dict(
        comfy.utils.load_torch_file(str(folder / "vae" / "diffusion_pytorch_model.safetensors"), safe_load=True)
    )
    return autoencoder.float().eval().requires_grad_(False)


def load_vae(folder: Path) -> comfy.sd.VAE:
    """The autoencoder as a VAE."""
    config = read_config(folder, "vae")
    device = comfy.model_management.vae_device()
    # comfy.sd.VAE builds only what it detects: it builds a TAESD here, whose place the shipped autoencoder takes.
    stand_in = comfy.taesd.taesd.TAESD(latent_channels=config["latent_channels"]).state_dict()
    dtype = comfy.model_management.vae_dtype(device, [torch.float16, torch.float32])
    vae = comfy.sd.VAE(sd=stand_in, device=device, dtype=dtype)
    stage = load_autoencoder(folder).to(vae.vae_dtype)
    getattr(comfy.model_management, "archive_model_dtypes", lambda module: None)(stage)
    vae.first_stage_model = stage
    vae.patcher = type(vae.patcher)(
        stage, load_device=vae.patcher.load_device, offload_device=vae.patcher.offload_device
    )
    vae.patcher.cached_patcher_init = (_vae_patcher, (folder,))
    vae.size = None
    vae.latent_channels = config["latent_channels"]
    vae.downscale_ratio = vae.upscale_ratio = ratio = downscale(config)
    width = max(config["encoder_block_out_channels"] + config["decoder_block_out_channels"])
    # About six maps of the full size are alive at once.
    size_of, maps = comfy.model_management.dtype_size, 6 * width
    vae.memory_used_encode = lambda shape, dtype: maps * shape[2] * shape[3] * size_of(dtype)
    vae.memory_used_decode = lambda shape, dtype: maps * shape[2] * shape[3] * ratio**2 * size_of(dtype)
    return vae


def _vae_patcher(folder: Path, disable_dynamic: bool = False):
    return load_vae(folder).patcher


def empty_latent(folder: Path) -> dict[str, Any]:
    """One empty LATENT of the model's own size."""
    config = read_config(folder, "transformer")
    side = config["sample_size"]
    samples = torch.zeros(1, config["in_channels"], side, side, device=comfy.model_management.intermediate_device())
    return {"samples": samples}
