"""Clipped surrogate, step weights and trained entries, by hand."""

import math

import pytest
import torch

from sfgrpo.credit import Credit, assign_credit
from sfgrpo.objective import MAX_LOG_RATIO, step_weights, surrogate_loss, trained_entries


def loss_and_gradient(ratio: float, advantage: float, **options):
    """Loss, its gradient in log_prob, the ratio and the clip flag of one entry."""
    log_prob = torch.tensor([math.log(ratio) - 1.0]).requires_grad_()
    out = surrogate_loss(log_prob, torch.tensor([-1.0]), torch.tensor([advantage]), **({"clip_range": 0.2} | options))
    out.loss.sum().backward()
    return float(out.loss.detach()), float(log_prob.grad), float(out.ratio), bool(out.clipped)


@pytest.mark.parametrize(
    "ratio, advantage, loss, gradient, clipped",
    (
        # Inside the range: -rho A, and d rho / d log p = rho.
        (1.0, 2.0, -2.0, -2.0, False),
        (1.0, -2.0, 2.0, 2.0, False),
        (1.1, 2.0, -2.2, -2.2, False),
        (0.9, -2.0, 1.8, 1.8, False),
        # Good and already likelier: clipped. Bad and already less likely: clipped.
        (1.5, 2.0, -2.4, 0.0, True),
        (0.5, -2.0, 1.6, 0.0, True),
        # The other two quadrants are never clipped.
        (0.5, 2.0, -1.0, -1.0, False),
        (1.5, -2.0, 3.0, 3.0, False),
        (1.5, 0.0, 0.0, 0.0, False),
    ),
)
def test_clipping_in_all_quadrants(ratio, advantage, loss, gradient, clipped):
    found = loss_and_gradient(ratio, advantage)
    assert found[:3] == pytest.approx((loss, gradient, ratio), abs=1e-6)
    assert found[3] is clipped


def test_published_loss_is_the_same():
    # yifan123/flow_grpo, train_sd3.py: mean(max(-A rho, -A clip(rho, 1 - eps, 1 + eps))).
    generator = torch.Generator().manual_seed(0)
    new, old, advantage = (torch.randn(200, generator=generator) for _ in range(3))
    for eps in (1e-4, 0.2, 0.9):
        ratio = torch.exp(new - old)
        published = torch.maximum(-advantage * ratio, -advantage * torch.clamp(ratio, 1 - eps, 1 + eps))
        torch.testing.assert_close(surrogate_loss(new, old, advantage, clip_range=eps).loss, published)


def test_weight_scales_the_surrogate_and_not_the_kl():
    kl = torch.tensor([0.5])
    assert loss_and_gradient(1.1, 2.0, weight=3.0)[:2] == pytest.approx((-6.6, -6.6))
    assert loss_and_gradient(1.1, 2.0, weight=torch.tensor([3.0]), kl=kl, kl_weight=0.4)[0] == pytest.approx(-6.4)
    assert loss_and_gradient(1.1, 2.0, kl=kl, kl_weight=0.0)[0] == pytest.approx(-2.2)


def test_kl_reaches_the_gradient_of_a_clipped_entry():
    log_prob, kl = torch.tensor([0.0]).requires_grad_(), torch.tensor([0.3]).requires_grad_()
    out = surrogate_loss(log_prob, torch.tensor([-1.0]), torch.tensor([1.0]), clip_range=0.1, kl=kl, kl_weight=0.25)
    out.loss.sum().backward()
    assert float(kl.grad) == 0.25 and float(log_prob.grad) == 0 and bool(out.clipped)
    assert float(out.loss.detach()) == pytest.approx(-1.1 + 0.075)
    assert not out.ratio.requires_grad


@pytest.mark.parametrize("log_ratio", (1000.0, -1000.0))
@pytest.mark.parametrize("advantage", (1.0, -1.0))
def test_huge_log_ratios_stay_finite(log_ratio, advantage):
    log_prob = torch.tensor([log_ratio]).requires_grad_()
    out = surrogate_loss(log_prob, torch.zeros(1), torch.tensor([advantage]), clip_range=0.1)
    out.loss.sum().backward()
    assert bool(out.loss.isfinite()) and bool(log_prob.grad.isfinite())
    assert float(out.ratio) == pytest.approx(math.exp(math.copysign(MAX_LOG_RATIO, log_ratio)), rel=1e-4)


def test_step_weights_by_hand():
    stds = torch.tensor([0.0, 0.2, 0.4, 0.6, 0.0])
    assert step_weights(stds).tolist() == [0.0, 1.0, 1.0, 1.0, 0.0]
    assert step_weights(stds, "std").tolist() == pytest.approx([0.0, 0.5, 1.0, 1.5, 0.0])
    for method in ("none", "std"):
        assert step_weights(torch.zeros(3), method).tolist() == [0.0, 0.0, 0.0]
        weights = step_weights(torch.tensor([0.7, 0.1, 0.0, 0.03]), method)
        assert float(weights[[0, 1, 3]].mean()) == pytest.approx(1.0) and weights[2] == 0


def test_step_weight_std_undoes_the_growth_of_the_gradient():
    # d log p / d mean = noise / std: times std it is the same at each step.
    stds = torch.tensor([0.5, 0.05])
    assert (step_weights(stds, "std") / stds).tolist() == pytest.approx([1 / 0.275] * 2)


def test_unknown_step_weight_is_rejected():
    with pytest.raises(ValueError, match="unknown step weight 'snr'; choose one of none, std"):
        step_weights(torch.ones(2), "snr")


def test_trained_entries_by_hand():
    credit = Credit(
        advantages=torch.tensor([[[1.0, 0.0, 2.0], [-1.0, 0.0, 1.0]], [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]]),
        gains=torch.zeros(2, 2, 3),
        valid=torch.tensor([[[True, True, True], [False, True, True]], [[True, True, True], [True, True, True]]]),
        alive=torch.tensor([True, False]),
        dropped=0,
    )
    stds = torch.tensor([0.3, 0.2, 0.0])
    dead = [[False] * 3] * 2
    # Step 2 is deterministic, member 1 lacks a reward at step 0, group 1 is dead; a 0 advantage matters without KL.
    assert trained_entries(credit, stds, 0.0).tolist() == [[[True, False, False], [False, False, False]], dead]
    assert trained_entries(credit, stds, 0.1).tolist() == [[[True, True, False], [False, True, False]], dead]


def test_trained_entries_of_real_credit():
    rewards = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0))
    rewards[0, 1, 3] = math.nan
    rewards[1] = 0.5
    entries = trained_entries(assign_credit(rewards, "gain"), torch.tensor([0.2, 0.1, 0.1]), 0.0)
    expected = torch.zeros(2, 4, 3, dtype=torch.bool)
    expected[0] = True
    expected[0, 1, 2] = False
    assert torch.equal(entries, expected)
