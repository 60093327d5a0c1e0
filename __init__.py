"""ComfyUI loads the node pack from here; the nodes are in `nodes/`."""

WEB_DIRECTORY = "./nodes/web"


async def comfy_entrypoint():
    """ComfyUI's entry point (V3). Imports ComfyUI only here, so that the repository can be imported without it."""
    import logging

    try:
        from .nodes import StepwiseGRPOExtension
    except Exception:
        # ComfyUI reports a failure here in one line and without its place.
        logging.exception("Stepwise-Flow-GRPO: the nodes could not be loaded")
        raise
    return StepwiseGRPOExtension()
