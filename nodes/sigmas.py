"""Flow Sigmas: the time grids of the headless trainer as SIGMAS, so that training and sampling agree."""

from __future__ import annotations

import comfy.model_sampling
import torch
from comfy_api.latest import io
from torch import Tensor

from ..sfgrpo.schedule import FAMILIES, Family, family_sigmas
from .comfy_model import is_flow
from .compat import make

MODEL_CONFIGS = {
    "SD3": "sd3",
    "FluxSchnell": "flux-schnell",
    "Flux2": "flux2",
    "Flux": "flux",
    "QwenImage": "qwen-image",
    "ZImage": "z-image",
    "WAN21_T2V": "wan",
}
"""ComfyUI's model configuration, or a base class of it -> our family."""

TOKEN_PIXELS = 16
"""Side of the square of pixels that is one latent token, in all families whose shift follows the resolution."""


def model_family(model) -> tuple[Family, float | None]:
    """Family of a MODEL, and the shift that the MODEL itself sets, if any.

    A static shift is always the MODEL's own. mu follows the resolution, unless a node like ModelSamplingFlux was put on
    the MODEL. Raises ValueError for a model that is no flow model.
    """
    sampling = model.get_model_object("model_sampling")
    if not is_flow(sampling):
        raise ValueError(
            f"Flow Sigmas is for flow models, and this {type(model.model).__name__} model is set up as another kind; "
            "use Basic Scheduler with it."
        )
    is_mu = isinstance(sampling, comfy.model_sampling.ModelSamplingFlux)
    shift = float(getattr(sampling, "shift", 0.0 if is_mu else 1.0))
    names = [kind.__name__ for kind in type(model.model.model_config).__mro__]
    family = next((FAMILIES[MODEL_CONFIGS[name]] for name in names if name in MODEL_CONFIGS), None)
    if family is None or (family.mu is not None) != is_mu:
        family = Family(mu=lambda tokens, steps: shift) if is_mu else Family(shift=shift)
    if is_mu and "model_sampling" not in model.object_patches:
        return family, None
    return family, shift


def flow_sigmas(
    family: str,
    steps: int,
    *,
    shift: float = 0.0,
    width: int = 1024,
    height: int = 1024,
    denoise: float = 1.0,
    model=None,
) -> Tensor:
    """The grid of a family, or of a MODEL where it is `auto`, (steps + 1,); with denoise < 1 the end of a longer one.

    shift: 0 takes the family's own, see family_sigmas. width and height: the image, in pixels. denoise 0 gives an empty
    tensor. Raises ValueError for `auto` without a MODEL.
    """
    if denoise <= 0:
        return torch.empty(0)
    own = None
    if family == "auto":
        if model is None:
            raise ValueError("family auto reads the model; connect one, or choose the family")
        chosen, own = model_family(model)
    else:
        chosen = FAMILIES[family]
    total = max(steps, int(steps / denoise))
    tokens = (width // TOKEN_PIXELS) * (height // TOKEN_PIXELS)
    return family_sigmas(chosen, total, tokens=tokens, shift=shift or own)[-(steps + 1) :]


class FlowSigmas(io.ComfyNode):
    """Time grids of flow models, as the headless trainer uses them."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return make(
            io.Schema,
            node_id="SFGRPO_FlowSigmas",
            display_name="Flow Sigmas (Stepwise-Flow-GRPO)",
            category="model/sampling/schedulers",
            search_aliases=[
                "flow scheduler",
                "diffusers sigmas",
                "FlowMatchEulerDiscreteScheduler",
                "flow shift",
                "mu",
            ],
            description="The noise levels at which diffusers samples a flow model, and at which the Stepwise-Flow-GRPO "
            "trainer trains it. Basic Scheduler's differ a little.",
            inputs=[
                io.Int.Input("steps", default=10, min=1, max=1000, tooltip="Number of sampling steps."),
                io.Combo.Input(
                    "family",
                    options=["auto", *FAMILIES],
                    default="auto",
                    tooltip="Whose grid. auto reads the model, with the shift that is set on it. plain: even steps "
                    "with the shift below.",
                ),
                io.Float.Input(
                    "shift",
                    default=0.0,
                    min=0.0,
                    max=100.0,
                    step=0.01,
                    round=False,
                    tooltip="0: the family's own. Else the shift (sd3, flux-schnell, z-image, wan, plain; 1 is none) "
                    "or mu (flux, flux2, qwen-image). Wan: 3 at 480p, 5 at 720p.",
                ),
                io.Int.Input(
                    "width",
                    default=1024,
                    min=16,
                    max=16384,
                    step=16,
                    tooltip="Width of the image in pixels; flux, flux2 and qwen-image shift larger images more.",
                ),
                io.Int.Input(
                    "height",
                    default=1024,
                    min=16,
                    max=16384,
                    step=16,
                    tooltip="Height of the image in pixels; see width.",
                ),
                io.Float.Input(
                    "denoise",
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="Below 1, for image-to-image: the last steps of a grid of steps / denoise steps, as in "
                    "Basic Scheduler.",
                ),
                io.Model.Input("model", optional=True, tooltip="The model that family auto reads; no other needs it."),
            ],
            outputs=[io.Sigmas.Output(tooltip="The noise levels, from 1 (or less, with denoise) down to 0.")],
        )

    @classmethod
    def execute(
        cls, steps: int, family: str, shift: float, width: int, height: int, denoise: float, model=None
    ) -> io.NodeOutput:
        sigmas = flow_sigmas(family, steps, shift=shift, width=width, height=height, denoise=denoise, model=model)
        return io.NodeOutput(sigmas)
