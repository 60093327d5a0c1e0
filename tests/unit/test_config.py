"""Settings and their ranges."""

import math

import pytest

from sfgrpo.config import GRPOConfig
from sfgrpo.kernels import Kernel


@pytest.mark.parametrize(
    "settings, message",
    (
        ({"group_size": 1}, "group_size must be 2 or more, for an advantage compares"),
        ({"substeps": 0}, "substeps must be 1 or more, got 0"),
        ({"credit": "gains"}, "credit must be one of uniform, gain, .*, got 'gains'"),
        ({"step_weight": "snr"}, "step_weight must be one of none, std, got 'snr'"),
        ({"gae_lambda": 1.1}, "gae_lambda must be from 0 to 1"),
        ({"gae_lambda": -0.1}, "gae_lambda must be from 0 to 1"),
        ({"ema_decay": 1.0}, "ema_decay must be from 0 to below 1"),
        ({"clip_range": 0.0}, "clip_range must be above 0 and below 1"),
        ({"clip_range": 1.0}, "clip_range must be above 0 and below 1"),
        ({"clip_range": math.nan}, "clip_range must be above 0"),
        ({"kl_weight": -1.0}, "kl_weight must be 0 or more"),
        ({"kl_weight": math.inf}, "kl_weight must be 0 or more"),
        ({"updates": 0}, "updates must be 1 or more"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be above 0"),
        ({"kernel": Kernel(name="ode")}, "kernel must be stochastic: ode or eta 0"),
        ({"kernel": Kernel(eta=0.0)}, "kernel must be stochastic: ode or eta 0"),
        ({"rollout_batch": 0}, "rollout_batch must be 1 or more"),
        ({"estimate_batch": 0}, "estimate_batch must be 1 or more"),
        ({"decode_batch": -1}, "decode_batch must be 1 or more"),
        ({"update_batch": 0}, "update_batch must be 1 or more"),
    ),
)
def test_bad_settings_are_rejected(settings, message):
    with pytest.raises(ValueError, match=message):
        GRPOConfig(**settings)


def test_defaults_and_the_ends_of_the_ranges_are_accepted():
    config = GRPOConfig()
    assert (config.group_size, config.credit, config.substeps, config.updates) == (24, "gain", 1, 1)
    assert config.kernel == Kernel(name="ddim", schedule="annealed", eta=0.7)
    ends = {"group_size": 2, "gae_lambda": 0.0, "ema_decay": 0.0, "clip_range": 1e-6, "max_grad_norm": math.inf}
    assert GRPOConfig(**ends, rollout_batch=1, decode_batch=1).gae_lambda == 0
    assert GRPOConfig(gae_lambda=1.0, ema_decay=0.999, clip_range=0.999).clip_range == 0.999


def test_settings_are_frozen_and_given_by_name():
    with pytest.raises(AttributeError, match="cannot assign to field 'updates'"):
        GRPOConfig().updates = 2
    with pytest.raises(TypeError, match="positional argument"):
        GRPOConfig(24)
