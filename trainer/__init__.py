"""The headless trainer: diffusers models, peft LoRAs and accelerate around the core in `sfgrpo`."""
