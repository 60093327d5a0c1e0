"""Tweedie Reward Preview: where along its steps does a model win or lose its reward?"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import comfy.model_management
import comfy.utils
import latent_preview
from comfy_api.latest import io, ui
from PIL import Image
from torch import Tensor

from ..sfgrpo.kernels import DEFAULT_ETA, KERNELS, SCHEDULES, Kernel
from ..sfgrpo.metrics import plain
from ..sfgrpo.probe import Probe, probe
from ..sfgrpo.probe_pictures import Board, draw_plot
from ..sfgrpo.prompts import Prompt
from ..sfgrpo.rewards import Term, check_prompts, combine
from ..sfgrpo.rollout import DistinctStates
from ..sfgrpo.schedule import check_sigmas
from ..sfgrpo.tweedie import clean_estimate
from .comfy_model import (
    ComfyPolicy,
    check_flow_model,
    latent_shape,
    open_model,
)
from .compat import advanced, make
from .conditioning import conditioning_for
from .pictures import arrange, to_image
from .rewards import RewardType, prompt_lines, write_json
from .sigmas import flow_sigmas

LIVE_SIZE = 1024
"""Longest side of the live preview, pixels."""
LIVE_SECONDS = 0.5
"""Least time between two drawings of the board."""


@dataclass
class Live:
    """The policy as `probe` sees it, with progress, live preview and Cancel on the way."""

    policy: ComfyPolicy
    board: Board
    previewer: latent_preview.LatentPreviewer | None
    """Draws latents while the rollout runs, if the user has switched previews on."""
    bar: comfy.utils.ProgressBar = field(default_factory=lambda: comfy.utils.ProgressBar(1))
    picture: tuple | None = None
    """What the next progress message shows."""
    drawn: float = 0.0

    def velocity(self, x: Tensor, sigma: Tensor, cond: Tensor) -> Tensor:
        v = self.policy.velocity(x, sigma, cond)
        if self.previewer is not None:
            x0 = clean_estimate(x[:1], v[:1], sigma[:1])
            self.picture = self.previewer.decode_latent_to_preview_image("JPEG", x0)
        return v

    def decode(self, latents: Tensor) -> Tensor:
        return self.policy.decode(latents)

    def on_progress(self, done: int, total: int) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()
        picture, self.picture = self.picture, None
        self.bar.update_absolute(done, total, picture)

    def on_images(self, states: DistinctStates, part: slice, images: Tensor, scores: Tensor) -> None:
        self.board.add(states, part, images, scores)
        if time.monotonic() - self.drawn > LIVE_SECONDS:
            self.picture = ("JPEG", self.board.draw(), LIVE_SIZE)
            self.drawn = time.monotonic()

    def finish(self, picture: Image.Image) -> None:
        """Leave a picture on the node: the frontend goes on showing the last preview instead of the node's images."""
        self.bar.update_absolute(self.bar.total, preview=("JPEG", picture, max(picture.size)))


def numbers(result: Probe, prompts: Sequence[str], settings: dict) -> str:
    """All numbers of a preview as JSON."""
    rewards, gains = result.rewards.flatten(0, 1), result.gains.flatten(0, 1)
    data = {
        "prompts": list(prompts),
        **settings,
        "sigmas": plain(result.trajectory.sigmas),
        "stds": plain(result.trajectory.stds),
        "mean_reward": plain(rewards.nanmean(0)),
        "mean_gain": plain(gains.nanmean(0)),
        "rewards": plain(result.rewards),
        "gains": plain(result.gains),
        "parts": {name: plain(values) for name, values in result.parts.items()},
    }
    return write_json(data)


class TweediePreview(io.ComfyNode):
    """Rewards of clean estimates along a model's steps."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return make(
            io.Schema,
            node_id="SFGRPO_TweediePreview",
            display_name="Tweedie Reward Preview",
            category="model/training/rewards",
            description="Shows at which sampling steps a flow model wins or loses a reward: the image that each step "
            "is heading for (the Tweedie estimate), its reward, and the gain of the step. Nothing is trained.",
            search_aliases=[
                "reward by step",
                "step credit",
                "clean estimate",
                "x0 preview",
                "Stepwise-Flow-GRPO",
                "denoising analysis",
            ],
            inputs=[*_sockets(), *_widgets()],
            outputs=[
                io.Image.Output(
                    "estimates",
                    display_name="estimates",
                    tooltip="Clean estimates: a row a trajectory, a column a state, below each its reward and the gain "
                    "since the state before (blue) or the loss (orange).",
                ),
                io.Image.Output("plot", display_name="plot", tooltip="Reward by state, and gain by step."),
                io.Latent.Output(
                    "latent", display_name="latent", tooltip="The finished latents, prompt by prompt, for VAE Decode."
                ),
                io.String.Output(
                    "json",
                    display_name="json",
                    tooltip="All numbers: rewards and parts by prompt, trajectory and state; gains by prompt, "
                    "trajectory and step; sigmas, noise of each step, settings.",
                ),
            ],
            is_output_node=True,
        )

    @classmethod
    def execute(
        cls,
        model,
        vae,
        reward: tuple[Term, ...],
        prompts: str,
        width: int,
        height: int,
        steps: int,
        guidance: float,
        trajectories: int,
        substeps: int,
        seed: int,
        kernel: str = "ddim",
        eta: float = 0.7,
        schedule: str = "annealed",
        batch_size: int = 8,
        clip=None,
        positive=None,
        negative=None,
        sigmas: Tensor | None = None,
    ) -> io.NodeOutput:
        check_flow_model(model)
        texts, score = prompt_lines(prompts), combine(reward)
        chosen = Kernel(name=kernel, eta=eta, schedule=schedule)
        shape = latent_shape(model, vae, width, height)
        grid = check_sigmas(
            flow_sigmas("auto", steps, width=width, height=height, model=model) if sigmas is None else sigmas.cpu()
        )
        asked = [Prompt(text) for text in texts]
        check_prompts(score, asked, (height, width))
        conditioning = conditioning_for(asked, clip, positive, negative, guidance)
        with open_model(
            model, positive=conditioning[0], negative=conditioning[1], guidance=guidance, vae=vae, latent_shape=shape
        ) as policy:
            form = model.get_model_object("latent_format")
            live = Live(policy, Board(texts, trajectories, grid), latent_preview.get_previewer(policy.device, form))
            result = probe(
                live,
                score,
                asked,
                sigmas=grid,
                latent_shape=shape,
                kernel=chosen,
                members=trajectories,
                substeps=substeps,
                seed=seed,
                batch=batch_size,
                device=policy.device,
                on_progress=live.on_progress,
                on_images=live.on_images,
            )
            final = policy.to_comfy_latent(result.trajectory.final)
        board, plot = live.board.draw(), draw_plot(result, texts)
        live.finish(arrange([board, plot], gap=8))
        estimates, plot = to_image(board), to_image(plot)
        settings = {
            "trajectories": trajectories,
            "substeps": substeps,
            "kernel": kernel,
            "eta": chosen.eta,
            "schedule": schedule,
            "guidance": guidance,
            "seed": seed,
            "width": width,
            "height": height,
        }
        return io.NodeOutput(
            estimates,
            plot,
            {"samples": final.to(comfy.model_management.intermediate_device())},
            numbers(result, texts, settings),
            ui=ui.PreviewImage([estimates[0], plot[0]], cls=cls),
        )


def _sockets() -> list:
    return [
        io.Model.Input("model", tooltip="A flow model: SD3.5, FLUX, Qwen-Image, Z-Image, Wan and the like."),
        io.Vae.Input("vae", tooltip="Decodes the estimates for the reward."),
        RewardType.Input("reward", tooltip="What is measured: Shapes Reward, JPEG Size Reward or a Reward Mix."),
        io.Clip.Input("clip", optional=True, tooltip="Encodes the prompts. Not needed where positive is connected."),
        io.Conditioning.Input(
            "positive",
            optional=True,
            tooltip="Ready conditioning in place of CLIP, for example after FluxGuidance: one entry for each prompt, "
            "several through Conditioning Combine. The prompts are then read by the reward only.",
        ),
        io.Conditioning.Input(
            "negative",
            optional=True,
            tooltip="Negative conditioning, read where guidance is above 1. Without it CLIP encodes an empty text.",
        ),
        io.Sigmas.Input(
            "sigmas",
            optional=True,
            tooltip="Noise levels in place of steps, for example of Flow Sigmas; they must end in 0.",
        ),
    ]


def _widgets() -> list:
    size = {"min": 16, "max": 16384, "step": 8}
    return [
        io.String.Input(
            "prompts",
            multiline=True,
            default="",
            placeholder="one prompt a line",
            tooltip="Prompts, one a line; each gets its own trajectories.",
        ),
        io.Int.Input("width", default=512, tooltip="Width of the image in pixels; 32 for the shapes demo.", **size),
        io.Int.Input("height", default=512, tooltip="Height of the image in pixels; 32 for the shapes demo.", **size),
        io.Int.Input(
            "steps",
            default=10,
            min=1,
            max=200,
            tooltip="Sampling steps, on the model's own noise levels. Not read where sigmas is connected.",
        ),
        io.Float.Input(
            "guidance",
            default=1.0,
            min=1.0,
            max=100.0,
            step=0.1,
            round=False,
            tooltip="Classifier-free guidance (cfg); 1 is off and takes half the time.",
        ),
        io.Int.Input(
            "trajectories",
            default=4,
            min=1,
            max=256,
            tooltip="Trajectories of each prompt. They start from the same noise and part with the noise that the "
            "steps add.",
        ),
        io.Int.Input(
            "substeps",
            default=1,
            min=1,
            max=200,
            tooltip="Euler steps from a state to its estimate. 1 is quick, and blurred at the first states; 5 is what "
            "the paper takes. More than the steps left makes no difference.",
        ),
        io.Int.Input(
            "seed",
            default=0,
            min=0,
            max=2**64 - 1,
            control_after_generate=True,
            tooltip="Seed of all noise. The same seed gives the same numbers.",
        ),
        advanced(
            io.Combo.Input,
            "kernel",
            options=list(KERNELS),
            default="ddim",
            tooltip="How a step adds noise, as in SDE Sampler. With ode nothing is added and all trajectories of a "
            "prompt are equal.",
        ),
        advanced(
            io.Float.Input,
            "eta",
            default=DEFAULT_ETA["ddim"],
            min=0.0,
            max=10.0,
            step=0.05,
            round=False,
            tooltip="Strength of the noise: 0 to 1 for ddim, about 0.7 for flow_grpo, 0.3 for dance.",
        ),
        advanced(
            io.Combo.Input,
            "schedule",
            options=list(SCHEDULES),
            default="annealed",
            tooltip="Read by ddim only. annealed: most noise at the first step; as_printed: none there; constant: the "
            "same share at each step.",
        ),
        advanced(
            io.Int.Input,
            "batch_size",
            default=8,
            min=1,
            max=256,
            tooltip="Latents in one pass of the model or the VAE. Lower it where memory runs out; the numbers stay.",
        ),
    ]
