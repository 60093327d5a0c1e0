"""Noise depends on (seed, iteration, prompt, member) and on nothing else."""

import hashlib

import torch

from sfgrpo.noise import draw, generator_for, initial_noise, member_generators

SHAPE = (2, 3)


def step_noise(prompts, group_size, seed=0, iteration=0, draws=3):
    """(G * N, draws, 2, 3): what the generators give in turn."""
    generators = member_generators(seed, iteration, prompts, group_size)
    return torch.stack([draw(generators, SHAPE, "cpu") for _ in range(draws)], 1)


def test_generator_is_seeded_by_a_blake2b_hash_of_the_key():
    digest = hashlib.blake2b(b"7/3/x1", digest_size=8).digest()
    expected = sum(byte << (8 * i) for i, byte in enumerate(digest)) % 2**63
    assert generator_for(7, 3, "x1").initial_seed() == expected
    assert generator_for(1, 23).initial_seed() != generator_for(12, 3).initial_seed()


def test_initial_noise_is_shared_in_a_group_and_differs_between_groups():
    x = initial_noise(0, 0, [3, 5], 3, SHAPE)
    assert x.shape == (6, *SHAPE) and x.dtype == torch.float32
    assert torch.equal(x[0], x[1]) and torch.equal(x[0], x[2])
    assert torch.equal(x[3], x[4]) and torch.equal(x[3], x[5])
    assert not torch.equal(x[0], x[3])


def test_seed_and_iteration_change_all_noise():
    x, steps = initial_noise(0, 0, [3], 1, SHAPE), step_noise([3], 1)
    for seed, iteration in ((1, 0), (0, 1)):
        assert not torch.equal(x, initial_noise(seed, iteration, [3], 1, SHAPE))
        assert not torch.equal(steps, step_noise([3], 1, seed, iteration))
    assert torch.equal(x, initial_noise(0, 0, [3], 1, SHAPE)) and torch.equal(steps, step_noise([3], 1))


def test_noise_does_not_depend_on_the_order_of_prompts_nor_on_the_others():
    for make in (lambda p: initial_noise(4, 2, p, 2, SHAPE), lambda p: step_noise(p, 2, 4, 2)):
        a, b, alone = make([3, 1]), make([1, 8, 3]), make([3])
        assert torch.equal(a[:2], b[4:]) and torch.equal(a[2:], b[:2]) and torch.equal(alone, a[:2])


def test_larger_groups_extend_smaller_ones():
    small, large = step_noise([3, 1], 4), step_noise([3, 1], 8)
    assert torch.equal(small[:4], large[:4]) and torch.equal(small[4:], large[8:12])
    assert torch.equal(initial_noise(0, 0, [3, 1], 4, SHAPE)[4], initial_noise(0, 0, [3, 1], 8, SHAPE)[8])


def test_a_prompt_that_comes_twice_has_two_noises_the_first_its_own():
    x, steps = initial_noise(0, 0, [3, 3], 2, SHAPE), step_noise([3, 3], 2)
    assert not torch.equal(x[0], x[2]) and not torch.equal(steps[0], steps[2])
    assert torch.equal(x[:2], initial_noise(0, 0, [3], 2, SHAPE)) and torch.equal(steps[:2], step_noise([3], 2))


def test_all_draws_differ():
    draws = torch.cat([step_noise([3, 1, 3], 3).flatten(0, 1), initial_noise(0, 0, [3, 1, 3], 1, SHAPE)])
    assert len({tuple(row) for row in draws.flatten(1).tolist()}) == 3 * 3 * 3 + 3


def test_draw_is_standard_normal():
    values = draw(member_generators(0, 0, range(50), 4), (100,), "cpu")
    assert values.shape == (200, 100) and values.dtype == torch.float32
    # 20000 samples: standard errors 0.0071 and 0.01.
    assert abs(float(values.mean())) < 0.03 and abs(float(values.var()) - 1) < 0.04
    # Between trajectories: 199 x 100 products of independent neighbours.
    assert abs(float((values[1:] * values[:-1]).mean())) < 0.03
