"""The update by itself, with a policy of one number: v = theta x."""

import math

import pytest
import torch

from sfgrpo.config import GRPOConfig
from sfgrpo.credit import assign_credit
from sfgrpo.kernels import Kernel
from sfgrpo.noise import initial_noise, member_generators
from sfgrpo.rollout import rollout
from sfgrpo.update import learning_rate, policy_loss, update

SIGMAS = torch.tensor([1.0, 0.75, 0.5, 0.0])
GROUPS, SIZE, SHAPE = 3, 2, (1, 2, 2)
COND = torch.arange(GROUPS).repeat_interleave(SIZE)
THETA, REFERENCE = 0.4, 0.1


class OneNumber:
    """v = theta x for prompt 0, 2 theta x for prompt 1 and so on."""

    def __init__(self, theta=THETA):
        self.theta = torch.tensor(theta).requires_grad_()
        self.conds = []

    def velocity(self, x, sigma, cond):
        self.conds.append(cond.tolist())
        return self.theta * (1 + cond.view(-1, 1, 1, 1)) * x

    def reference_velocity(self, x, sigma, cond):
        return REFERENCE * (1 + cond.view(-1, 1, 1, 1)) * x

    def trainable_parameters(self):
        return [self.theta]


def sampled(kernel=None):
    return rollout(
        OneNumber().velocity,
        initial_noise(0, 0, range(GROUPS), SIZE, SHAPE),
        SIGMAS,
        COND,
        kernel=kernel or Kernel(),
        generators=member_generators(0, 0, range(GROUPS), SIZE),
        group_size=SIZE,
    )


def credit(dead=()):
    rewards = torch.randn(GROUPS, SIZE, 4, generator=torch.Generator().manual_seed(0))
    rewards[list(dead)] = 0.5
    return assign_credit(rewards, "gain")


def run(policy, trajectory, given, order=(0, 1, 2), lr=1.0, **options):
    passed = {name: options.pop(name) for name in ("on_batch", "after_update") if name in options}
    return update(
        policy,
        torch.optim.SGD(policy.trainable_parameters(), lr=lr),
        trajectory,
        COND,
        given,
        GRPOConfig(**({"group_size": SIZE, "max_grad_norm": math.inf} | options)),
        order=torch.tensor(order),
        scaler=torch.amp.GradScaler(enabled=False),
        **passed,
    )


def log_density(trajectory, row, k, theta):
    """Mean log-density of a step of ddim with the annealed schedule, in plain Python."""
    t, s = SIGMAS[k].item(), SIGMAS[k + 1].item()
    std = 0.7 * s * math.sqrt(t)
    total = 0.0
    pairs = zip(
        trajectory.latents[row, k].flatten().tolist(), trajectory.latents[row, k + 1].flatten().tolist(), strict=True
    )
    for x, x_next in pairs:
        v = theta * (1 + int(COND[row])) * x
        mean = (1 - s) * (x - t * v) + math.sqrt(s * s - std * std) * (x + (1 - t) * v)
        total += -0.5 * ((x_next - mean) / std) ** 2 - math.log(std) - 0.5 * math.log(2 * math.pi)
    return total / 4


def test_policy_loss_by_hand():
    trajectory = sampled()
    row, step = torch.tensor([0, 3, 5, 2]), torch.tensor([0, 1, 1, 0])
    advantage, weight = torch.tensor([1.0, -2.0, 0.5, -1.0]), torch.tensor([1.0, 0.5, 2.0, 1.0])
    config = GRPOConfig(kl_weight=0.25, clip_range=0.01, group_size=SIZE)
    moved = 0.6
    policy = OneNumber(moved)
    losses = policy_loss(policy, trajectory, COND, row, step, advantage, weight, config)
    loss, kl = losses.surrogate, losses.kl
    assert policy.conds == [[0, 1, 2, 1]]
    for i in range(4):
        r, k, a = int(row[i]), int(step[i]), float(advantage[i])
        ratio = math.exp(log_density(trajectory, r, k, moved) - log_density(trajectory, r, k, THETA))
        surrogate = min(ratio * a, min(max(ratio, 0.99), 1.01) * a)
        t, s = SIGMAS[k].item(), SIGMAS[k + 1].item()
        std = 0.7 * s * math.sqrt(t)
        # The mean moves by this for each unit of v.
        slope = -(1 - s) * t + math.sqrt(s * s - std * std) * (1 - t)
        x = trajectory.latents[r, k]
        shift = slope * (moved - REFERENCE) * (1 + int(COND[r])) * x
        divergence = float((shift.square() / (2 * std * std)).mean()) * (t - s)
        assert float(loss.ratio[i]) == pytest.approx(ratio, rel=1e-4)
        assert float(kl[i].detach()) == pytest.approx(divergence, rel=1e-4)
        assert float(loss.loss[i].detach()) == pytest.approx(
            -float(weight[i]) * surrogate + 0.25 * divergence, rel=1e-4
        )
    assert policy_loss(policy, trajectory, COND, row, step, advantage, weight, GRPOConfig()).kl is None


def test_an_unchanged_policy_has_ratio_1_whatever_the_rollout_noted():
    trajectory = sampled()
    trajectory.log_probs = trajectory.log_probs + 0.01
    row, step, one = torch.tensor([0, 3]), torch.tensor([0, 1]), torch.ones(2)
    for unchanged in (True, False):
        losses = policy_loss(
            OneNumber(), trajectory, COND, row, step, one, one, GRPOConfig(clip_range=0.5), unchanged=unchanged
        )
        expected = 1.0 if unchanged else math.exp(-0.01)
        assert losses.surrogate.ratio.tolist() == pytest.approx([expected] * 2, rel=1e-6)
        assert losses.drift.tolist() == pytest.approx([0.01] * 2, rel=1e-3)


@pytest.mark.parametrize("update_batch", (1000, 1, 5))
def test_one_update_is_the_mean_gradient_of_all_trained_steps(update_batch):
    trajectory, given, policy = sampled(), credit(), OneNumber()
    metrics = run(policy, trajectory, given, update_batch=update_batch)
    h, slope = 1e-4, 0.0
    for row in range(GROUPS * SIZE):
        for k in (0, 1):
            difference = log_density(trajectory, row, k, THETA + h) - log_density(trajectory, row, k, THETA - h)
            slope += float(given.advantages.flatten(0, 1)[row, k]) * difference / (2 * h)
    assert float(policy.theta.detach()) == pytest.approx(THETA + slope / (GROUPS * SIZE * 2), rel=1e-4)
    assert metrics["updates"] == 1 and metrics["ratio/rounding"] < 1e-6


def test_micro_batches_are_sorted_by_step_and_announced():
    policy, trajectory, seen = OneNumber(), sampled(), []
    run(policy, trajectory, credit(), update_batch=4, on_batch=lambda *call: seen.append(call))
    assert seen == [(0, 12), (4, 12), (8, 12)]
    # Step 0 of all trajectories, then step 1.
    assert policy.conds == [[0, 0, 1, 1], [2, 2, 0, 0], [1, 1, 2, 2]]


def test_updates_take_the_groups_in_the_given_order():
    policy, thetas = OneNumber(), []
    metrics = run(
        policy,
        sampled(),
        credit(),
        (2, 0, 1),
        updates=2,
        after_update=lambda: thetas.append(float(policy.theta.detach())),
    )
    assert [set(c) for c in policy.conds] == [{2, 0}, {1}]
    assert metrics["updates"] == 2 and len(set(thetas)) == 2 and thetas[-1] == float(policy.theta.detach())


def test_a_dead_groups_update_is_left_out():
    policy, calls = OneNumber(), []
    metrics = run(policy, sampled(), credit(dead=[1]), (0, 1, 2), updates=3, after_update=lambda: calls.append(1))
    assert [set(c) for c in policy.conds] == [{0}, {2}] and len(calls) == metrics["updates"] == 2
    policy = OneNumber()
    metrics = run(policy, sampled(), credit(dead=[0, 1, 2]))
    assert metrics["updates"] == 0 and policy.conds == [] and float(policy.theta.detach()) == pytest.approx(THETA)


def test_the_policy_counts_as_unchanged_until_an_update_was_made():
    # The rollout notes 0.01 too much. The first of three updates is skipped, so that the second still has ratio 1; the
    # second (of learning rate 0) counts as a change.
    policy, trajectory, calls = OneNumber(), sampled(), []
    trajectory.log_probs = trajectory.log_probs + 0.01
    policy.theta.register_hook(lambda g: g * (math.nan if not calls.append(1) and len(calls) == 1 else 1.0))
    metrics = run(policy, trajectory, credit(), updates=3, lr=0.0)
    assert (metrics["updates_skipped"], metrics["updates"]) == (1, 2)
    assert metrics["ratio/mean"] == pytest.approx((8 + 4 * math.exp(-0.01)) / 12, rel=1e-6)
    assert metrics["ratio/rounding"] == pytest.approx(0.01, rel=1e-3)


def test_later_updates_are_clipped_against_the_rollout():
    policy, trajectory, given, thetas = OneNumber(), sampled(), credit(), [THETA]
    metrics = run(
        policy,
        trajectory,
        given,
        updates=3,
        clip_range=1e-3,
        after_update=lambda: thetas.append(float(policy.theta.detach())),
    )
    ratios, clipped = [], []
    for row in range(GROUPS * SIZE):
        for k in (0, 1):
            new = log_density(trajectory, row, k, thetas[int(COND[row])])
            ratios.append(math.exp(new - log_density(trajectory, row, k, THETA)))
            sign = 1 if float(given.advantages.flatten(0, 1)[row, k]) > 0 else -1
            clipped.append(sign * (ratios[-1] - 1) > 1e-3)
    assert 0 < metrics["clipped"] == pytest.approx(sum(clipped) / 12)
    assert metrics["ratio/mean"] == pytest.approx(sum(ratios) / 12, rel=1e-4)
    assert metrics["ratio/max"] == pytest.approx(max(ratios), rel=1e-4) and metrics["ratio/rounding"] < 1e-6


@pytest.mark.parametrize("warmup", [0, 3])
def test_learning_rate_is_that_of_torch(warmup):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    schedules = [torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, total_iters=9 - warmup)]
    if warmup:
        schedules.insert(0, torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warmup, 1.0, total_iters=warmup - 1))
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, schedules, milestones=[warmup] * bool(warmup))
    for iteration in range(10):
        expected = optimizer.param_groups[0]["lr"]
        assert learning_rate(0.5, iteration, 10, warmup=warmup, final=0.2) == pytest.approx(expected)
        optimizer.step()
        schedule.step()
    assert learning_rate(0.5, 0, 1, final=0.2) == 0.5
