"""Rollouts with a nonlinear velocity, against a recursion written a second time."""

import pytest
import torch
from torch.distributions import Normal

from sfgrpo.kernels import Kernel
from sfgrpo.noise import initial_noise, member_generators
from sfgrpo.rollout import batches, in_batches, rollout, shared_states
from sfgrpo.schedule import even_sigmas, window_mask

SHAPE = (2, 3)
KERNELS = [
    Kernel(schedule="annealed"),
    Kernel(schedule="as_printed"),
    Kernel(schedule="constant"),
    Kernel(name="flow_grpo"),
    Kernel(name="dance"),
]


def by_name(kernel: Kernel) -> str:
    return f"{kernel.name}-{kernel.schedule}"


def velocity(x, sigma, cond):
    """Nonlinear in x and t, another function for each prompt."""
    view = (-1, *[1] * (x.ndim - 1))
    t, c = sigma.view(view), cond.view(view).float()
    return torch.tanh((1 + 0.3 * c) * x - t) + 0.5 * c * t * x.square().mean(tuple(range(1, x.ndim)), keepdim=True)


class Counting:
    """A velocity that keeps what it was called with."""

    def __init__(self):
        self.sizes, self.sigmas, self.conds = [], [], []

    def __call__(self, x, sigma, cond):
        assert len(x) == len(sigma) == len(cond) and sigma.dtype == torch.float32
        self.sizes.append(len(x))
        self.sigmas += sigma.tolist()
        self.conds += cond.tolist()
        return velocity(x, sigma, cond)


def run(prompts, group_size, *, kernel=KERNELS[0], steps=5, shape=SHAPE, velocity_fn=velocity, share=True, **options):
    x = initial_noise(0, 0, prompts, group_size, shape)
    generators = member_generators(0, 0, prompts, group_size)
    cond = torch.tensor(prompts).repeat_interleave(group_size)
    sigmas = options.pop("sigmas", even_sigmas(steps, shift=2.0))
    size = group_size if share else 1
    return rollout(velocity_fn, x, sigmas, cond, kernel=kernel, generators=generators, group_size=size, **options)


def close(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kernel", KERNELS, ids=by_name)
@pytest.mark.parametrize("shape", ((2, 3), (1, 2, 2), (2, 1, 2, 2)), ids=("tokens", "image", "video"))
def test_latents_follow_the_recursion_and_log_probs_are_those_of_the_steps(kernel, shape):
    prompts, group_size, steps = [1, 4], 2, 4
    result = run(prompts, group_size, kernel=kernel, steps=steps, shape=shape)
    cond = torch.tensor([1, 1, 4, 4])
    generators = member_generators(0, 0, prompts, group_size)
    x = initial_noise(0, 0, prompts, group_size, shape)
    for k in range(steps):
        t, s = result.sigmas[k], result.sigmas[k + 1]
        assert torch.equal(result.latents[:, k], x)
        v = velocity(x, t.expand(4), cond)
        close(result.velocities[:, k], v)
        step = kernel.transition(x, v, t, s)
        assert float(result.stds[k]) == float(step.std)
        if step.std > 0:
            eps = torch.stack([torch.randn(shape, generator=g) for g in generators])
            close(result.latents[:, k + 1], step.mean + step.std * eps)
            density = Normal(step.mean, step.std.expand_as(x)).log_prob(result.latents[:, k + 1])
            torch.testing.assert_close(result.log_probs[:, k], density.flatten(1).mean(1), rtol=1e-5, atol=1e-5)
        else:
            close(result.latents[:, k + 1], step.mean)
            assert torch.equal(result.log_probs[:, k], torch.zeros(4))
        x = result.latents[:, k + 1]
    assert result.steps == steps and torch.equal(result.final, x)
    assert result.stds[-1] == 0


def test_shapes_and_dtypes():
    def low(x, sigma, cond):
        return velocity(x, sigma, cond).bfloat16()

    result = run([1, 2], 3, steps=4, velocity_fn=low)
    assert result.latents.shape == (6, 5, *SHAPE) and result.velocities.shape == (6, 4, *SHAPE)
    assert result.log_probs.shape == (6, 4) and result.stds.shape == (4,) and result.sigmas.shape == (5,)
    for values in (result.latents, result.velocities, result.log_probs, result.stds, result.sigmas):
        assert values.dtype == torch.float32
    assert result.group_size == 3
    assert not result.latents.requires_grad


def test_bfloat16_noise_is_upcast_before_the_model_sees_it():
    def strict(x, sigma, cond):
        assert x.dtype == torch.float32
        return velocity(x, sigma, cond)

    x = initial_noise(0, 0, [1], 2, SHAPE).bfloat16()
    given = [
        rollout(strict, z, even_sigmas(3), torch.ones(2), kernel=Kernel(), generators=member_generators(0, 0, [1], 2))
        for z in (x, x.float())
    ]
    assert torch.equal(given[0].latents, given[1].latents) and given[0].latents.dtype == torch.float32


@pytest.mark.parametrize("kernel", KERNELS, ids=by_name)
@pytest.mark.parametrize("micro_batch", (1, 2, 3, 5, 100))
def test_micro_batches_change_nothing(kernel, micro_batch):
    whole, cut = run([0, 3, 7], 3, kernel=kernel), run([0, 3, 7], 3, kernel=kernel, micro_batch=micro_batch)
    close(cut.latents, whole.latents)
    close(cut.velocities, whole.velocities)
    torch.testing.assert_close(cut.log_probs, whole.log_probs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS, ids=by_name)
def test_a_group_is_the_same_whatever_other_prompts_are_there(kernel):
    alone, among = run([3], 4, kernel=kernel), run([7, 3, 0], 4, kernel=kernel, micro_batch=5)
    close(among.latents[4:8], alone.latents)
    torch.testing.assert_close(among.log_probs[4:8], alone.log_probs, rtol=0, atol=1e-5)
    assert not torch.allclose(among.latents[:4, -1], alone.final)


def test_members_of_a_group_part_and_larger_groups_extend_smaller_ones():
    small, large = run([3], 2), run([3], 5)
    close(large.latents[:2], small.latents)
    finals = {tuple(row) for row in large.final.flatten(1).tolist()}
    assert len(finals) == 5


@pytest.mark.parametrize(
    "kernel, window, shared",
    (
        (Kernel(schedule="annealed"), (0, 5), 1),
        (Kernel(schedule="as_printed"), (0, 5), 2),
        (Kernel(name="flow_grpo"), (0, 5), 1),
        (Kernel(name="flow_grpo"), (2, 4), 3),
        (Kernel(name="dance"), (3, 5), 4),
        (Kernel(eta=0.0), (0, 5), 6),
        (Kernel(name="ode"), (0, 5), 6),
    ),
)
def test_shared_prefix_is_computed_once_and_equal_to_the_unshared_computation(kernel, window, shared):
    prompts, size, steps = [2, 5], 3, 5
    options = {"kernel": kernel, "steps": steps, "stochastic": window_mask(steps, *window)}
    count, plain_count = Counting(), Counting()
    result = run(prompts, size, velocity_fn=count, **options)
    plain = run(prompts, size, velocity_fn=plain_count, share=False, **options)
    assert result.shared_states == shared and shared_states(result.stds) == shared and plain.shared_states == 0
    assert count.sizes == [2 if k < shared else 6 for k in range(steps)]
    assert plain_count.sizes == [6] * steps
    close(result.latents, plain.latents)
    close(result.velocities, plain.velocities)
    torch.testing.assert_close(result.log_probs, plain.log_probs, rtol=0, atol=1e-5)
    groups = result.latents.view(2, size, steps + 1, -1)
    equal = [bool((groups[:, :, k] == groups[:, :1, k]).all()) for k in range(steps + 1)]
    assert equal == [k < shared for k in range(steps + 1)]


def test_each_row_is_called_with_its_time_and_its_prompt():
    count = Counting()
    result = run([2, 5], 2, steps=3, velocity_fn=count, micro_batch=3)
    t = result.sigmas.tolist()
    assert count.sizes == [2, 3, 1, 3, 1]
    assert count.sigmas == [t[0]] * 2 + [t[1]] * 4 + [t[2]] * 4
    assert count.conds == [2, 5] + [2, 2, 5, 5] * 2


@pytest.mark.parametrize("kernel", KERNELS, ids=by_name)
def test_steps_outside_the_window_are_euler_steps(kernel):
    mask = window_mask(6, 2, 4)
    result = run([1, 3], 2, kernel=kernel, steps=6, stochastic=mask)
    assert (result.stds > 0).tolist() == mask.tolist()
    assert torch.equal(result.stds[2:4], kernel.std(result.sigmas[2:4], result.sigmas[3:5]))
    for k in (0, 1, 4, 5):
        euler = result.latents[:, k] + (result.sigmas[k + 1] - result.sigmas[k]) * result.velocities[:, k]
        close(result.latents[:, k + 1], euler)
        assert torch.equal(result.log_probs[:, k], torch.zeros(4))
    for k in (2, 3):
        euler = result.latents[:, k] + (result.sigmas[k + 1] - result.sigmas[k]) * result.velocities[:, k]
        assert float((result.latents[:, k + 1] - euler).abs().min()) > 1e-6
        assert bool((result.log_probs[:, k] != 0).all())


def test_a_generator_draws_once_a_stochastic_step():
    prompts = [1]
    result = run(prompts, 2, steps=4, stochastic=window_mask(4, 1, 2))
    generators = member_generators(0, 0, prompts, 2)
    first = torch.stack([torch.randn(SHAPE, generator=g) for g in generators])
    step = KERNELS[0].transition(result.latents[:, 1], result.velocities[:, 1], result.sigmas[1], result.sigmas[2])
    close(result.latents[:, 2], step.mean + step.std * first)


def test_a_grid_that_starts_below_1_and_the_call_before_each_step():
    calls = []
    result = run([1], 2, sigmas=torch.tensor([0.6, 0.3, 0.0]), on_step=calls.append)
    assert calls == [0, 1] and result.steps == 2
    assert torch.equal(result.latents[:, 0], initial_noise(0, 0, [1], 2, SHAPE))


@pytest.mark.parametrize("kernel", [Kernel(), Kernel(schedule="as_printed"), Kernel(name="ode")], ids=by_name)
@pytest.mark.parametrize("group_size", (1, 3))
def test_distinct_states_hold_every_state_once(kernel, group_size):
    result = run([2, 5], group_size, kernel=kernel, steps=4)
    states = result.distinct_states()
    values = result.latents[states.row, states.state]
    assert torch.equal(values[states.index], result.latents)
    shared = {1: 0, 3: {"annealed": 1, "as_printed": 2}[kernel.schedule] if kernel.name == "ddim" else 5}[group_size]
    rows = 2 * group_size
    assert len(values) == shared * 2 + (5 - shared) * rows
    assert len(
        {(k, *value) for k, value in zip(states.state.tolist(), values.flatten(1).tolist(), strict=True)}
    ) == len(values)
    assert states.state.tolist() == sorted(states.state.tolist())
    assert torch.equal(states.state[states.index], torch.arange(5).expand(rows, 5))
    # A shared state stands for its own group only.
    assert torch.equal(
        states.row[states.index] // group_size, (torch.arange(rows) // group_size)[:, None].expand(-1, 5)
    )
    assert states.index.shape == (rows, 5) and states.index.dtype == torch.int64


def test_final_states_are_the_finished_latents():
    result = run([2, 5], 2, steps=4)
    states = result.final_states()
    assert torch.equal(result.latents[states.row, states.state], result.final)
    assert states.index.tolist() == [[0], [1], [2], [3]]


def test_shared_states_by_hand():
    assert shared_states(torch.tensor([0.1, 0.2, 0.0])) == 1
    assert shared_states(torch.tensor([0.0, 0.0, 0.2, 0.0])) == 3
    assert shared_states(torch.zeros(3)) == 4


def test_batches_by_hand():
    assert batches(5, 2) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert batches(4, 2) == [slice(0, 2), slice(2, 4)]
    assert batches(3, None) == [slice(0, 3)]
    assert batches(3, 9) == [slice(0, 3)]
    assert batches(0, 2) == [] and batches(0, None) == []


def test_in_batches_equals_one_call():
    x, sigma, cond = torch.linspace(-1, 1, 30).view(5, 2, 3), torch.linspace(1, 0.2, 5), torch.arange(5)
    count = Counting()
    close(in_batches(count, x, sigma, cond, 2), velocity(x, sigma, cond))
    assert count.sizes == [2, 2, 1]
