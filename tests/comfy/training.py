"""API prompts around Stepwise GRPO Train LoRA, in small, for the tests of training."""

from __future__ import annotations

import json

import torch
from safetensors.torch import load_file

SEED = 11
SD3_SCALE, SD3_SHIFT = 1.5305, 0.0609
"""ComfyUI's numbers for SD3's latents."""

TINY = {
    "prompts": "two circles\na blue square",
    "prompt_file": "none",
    "negative_prompt": "",
    "width": 32,
    "height": 32,
    "steps": 4,
    "guidance": 1.0,
    "iterations": 2,
    "prompts_per_iteration": 2,
    "group_size": 4,
    "learning_rate": 0.01,
    "rank": 4,
    "layers": "attention",
    "seed": 3,
    "name": "tiny",
    "continue_from": "none",
    "ema_decay": 0.0,
    "update_batch": 8,
    "gradient_checkpointing": False,
    "eval_every": 1,
    "eval_prompts": 2,
}
"""Settings of a training of two or three seconds whose LoRA can be seen."""


def defaults(server, kind: str) -> dict:
    """The settings of a node as it comes into a workflow."""
    fields = server.get(f"/object_info/{kind}")[kind]["input"]["required"].items()
    return {name: field[1]["default"] for name, field in fields if len(field) > 1 and "default" in field[1]}


class Graph:
    """An API prompt. Nodes have names, and so are the same for ComfyUI's cache wherever they are again."""

    def __init__(self, server) -> None:
        self.server = server
        self.nodes: dict[str, dict] = {}
        self.add("load", "SFGRPO_LoadShapesDemo")
        self.model, self.clip, self.vae, self.latent = (["load", i] for i in range(4))

    def add(self, name: str, kind: str, /, *, slot: int = 0, **inputs) -> list:
        """Add a node; returns a link to one of its outputs."""
        self.nodes[name] = {"class_type": kind, "inputs": inputs}
        return [name, slot]

    def reward(self, **options) -> list:
        return self.add("reward", "Probe_Reward", **({"fail_at": 0, "record": ""} | options))

    def train(self, **settings) -> list:
        """The training, by default of TINY settings; returns its LoRA. None takes an input away."""
        sockets = {"model": self.model, "clip": self.clip, "vae": self.vae}
        inputs = sockets | defaults(self.server, "SFGRPO_TrainLoRA") | TINY | settings
        if "reward" not in inputs:
            inputs["reward"] = self.reward()
        return self.add("train", "SFGRPO_TrainLoRA", **{k: v for k, v in inputs.items() if v is not None})

    def look(self, model: list | None = None, *, at_rest: bool = False, **after) -> list:
        """Have a MODEL looked at; `after` is waited for. Returns the MODEL, for what is to come later."""
        return self.add("look", "Probe_Look", model=model or self.model, at_rest=at_rest, **after)

    def draw(self, name: str, model: list | None = None, *, cfg: float = 1.0, sigmas: str = "", **after) -> None:
        """A picture by stock nodes, computed anew and saved as a latent; `after` is waited for.

        KSampler draws it, or Sampler Custom where sigmas are given.
        """
        texts = {"positive": "two circles", "negative": "a green cross"}
        links = {k: self.add(f"text {k}", "CLIPTextEncode", clip=self.clip, text=v) for k, v in texts.items()}
        shared = {"model": model or self.model, "cfg": cfg, **links}
        latent = self.add(f"{name} again", "Probe_Again", latent=self.latent, **after)
        if not sigmas:
            steps = {"seed": SEED, "steps": 6, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
            drawn = self.add(f"{name} drawn", "KSampler", latent_image=latent, **shared, **steps)
        else:
            steps = {
                "sampler": self.add("euler", "KSamplerSelect", sampler_name="euler"),
                "sigmas": self.add("sigmas", "ManualSigmas", sigmas=sigmas),
            }
            noise = {"add_noise": True, "noise_seed": SEED}
            drawn = self.add(f"{name} drawn", "SamplerCustom", latent_image=latent, **shared, **steps, **noise)
        self.add(name, "SaveLatent", samples=drawn, filename_prefix=f"latents/{name}")

    def run(self) -> Result:
        """Run it; fails where ComfyUI does not end it well."""
        outcome = self.server.run(self.nodes)
        assert outcome.status == "success", outcome.error
        return Result(self.server, outcome)

    def error(self) -> str:
        """Run it; returns the words of the error in which it ends."""
        outcome = self.server.run(self.nodes)
        assert outcome.status == "error", outcome.status
        return outcome.error


class Result:
    """What a prompt that ran gave out."""

    def __init__(self, server, outcome) -> None:
        self.server, self.outputs = server, outcome.outputs

    def latent(self, name: str) -> torch.Tensor:
        """The latents that `draw` saved under a name, as the transformer has them."""
        (entry,) = self.outputs[name]["latents"]
        saved = load_file(self.server.output / entry["subfolder"] / entry["filename"])["latent_tensor"]
        return (saved - SD3_SHIFT) * SD3_SCALE

    def look(self) -> dict:
        """What Probe_Look saw."""
        return json.loads(self.outputs["look"]["text"][0])

    def text(self) -> str:
        """What the training node says at its end."""
        return self.outputs["train"]["text"][0]

    def lora(self, kind: str = "last") -> dict[str, torch.Tensor]:
        """The LoRA that the training saved, `last` or `best`."""
        return load_file(self.server.output.parent / self.place(kind))

    def place(self, kind: str = "last") -> str:
        """Where the training node says that the LoRA lies."""
        (line,) = [line for line in self.text().splitlines() if line.startswith(f"{kind}: ")]
        return line.removeprefix(f"{kind}: ")
