"""LoRA Doctor: what a LoRA file is, what loads of it, and the same LoRA in a form that loads everywhere."""

from __future__ import annotations

import torch
from comfy_api.latest import io, ui
from comfy_execution.graph_utils import ExecutionBlocker

from ..sfgrpo.dtypes import DTYPES
from ..sfgrpo.lora_files.convert import convert
from ..sfgrpo.lora_files.doctor import report
from ..sfgrpo.lora_files.families import FAMILIES
from .compat import advanced, make
from .files import NONE, Checkpoints, lora_files, read_lora_file, safe_name, stamps
from .pictures import show_text

SAME = "same"
"""Choice of dtype that keeps the file's."""
ANY = "as the file says"
"""Choice of model that leaves it to the file."""


class LoRADoctor(io.ComfyNode):
    """Examines a LoRA file and repairs it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return make(
            io.Schema,
            node_id="SFGRPO_LoRADoctor",
            display_name="LoRA Doctor",
            category="model/training",
            description="Says what a LoRA file is, who wrote it, and what ComfyUI and diffusers load of it and how "
            "strongly; and writes it so that both load it at strength 1.0.",
            search_aliases=["convert LoRA", "inspect LoRA", "lora key not loaded", "kohya", "peft", "alpha", "rank"],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
            # Of two nodes with equal inputs ComfyUI would run one, and the other would show no report.
            not_idempotent=True,
            inputs=[
                io.Combo.Input(
                    "lora_file",
                    options=[NONE, *lora_files()],
                    tooltip="A .safetensors file of the loras folders. Press R to see new ones.",
                ),
                io.String.Input(
                    "name",
                    default="",
                    placeholder="fixed_lora",
                    tooltip="The fixed LoRA is saved as output/loras/<name>_<number>_fixed.safetensors, and never over "
                    "another file. Empty saves nothing.",
                ),
                io.Combo.Input(
                    "dtype",
                    options=[SAME, *DTYPES],
                    default=SAME,
                    tooltip="Precision of the fixed LoRA; same keeps the file's.",
                ),
                advanced(
                    io.Float.Input,
                    "alpha",
                    default=0.0,
                    min=0.0,
                    max=1e6,
                    step=0.5,
                    optional=True,
                    tooltip="The alpha that it was trained with, where you know better than the file; 0 takes what the "
                    "file says.",
                ),
                advanced(
                    io.Combo.Input,
                    "model",
                    options=[ANY, *FAMILIES],
                    default=ANY,
                    optional=True,
                    tooltip="The model that it is of, where the report says that it is in doubt.",
                ),
            ],
            outputs=[
                io.String.Output("report", display_name="report", tooltip="What the file is, in words."),
                io.Custom("LORA_MODEL").Output(
                    "lora",
                    display_name="lora",
                    tooltip="The fixed LoRA, for Load LoRA Model and Save LoRA Weights. Where there can be none, nodes "
                    "that want it do not run.",
                ),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, lora_file=NONE, **inputs) -> str:
        """What the chosen file holds: its content may change under the same name."""
        return stamps(NONE, lora_file)

    @classmethod
    def execute(cls, lora_file: str, name: str, dtype: str, alpha: float = 0.0, model: str = ANY) -> io.NodeOutput:
        if lora_file == NONE:
            raise ValueError("choose a lora_file; it lists the .safetensors files of the loras folders")
        if name.strip():
            safe_name(name)
        with torch.no_grad():
            file = read_lora_file(lora_file)
            known = {"alpha": alpha or None, "model": None if model == ANY else model}
            text = report(file, **known).text()
            try:
                lora, metadata = convert(file, DTYPES.get(dtype), **known)
            except ValueError as refusal:
                # The report is worth having all the same. Nodes that want the LoRA are stopped with the reason.
                text += f"\nno fixed LoRA: {refusal}"
                lora = ExecutionBlocker(str(refusal))
            else:
                if name.strip():
                    text += f"\nsaved: {Checkpoints(name).save('fixed', lora, metadata)}"
        show_text(cls, text)
        return io.NodeOutput(text, lora, ui=ui.PreviewText(text))
