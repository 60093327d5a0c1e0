"""Credit, against numbers worked out by hand.

Two members, two steps: rewards (0, 1, 3) and (0, 0, 2), gains (1, 2) and (0, 2). The other group has rewards (1, 1, 1)
twice and carries no signal.
"""

import math

import pytest
import torch

from sfgrpo.credit import CREDITS, assign_credit, discounted_sums, mix_credits, step_gains

REWARDS = torch.tensor([[[0.0, 1.0, 3.0], [0.0, 0.0, 2.0]], [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]])
NAN, INF = math.nan, math.inf


def random_rewards(groups=3, members=5, steps=4, seed=0):
    return torch.randn(groups, members, steps + 1, generator=torch.Generator().manual_seed(seed))


def close(values, expected, tolerance=1e-5):
    torch.testing.assert_close(values, torch.as_tensor(expected), rtol=0, atol=tolerance)


def test_gains_by_hand():
    assert step_gains(REWARDS).tolist() == [[[1, 2], [0, 2]], [[0, 0], [0, 0]]]
    assert assign_credit(REWARDS, "gain").gains.tolist() == [[[1, 2], [0, 2]], [[0, 0], [0, 0]]]
    assert assign_credit(REWARDS, "uniform").gains.tolist() == [[[1, 2], [0, 2]], [[0, 0], [0, 0]]]


def test_gains_telescope():
    rewards = random_rewards()
    close(assign_credit(rewards).gains.sum(-1), rewards[..., -1] - rewards[..., 0])


@pytest.mark.parametrize(
    "method, options, expected",
    (
        # Finals 3 and 2: mean 5/2, std 1/2.
        ("uniform", {}, [[1, 1], [-1, -1]]),
        # Gains 1 2 0 2: mean 5/4, deviations -1/4 3/4 -5/4 3/4, variance 44/64.
        ("gain", {}, [[-0.301511, 0.904534], [-1.507557, 0.904534]]),
        # Step means 1/2 and 2: deviations 1/2 0 -1/2 0, variance 1/8.
        ("gain_centred", {}, [[math.sqrt(2), 0], [-math.sqrt(2), 0]]),
        # Step 0: mean 1/2, std 1/2; step 1: std 0.
        ("gain_per_step", {}, [[1, 0], [-1, 0]]),
        # 1 + 2/2, 2, 0 + 2/2, 2: mean 7/4, deviations 1/4 1/4 -3/4 1/4, variance 3/16.
        ("gain_gae", {"gae_lambda": 0.5}, [[0.577350, 0.577350], [-1.732051, 0.577350]]),
    ),
)
def test_advantages_by_hand(method, options, expected):
    credit = assign_credit(REWARDS, method, **options)
    close(credit.advantages[0], [[float(a) for a in row] for row in expected])
    assert credit.advantages[1].tolist() == [[0, 0], [0, 0]]
    assert credit.alive.tolist() == [True, False]
    assert credit.advantages.dtype == credit.gains.dtype == torch.float32
    assert bool(credit.valid.all()) and credit.dropped == 0 and credit.ema is None


def test_ema_by_hand():
    # Given means (1, 1) and decay 1/2 the new means are 1/2 + (1/2 2)/2 = (3/4, 3/2), so that 1/4 1/2 -3/4 1/2 remain:
    # mean 1/8, deviations 1/8 3/8 -7/8 3/8, variance 68/256.
    credit = assign_credit(REWARDS[:1], "gain_ema", ema=torch.tensor([1.0, 1.0]), ema_decay=0.5)
    close(credit.advantages[0], [[0.242536, 0.727607], [-1.697749, 0.727607]])
    close(credit.ema.float(), [0.75, 1.5])


def test_ema_starts_at_the_mean_gain_of_all_groups_and_is_carried_on():
    first = assign_credit(REWARDS, "gain_ema", ema_decay=0.9)
    # Over both groups the mean gains are 1/4 and 1.
    close(first.ema.float(), [0.25, 1.0])
    # What remains in group 0: 3/4 1 -1/4 1, mean 5/8, deviations 1/8 3/8 -7/8 3/8: the numbers above.
    close(first.advantages[0], [[0.242536, 0.727607], [-1.697749, 0.727607]])
    second = assign_credit(2 * REWARDS, "gain_ema", ema=first.ema, ema_decay=0.9)
    close(second.ema.float(), [0.9 * 0.25 + 0.1 * 0.5, 0.9 * 1.0 + 0.1 * 2.0])


def test_uniform_is_flow_grpo_on_the_finals_alone():
    rewards = random_rewards()
    full = assign_credit(rewards, "uniform")
    final = rewards[..., -1].double()
    expected = (final - final.mean(1, keepdim=True)) / final.std(1, correction=0, keepdim=True)
    close(full.advantages, expected.float().unsqueeze(-1).expand(3, 5, 4))
    alone = assign_credit(rewards[..., -1:], "uniform", steps=4)
    assert torch.equal(alone.advantages, full.advantages) and torch.equal(alone.valid, full.valid)
    assert alone.gains.shape == (3, 5, 0)


def test_published_flow_grpo_adds_1e_4_to_the_std():
    # yifan123/flow_grpo, stat_tracking.py: (rewards - mean) / (np.std(rewards) + 1e-4). For rewards 1 2 3 6: mean 3,
    # variance 14/4.
    ours = assign_credit(torch.tensor([[[1.0], [2.0], [3.0], [6.0]]]), "uniform", steps=1).advantages.flatten()
    std = math.sqrt(3.5)
    close(ours, [-2 / std, -1 / std, 0.0, 3 / std])
    published = torch.tensor([-2.0, -1.0, 0.0, 3.0], dtype=torch.float64) / (std + 1e-4)
    # The difference is a factor std / (std + 1e-4), 1 - 5.345e-5 here.
    close(published, ours.double() * (1 - 5.345e-5), 1e-6)
    assert float((published - ours).abs().max()) > 5e-5


def test_gain_is_normalised_jointly_over_members_and_steps():
    credit = assign_credit(random_rewards(), "gain")
    flat = credit.advantages.flatten(1)
    close(flat.mean(1), [0.0] * 3)
    close(flat.std(1, correction=0), [1.0] * 3)
    # Jointly: not step by step.
    assert float(credit.advantages.mean(1).abs().max()) > 0.1


def test_other_normalisations():
    rewards = random_rewards()
    centred = assign_credit(rewards, "gain_centred").advantages
    close(centred.mean(1), torch.zeros(3, 4))
    close(centred.flatten(1).std(1, correction=0), [1.0] * 3)
    assert float((centred.std(1, correction=0) - 1).abs().max()) > 0.05
    per_step = assign_credit(rewards, "gain_per_step").advantages
    close(per_step.mean(1), torch.zeros(3, 4))
    close(per_step.std(1, correction=0), torch.ones(3, 4))


def test_per_step_blows_up_small_gains_and_gain_does_not():
    rewards = torch.tensor([[[0.0, 1.0, 1.001], [0.0, 0.0, 0.0]]])
    close(assign_credit(rewards, "gain_per_step").advantages[0], [[1.0, 1.0], [-1.0, -1.0]])
    gain = assign_credit(rewards, "gain").advantages[0]
    assert abs(float(gain[0, 1] - gain[1, 1])) < 0.01 < 1 < float(gain[0, 0] - gain[1, 0])


@pytest.mark.parametrize("method", CREDITS)
def test_advantages_do_not_depend_on_the_scale_of_rewards_nor_on_other_groups(method):
    rewards = random_rewards()
    whole = assign_credit(rewards, method).advantages
    close(assign_credit(7 * rewards + 3, method).advantages, whole)
    if method != "gain_ema":
        close(assign_credit(rewards[1:2], method).advantages, whole[1:2])


@pytest.mark.parametrize("method", CREDITS)
@pytest.mark.parametrize("value", (0.0, 0.1, 1e6, -3.3))
def test_equal_rewards_get_exactly_0(method, value):
    credit = assign_credit(torch.full((2, 3, 5), value), method)
    assert torch.equal(credit.advantages, torch.zeros(2, 3, 4))
    assert credit.alive.tolist() == [False, False]


@pytest.mark.parametrize("method", CREDITS)
def test_a_group_lives_by_its_noisy_steps(method):
    rewards = torch.zeros(2, 3, 5)
    rewards[0, :, 4] = torch.arange(3.0)  # gains differ at the last step alone
    rewards[1, :, 2:] = torch.arange(3.0).view(3, 1)  # at step 1
    noisy = torch.tensor([False, True, False, False])
    # These read later steps too: the finished image, and the gains to the end.
    late = {"uniform", "gain_gae"}
    credit = assign_credit(rewards, method, noisy=noisy)
    assert credit.alive.tolist() == [method in late, True]
    assert not credit.advantages[..., ~noisy].any()
    assert assign_credit(rewards, method).alive.tolist() == [True, True]


@pytest.mark.parametrize("method", [m for m in CREDITS if m not in ("uniform", "gain_gae")])
def test_steps_without_noise_have_no_part_in_the_statistics(method):
    """The advantages of a window are those of a trajectory that is nothing but the window."""
    rewards, noisy = random_rewards(2, 6, 10), torch.zeros(10, dtype=torch.bool)
    noisy[6:8] = True
    rewards[..., :6] += torch.linspace(0, 20, 6)  # large gains outside of it
    inside = assign_credit(rewards[..., 6:9], method)
    credit = assign_credit(rewards, method, noisy=noisy)
    close(credit.advantages[..., 6:8], inside.advantages)
    if method == "gain_ema":
        close(credit.ema[6:8].float(), inside.ema.float())
        assert bool(credit.ema[~noisy].isnan().all())


def test_a_late_window_has_a_signal():
    """Gains as the paper has them, largest in the early steps: over all steps every advantage in it was negative."""
    generator = torch.Generator().manual_seed(0)
    gains = torch.tensor([0.3, 0.2, 0.12, 0.08, 0.05, 0.03, 0.02, 0.01, 0.005, 0.002])
    spread = 0.02 * torch.randn(1, 24, 10, generator=generator)
    rewards = torch.nn.functional.pad((gains + spread).cumsum(-1), (1, 0))
    noisy = torch.zeros(10, dtype=torch.bool)
    noisy[6:8] = True
    advantages = assign_credit(rewards, "gain", noisy=noisy).advantages[..., 6:8]
    assert float(advantages.mean().abs()) < 1e-5 and float(advantages.std(correction=0)) == pytest.approx(1, abs=1e-4)
    values = (gains + spread)[..., 6:8]
    close(advantages, (values - values.mean()) / values.std(correction=0), 1e-4)


def test_gae_adds_what_comes_after_the_window():
    """A noisy step's effect shows in the later steps, whether they have noise or not."""
    rewards, noisy = random_rewards(1, 5, 4), torch.tensor([False, True, True, False])
    gains = (rewards[..., 1:] - rewards[..., :-1]).double()
    sums = torch.stack([gains[..., k:] @ 0.5 ** torch.arange(4.0 - k).double() for k in (1, 2)], -1)
    expected = (sums - sums.mean()) / sums.std(correction=0)
    credit = assign_credit(rewards, "gain_gae", gae_lambda=0.5, noisy=noisy)
    close(credit.advantages[..., 1:3], expected.float())
    assert not credit.advantages[..., [0, 3]].any()


def test_a_running_mean_moves_at_the_steps_that_had_noise():
    """With a window that is drawn anew, a step keeps its mean until it has noise again."""
    rewards = random_rewards(2, 3, 3)
    gains = rewards[..., 1:] - rewards[..., :-1]
    first = assign_credit(rewards, "gain_ema", noisy=torch.tensor([True, True, False]), ema_decay=0.5)
    second = assign_credit(
        2 * rewards, "gain_ema", noisy=torch.tensor([False, True, True]), ema=first.ema, ema_decay=0.5
    )
    mean = gains.double().mean((0, 1))
    close(second.ema.float(), torch.stack([mean[0], 1.5 * mean[1], 2 * mean[2]]).float())


def test_finals_that_differ_by_rounding_only_are_no_signal():
    spread = torch.randn(1, 4, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    spread = (spread - spread.mean()) / spread.std(correction=0)
    for size in (1.0, 1e3):
        assert not assign_credit(size * (1 + 0.5e-6 * spread), "uniform", steps=2).alive.any()
        assert assign_credit(size * (1 + 2e-6 * spread), "uniform", steps=2).alive.all()
    assert not assign_credit(0.5e-6 * spread, "uniform", steps=2).alive.any()


@pytest.mark.parametrize("method", CREDITS)
def test_spreads_are_measured_against_1_where_values_are_smaller(method):
    assert not assign_credit(1e-8 * random_rewards(1, 4, 2), method).alive.any()
    assert assign_credit(1e-3 * random_rewards(1, 4, 2), method).alive.all()
    assert assign_credit(1e3 + random_rewards(1, 4, 2), method).alive.all()


def test_gae_between_gain_and_return_to_go():
    rewards = random_rewards()
    close(assign_credit(rewards, "gain_gae", gae_lambda=0.0).advantages, assign_credit(rewards, "gain").advantages)
    to_go = rewards[..., -1:] - rewards[..., :-1]
    flat = to_go.flatten(1)
    expected = (to_go - flat.mean(1).view(3, 1, 1)) / flat.std(1, correction=0).view(3, 1, 1)
    close(assign_credit(rewards, "gain_gae", gae_lambda=1.0).advantages, expected)


def test_discounted_sums_by_hand():
    gains = torch.tensor([[1.0, 2.0, 4.0], [0.0, 0.0, 8.0]])
    assert discounted_sums(gains, 0.5).tolist() == [[3.0, 4.0, 4.0], [2.0, 4.0, 8.0]]
    assert gains.tolist() == [[1.0, 2.0, 4.0], [0.0, 0.0, 8.0]]


@pytest.mark.parametrize("bad", (NAN, INF, -INF))
def test_uniform_drops_a_member_without_a_finite_final_reward(bad):
    rewards = random_rewards()
    rewards[1, 2, -1] = bad
    credit = assign_credit(rewards, "uniform")
    without = assign_credit(rewards[1:2, [0, 1, 3, 4]], "uniform")
    close(credit.advantages[1, [0, 1, 3, 4]], without.advantages[0])
    close(credit.advantages[[0, 2]], assign_credit(rewards[[0, 2]], "uniform").advantages)
    assert torch.equal(credit.advantages[1, 2], torch.zeros(4))
    assert credit.dropped == 1
    expected = torch.ones(3, 5, 4, dtype=torch.bool)
    expected[1, 2] = False
    assert torch.equal(credit.valid, expected)


@pytest.mark.parametrize("bad", (NAN, INF, -INF))
@pytest.mark.parametrize(
    "method, touched",
    (
        ("gain", [1, 2]),
        ("gain_centred", [1, 2]),
        ("gain_per_step", [1, 2]),
        ("gain_ema", [1, 2]),
        ("gain_gae", [0, 1, 2]),
    ),
)
def test_gains_drop_the_steps_that_a_bad_reward_touches(method, touched, bad):
    rewards = random_rewards()
    rewards[1, 3, 2] = bad
    credit = assign_credit(rewards, method)
    assert credit.dropped == 1 and bool(credit.advantages.isfinite().all())
    expected = torch.ones(3, 5, 4, dtype=torch.bool)
    expected[1, 3, touched] = False
    assert torch.equal(credit.valid, expected)
    assert torch.equal(credit.advantages[~credit.valid], torch.zeros(len(touched)))
    assert credit.gains[1, 3, 1].isnan() and credit.gains[1, 3, 2].isnan()
    if method != "gain_ema":
        close(credit.advantages[[0, 2]], assign_credit(rewards[[0, 2]], method).advantages)
    else:
        assert bool(credit.ema.isfinite().all())


def test_joint_statistics_leave_bad_gains_out():
    rewards = random_rewards(1, 3, 2)
    rewards[0, 0, 2] = NAN
    gains = (rewards[0, :, 1:] - rewards[0, :, :-1]).double()
    kept = gains[gains.isfinite()]
    credit = assign_credit(rewards, "gain")
    close(credit.advantages[0][credit.valid[0]], ((kept - kept.mean()) / kept.std(correction=0)).float())
    # Centred: the mean of step 1 is over two members, the scale over the five gains that are left.
    centred = gains - torch.stack([gains[:, 0].mean(), gains[1:, 1].mean()])
    centred = centred[gains.isfinite()]
    credit = assign_credit(rewards, "gain_centred")
    close(credit.advantages[0][credit.valid[0]], (centred / centred.square().mean().sqrt()).float())


@pytest.mark.parametrize("method", CREDITS)
def test_nothing_finite_is_a_dead_group(method):
    rewards = random_rewards()
    rewards[0] = NAN
    credit = assign_credit(rewards, method)
    assert torch.equal(credit.advantages[0], torch.zeros(5, 4)) and credit.alive.tolist() == [False, True, True]
    assert not credit.valid[0].any() and credit.dropped == 25


def test_unknown_method_and_groups_of_one_are_rejected():
    with pytest.raises(ValueError, match="unknown credit 'gains'; choose one of uniform, gain, "):
        assign_credit(REWARDS, "gains")
    with pytest.raises(ValueError, match="a group needs at least 2 members"):
        assign_credit(REWARDS[:, :1], "gain")


# ----- several rewards


def test_credit_of_each_reward_then_mixed_by_hand():
    """A = sum_j w_j A_j / sum_j |w_j|, with A_j by its own mean and std: the scale of a reward drops out."""
    generator = torch.Generator().manual_seed(3)
    first, second = torch.rand(2, 3, 5, generator=generator), 1000 * torch.rand(2, 3, 5, generator=generator)
    weights, noisy = (0.75, -0.5), torch.tensor([True, True, True, False])
    total = weights[0] * first + weights[1] * second
    credits = [assign_credit(r, "gain", noisy=noisy) for r in (first, second)]
    mixed = mix_credits(credits, weights, total)
    for g in range(2):
        expected = 0
        for r, w in zip((first, second), weights, strict=True):
            gains = (r[g, :, 1:] - r[g, :, :-1]).double()[:, noisy]
            expected = expected + w * (gains - gains.mean()) / gains.std(unbiased=False) / 1.25
        torch.testing.assert_close(mixed.advantages[g][:, noisy], expected.float(), rtol=0, atol=1e-5)
        assert not mixed.advantages[g][:, ~noisy].any()
    torch.testing.assert_close(mixed.gains, (total[..., 1:] - total[..., :-1]), rtol=0, atol=1e-3)
    scaled = [assign_credit(r, "gain", noisy=noisy) for r in (first, second / 1000)]
    torch.testing.assert_close(mix_credits(scaled, weights, total).advantages, mixed.advantages)
    doubled = mix_credits(credits, (1.5, -1.0), 2 * total)
    torch.testing.assert_close(doubled.advantages, mixed.advantages)
    assert mixed.alive.tolist() == [True, True] and mixed.dropped == 0 and bool(mixed.valid.all())


def test_an_image_without_one_of_the_scores_is_left_out_of_the_mix():
    first, second = torch.rand(1, 3, 2), torch.rand(1, 3, 2)
    second[0, 1, 1] = math.nan
    noisy = torch.tensor([True])
    credits = [assign_credit(r, "gain", noisy=noisy) for r in (first, second)]
    mixed = mix_credits(credits, (1.0, 1.0), first + second)
    assert mixed.valid[0, :, 0].tolist() == [True, False, True] and mixed.dropped == 1
    assert mixed.advantages[0, 1, 0] == 0 and credits[0].advantages[0, 1, 0] != 0
    assert bool(mixed.advantages.isfinite().all())


def test_weights_that_are_all_0():
    credit = assign_credit(torch.rand(1, 3, 2), "gain")
    with pytest.raises(ValueError, match="all weights are 0"):
        mix_credits([credit], [0.0], torch.rand(1, 3, 2))
