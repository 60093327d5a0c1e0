"""Stepwise-Flow-GRPO: reinforcement learning of flow-matching image models with credit for each denoising step.

The core needs torch only and knows a model as `velocity_fn(x, sigma, cond) -> v`.
"""

__version__ = "0.1.0"
