"""ComfyUI loads the node pack from here; the nodes follow in `nodes/`."""
