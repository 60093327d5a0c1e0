"""Load Shapes Demo Model: the model that comes with this pack, for stock nodes."""

from __future__ import annotations

from comfy_api.latest import io

from ..sfgrpo.shapes import MODEL_DIR
from .compat import make
from .shapes_model import empty_latent, load_model, load_vae
from .shapes_text import load_clip


class LoadShapesDemo(io.ComfyNode):
    """The shipped model as MODEL, CLIP, VAE and an empty LATENT."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return make(
            io.Schema,
            node_id="SFGRPO_LoadShapesDemo",
            display_name="Load Shapes Demo Model",
            category="model/loaders",
            description="A tiny Stable Diffusion 3 that comes with this pack: no download, quick on a CPU. It draws "
            "pictures of 32 x 32 pixels with one to four circles, squares, triangles and crosses in six colours.",
            search_aliases=["shapes", "demo model", "tiny sd3", "toy model", "stepwise grpo", "test model"],
            inputs=[],
            outputs=[
                io.Model.Output(
                    display_name="MODEL",
                    tooltip="The transformer, an SD3 model; for every node that takes a MODEL.",
                ),
                io.Clip.Output(
                    display_name="CLIP",
                    tooltip="Its two text encoders. They know the words of its captions alone; see the help page.",
                ),
                io.Vae.Output(display_name="VAE", tooltip="Its autoencoder, for VAE Decode and VAE Encode."),
                io.Latent.Output(
                    display_name="LATENT",
                    tooltip="One empty latent of 32 x 32 pixels. For several, use Empty Latent Image at 32 x 32.",
                ),
            ],
        )

    @classmethod
    def execute(cls) -> io.NodeOutput:
        return io.NodeOutput(load_model(MODEL_DIR), load_clip(MODEL_DIR), load_vae(MODEL_DIR), empty_latent(MODEL_DIR))
