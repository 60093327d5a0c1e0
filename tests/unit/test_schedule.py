"""Time grids against diffusers' own scheduler."""

import math

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift

from sfgrpo.schedule import (
    FAMILIES,
    check_sigmas,
    even_sigmas,
    family_sigmas,
    mu_for_tokens,
    sd3_sigmas,
    shift_dynamic,
    shift_static,
    stretch_to_terminal,
    window_mask,
)

STEPS = (1, 2, 3, 10, 28, 40)


def evenly(steps: int) -> np.ndarray:
    return np.linspace(1.0, 1 / steps, steps)


@pytest.mark.parametrize("shift", (1.0, 2.5, 3.0))
@pytest.mark.parametrize("steps", STEPS)
def test_sd3_grid_is_diffusers(steps, shift):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(steps)
    torch.testing.assert_close(sd3_sigmas(steps, shift), scheduler.sigmas, rtol=0, atol=1e-6)


def test_sd3_shift_is_3_by_default():
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(10)
    torch.testing.assert_close(sd3_sigmas(10), scheduler.sigmas, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mu", (0.0, 0.5, 1.15))
@pytest.mark.parametrize("steps", STEPS)
def test_flux_grid_is_diffusers(steps, mu):
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15)
    scheduler.set_timesteps(sigmas=evenly(steps), mu=mu)
    torch.testing.assert_close(even_sigmas(steps, mu=mu), scheduler.sigmas, rtol=0, atol=1e-6)


@pytest.mark.parametrize("steps", (2, 3, 10, 28, 40))
def test_qwen_image_grid_is_diffusers(steps):
    mu = mu_for_tokens(1024, 256, 8192, 0.5, 0.9)
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, shift_terminal=0.02, time_shift_type="exponential", base_shift=0.5, max_shift=0.9
    )
    scheduler.set_timesteps(sigmas=evenly(steps), mu=mu)
    torch.testing.assert_close(even_sigmas(steps, mu=mu, terminal=0.02), scheduler.sigmas, rtol=0, atol=1e-6)


@pytest.mark.parametrize("steps", STEPS)
def test_even_grid_with_static_shift_is_diffusers(steps):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(sigmas=evenly(steps))
    torch.testing.assert_close(even_sigmas(steps, shift=3.0), scheduler.sigmas, rtol=0, atol=1e-6)


# scheduler_config.json of Stable Diffusion 3.5, FLUX.1-dev, FLUX.1-schnell, FLUX.2, Qwen-Image and Z-Image-Turbo.
SD3 = {"num_train_timesteps": 1000, "shift": 3.0}
DYNAMIC = {"base_image_seq_len": 256, "base_shift": 0.5, "num_train_timesteps": 1000, "use_dynamic_shifting": True}
FLUX = DYNAMIC | {"max_image_seq_len": 4096, "max_shift": 1.15, "shift": 3.0}
SCHNELL = FLUX | {"shift": 1.0, "use_dynamic_shifting": False}
QWEN = DYNAMIC | {"max_image_seq_len": 8192, "max_shift": 0.9, "shift": 1.0, "shift_terminal": 0.02}
QWEN |= {"time_shift_type": "exponential"}
Z_IMAGE = {"num_train_timesteps": 1000, "use_dynamic_shifting": False, "shift": 3.0}
WAN = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "num_train_timesteps": 1000, "flow_shift": 3.0}


def in_diffusers(family: str, steps: int, tokens: int) -> torch.Tensor:
    """The sigmas that the family's pipeline in diffusers asks its scheduler for."""
    if family == "wan":
        scheduler = UniPCMultistepScheduler(**WAN)
        scheduler.set_timesteps(steps)
        return scheduler.sigmas
    config = {"sd3": SD3, "flux-schnell": SCHNELL, "qwen-image": QWEN, "z-image": Z_IMAGE, "plain": {}}.get(
        family, FLUX
    )
    scheduler = FlowMatchEulerDiscreteScheduler(**config)
    if family == "sd3":
        scheduler.set_timesteps(steps)
        return scheduler.sigmas
    mu = None
    if family == "flux2":
        mu = compute_empirical_mu(tokens, steps)
    elif family in ("flux", "qwen-image"):
        names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
        mu = calculate_shift(tokens, *(config[name] for name in names))
    scheduler.set_timesteps(sigmas=evenly(steps), mu=mu)
    return scheduler.sigmas


@pytest.mark.parametrize("tokens", (256, 1024, 4096, 6000))
@pytest.mark.parametrize("steps", (2, 4, 10, 28, 50))
@pytest.mark.parametrize("family", FAMILIES)
def test_grid_of_every_family_is_its_pipelines(family, steps, tokens):
    grid = family_sigmas(FAMILIES[family], steps, tokens=tokens)
    # UniPC starts at 1 - 1e-6.
    torch.testing.assert_close(grid, in_diffusers(family, steps, tokens), rtol=0, atol=2e-6)
    assert torch.equal(check_sigmas(grid), grid) and grid[0] == 1


@pytest.mark.parametrize("shift", (0.5, 1.7))
def test_a_shift_of_ones_own(shift):
    for family in ("flux", "flux2"):
        given = family_sigmas(FAMILIES[family], 8, shift=shift)
        torch.testing.assert_close(given, even_sigmas(8, mu=shift), rtol=0, atol=0)
    qwen = family_sigmas(FAMILIES["qwen-image"], 8, shift=shift)
    torch.testing.assert_close(qwen, even_sigmas(8, mu=shift, terminal=0.02), rtol=0, atol=0)
    for family in ("flux-schnell", "z-image", "plain"):
        given = family_sigmas(FAMILIES[family], 8, shift=shift)
        torch.testing.assert_close(given, even_sigmas(8, shift=shift), rtol=0, atol=0)
    torch.testing.assert_close(family_sigmas(FAMILIES["sd3"], 8, shift=shift), sd3_sigmas(8, shift), rtol=0, atol=0)
    scheduler = UniPCMultistepScheduler(**WAN | {"flow_shift": shift})
    scheduler.set_timesteps(8)
    torch.testing.assert_close(family_sigmas(FAMILIES["wan"], 8, shift=shift), scheduler.sigmas, rtol=0, atol=2e-6)


def test_even_grid_without_shift():
    torch.testing.assert_close(even_sigmas(4), torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0]), rtol=0, atol=0)


@pytest.mark.parametrize(
    "grid", (sd3_sigmas(10), even_sigmas(10), even_sigmas(10, mu=1.15), even_sigmas(10, mu=0.6, terminal=0.02))
)
def test_every_grid_is_a_valid_float32_grid_from_1_to_0(grid):
    assert grid.dtype == torch.float32 and grid.shape == (11,)
    assert grid[0] == 1 and grid[-1] == 0
    assert torch.equal(check_sigmas(grid), grid)


def test_mu_is_linear_in_the_tokens():
    tokens = (256, 1024, 2048, 4096, 6000)
    line = np.polyfit((256, 4096), (0.5, 1.15), 1)
    assert [mu_for_tokens(n) for n in tokens] == pytest.approx([np.polyval(line, n) for n in tokens])
    assert mu_for_tokens(8192, 256, 8192, 0.5, 0.9) == pytest.approx(0.9)


def test_shifts_by_hand():
    t = torch.tensor([0.0, 0.25, 0.5, 1.0])
    torch.testing.assert_close(shift_static(t, 3.0), torch.tensor([0.0, 0.5, 0.75, 1.0]))
    torch.testing.assert_close(shift_static(t, 1.0), t)
    torch.testing.assert_close(shift_dynamic(t, math.log(3.0)), torch.tensor([0.0, 0.5, 0.75, 1.0]))
    torch.testing.assert_close(shift_dynamic(t, 0.0), t)


def test_stretch_by_hand():
    stretched = stretch_to_terminal(torch.tensor([1.0, 0.6, 0.2]), 0.1)
    torch.testing.assert_close(stretched, torch.tensor([1.0, 0.55, 0.1]))


def test_check_sigmas_takes_lists_and_other_dtypes():
    for grid in ([1, 0.5, 0], torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64)):
        checked = check_sigmas(grid)
        assert checked.dtype == torch.float32 and checked.tolist() == [1.0, 0.5, 0.0]
    assert check_sigmas([0.7, 0.0]).tolist() == pytest.approx([0.7, 0.0])


@pytest.mark.parametrize(
    "sigmas, message",
    (
        ([1.0], "at least 2 values"),
        ([[1.0, 0.0]], r"got shape \(1, 2\)"),
        ([1.0, 0.5, 0.5, 0.0], "fall strictly"),
        ([0.0, 1.0], "fall strictly"),
        ([1.0, math.nan, 0.0], "fall strictly"),
        ([1.5, 0.5, 0.0], "start at 1 or below"),
        ([1.0, 0.5, 0.01], "end at exactly 0"),
        ([1.0, 0.5, -0.1], "end at exactly 0"),
    ),
)
def test_check_sigmas_rejects_what_is_no_grid(sigmas, message):
    with pytest.raises(ValueError, match=message):
        check_sigmas(sigmas)


def test_window_mask_by_hand():
    assert window_mask(4).tolist() == [True, True, True, True]
    assert window_mask(4, 1, 3).tolist() == [False, True, True, False]
    assert window_mask(4, 2).tolist() == [False, False, True, True]
    assert window_mask(4, 0, 1).tolist() == [True, False, False, False]


@pytest.mark.parametrize("start, stop", ((2, 2), (3, 1), (-1, 2), (0, 5), (4, None)))
def test_window_mask_rejects_empty_and_outside(start, stop):
    with pytest.raises(ValueError, match="its start is .*, and there are 4 steps"):
        window_mask(4, start, stop)
