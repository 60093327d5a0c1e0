"""A model that is known exactly: x0 ~ N(m, S), where every quantity has a closed form.

With V(t) = (1 - t)^2 S + t^2 and y = x_t - (1 - t) m, in each dimension:

    E[x0 | x_t] = m + (1 - t) S y / V,   E[x1 | x_t] = t y / V,   v = E[x1 | x_t] - E[x0 | x_t]

A step of any kernel is then x_s = a x_t + b + std * noise, so that mean and variance are carried from t to s without
sampling; a and b are read off `Kernel.transition`.

What theory gives for the variance after ONE step of `ddim`, against that of the Euler step (sigma = 0):

    sigma^2 (1 - t) S (s - t) / (s V)  -  sigma^4 (1 - s) (1 - t) S t / (4 s^3 V)  +  O(sigma^6)

So the error is O(sigma^4) only where the step is small against sigma^2 (and 0 at t = 1 and for S = 0); at a finite
step it is O(sigma^2 (t - s)). Over a whole grid that is refined at fixed eta the error does not vanish.
"""

import math
from itertools import pairwise

import pytest
import torch

from sfgrpo.kernels import Kernel
from sfgrpo.noise import initial_noise, member_generators
from sfgrpo.rollout import rollout
from sfgrpo.tweedie import clean_estimate, estimates

MEAN, VAR = 0.7, 0.5
SCHEDULES = ("as_printed", "annealed", "constant")
ODE = Kernel(name="ode")


def marginal(t, mean=MEAN, var=VAR):
    """Mean and variance of x_t."""
    return (1 - t) * mean, (1 - t) ** 2 * var + t**2


def velocity(x, t, mean=MEAN, var=VAR):
    centre, total = marginal(t, mean, var)
    y = x - centre
    return t * y / total - (mean + (1 - t) * var * y / total)


def affine(kernel, t, s, mean=MEAN, var=VAR):
    """a, b and std of the step x_s = a x_t + b + std * noise."""
    x = torch.tensor([[0.0], [1.0]])
    step = kernel.transition(x, velocity(x, t, mean, var), t, s)
    b, end = step.mean.double().flatten().tolist()
    return end - b, b, float(step.std)


def carry(kernel, grid, mean=MEAN, var=VAR):
    """Mean and variance at the end of the grid, from the exact marginal at its start."""
    m, v = marginal(grid[0], mean, var)
    for t, s in pairwise(grid):
        a, b, std = affine(kernel, t, s, mean, var)
        m, v = a * m + b, a * a * v + std * std
    return m, v


def even(steps, start=1.0, end=0.0):
    return [start + (end - start) * k / steps for k in range(steps + 1)]


def variance_errors(kernel, start, refinements=(20, 40, 80)):
    return [carry(kernel, even(n, start))[1] - VAR for n in refinements]


def extra_variance(eta, t, s, schedule="constant", **law):
    """Variance after one ddim step less that after an Euler step, and sigma."""
    kernel = Kernel(eta=eta, schedule=schedule)
    start = marginal(t, **law)[1]
    a, _, std = affine(kernel, t, s, **law)
    euler = affine(ODE, t, s, **law)[0]
    return a * a * start + std * std - euler * euler * start, std


ALL = [ODE, Kernel(name="flow_grpo"), Kernel(name="dance"), *(Kernel(schedule=schedule) for schedule in SCHEDULES)]


def by_name(kernel):
    return f"{kernel.name}-{kernel.schedule}" if kernel.name == "ddim" else kernel.name


@pytest.mark.parametrize("kernel", ALL, ids=by_name)
@pytest.mark.parametrize("start", (1.0, 0.8))
def test_the_mean_is_carried_exactly_by_every_kernel(kernel, start):
    assert carry(kernel, even(10, start))[0] == pytest.approx(MEAN, abs=1e-5)


@pytest.mark.parametrize("kernel", ALL, ids=by_name)
def test_a_single_point_is_reached_exactly_by_every_kernel(kernel):
    mean, var = carry(kernel, even(10), var=0.0)
    assert mean == pytest.approx(MEAN, abs=1e-5) and var == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("start", (1.0, 0.8))
def test_euler_error_is_first_order(start):
    errors = variance_errors(ODE, start)
    assert errors[0] < 0 and 1.7 < errors[0] / errors[1] < 2.4 and 1.7 < errors[1] / errors[2] < 2.4


@pytest.mark.parametrize(
    "kernel, start",
    (
        (Kernel(name="flow_grpo"), 0.8),
        (Kernel(name="dance"), 0.8),
        (Kernel(name="dance"), 1.0),
        (Kernel(name="dance", eta=0.7), 1.0),
    ),
)
def test_sde_error_is_first_order(kernel, start):
    errors = variance_errors(kernel, start)
    assert 1.7 < errors[0] / errors[1] < 2.4 and 1.7 < errors[1] / errors[2] < 2.4
    assert abs(errors[2]) < 0.02


@pytest.mark.parametrize("eta", (0.4, 0.7))
def test_first_step_of_flow_grpo_from_pure_noise_adds_noise_whatever_its_size(eta):
    # std^2 = a^2 (1 - s) = eta^2 at t = 1 and v = x - m, so that the variance is (1 - eta^2 / 2 - (1 - s))^2 + eta^2:
    # eta^4 / 4 too much however fine the grid. That is why flow_grpo is not first order from t = 1.
    for s in (0.9, 0.99, 0.999):
        a, b, std = affine(Kernel(name="flow_grpo", eta=eta), 1.0, s)
        assert std == pytest.approx(eta, rel=1e-4)
        assert a == pytest.approx(s - eta**2 / 2, abs=1e-4) and b == pytest.approx((1 - s) * MEAN, abs=1e-6)
    excess = a * a + std * std - marginal(0.999)[1]
    assert excess == pytest.approx(eta**4 / 4, abs=3e-3)


def test_flow_grpo_from_pure_noise_converges_slower_than_first_order():
    # The excess above decays as (1 - t)^(eta^2): on fine grids it outweighs the discretisation error.
    ode, sde = variance_errors(ODE, 1.0, (320,))[0], variance_errors(Kernel(name="flow_grpo"), 1.0, (320,))[0]
    assert ode < 0 < sde < 0.01


@pytest.mark.parametrize("eta", (0.3, 0.7, 1.0))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ddim_from_pure_noise_has_the_variance_of_the_euler_step_exactly(schedule, eta):
    # At t = 1 the noise estimate is the noise itself, so that coefficient^2 + sigma^2 = s^2 does it.
    assert extra_variance(eta, 1.0, 0.6, schedule)[0] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ddim_of_a_single_point_has_the_exact_variance(schedule):
    assert extra_variance(0.7, 0.6, 0.4, schedule, var=0.0)[0] == pytest.approx(0, abs=1e-6)


def test_ddim_error_is_fourth_order_in_sigma_where_the_step_is_small():
    t, s = 0.5, 0.49999
    (large, sigma), (small, half) = extra_variance(0.2, t, s), extra_variance(0.1, t, s)
    assert 14.5 < large / small < 17 * (sigma / half / 2) ** 4
    theory = -(1 - s) * (1 - t) * VAR * t / (4 * s**3 * marginal(t)[1])
    assert large / sigma**4 == pytest.approx(theory, rel=0.1) and small / half**4 == pytest.approx(theory, rel=0.1)


@pytest.mark.parametrize("t, s", ((0.9, 0.7), (0.5, 0.4), (0.3, 0.1)))
def test_ddim_error_is_second_order_in_sigma_at_a_finite_step(t, s):
    (large, sigma), (small, half) = extra_variance(0.1, t, s), extra_variance(0.05, t, s)
    theory = (1 - t) * VAR * (s - t) / (s * marginal(t)[1])
    assert 3.8 < large / small < 4.2
    assert large / sigma**2 == pytest.approx(theory, rel=0.03) and small / half**2 == pytest.approx(theory, rel=0.01)


@pytest.mark.parametrize("t, s", ((0.9, 0.7), (0.5, 0.4), (0.5, 0.4999)))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ddim_error_is_both_terms_up_to_the_sixth_order(schedule, t, s):
    error, sigma = extra_variance(0.2, t, s, schedule)
    total = marginal(t)[1]
    second = sigma**2 * (1 - t) * VAR * (s - t) / (s * total)
    fourth = -(sigma**4) * (1 - s) * (1 - t) * VAR * t / (4 * s**3 * total)
    assert error == pytest.approx(second + fourth, abs=sigma**6 / s**5 + 1e-6)


def fine_grid_bias(schedule, eta, steps):
    grid = even(steps)
    return carry(Kernel(eta=eta, schedule=schedule), grid)[1] - carry(ODE, grid)[1]


@pytest.mark.parametrize("eta", (0.8, 0.6, 0.4))
def test_ddim_on_fine_grids_ends_with_too_little_variance_by_order_eta_squared(eta):
    # sigma does not shrink with the step, so that x settles at each time where a^2 V + sigma^2 = V. As t -> 0, with
    # sigma = s sin(theta), that is V = S (1 + cos(theta)) / 2.
    limit = VAR * (1 + math.cos(eta * math.pi / 2)) / 2 - VAR
    assert fine_grid_bias("constant", eta, 320) == pytest.approx(limit, rel=0.04)
    limit = VAR * (1 + math.cos(math.asin(eta))) / 2 - VAR
    assert limit < fine_grid_bias("as_printed", eta, 320) < 0.7 * limit
    # `annealed` has sigma / s -> 0 as t -> 0, and forgets the error, slowly.
    coarse, fine = fine_grid_bias("annealed", eta, 320), fine_grid_bias("annealed", eta, 1280)
    assert 0.4 * limit < coarse < 0.9 * fine < 0


def test_ddim_at_10_steps_adds_less_to_the_variance_error_than_euler_has_already():
    grid = even(10)
    euler = carry(ODE, grid)[1] - VAR
    for schedule in ("as_printed", "annealed"):
        assert abs(carry(Kernel(schedule=schedule), grid)[1] - VAR - euler) < 0.25 * abs(euler)


DIMS = {"mean": torch.tensor([0.7, -0.3, 0.0]), "var": torch.tensor([0.5, 1.0, 0.05])}


def velocity_fn(x, sigma, cond):
    return velocity(x, sigma.unsqueeze(1), **DIMS)


@pytest.mark.parametrize(
    "kernel", [Kernel(), Kernel(schedule="as_printed"), Kernel(name="flow_grpo"), ODE], ids=by_name
)
def test_sampled_rollouts_have_the_carried_mean_and_variance(kernel):
    samples, grid = 3000, even(6)
    prompts = range(samples)
    result = rollout(
        velocity_fn,
        initial_noise(0, 0, prompts, 1, (3,)),
        torch.tensor(grid),
        torch.arange(samples),
        kernel=kernel,
        generators=member_generators(0, 0, prompts, 1),
    )
    for d in range(3):
        mean, var = carry(kernel, grid, float(DIMS["mean"][d]), float(DIMS["var"][d]))
        final = result.final[:, d].double()
        assert abs(float(final.mean()) - mean) < 4 * math.sqrt(var / samples)
        assert abs(float(final.var()) - var) < 4 * var * math.sqrt(2 / samples)


def test_one_step_estimate_is_the_posterior_mean():
    x, t = torch.tensor([[0.3, -1.0, 2.0], [1.0, 0.0, -0.5]]), torch.tensor([0.8, 0.3])
    for i in range(2):
        for d in range(3):
            m, s, ti, xi = float(DIMS["mean"][d]), float(DIMS["var"][d]), float(t[i]), float(x[i, d])
            # Gaussian regression of x0 on x_t: cov / var = (1 - t) S / V.
            posterior = m + (1 - ti) * s / ((1 - ti) ** 2 * s + ti**2) * (xi - (1 - ti) * m)
            estimate = clean_estimate(x, velocity_fn(x, t, None), t)
            assert float(estimate[i, d]) == pytest.approx(posterior, abs=1e-5)


def test_estimates_reach_the_end_of_the_exact_ode_to_first_order():
    x, start = torch.tensor([[0.3, -1.0, 2.0], [1.0, 0.5, -0.5]]), 0.8
    centre, total = marginal(start, **DIMS)
    exact = DIMS["mean"] + torch.sqrt(DIMS["var"] / total) * (x - centre)
    errors = []
    for n in (20, 40, 80):
        trajectory = rollout(
            velocity_fn,
            x,
            torch.tensor(even(n, start)),
            torch.arange(2),
            kernel=Kernel(),
            generators=member_generators(0, 0, [0, 1], 1),
        )
        values, states = estimates(velocity_fn, trajectory, torch.arange(2), substeps=n)
        errors.append(float((values[states.index[:, 0]] - exact).norm()))
    assert 1.7 < errors[0] / errors[1] < 2.4 and 1.7 < errors[1] / errors[2] < 2.4
    assert errors[2] < 0.03
