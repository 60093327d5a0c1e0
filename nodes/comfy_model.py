"""A ComfyUI MODEL with CONDITIONING and VAE as the core's `Policy`.

The velocity goes through ComfyUI's own sampling function, so that guidance, patches and hooks of the MODEL count as
they do in a KSampler, and v = (x - denoised) / sigma. Rows of different prompts share a forward pass wherever ComfyUI
could batch their conditioning. ComfyUI's memory management decides what is loaded: decoding may push the model out,
and the next velocity brings it back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import comfy.model_management
import comfy.model_patcher
import comfy.model_sampling
import comfy.sampler_helpers
import comfy.samplers
import torch
from torch import Tensor

from .comfy_patch import KEY, LoRA, recomputed_in_backward, training_mode, usable_by_autograd
from .conditioning import check_conditioning, ordinary

KEPT_MEMORY, CHECKPOINTED_MEMORY = 4, 1.5
"""Memory of a pass that is followed by a backward pass, in units of ComfyUI's estimate for one that is not, without and
with gradient checkpointing. A guess: too little ends out of memory, too much has ComfyUI offload weights in vain."""


def is_flow(sampling) -> bool:
    """Whether a model_sampling is that of a flow from noise to image."""
    image_to_image = getattr(comfy.model_sampling, "IMG_TO_IMG_FLOW", ())
    return isinstance(sampling, comfy.model_sampling.CONST) and not isinstance(sampling, image_to_image)


def check_flow_model(model) -> None:
    """Raise ValueError for a MODEL that is no flow-matching model, or starts from other than unit noise."""
    sampling = model.get_model_object("model_sampling")
    if not is_flow(sampling):
        raise ValueError(
            f"this MODEL ({type(model.model).__name__}) is not a flow-matching model; connect one like SD3.5, FLUX, "
            "Qwen-Image, Z-Image or Wan"
        )
    scale = getattr(sampling, "noise_scale", 1.0)
    if scale != 1:
        raise ValueError(
            f"this MODEL ({type(model.model).__name__}) starts from noise of {scale:g} times the usual strength, which "
            "rollouts do not know; connect another model"
        )


def latent_shape(model, vae, width: int, height: int) -> tuple[int, ...]:
    """Shape of one latent, without the batch, of an image of width x height pixels.

    Raises ValueError for a VAE of another kind of latent, and for a size that the VAE cannot make.
    """
    form = model.get_model_object("latent_format")
    # VAEs of other packs need not tell.
    channels = getattr(vae, "latent_channels", form.latent_channels)
    if channels != form.latent_channels:
        raise ValueError(
            f"this VAE decodes latents of {channels} channels, and those of this MODEL "
            f"({type(model.model).__name__}) have {form.latent_channels}; connect the VAE that belongs to the model"
        )
    unit = int(vae.spacial_compression_encode())
    if width % unit or height % unit:
        raise ValueError(f"width and height must be multiples of {unit} with this VAE, got {width} x {height}")
    frames = (1,) if form.latent_dimensions == 3 else ()
    return (form.latent_channels, *frames, height // unit, width // unit)


class ComfyPolicy:
    """See sfgrpo.policy.Policy; `cond` is a (B,) LongTensor of indices into the prompts."""

    def __init__(
        self,
        patcher,
        positive: Sequence,
        negative: Sequence | None,
        *,
        guidance: float,
        vae,
        shape: tuple[int, ...],
        lora: LoRA | None,
        kept_memory: float = KEPT_MEMORY,
    ) -> None:
        self.patcher, self.guidance, self.vae, self.shape, self.lora = patcher, guidance, vae, tuple(shape), lora
        self.device = patcher.load_device
        self._raw = {"positive": list(positive), "negative": list(negative or [])}
        self._conds: dict[str, list[dict]] = {}
        self._loaded = False
        self._kept_memory = kept_memory
        # Largest batches seen: without a backward pass, and with one.
        self._rows = {False: 1, True: 0}
        self.model_options: dict = {}

    def start(self) -> None:
        """Load the model and let it encode the conditioning."""
        raw, self._raw = self._raw, {}
        for name, prompts in raw.items():
            check_conditioning(prompts, name)
        self.model_options = comfy.model_patcher.create_model_options_clone(self.patcher.model_options)
        entries = {k: [entry for c in v for entry in c] for k, v in raw.items()}
        conds = {k: comfy.sampler_helpers.convert_cond(v) for k, v in entries.items()}
        comfy.sampler_helpers.prepare_model_patcher(self.patcher, conds, self.model_options)
        self._load()
        comfy.samplers.cast_to_load_options(self.model_options, device=self.device, dtype=self.patcher.model_dtype())
        noise = torch.zeros(1, *self.shape, device=self.device)
        conds = comfy.samplers.process_conds(self.patcher.model, noise, conds, self.device, latent_image=noise, seed=0)
        self._conds = {k: [ordinary(entry) for entry in v] for k, v in conds.items()}

    def _load(self) -> None:
        """Have ComfyUI load the model, with room for a pass over the rows that were seen."""
        twice = 2 if self.guidance > 1 else 1
        needs = [self.patcher.memory_required([twice * self._rows[False], *self.shape])]
        if self._rows[True]:
            needs.append(self._kept_memory * self.patcher.memory_required([twice * self._rows[True], *self.shape]))
        memory = max(needs)
        # In inference mode, as in any node: quantised weights that are moved outside of it become tensors that ComfyUI
        # cannot move within it again.
        with torch.inference_mode():
            comfy.model_management.load_models_gpu([self.patcher], memory_required=memory)
        if self.lora is not None:
            usable_by_autograd(self.patcher.model)
        self.patcher.pre_run()
        self._loaded = True

    def velocity(self, x: Tensor, sigma: Tensor, cond: Tensor) -> Tensor:
        """See sfgrpo.policy.Policy."""
        comfy.model_management.throw_exception_if_processing_interrupted()
        kept = torch.is_grad_enabled() and self.lora is not None
        if not self._loaded or len(x) > self._rows[kept]:
            self._rows[kept] = max(self._rows[kept], len(x))
            self._load()
        x, sigma = x.to(self.device).float(), sigma.to(self.device).float()
        cond = cond.cpu()
        classes = self._classes(cond.tolist())
        parts = [self._denoised(x[rows], sigma[rows], cond[rows]) for rows in classes]
        denoised = parts[0] if len(parts) == 1 else torch.cat(parts)[torch.cat(classes).argsort()]
        return (x - denoised) / sigma.view(-1, *[1] * (x.ndim - 1))

    def _denoised(self, x: Tensor, sigma: Tensor, cond: Tensor) -> Tensor:
        positive = [self._stacked("positive", cond)]
        negative = [self._stacked("negative", cond)] if self._conds["negative"] else None
        return comfy.samplers.sampling_function(
            self.patcher.model,
            x,
            sigma,
            negative,
            positive,
            self.guidance if negative else 1.0,
            model_options=self.model_options,
            seed=0,
        ).float()

    def _classes(self, cond: list[int]) -> list[Tensor]:
        """Rows that can share a forward pass, as index tensors."""
        classes: list[tuple[int, list[int]]] = []
        for row, prompt in enumerate(cond):
            for first, rows in classes:
                if all(self._batch_together(kind, first, prompt) for kind in self._conds):
                    rows.append(row)
                    break
            else:
                classes.append((prompt, [row]))
        return [torch.tensor(rows) for _, rows in classes]

    def _batch_together(self, kind: str, i: int, j: int) -> bool:
        if i == j or not self._conds[kind]:
            return True
        one, other = (self._entry(kind, k)["model_conds"] for k in (i, j))
        return one.keys() == other.keys() and all(one[k].can_concat(other[k]) for k in one)

    def _entry(self, kind: str, i: int) -> dict:
        """The conditioning of prompt i; one negative serves all prompts."""
        entries = self._conds[kind]
        return entries[i if len(entries) > 1 else 0]

    def _stacked(self, kind: str, cond: Tensor) -> dict:
        """The conditioning of rows `cond` as one entry whose tensors have a row each."""
        entries = [self._entry(kind, i) for i in cond.tolist()]
        first = entries[0]
        if all(entry is first for entry in entries):
            return first
        conds = {
            name: value._copy_with(value.concat([entry["model_conds"][name] for entry in entries[1:]]))
            for name, value in first["model_conds"].items()
        }
        return first | {"model_conds": conds}

    def reference_velocity(self, x: Tensor, sigma: Tensor, cond: Tensor) -> Tensor:
        """See sfgrpo.policy.Policy."""
        with self.lora.off() if self.lora is not None else nullcontext():
            return self.velocity(x, sigma, cond)

    @torch.no_grad()
    def to_comfy_latent(self, latents: Tensor) -> Tensor:
        """Latents as ComfyUI's LATENT holds them, and as its VAE takes them."""
        return self.patcher.model.process_latent_out(latents)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """See sfgrpo.policy.Policy. Of a video the middle frame is taken."""
        comfy.model_management.throw_exception_if_processing_interrupted()
        # On a GPU with little memory the VAE pushes the model out.
        self._loaded = self.device.type == "cpu" and self._loaded
        with torch.inference_mode():
            images = self.vae.decode(self.to_comfy_latent(latents))
        if images.ndim == 5:
            images = images[:, images.shape[1] // 2]
        return images[..., :3].movedim(-1, 1).float().clamp(0, 1)

    def scaler(self) -> torch.amp.GradScaler | None:
        """A scaler of the loss where the model computes in fp16, in which its gradients would vanish."""
        model = self.patcher.model
        if (model.manual_cast_dtype or model.get_dtype()) != torch.float16:
            return None
        return torch.amp.GradScaler(self.device.type)

    def trainable_parameters(self) -> list[Tensor]:
        """See sfgrpo.policy.Policy."""
        return [] if self.lora is None else self.lora.parameters()


@contextmanager
def open_model(
    model,
    *,
    positive: Sequence,
    negative: Sequence | None = None,
    guidance: float = 1.0,
    vae,
    latent_shape: tuple[int, ...],
    lora: LoRA | None = None,
    gradient_checkpointing: bool = False,
) -> Iterator[ComfyPolicy]:
    """A MODEL as a policy inside the block, with or without a LoRA to train; the MODEL itself is not changed.

    positive: one CONDITIONING a prompt; negative: as many, or one for all, and only used where guidance is above 1.
    Whatever ends the block, the LoRA and all patches are taken off. Raises ValueError for conditioning that is more
    than text.
    """
    patcher = model.clone()
    if lora is not None and _is_dynamic(patcher):
        # Its weights come and go during a pass, so that none can wait for the backward pass.
        patcher = _static(patcher)
    policy = ComfyPolicy(
        patcher,
        positive,
        negative if guidance > 1 else None,
        guidance=guidance,
        vae=vae,
        shape=latent_shape,
        lora=lora,
        kept_memory=CHECKPOINTED_MEMORY if gradient_checkpointing else KEPT_MEMORY,
    )
    try:
        if lora is None:
            policy.start()
            yield policy
        else:
            patcher.set_injections(KEY, [lora.injection()])
            with training_mode(), recomputed_in_backward(patcher.model.diffusion_model, gradient_checkpointing):
                try:
                    policy.start()
                    yield policy
                finally:
                    # First what was put on last.
                    patcher.eject_model()
    finally:
        patcher.eject_model()
        patcher.remove_injections(KEY)
        patcher.cleanup()


def _is_dynamic(patcher) -> bool:
    return getattr(patcher, "is_dynamic", lambda: False)()


def _static(patcher):
    """The same model under ComfyUI's older memory management, read from its file again."""
    try:
        return patcher.clone(disable_dynamic=True)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise ValueError(
            f"this MODEL cannot be trained under ComfyUI's dynamic VRAM ({error}); start ComfyUI with "
            "--disable-dynamic-vram"
        ) from None
