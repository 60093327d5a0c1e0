"""Kernels against the published formulas, written a second time in float64 for one number at a time."""

import math

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from sfgrpo.kernels import DEFAULT_ETA, Kernel, Transition, expand

ALL = [
    Kernel(schedule="as_printed"),
    Kernel(schedule="annealed"),
    Kernel(schedule="constant"),
    Kernel(schedule="annealed", eta=1.0),
    Kernel(schedule="constant", eta=0.25),
    Kernel(name="flow_grpo"),
    Kernel(name="flow_grpo", eta=1.2),
    Kernel(name="dance"),
    Kernel(name="ode"),
]
STOCHASTIC = [k for k in ALL if k.name != "ode"]
TIMES = ((1.0, 0.9), (0.9, 0.6), (0.6, 0.1), (0.3, 0.0), (1.0, 0.0))


def name_of(kernel: Kernel) -> str:
    return f"{kernel.name}-{kernel.schedule}-{kernel.eta}" if kernel.name == "ddim" else f"{kernel.name}-{kernel.eta}"


def by_hand(kernel: Kernel, x: float, v: float, t: float, s: float) -> tuple[float, float]:
    """Mean and std of the next number, from the papers' formulas."""
    dt = s - t
    if s == 0 or kernel.name == "ode":
        return x + dt * v, 0.0
    if kernel.name == "flow_grpo":
        a = kernel.eta * math.sqrt(t / (1 - (s if t == 1 else t)))
        mean = x * (1 + a**2 / (2 * t) * dt) + v * (1 + a**2 * (1 - t) / (2 * t)) * dt
        return mean, a * math.sqrt(-dt)
    if kernel.name == "dance":
        score = -(x - (1 - t) * (x - t * v)) / t**2
        return x + dt * v - 0.5 * kernel.eta**2 * score * dt, kernel.eta * math.sqrt(-dt)
    std = {
        "as_printed": kernel.eta * s * math.sqrt(1 - t),
        "annealed": kernel.eta * s * math.sqrt(t),
        "constant": s * math.sin(kernel.eta * math.pi / 2),
    }[kernel.schedule]
    return (1 - s) * (x - t * v) + math.sqrt(s**2 - std**2) * (x + (1 - t) * v), std


def latents(*shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


@pytest.mark.parametrize("kernel", ALL, ids=name_of)
@pytest.mark.parametrize("t, s", TIMES)
def test_scalar_times_follow_the_formulas(kernel, t, s):
    x, v = latents(2, 3)
    step = kernel.transition(x, v, t, s)
    for i in range(2):
        for j in range(3):
            mean, std = by_hand(kernel, float(x[i, j]), float(v[i, j]), t, s)
            assert float(step.mean[i, j]) == pytest.approx(mean, abs=2e-6)
    assert step.std.flatten().tolist() == pytest.approx([std], abs=1e-6)
    assert float(kernel.std(t, s)) == pytest.approx(std, abs=1e-6)


@pytest.mark.parametrize("kernel", ALL, ids=name_of)
def test_per_sample_times_follow_the_formulas(kernel):
    x, v = latents(len(TIMES), 4, seed=1)
    t, s = torch.tensor(TIMES).unbind(1)
    step = kernel.transition(x, v, t, s)
    for i, (ti, si) in enumerate(TIMES):
        for j in range(4):
            mean, std = by_hand(kernel, float(x[i, j]), float(v[i, j]), ti, si)
            assert float(step.mean[i, j]) == pytest.approx(mean, abs=2e-6)
        assert float(step.std[i, 0]) == pytest.approx(std, abs=1e-6)
    assert kernel.std(t, s).tolist() == pytest.approx(step.std.flatten().tolist(), abs=0)


def test_ddim_without_noise_is_the_euler_step_exactly():
    # Eighths: every product and sum below is exact in float32.
    x, v = torch.arange(-8, 8).view(2, 8) / 8, torch.arange(16).view(2, 8) / 4 - 1.5
    for schedule in ("as_printed", "annealed", "constant"):
        step = Kernel(eta=0.0, schedule=schedule).transition(x, v, 0.75, 0.5)
        assert torch.equal(step.mean, x - 0.25 * v)
        assert torch.equal(step.mean, Kernel(name="ode").transition(x, v, 0.75, 0.5).mean)
        assert float(step.std) == 0


@pytest.mark.parametrize("kernel", [k for k in ALL if k.name == "ddim"], ids=name_of)
def test_ddim_noise_and_coefficient_keep_the_noise_level(kernel):
    t, s = torch.tensor([1.0, 0.8, 0.5]), torch.tensor([0.9, 0.3, 0.4])
    # With v = x / t the clean estimate is 0 and the noise estimate x / t, so that the mean is coefficient * x / t.
    x = torch.full((3, 1), 2.0)
    step = kernel.transition(x, x / t.unsqueeze(1), t, s)
    coefficient = (step.mean * t.unsqueeze(1) / x).flatten()
    torch.testing.assert_close(coefficient.square() + step.std.flatten().square(), s.square())


def test_constant_schedule_is_flow_cps():
    t, s, eta = torch.tensor([1.0, 0.5]), torch.tensor([0.8, 0.25]), 0.6
    x = torch.ones(2, 1)
    step = Kernel(schedule="constant", eta=eta).transition(x, x / t.unsqueeze(1), t, s)
    torch.testing.assert_close(step.std.flatten(), s * math.sin(eta * math.pi / 2))
    torch.testing.assert_close((step.mean * t.unsqueeze(1)).flatten(), s * math.cos(eta * math.pi / 2))


def test_as_printed_is_quiet_at_the_start_and_annealed_loudest_there():
    t = torch.linspace(1, 0.02, 50)
    s = t - 0.01
    assert Kernel(schedule="as_printed").std(t, s)[0] == 0
    annealed = Kernel(schedule="annealed").std(t, s)
    assert bool((annealed[1:] < annealed[:-1]).all()) and annealed[-1] < 1e-2


@pytest.mark.parametrize("kernel", ALL, ids=name_of)
def test_last_step_is_the_clean_estimate_without_noise(kernel):
    x, v = latents(2, 3, seed=2)
    step = kernel.transition(x, v, torch.tensor([0.4, 1.0]), 0.0)
    assert step.std.flatten().tolist() == [0.0] * len(step.std)
    torch.testing.assert_close(step.mean, x - torch.tensor([[0.4], [1.0]]) * v, rtol=0, atol=1e-6)
    assert torch.equal(step.sample(torch.ones_like(x)), step.mean)


@pytest.mark.parametrize("eta", (0.7, 1.0))
@pytest.mark.parametrize("schedule", ("as_printed", "annealed", "constant"))
def test_ddim_is_finite_on_fine_grids(schedule, eta):
    grid = torch.linspace(1, 0, 1001)
    kernel = Kernel(schedule=schedule, eta=eta)
    x = torch.ones(1000, 2)
    step = kernel.transition(x, x, grid[:-1], grid[1:])
    assert bool(step.mean.isfinite().all()) and bool((step.std.flatten() <= grid[1:]).all())


@pytest.mark.parametrize("kernel", STOCHASTIC, ids=name_of)
@pytest.mark.parametrize("shape", ((3, 4, 5, 6), (2, 3, 2, 4, 4), (3, 7, 8)), ids=("image", "video", "tokens"))
def test_log_prob_is_the_mean_of_torch_normal(kernel, shape):
    x, v = latents(*shape, seed=3)
    t = torch.linspace(0.9, 0.5, shape[0])
    step = kernel.transition(x, v, t, t - 0.3)
    x_next = step.sample(torch.randn(shape, generator=torch.Generator().manual_seed(4)))
    expected = Normal(step.mean, step.std.expand(shape)).log_prob(x_next).flatten(1).mean(1)
    torch.testing.assert_close(step.log_prob(x_next), expected, rtol=1e-5, atol=1e-5)
    assert step.log_prob(x_next).shape == (shape[0],)


@pytest.mark.parametrize("shape", ((3, 4, 5, 6), (2, 3, 2, 4, 4), (3, 7, 8)), ids=("image", "video", "tokens"))
def test_kl_is_the_mean_of_torch_kl_divergence(shape):
    x, v = latents(*shape, seed=5)
    t = torch.linspace(0.9, 0.5, shape[0])
    for kernel in STOCHASTIC:
        step, reference = kernel.transition(x, v, t, t - 0.3), kernel.transition(x, 0.8 * v + 0.1, t, t - 0.3)
        expected = kl_divergence(
            Normal(step.mean, step.std.expand(shape)), Normal(reference.mean, reference.std.expand(shape))
        )
        mean = expected.flatten(1).mean(1)
        for span in (1.0, 0.125):
            torch.testing.assert_close(step.kl(reference, span), span * mean, rtol=1e-5, atol=1e-6)
        assert torch.equal(step.kl(step, 0.1), torch.zeros(shape[0]))


def test_kl_is_that_of_flow_grpo():
    """Its code divides the squared difference of the means by 2 std_dev_t^2, without the size of the step."""
    generator = torch.Generator().manual_seed(3)
    x, v, v_ref = (torch.randn(4, 3, 5, 5, generator=generator) for _ in range(3))
    t, s = torch.tensor([0.9601, 0.7, 0.3, 0.05]), torch.tensor([0.9133, 0.6, 0.1, 0.0089])
    kernel = Kernel(name="flow_grpo", eta=0.7)
    step, reference = (kernel.transition(x, velocity, t, s) for velocity in (v, v_ref))
    for i in range(4):
        time, dt = float(t[i]), float(s[i] - t[i])
        std_dev = 0.7 * math.sqrt(time / (1 - time))

        def mean(velocity, i=i, time=time, dt=dt, std_dev=std_dev):
            grown = x[i].double() * (1 + std_dev**2 / (2 * time) * dt)
            return grown + velocity[i].double() * (1 + std_dev**2 * (1 - time) / (2 * time)) * dt

        theirs = ((mean(v) - mean(v_ref)) ** 2).mean() / (2 * std_dev**2)
        assert float(step.kl(reference, t - s)[i]) == pytest.approx(float(theirs), rel=1e-4)


@pytest.mark.parametrize("kernel", ALL, ids=name_of)
def test_bfloat16_inputs_are_upcast(kernel):
    x, v = (z.bfloat16() for z in latents(2, 3, 4, seed=6))
    t, s = torch.tensor([1.0, 0.7]), torch.tensor([0.8, 0.5])
    low, high = kernel.transition(x, v, t, s), kernel.transition(x.float(), v.float(), t, s)
    assert low.mean.dtype == low.std.dtype == torch.float32
    assert torch.equal(low.mean, high.mean) and torch.equal(low.std, high.std)
    noise = latents(2, 3, 4, seed=7)[0].bfloat16()
    assert torch.equal(low.sample(noise), high.mean + high.std * noise.float())
    if kernel.name != "ode":
        # The second sample only: `as_printed` has no density at t = 1.
        assert torch.equal(low.log_prob(noise)[1], high.log_prob(noise.float())[1])
        assert bool(low.log_prob(noise)[1].isfinite())


@pytest.mark.parametrize("kernel", ALL, ids=name_of)
def test_float64_inputs_are_computed_in_float32(kernel):
    x, v = latents(2, 3, seed=9)
    step, same = kernel.transition(x.double(), v.double(), 0.7, 0.5), kernel.transition(x, v, 0.7, 0.5)
    assert step.mean.dtype == torch.float32 and torch.equal(step.mean, same.mean) and torch.equal(step.std, same.std)


def test_sample_is_mean_plus_std_times_noise():
    step = Transition(mean=torch.tensor([[1.0, 2.0], [3.0, 4.0]]), std=torch.tensor([[0.5], [2.0]]))
    assert step.sample(torch.tensor([[2.0, -2.0], [1.0, 0.0]])).tolist() == [[2.0, 1.0], [5.0, 4.0]]


def test_gradient_of_log_prob_grows_as_one_over_std():
    x, v = latents(1, 6, seed=8)
    noise = torch.ones(1, 6)
    norms = []
    for eta in (0.4, 0.2):
        velocity = v.clone().requires_grad_()
        step = Kernel(name="dance", eta=eta).transition(x, velocity, 0.5, 0.4)
        step.log_prob(step.sample(noise).detach()).sum().backward()
        norms.append(float(velocity.grad.norm()))
        # d mean / d v = dt + eta^2 (1 - t) dt / 2t, and d log p / d mean = noise / std / elements.
        slope = 0.1 * (1 + eta**2 / 2)
        assert norms[-1] == pytest.approx(slope / (eta * math.sqrt(0.1)) / 6 * math.sqrt(6), rel=1e-4)
    assert norms[1] / norms[0] == pytest.approx(2 * (1 + 0.2**2 / 2) / (1 + 0.4**2 / 2), rel=1e-4)


def test_expand_broadcasts_scalars_and_batches():
    like = torch.zeros(2, 3, 4, 5)
    assert expand(0.5, like).shape == (1, 1, 1, 1)
    assert expand(torch.tensor([1.0, 2.0]), like).shape == (2, 1, 1, 1)
    assert expand(torch.tensor([1, 2]), like).dtype == torch.float32


def test_default_eta_belongs_to_the_kernel():
    assert {name: Kernel(name=name).eta for name in DEFAULT_ETA} == {
        "ddim": 0.7,
        "flow_grpo": 0.7,
        "dance": 0.3,
        "ode": 0.0,
    }
    assert Kernel().name == "ddim" and Kernel().schedule == "annealed" and Kernel(eta=0.0).eta == 0.0


@pytest.mark.parametrize(
    "settings, message",
    (
        ({"name": "euler"}, "unknown kernel 'euler'; choose one of ddim, flow_grpo, dance, ode"),
        ({"schedule": "cosine"}, "unknown schedule 'cosine'; choose one of as_printed, annealed, constant"),
        ({"eta": 1.01}, "eta of the ddim kernel must be 0 to 1, got 1.01"),
        ({"eta": -0.1}, "eta of the ddim kernel must be 0 to 1"),
        ({"name": "flow_grpo", "eta": -0.1}, "eta of the flow_grpo kernel must be 0 or more"),
        ({"name": "dance", "eta": math.nan}, "eta of the dance kernel must be 0 or more, got nan"),
        ({"name": "dance", "eta": math.inf}, "eta of the dance kernel must be 0 or more, got inf"),
    ),
)
def test_bad_kernels_are_rejected(settings, message):
    with pytest.raises(ValueError, match=message):
        Kernel(**settings)
