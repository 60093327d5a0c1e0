"""Flow Sigmas: the time grids of the headless trainer as SIGMAS."""

from __future__ import annotations

from comfy_api.latest import io

from ..sfgrpo.schedule import sd3_sigmas


class FlowSigmas(io.ComfyNode):
    """Time grids of flow models, as the headless trainer uses them."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SFGRPO_FlowSigmas",
            display_name="Flow Sigmas",
            category="model/sampling/schedulers",
            inputs=[io.Int.Input("steps", default=10, min=1, max=1000, tooltip="Number of sampling steps.")],
            outputs=[io.Sigmas.Output()],
        )

    @classmethod
    def execute(cls, steps: int) -> io.NodeOutput:
        return io.NodeOutput(sd3_sigmas(steps))
