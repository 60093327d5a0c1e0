"""Clean estimates, against Euler steps written out by hand."""

from itertools import pairwise

import pytest
import torch

from sfgrpo.kernels import Kernel
from sfgrpo.noise import initial_noise, member_generators
from sfgrpo.rollout import rollout
from sfgrpo.schedule import even_sigmas, window_mask
from sfgrpo.tweedie import clean_estimate, estimates, substep_grid

SHAPE = (2, 3)
PROMPTS = [1, 4]
SIZE = 3
STEPS = 6


def velocity(x, sigma, cond):
    """Nonlinear in x and t, another function for each prompt."""
    view = (-1, *[1] * (x.ndim - 1))
    return torch.tanh((1 + 0.3 * cond.view(view)) * x - sigma.view(view)) + 0.2 * sigma.view(view) * x.sin()


class Counting:
    """A velocity that keeps what it was called with."""

    def __init__(self):
        self.rows, self.sizes, self.sigmas = 0, [], []

    def __call__(self, x, sigma, cond):
        assert len(x) == len(sigma) == len(cond)
        self.rows += len(x)
        self.sizes.append(len(x))
        self.sigmas += sigma.tolist()
        return velocity(x, sigma, cond)


COND = torch.tensor(PROMPTS).repeat_interleave(SIZE)


def sampled(kernel=None, share=True, shape=SHAPE, **options):
    generators = member_generators(0, 0, PROMPTS, SIZE)
    x = initial_noise(0, 0, PROMPTS, SIZE, shape)
    return rollout(
        velocity,
        x,
        even_sigmas(STEPS, shift=2.0),
        COND,
        kernel=kernel or Kernel(),
        generators=generators,
        group_size=SIZE if share else 1,
        **options,
    )


def all_estimates(trajectory, velocity_fn=velocity, **options):
    """(B, T + 1, ...): the estimate of each state of each trajectory."""
    values, states = estimates(velocity_fn, trajectory, COND, **options)
    return values[states.index]


def close(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=2e-6)


def test_clean_estimate_by_hand():
    x, v = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[2.0, 0.0], [1.0, -1.0]])
    assert clean_estimate(x, v, 0.5).tolist() == [[0.0, 2.0], [2.5, 4.5]]
    assert clean_estimate(x, v, torch.tensor([1.0, 0.25])).tolist() == [[-1.0, 2.0], [2.75, 4.25]]
    # Exact for a straight path: x_t = (1 - t) x0 + t x1.
    x0, x1 = torch.tensor([[1.0, -2.0]]), torch.tensor([[0.5, 3.0]])
    assert clean_estimate((0.25 * x0 + 0.75 * x1).bfloat16(), (x1 - x0).bfloat16(), 0.75).tolist() == x0.tolist()


def test_one_step_is_x_minus_t_v_and_calls_no_model():
    trajectory, count = sampled(), Counting()
    result = all_estimates(trajectory, count)
    assert count.rows == 0
    for k in range(STEPS):
        close(result[:, k], trajectory.latents[:, k] - trajectory.sigmas[k] * trajectory.velocities[:, k])
    assert torch.equal(result[:, STEPS], trajectory.final)


@pytest.mark.parametrize("kernel", (Kernel(), Kernel(schedule="as_printed"), Kernel(name="flow_grpo")))
@pytest.mark.parametrize("substeps", (STEPS, STEPS + 3))
def test_with_as_many_substeps_as_steps_left_the_ode_is_continued_on_the_grid(kernel, substeps):
    trajectory = sampled(kernel)
    result = all_estimates(trajectory, substeps=substeps)
    for k in range(STEPS + 1):
        x = trajectory.latents[:, k]
        for j in range(k, STEPS):
            t, s = trajectory.sigmas[j], trajectory.sigmas[j + 1]
            x = x + (s - t) * velocity(x, t.expand(len(x)), COND)
        close(result[:, k], x)


@pytest.mark.parametrize("substeps", (2, 3, 4))
def test_fewer_substeps_skip_times_of_the_grid(substeps):
    # Times of 6 steps, by hand: with 4 sub-steps of 6 left round(1.5) = 2, 3, round(4.5) = 4 and so on.
    skips = {
        2: [[0, 3, 6], [1, 3, 6], [2, 4, 6], [3, 5, 6], [4, 5, 6], [5, 6]],
        3: [[0, 2, 4, 6], [1, 3, 4, 6], [2, 3, 5, 6], [3, 4, 5, 6], [4, 5, 6], [5, 6]],
        4: [[0, 2, 3, 4, 6], [1, 2, 3, 5, 6], [2, 3, 4, 5, 6], [3, 4, 5, 6], [4, 5, 6], [5, 6]],
    }[substeps]
    trajectory = sampled()
    result = all_estimates(trajectory, substeps=substeps)
    for k, times in enumerate(skips):
        assert torch.equal(substep_grid(trajectory.sigmas, k, substeps), trajectory.sigmas[times])
        x = trajectory.latents[:, k]
        for i, j in pairwise(times):
            t, s = trajectory.sigmas[i], trajectory.sigmas[j]
            x = x + (s - t) * velocity(x, t.expand(len(x)), COND)
        close(result[:, k], x)
    assert torch.equal(result[:, STEPS], trajectory.final)


def test_after_the_last_noise_estimates_are_the_finished_latent():
    trajectory = sampled(stochastic=window_mask(STEPS, 0, 3))
    result = all_estimates(trajectory, substeps=STEPS)
    for k in range(3, STEPS + 1):
        close(result[:, k], trajectory.final)
    assert float((result[:, 2] - trajectory.final).abs().amax()) > 1e-2


def test_substep_grids_fall_strictly_from_the_state_to_0():
    for steps in (1, 2, 7, 10, 40):
        sigmas = even_sigmas(steps, shift=3.0)
        for k in range(steps):
            for n in (1, 2, 3, 5, 8, 100):
                grid = substep_grid(sigmas, k, n)
                assert len(grid) == min(n, steps - k) + 1
                assert grid[0] == sigmas[k] and grid[-1] == 0 and bool((grid[1:] < grid[:-1]).all())
                assert set(grid.tolist()) <= set(sigmas.tolist())


@pytest.mark.parametrize(
    "kernel, shared", ((Kernel(), 1), (Kernel(schedule="as_printed"), 2), (Kernel(name="ode"), STEPS + 1))
)
@pytest.mark.parametrize("share", (True, False))
@pytest.mark.parametrize("substeps", (1, 2, 5, 6, 9))
def test_rows_called(kernel, shared, share, substeps):
    count, seen = Counting(), []
    all_estimates(sampled(kernel, share), count, substeps=substeps, on_batch=seen.append)
    rows = [len(PROMPTS) if share and k < shared else len(PROMPTS) * SIZE for k in range(STEPS)]
    # State k takes min(T', T - k) sub-steps, the first of them free.
    assert count.rows == sum(n * (min(substeps, STEPS - k) - 1) for k, n in enumerate(rows))
    assert seen == count.sizes


def test_states_of_different_steps_are_refined_together():
    count = Counting()
    all_estimates(sampled(share=False), count, substeps=2)
    assert count.sizes == [(STEPS - 1) * len(COND)]
    assert len(set(count.sigmas)) > 1


@pytest.mark.parametrize("micro_batch", (1, 4, 7, 1000))
@pytest.mark.parametrize("substeps", (2, 5))
def test_micro_batches_change_nothing(micro_batch, substeps):
    trajectory, count = sampled(), Counting()
    result = all_estimates(trajectory, count, substeps=substeps, micro_batch=micro_batch)
    close(result, all_estimates(trajectory, substeps=substeps))
    assert max(count.sizes) <= micro_batch


def test_shared_states_give_the_unshared_estimates():
    for kernel in (Kernel(), Kernel(schedule="as_printed"), Kernel(name="ode")):
        close(all_estimates(sampled(kernel), substeps=3), all_estimates(sampled(kernel, share=False), substeps=3))


@pytest.mark.parametrize("shape", ((1, 2, 2), (2, 1, 2, 2)), ids=("image", "video"))
def test_other_latent_shapes(shape):
    trajectory = sampled(shape=shape)
    x = trajectory.latents[:, STEPS - 2]
    for j in (STEPS - 2, STEPS - 1):
        t, s = trajectory.sigmas[j], trajectory.sigmas[j + 1]
        x = x + (s - t) * velocity(x, t.expand(len(x)), COND)
    close(all_estimates(trajectory, substeps=5)[:, STEPS - 2], x)


def test_the_trajectory_is_left_as_it_is():
    trajectory = sampled()
    before = trajectory.latents.clone()
    estimates(velocity, trajectory, COND, substeps=4)
    assert torch.equal(trajectory.latents, before)


@pytest.mark.parametrize("substeps", (0, -2))
def test_no_substep_is_rejected(substeps):
    with pytest.raises(ValueError, match=f"sub-steps must be 1 or more, got {substeps}"):
        estimates(velocity, sampled(), COND, substeps=substeps)
