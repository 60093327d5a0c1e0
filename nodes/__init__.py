"""The ComfyUI nodes. A node holds a schema and a short `execute`; the work is in `sfgrpo/`.

ComfyUI imports this package by path, together with the repository's root; nothing here is installed. Only this folder
imports ComfyUI, and of it only `comfy_patch.py` changes its models.
"""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io


class StepwiseGRPOExtension(ComfyExtension):
    """All nodes of the pack."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        from .lora_doctor import LoRADoctor
        from .preview import TweediePreview
        from .rewards import JPEGSizeReward, RewardMix, ScoreImages, ShapesReward
        from .sampler import SDESampler
        from .shapes_demo import LoadShapesDemo
        from .sigmas import FlowSigmas
        from .train import TrainLoRA

        return [
            LoadShapesDemo,
            SDESampler,
            FlowSigmas,
            ShapesReward,
            JPEGSizeReward,
            RewardMix,
            ScoreImages,
            TweediePreview,
            TrainLoRA,
            LoRADoctor,
        ]
