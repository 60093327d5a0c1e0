"""The whole iteration with a real, tiny policy, against estimators written a second time in float64."""

import math
import threading

import pytest
import torch

from sfgrpo.config import GRPOConfig
from sfgrpo.credit import CREDITS
from sfgrpo.kernels import Kernel
from sfgrpo.loop import PHASES, GradientError, StepwiseGRPO
from sfgrpo.noise import generator_for
from sfgrpo.prompts import Prompt
from sfgrpo.rewards import FailurePolicy, Guard, Mix, RewardError, Scores, Term, combine
from sfgrpo.schedule import even_sigmas

SHAPE = (3, 2, 2)
PROMPTS = [Prompt("warm", metadata={"sign": 1.0}), Prompt("cold", metadata={"sign": -1.0}), Prompt("warm too")]
PROMPTS.append(Prompt("dead", metadata={"dead": True}))
SIGMAS = even_sigmas(4, shift=2.0)
SIZE = 4


class TinyPolicy:
    """A two-layer network with a low-rank adapter on its second layer; it computes in float64."""

    def __init__(self, start: float = 0.0):
        generator = torch.Generator().manual_seed(0)

        def randn(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        n = math.prod(SHAPE)
        self.first, self.second, self.embedding = 0.4 * randn(n + 2, 8), 0.5 * randn(8, n), randn(len(PROMPTS))
        self.a = (0.5 * randn(8, 2)).requires_grad_()
        self.b = (start * randn(2, n)).requires_grad_()
        self.rows = {"velocity": [], "reference": [], "decode": []}

    def _velocity(self, x, sigma, cond, second):
        inputs = torch.cat([x.double().flatten(1), sigma.double()[:, None], self.embedding[cond][:, None]], 1)
        return (torch.tanh(inputs @ self.first) @ second).view_as(x).float()

    def velocity(self, x, sigma, cond):
        self.rows["velocity"].append(len(x))
        return self._velocity(x, sigma, cond, self.second + self.a @ self.b)

    def reference_velocity(self, x, sigma, cond):
        self.rows["reference"].append(len(x))
        return self._velocity(x, sigma, cond, self.second)

    def decode(self, latents):
        self.rows["decode"].append(len(latents))
        return torch.sigmoid(latents)

    def trainable_parameters(self):
        return [self.a, self.b]

    def flat(self):
        return torch.cat([p.detach().flatten() for p in self.trainable_parameters()])


def score(images, prompts, metadata):
    """Red for a warm prompt and blue for a cold one; the same for every picture of a dead prompt."""
    sign = torch.tensor([m.get("sign", 1.0) for m in metadata])
    dead = torch.tensor([bool(m.get("dead")) for m in metadata])
    assert [p == "dead" for p in prompts] == dead.tolist()
    red = images[:, 0].flatten(1).mean(1) - images[:, 2].flatten(1).mean(1).square()
    contrast = images.flatten(1).std(1)
    total = torch.where(dead, torch.tensor(0.25), sign * red + 0.3 * contrast)
    return Scores(total, {"red": red, "contrast": contrast})


def trained(index=(0, 1), *, policy=None, lr=1.0, iterations=1, score_fn=score, optimizer=None, seed=0, **settings):
    """Policy, last iteration and loop, after iterations with SGD and without a bound on the gradient's norm."""
    policy = policy or TinyPolicy()
    parameters = policy.trainable_parameters()
    names = ("on_progress", "after_update", "scaler", "processes")
    options = {name: settings.pop(name) for name in names if name in settings}
    config = GRPOConfig(**({"group_size": SIZE, "max_grad_norm": math.inf} | settings))
    loop = StepwiseGRPO(
        policy,
        score_fn,
        optimizer(parameters) if optimizer else torch.optim.SGD(parameters, lr=lr),
        sigmas=SIGMAS,
        latent_shape=SHAPE,
        config=config,
        seed=seed,
        **options,
    )
    for i in range(iterations):
        result = loop.iterate(i, PROMPTS, list(index))
    return policy, result, loop


def gradient(index=(0, 1), start=0.3, **settings):
    """Minus the change of the parameters at learning rate 1: the gradient of the loss."""
    policy = TinyPolicy(start)
    before = policy.flat()
    _, result, _ = trained(index, policy=policy, **settings)
    return before - policy.flat(), result


# ----- a second implementation


def hand_step(kernel, x, v, t, s):
    """Mean and std of the step, float64, for ddim with the annealed schedule and flow_grpo."""
    if kernel.name == "ddim":
        std = kernel.eta * s * math.sqrt(t)
        return (1 - s) * (x - t * v) + math.sqrt(s**2 - std**2) * (x + (1 - t) * v), std
    a = kernel.eta * math.sqrt(t / (1 - (s if t == 1 else t)))
    mean = x * (1 + a**2 / (2 * t) * (s - t)) + v * (1 + a**2 * (1 - t) / (2 * t)) * (s - t)
    return mean, a * math.sqrt(t - s)


def hand_rewards(policy, latents, cond, times):
    """(B, T + 1): rewards of x - t v at every state."""
    columns = []
    for k, t in enumerate(times):
        x = latents[:, k]
        if t > 0:
            x = x - t * policy._velocity(x, torch.full((len(x),), t), cond, policy.second + policy.a @ policy.b)
        metadata = [PROMPTS[c].metadata for c in cond]
        columns.append(score(torch.sigmoid(x), [PROMPTS[c].text for c in cond], metadata).total)
    return torch.stack(columns, 1).detach().double()


def hand_advantages(rewards, credit, groups):
    """(B, T) from rewards (B, T + 1), for `uniform` and `gain`; the last step has no noise and no part in them."""
    out = []
    for group in rewards.view(groups, SIZE, -1):
        values = group[:, 1:] - group[:, :-1] if credit == "gain" else group[:, -1:].expand(SIZE, group.shape[1] - 1)
        values = values[:, :-1]
        std = values.std(correction=0)
        advantages = (values - values.mean()) / std if std > 1e-6 else torch.zeros_like(values)
        out.append(torch.nn.functional.pad(advantages, (0, 1)))
    return torch.cat(out)


def hand_gradient(policy, result, cond, *, kernel, credit, weight="none", kl_weight=0.0):
    """Policy gradient: minus the gradient of the mean over trajectories and noisy steps of A log N(x_next; mu, std)."""
    latents, times = result.trajectory.latents.double(), SIGMAS.tolist()
    noisy = range(len(times) - 2)
    advantages = hand_advantages(
        hand_rewards(policy, result.trajectory.latents, cond, times), credit, len(cond) // SIZE
    )
    stds = [hand_step(kernel, 0.0, 0.0, times[k], times[k + 1])[1] for k in noisy]
    objective = 0.0
    for k in noisy:
        x, t = latents[:, k], torch.full((len(cond),), times[k])
        v = policy._velocity(x.float(), t, cond, policy.second + policy.a @ policy.b).double()
        mean, std = hand_step(kernel, x, v, times[k], times[k + 1])
        log_prob = torch.distributions.Normal(mean, std).log_prob(latents[:, k + 1]).flatten(1).mean(1)
        w = std / (sum(stds) / len(stds)) if weight == "std" else 1.0
        objective = objective + (w * advantages[:, k] * log_prob).sum()
        if kl_weight:
            v_ref = policy._velocity(x.float(), t, cond, policy.second).double()
            kl = (mean - hand_step(kernel, x, v_ref, times[k], times[k + 1])[0]).square() / (2 * std**2)
            kl = kl * (times[k] - times[k + 1])
            alive = (advantages.view(-1, SIZE, advantages.shape[1]) != 0).any(2).any(1).repeat_interleave(SIZE)
            objective = objective - kl_weight * (kl.flatten(1).mean(1) * alive).sum()
    loss = -objective / (len(cond) * len(noisy))
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, policy.trainable_parameters())])


def assert_same_direction_and_length(found, expected, tolerance=1e-5):
    assert float(expected.norm()) > 1e-3
    assert float((found - expected).norm() / expected.norm()) < tolerance


# ----- the update


@pytest.mark.parametrize("kernel", (Kernel(), Kernel(name="flow_grpo")), ids=lambda k: k.name)
@pytest.mark.parametrize("credit", ("uniform", "gain"))
@pytest.mark.parametrize("weight", ("none", "std"))
def test_first_update_is_the_plain_policy_gradient(kernel, credit, weight):
    found, result = gradient(kernel=kernel, credit=credit, step_weight=weight)
    cond = torch.tensor([0, 1]).repeat_interleave(SIZE)
    expected = hand_gradient(TinyPolicy(0.3), result, cond, kernel=kernel, credit=credit, weight=weight)
    assert_same_direction_and_length(found, expected)
    assert result.metrics["grad_norm"] == pytest.approx(float(expected.norm()), rel=1e-4)


@pytest.mark.parametrize("credit", ("uniform", "gain"))
def test_first_update_with_kl_adds_its_gradient(credit):
    cond = torch.tensor([0, 3, 1]).repeat_interleave(SIZE)
    found, result = gradient((0, 3, 1), credit=credit, kl_weight=3.0)
    expected = hand_gradient(TinyPolicy(0.3), result, cond, kernel=Kernel(), credit=credit, kl_weight=3.0)
    assert_same_direction_and_length(found, expected)
    without = hand_gradient(TinyPolicy(0.3), result, cond, kernel=Kernel(), credit=credit)
    assert float((without - expected).norm() / expected.norm()) > 1e-2


def test_rewards_credit_and_images_of_an_iteration_are_those_of_the_second_implementation():
    policy, result, _ = trained((0, 1), credit="gain", lr=0.0)
    cond = torch.tensor([0, 1]).repeat_interleave(SIZE)
    rewards = hand_rewards(policy, result.trajectory.latents, cond, SIGMAS.tolist())
    torch.testing.assert_close(result.rewards.flatten(0, 1).double(), rewards, rtol=0, atol=1e-6)
    advantages = hand_advantages(rewards, "gain", 2)
    torch.testing.assert_close(result.credit.advantages.flatten(0, 1).double(), advantages, rtol=0, atol=1e-4)
    torch.testing.assert_close(result.images, torch.sigmoid(result.trajectory.final), rtol=0, atol=1e-6)
    # All of a group start at one point: one reward.
    assert torch.equal(result.rewards[..., 0], result.rewards[:, :1, 0].expand(2, SIZE))


def test_uniform_with_the_flow_grpo_kernel_is_the_published_update():
    """yifan123/flow_grpo, sd3_sde_with_logprob.py and train_sd3.py, transcribed; two updates on one rollout."""
    kernel, eps = Kernel(name="flow_grpo"), 1e-4
    found, result = gradient((0,), kernel=kernel, credit="uniform", clip_range=eps)
    policy = TinyPolicy(0.3)
    latents = result.trajectory.latents
    rewards = score(torch.sigmoid(latents[:, -1]), ["warm"] * SIZE, [{"sign": 1.0}] * SIZE).total
    advantages = ((rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-4)).clamp(-5, 5)
    cond, losses = torch.zeros(SIZE, dtype=torch.int64), []
    for j in range(len(SIGMAS) - 2):
        sigma, sigma_prev, sigma_max = SIGMAS[j], SIGMAS[j + 1], SIGMAS[1]
        dt = sigma_prev - sigma
        std_dev_t = torch.sqrt(sigma / (1 - torch.where(sigma == 1, sigma_max, sigma))) * 0.7
        model_output = policy.velocity(latents[:, j], sigma.expand(SIZE), cond)
        prev_sample_mean = (
            latents[:, j] * (1 + std_dev_t**2 / (2 * sigma) * dt)
            + model_output * (1 + std_dev_t**2 * (1 - sigma) / (2 * sigma)) * dt
        )
        log_prob = (
            -((latents[:, j + 1] - prev_sample_mean) ** 2) / (2 * ((std_dev_t * torch.sqrt(-1 * dt)) ** 2))
            - torch.log(std_dev_t * torch.sqrt(-1 * dt))
            - torch.log(torch.sqrt(2 * torch.as_tensor(math.pi)))
        ).mean(dim=(1, 2, 3))
        torch.testing.assert_close(result.trajectory.log_probs[:, j], log_prob.detach(), rtol=1e-5, atol=1e-5)
        ratio = torch.exp(log_prob - log_prob.detach())
        losses.append(torch.maximum(-advantages * ratio, -advantages * torch.clamp(ratio, 1 - eps, 1 + eps)).mean())
    expected = torch.autograd.grad(sum(losses) / len(losses), policy.trainable_parameters())
    expected = torch.cat([g.flatten() for g in expected])
    # The published std has 1e-4 added to it.
    expected *= float(1 + 1e-4 / rewards.std(correction=0))
    assert_same_direction_and_length(found, expected, 2e-5)


@pytest.mark.parametrize("rollout_batch", (1000, 1, 5))
@pytest.mark.parametrize("update_batch", (1000, 1, 7))
@pytest.mark.parametrize("credit, kernel", (("gain", Kernel()), ("uniform", Kernel(name="flow_grpo"))))
def test_the_ratio_is_1_before_the_first_update(credit, kernel, rollout_batch, update_batch):
    policy = TinyPolicy(0.3)
    _, result, _ = trained(
        policy=policy,
        credit=credit,
        kernel=kernel,
        rollout_batch=rollout_batch,
        update_batch=update_batch,
        kl_weight=0.1,
    )
    metrics = result.metrics
    assert metrics["ratio/rounding"] <= 1e-6
    assert metrics["ratio/mean"] == pytest.approx(1, abs=1e-6) and metrics["ratio/max"] == pytest.approx(1, abs=1e-6)
    assert metrics["clipped"] == 0 and metrics["updates"] == 1


@pytest.mark.parametrize(
    "batches",
    (
        {"rollout_batch": 1},
        {"rollout_batch": 3, "estimate_batch": 1},
        {"estimate_batch": 5, "decode_batch": 1},
        {"decode_batch": 1000, "update_batch": 1},
        {"rollout_batch": 5, "estimate_batch": 7, "decode_batch": 3, "update_batch": 4},
    ),
)
@pytest.mark.parametrize("credit", ("uniform", "gain_centred"))
def test_parameters_do_not_depend_on_micro_batches(credit, batches):
    settings = {"credit": credit, "substeps": 3, "kl_weight": 0.1, "lr": 0.1, "iterations": 2}
    at_once = dict.fromkeys(("rollout_batch", "estimate_batch", "decode_batch", "update_batch"), 1000)
    whole, one, _ = trained(policy=TinyPolicy(0.3), **settings, **at_once)
    cut, other, _ = trained(policy=TinyPolicy(0.3), **settings, **batches)
    torch.testing.assert_close(cut.flat(), whole.flat(), rtol=0, atol=1e-6)
    assert float((whole.flat() - TinyPolicy(0.3).flat()).norm()) > 1e-3
    timed = {name for name in one.metrics if name.startswith("seconds/")}
    for name in set(one.metrics) - timed:
        assert other.metrics[name] == pytest.approx(one.metrics[name], abs=1e-5), name
    for name, rows in cut.rows.items():
        limit = {"decode": batches.get("decode_batch", 64), "reference": batches.get("update_batch")}.get(name)
        assert limit is None or max(rows) <= limit


def test_groups_do_not_depend_on_the_other_prompts_nor_on_their_order():
    _, alone, _ = trained((1,), lr=0.0)
    _, among, _ = trained((2, 0, 1), lr=0.0)
    torch.testing.assert_close(among.rewards[2], alone.rewards[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(among.credit.advantages[2], alone.credit.advantages[0], rtol=0, atol=1e-4)


def test_gradient_is_a_mean_over_groups():
    both, _ = gradient((0, 1))
    first, second = gradient((0,))[0], gradient((1,))[0]
    assert_same_direction_and_length(both, (first + second) / 2)


@pytest.mark.parametrize("kl_weight", (0.0, 5.0))
@pytest.mark.parametrize("credit", ("uniform", "gain"))
def test_a_dead_group_has_no_gradient_and_counts_in_the_mean(credit, kl_weight):
    alone, result = gradient((3,), credit=credit, kl_weight=kl_weight)
    assert torch.equal(alone, torch.zeros_like(alone))
    assert result.metrics["updates"] == 0 and result.metrics["dead_groups"] == 1 and result.metrics["loss"] == 0
    assert result.metrics["ratio/mean"] == 1 and result.metrics["grad_norm"] == 0
    with_dead, _ = gradient((0, 3), credit=credit, kl_weight=kl_weight)
    without, _ = gradient((0,), credit=credit, kl_weight=kl_weight)
    assert_same_direction_and_length(with_dead, without / 2)


def test_a_lost_reward_leaves_its_trajectory_out():
    def broken(images, prompts, metadata):
        scores = score(images, prompts, metadata)
        scores.total[2] = math.nan
        return scores

    policy = TinyPolicy(0.3)
    before = policy.flat()
    _, result, _ = trained((0,), policy=policy, credit="uniform", score_fn=broken)
    assert result.metrics["dropped_rewards"] == 1 and bool(policy.flat().isfinite().all())
    assert result.metrics["reward"] == pytest.approx(float(result.rewards[0, [0, 1, 3], 0].mean()))
    assert torch.equal(result.credit.advantages[0, 2], torch.zeros(4)) and not torch.equal(policy.flat(), before)


def test_two_updates_take_the_groups_in_turn_and_clip():
    """The second update by hand: new ratios on the rollout's own log-probabilities, clipped."""
    index, lr, eps = (0, 1), 30.0, 2e-3
    policy, result, _ = trained(index, policy=TinyPolicy(0.3), updates=2, lr=lr, clip_range=eps, credit="gain")
    hand, clipped, ratios = TinyPolicy(0.3), [], []
    times, latents = SIGMAS.tolist(), result.trajectory.latents
    advantages = result.credit.advantages.double()
    for group in torch.randperm(2, generator=generator_for(0, 0, "updates")).tolist():
        rows, loss = slice(group * SIZE, (group + 1) * SIZE), 0.0
        cond = torch.full((SIZE,), index[group])
        for k in range(len(times) - 2):
            x = latents[rows, k]
            v = hand._velocity(x, torch.full((SIZE,), times[k]), cond, hand.second + hand.a @ hand.b).double()
            mean, std = hand_step(Kernel(), x.double(), v, times[k], times[k + 1])
            new = torch.distributions.Normal(mean, std).log_prob(latents[rows, k + 1].double()).flatten(1).mean(1)
            ratio = torch.exp(new - result.trajectory.log_probs[rows, k].double())
            a = advantages[group, :, k]
            loss = loss + torch.maximum(-a * ratio, -a * ratio.clamp(1 - eps, 1 + eps)).sum()
            clipped.append((ratio.clamp(1 - eps, 1 + eps) * a < ratio * a).double())
            ratios.append(ratio.detach())
        grads = torch.autograd.grad(loss / (SIZE * (len(times) - 2)), hand.trainable_parameters())
        with torch.no_grad():
            for p, g in zip(hand.trainable_parameters(), grads, strict=True):
                p -= lr * g
    torch.testing.assert_close(policy.flat(), hand.flat(), rtol=1e-4, atol=1e-4)
    metrics = result.metrics
    assert metrics["updates"] == 2 and metrics["ratio/rounding"] <= 1e-6
    assert metrics["ratio/max"] == pytest.approx(float(torch.cat(ratios).max()), rel=1e-4)
    assert 0 < metrics["clipped"] == pytest.approx(float(torch.cat(clipped).mean()), abs=0.05)


def test_there_are_never_more_updates_than_groups():
    calls = []
    _, result, _ = trained((0, 1), updates=5, after_update=lambda: calls.append(1))
    assert result.metrics["updates"] == 2 and len(calls) == 2


@pytest.mark.parametrize("with_scaler", (False, True))
def test_a_gradient_that_is_not_finite_skips_the_update(with_scaler):
    policy, calls = TinyPolicy(0.3), []
    policy.a.register_hook(lambda g: g * math.nan)
    before = policy.flat()
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0) if with_scaler else None
    _, result, loop = trained(
        policy=policy,
        updates=2,
        scaler=scaler,
        after_update=lambda: calls.append(1),
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.1),
    )
    assert torch.equal(policy.flat(), before) and calls == []
    assert result.metrics["updates_skipped"] == 2 and result.metrics["updates"] == 0
    assert result.metrics["grad_norm"] == 0 and not loop.optimizer.state
    assert policy.a.grad is None and policy.b.grad is None
    if with_scaler:
        assert scaler.get_scale() == 4.0


def test_a_loss_scaler_changes_nothing():
    plain, one, _ = trained(policy=TinyPolicy(0.3), lr=0.1, iterations=2, max_grad_norm=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaled, two, _ = trained(policy=TinyPolicy(0.3), lr=0.1, iterations=2, max_grad_norm=0.5, scaler=scaler)
    torch.testing.assert_close(scaled.flat(), plain.flat(), rtol=0, atol=1e-9)
    assert two.metrics["grad_norm"] == pytest.approx(one.metrics["grad_norm"])


def test_gradients_are_scaled_down_to_the_norm():
    free, _ = gradient()
    bound = float(free.norm()) / 3
    clipped, result = gradient(max_grad_norm=bound)
    assert_same_direction_and_length(clipped, free / 3)
    assert result.metrics["grad_norm"] == pytest.approx(3 * bound, rel=1e-5)


@pytest.mark.parametrize("kl_weight", (0.0, 5.0))
def test_signal_on_steps_without_noise_alone_is_none(kl_weight):
    """Rewards differ between finished images alone, and the step that makes them is not stochastic."""

    def late(images, prompts, metadata):
        total = torch.zeros(len(images))
        total[-8:] = torch.arange(8.0)
        return Scores(total, {})

    settings = {"score_fn": late, "credit": "gain_centred", "decode_batch": 1000, "kl_weight": kl_weight}
    policy = TinyPolicy(0.3)
    before = policy.flat()
    _, result, _ = trained((0, 1), policy=policy, window_stop=2, **settings)
    assert bool((result.credit.gains[..., 3] != 0).any()) and not result.credit.advantages.any()
    assert result.metrics["dead_groups"] == 2 and result.metrics["updates"] == 0
    assert torch.equal(policy.flat(), before)


def test_a_grid_below_1_starts_from_less_noise():
    """x_t = (1 - t) 0 + t noise, as ComfyUI has it for an empty latent."""
    policy, sigmas = TinyPolicy(), torch.tensor([0.6, 0.3, 0.0])
    loop = StepwiseGRPO(
        policy,
        score,
        torch.optim.SGD(policy.trainable_parameters(), lr=1.0),
        sigmas=sigmas,
        latent_shape=SHAPE,
        config=GRPOConfig(group_size=SIZE),
        seed=5,
    )
    result = loop.iterate(2, PROMPTS, [0, 1])
    noises = [torch.randn(SHAPE, generator=generator_for(5, 2, i, 0, "x1")) for i in (0, 1)]
    noise = torch.stack(noises).repeat_interleave(SIZE, 0)
    torch.testing.assert_close(result.trajectory.latents[:, 0], 0.6 * noise)


# ----- phases


def test_uniform_decodes_the_finished_images_only_and_gain_every_distinct_state():
    uniform, result, _ = trained((0, 1), credit="uniform")
    assert sum(uniform.rows["decode"]) == 2 * SIZE and result.rewards.shape == (2, SIZE, 1)
    assert "gain" not in result.metrics
    gain, result, _ = trained((0, 1), credit="gain")
    assert sum(gain.rows["decode"]) == 2 + 4 * 2 * SIZE and result.rewards.shape == (2, SIZE, 5)
    assert len(result.metrics["gain"]) == len(result.metrics["gain_abs"]) == 4


def test_model_calls_of_an_iteration():
    # Rollout: 2 rows at the shared start, then 3 x 8. Estimates with T' = 3 and 4, 3, 2, 1 steps left: 2 further rows
    # for each of 2 shared states, then 2, 1 and 0 for each of 8. Update: 3 noisy steps of 8.
    policy, _, _ = trained((0, 1), substeps=3, kl_weight=0.1)
    assert sum(policy.rows["velocity"]) == (2 + 24) + (2 * 2 + 8 * (2 + 1)) + 24
    assert sum(policy.rows["reference"]) == 24
    policy, _, _ = trained((0, 1), credit="uniform", substeps=3)
    assert sum(policy.rows["velocity"]) == (2 + 24) + 24 and policy.rows["reference"] == []


def test_only_steps_of_the_window_are_trained():
    policy, result, _ = trained((0, 1), window_start=1, window_stop=2)
    assert (result.trajectory.stds > 0).tolist() == [False, True, False, False]
    # Rollout: states 0 and 1 are shared; one step of 8 trajectories is trained.
    assert sum(policy.rows["velocity"]) == (2 + 2 + 8 + 8) + 8
    assert bool((result.trajectory.log_probs[:, [0, 2, 3]] == 0).all())


def test_metrics_by_hand():
    policy, result, _ = trained((0, 1), policy=TinyPolicy(0.3), lr=0.0, kl_weight=0.1)
    metrics, rewards, images = result.metrics, result.rewards, result.images
    assert metrics["reward"] == pytest.approx(float(rewards[..., -1].mean()))
    assert metrics["reward_std"] == pytest.approx(float(rewards[..., -1].std(correction=0)))
    gains = rewards[..., 1:] - rewards[..., :-1]
    assert metrics["gain"] == pytest.approx(gains.mean((0, 1)).tolist(), abs=1e-6)
    assert metrics["gain_abs"] == pytest.approx(gains.abs().mean((0, 1)).tolist(), abs=1e-6)
    assert sum(metrics["gain"]) == pytest.approx(float((rewards[..., -1] - rewards[..., 0]).mean()), abs=1e-6)
    red = images[:, 0].flatten(1).mean(1) - images[:, 2].flatten(1).mean(1).square()
    assert metrics["reward/red"] == pytest.approx(float(red.mean()), abs=1e-6)
    assert metrics["reward/red_std"] == pytest.approx(float(red.std(correction=0)), abs=1e-6)
    assert metrics["brightness"] == pytest.approx(float(images.mean((0, 2, 3)) @ torch.tensor([0.299, 0.587, 0.114])))
    assert metrics["diversity"] == pytest.approx(float(images.view(2, SIZE, -1).std(1, correction=0).mean()), abs=1e-6)
    assert 0 < metrics["sharpness"] < 1
    assert {f"seconds/{phase}" for phase in PHASES} <= set(metrics) and metrics["dropped_rewards"] == 0
    # KL of every trained entry: |mean - mean_ref|^2 / 2 std^2 times the step's size, averaged over elements.
    cond, kl = torch.tensor([0, 1]).repeat_interleave(SIZE), []
    for k in range(3):
        x, t, s = result.trajectory.latents[:, k], float(SIGMAS[k]), float(SIGMAS[k + 1])
        tt = torch.full((len(x),), t)
        mean, std = hand_step(Kernel(), x.double(), policy.velocity(x, tt, cond).double(), t, s)
        other, _ = hand_step(Kernel(), x.double(), policy.reference_velocity(x, tt, cond).double(), t, s)
        kl.append((t - s) * ((mean - other) ** 2 / (2 * std**2)).flatten(1).mean(1))
    assert metrics["kl"] == pytest.approx(float(torch.cat(kl).mean().detach()), rel=1e-4)


def test_kl_is_0_while_the_adapter_is_0_and_not_reported_without_weight():
    _, result, _ = trained((0, 1), kl_weight=0.1)
    assert result.metrics["kl"] == 0
    _, result, _ = trained((0, 1))
    assert "kl" not in result.metrics


def test_loss_metric_is_the_mean_over_the_trained_steps():
    # At ratio 1: minus the mean advantage of the 3 steps of 4 that have noise, of the group that has a signal.
    _, result, _ = trained((0, 3), lr=0.0)
    assert result.metrics["loss"] == pytest.approx(-float(result.credit.advantages[0, :, :3].mean()), abs=1e-6)


class Inexact(TinyPolicy):
    """Computes a little differently in the update than in the rollout, as a model with dropout does."""

    def velocity(self, x, sigma, cond):
        return super().velocity(x, sigma, cond) + (1e-3 if torch.is_grad_enabled() else 0.0)


def rounding_with_updates_in_order(first, second):
    """`ratio/rounding` of two updates, of which a seed is sought that takes the groups in this order."""
    index = (0, 3)
    seed = next(
        s for s in range(50) if torch.randperm(2, generator=generator_for(s, 0, "updates")).tolist() == [first, second]
    )
    return trained(index, policy=Inexact(), updates=2, seed=seed)[1].metrics["ratio/rounding"]


def test_a_policy_that_computes_otherwise_in_the_update_is_seen():
    assert trained(policy=Inexact())[1].metrics["ratio/rounding"] > 1e-5
    assert rounding_with_updates_in_order(0, 1) > 1e-5


def test_it_is_seen_where_the_first_update_is_skipped():
    assert rounding_with_updates_in_order(1, 0) > 1e-5


def test_progress_is_reported_for_every_phase_and_may_stop_the_run():
    calls = []
    trained((0, 1), substeps=2, update_batch=10, on_progress=lambda *call: calls.append(call))
    assert {phase for phase, _, _ in calls} == set(PHASES)
    assert all(0 <= done <= total for _, done, total in calls)
    assert [call for call in calls if call[0] == "sample"] == [("sample", 2 * k, 8) for k in range(4)]
    assert [call for call in calls if call[0] == "update"] == [("update", done, 24) for done in (0, 10, 20)]

    def stop(phase, done, total):
        if phase == "score":
            raise KeyboardInterrupt("stopped by the user")

    policy = TinyPolicy(0.3)
    before = policy.flat()
    with pytest.raises(KeyboardInterrupt, match="stopped by the user"):
        trained((0, 1), policy=policy, on_progress=stop)
    assert torch.equal(policy.flat(), before)


def test_iterations_differ_in_noise_and_repeat_with_the_seed():
    _, first, _ = trained((0, 1), lr=0.0)
    _, second, _ = trained((0, 1), lr=0.0, iterations=2)
    _, again, _ = trained((0, 1), lr=0.0)
    _, other, _ = trained((0, 1), lr=0.0, seed=1)
    assert torch.equal(first.images, again.images)
    assert not torch.equal(first.images, second.images) and not torch.equal(first.images, other.images)


def test_ema_is_carried_from_iteration_to_iteration():
    _, one, loop = trained((0, 1), credit="gain_ema", lr=0.0, ema_decay=0.8)
    first = torch.tensor(one.metrics["gain"]).double()[:3]
    torch.testing.assert_close(loop.ema["total"][:3], first, rtol=0, atol=1e-6)
    second = torch.tensor(loop.iterate(1, PROMPTS, [0, 1]).metrics["gain"]).double()[:3]
    torch.testing.assert_close(loop.ema["total"][:3], 0.8 * first + 0.2 * second, rtol=0, atol=1e-6)
    assert bool(loop.ema["total"][3].isnan())  # the last step has no noise
    assert trained((0, 1), credit="gain")[2].ema == {}


@pytest.mark.parametrize("kernel", (Kernel(), Kernel(name="flow_grpo")), ids=lambda k: k.name)
@pytest.mark.parametrize("credit", CREDITS)
def test_iterations_raise_an_easy_reward(credit, kernel):
    def red(images, prompts, metadata):
        value = images[:, 0].flatten(1).mean(1)
        return Scores(value, {"red": value})

    policy = TinyPolicy()
    _, _, loop = trained(
        policy=policy,
        score_fn=red,
        optimizer=lambda p: torch.optim.Adam(p, lr=0.1),
        credit=credit,
        kernel=kernel,
        group_size=16,
        max_grad_norm=1.0,
    )

    def reward():
        """Mean over the same noise of 4 iterations."""
        return (
            sum(float(red(policy.decode(loop.sample(i, [0, 1])[0].final), (), ()).total.mean()) for i in range(4)) / 4
        )

    before = reward()
    for i in range(1, 31):
        loop.iterate(i, PROMPTS, [0, 1])
    assert reward() > before + 0.2


def test_windows_without_noise_are_rejected():
    with pytest.raises(ValueError, match="its start is 3, its end 5, and there are 4 steps"):
        trained(window_start=3, window_stop=5)
    # The first step of as_printed and the last of every kernel are quiet.
    for settings in ({"window_stop": 1, "kernel": Kernel(schedule="as_printed")}, {"window_start": 3}):
        with pytest.raises(ValueError, match="no step of the window injects noise"):
            trained(**settings)


def test_a_window_of_a_size_is_drawn_anew_for_each_iteration():
    config = GRPOConfig(window_start=1, window_stop=6, window_size=2)
    places = {tuple(w.nonzero().flatten().tolist()) for w in config.windows(8)}
    assert places == {(1, 2), (2, 3), (3, 4), (4, 5)}
    assert len(GRPOConfig().windows(8)) == 1 and bool(GRPOConfig().windows(8)[0].all())
    _, _, loop = trained((0, 1), window_size=1, window_stop=3)
    drawn = [loop.window(i).nonzero().flatten().tolist() for i in range(40)]
    assert {tuple(d) for d in drawn} == {(0,), (1,), (2,)}
    assert drawn == [loop.window(i).nonzero().flatten().tolist() for i in range(40)]


@pytest.mark.parametrize(
    "settings, message",
    (
        ({"window_size": 4, "window_stop": 3}, "window_size 4 is more than the 3 steps of the window; lower it"),
        ({"window_start": 3, "window_stop": 3}, "its start is 3, its end 3, and there are 4 steps"),
        ({"window_start": 3}, "no step of the window injects noise"),
    ),
)
def test_windows_that_train_nothing_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        trained((0, 1), **settings)


# ----- several rewards, and scores on another thread


def red(images, prompts, metadata):
    return images[:, 0].flatten(1).mean(1)


def contrast(images, prompts, metadata):
    return 50 * images.flatten(1).std(1)


def test_rewards_normalised_by_the_spread_of_the_finished_images():
    """A run on red / std(red) and on contrast / std(contrast), the stds taken from a run that only looks."""
    plain = combine([Term("red", red, 0.5), Term("contrast", contrast, -0.25)])
    _, result, _ = trained((0, 1), score_fn=plain, lr=0.0)
    stds = {name: result.metrics[f"reward/{name}_std"] for name in ("red", "contrast")}
    by_hand = combine([Term("red", red, 0.5 / stds["red"]), Term("contrast", contrast, -0.25 / stds["contrast"])])
    asked = combine([Term("red", red, 0.5, True), Term("contrast", contrast, -0.25, True)])
    (expected, _), (got, result) = gradient(score_fn=by_hand), gradient(score_fn=asked)
    # The gradient's own policy starts elsewhere, so that its stds are others.
    assert not torch.allclose(got, gradient(score_fn=plain)[0], atol=1e-3)
    _, first, _ = trained((0, 1), score_fn=by_hand, lr=0.0)
    _, second, _ = trained((0, 1), score_fn=asked, lr=0.0)
    torch.testing.assert_close(first.credit.advantages, second.credit.advantages, rtol=0, atol=1e-5)
    # What is reported is the plain sum.
    torch.testing.assert_close(second.rewards, trained((0, 1), score_fn=plain, lr=0.0)[1].rewards)
    assert torch.isfinite(expected).all() and result.metrics["updates"] == 1


def test_a_reward_equal_for_all_finished_images_has_no_say_when_normalised():
    constant = Term("constant", lambda images, prompts, metadata: torch.full((len(images),), 7.0), 1.0, True)
    got, _ = gradient(score_fn=combine([Term("red", red), constant]))
    torch.testing.assert_close(got, gradient(score_fn=combine([Term("red", red)]))[0])


@pytest.mark.parametrize("credit", ("gain", "gain_ema", "uniform"))
def test_credit_of_each_reward(credit):
    """The gradient is the weighted sum of those of the rewards alone: the objective is linear in the advantages."""
    both = combine([Term("red", red, 3.0), Term("contrast", contrast, -1.0), Term("watched", red, 0.0)])
    got, _ = gradient(score_fn=both, mix="each", credit=credit)
    first, _ = gradient(score_fn=combine([Term("red", red)]), credit=credit)
    second, _ = gradient(score_fn=combine([Term("contrast", contrast)]), credit=credit)
    torch.testing.assert_close(got, (3 * first - second) / 4, rtol=0, atol=1e-6)


@pytest.mark.parametrize("credit", ("gain_centred", "uniform"))
def test_scores_on_another_thread_change_nothing(credit):
    settings = {"credit": credit, "decode_batch": 3, "rollout_batch": 2, "updates": 2, "substeps": 2}
    index = (0, 1, 0, 2)  # a prompt that comes twice has two noises, whatever the chunks
    plain, expected = gradient(index, **settings)
    got, result = gradient(index, score_ahead=5, **settings)
    torch.testing.assert_close(got, plain, rtol=0, atol=1e-6)
    torch.testing.assert_close(result.images, expected.images, rtol=0, atol=1e-6)
    torch.testing.assert_close(result.rewards, expected.rewards, rtol=0, atol=1e-6)
    torch.testing.assert_close(result.trajectory.velocities, expected.trajectory.velocities, rtol=0, atol=1e-6)
    for name, value in expected.metrics.items():
        if not name.startswith("seconds/"):
            assert result.metrics[name] == pytest.approx(value, abs=1e-5, nan_ok=True), name


def test_the_next_prompts_are_sampled_while_scores_are_awaited():
    """The first scores come only when the second group is being sampled, which would wait for ever one by one."""
    sampled, waited = threading.Event(), []

    def slow(images, prompts, metadata):
        waited.append(sampled.wait(30))
        return score(images, prompts, metadata)

    def on_progress(phase, done, total):
        if phase == "sample" and done > total / 2:
            sampled.set()

    many = SIZE * 5
    trained((0, 1), score_fn=slow, score_ahead=many, rollout_batch=SIZE, decode_batch=many, on_progress=on_progress)
    assert waited == [True, True]


def test_no_more_images_wait_than_are_allowed():
    policy, behind = TinyPolicy(), []

    def counting(images, prompts, metadata):
        behind.append(sum(policy.rows["decode"]))
        return score(images, prompts, metadata)

    trained((0, 1), policy=policy, score_fn=counting, score_ahead=4, rollout_batch=SIZE, decode_batch=2)
    # At the n-th call n batches have been taken, at most 4 images wait with this one, and one batch is being decoded.
    assert all(decoded <= 2 * n + 4 + 2 for n, decoded in enumerate(behind)) and len(behind) == 18


def test_an_error_of_a_score_on_another_thread_stops_the_iteration():
    def broken(images, prompts, metadata):
        raise ValueError("no such model")

    policy = TinyPolicy()
    before = policy.flat()
    with pytest.raises(ValueError, match="no such model"):
        trained((0, 1), policy=policy, score_fn=broken, score_ahead=4)
    assert torch.equal(policy.flat(), before)


def test_too_many_dropped_images_stop_the_iteration_before_the_update():
    def half(images, prompts, metadata):
        scores = red(images, prompts, metadata)
        scores[::2] = math.nan
        return scores

    def run(share):
        policy = TinyPolicy()
        guard = Guard(FailurePolicy(retries=0, max_dropped=share))
        return trained((0, 1), policy=policy, score_fn=Mix((Term("half", half),), guard))[1]

    result = run(0.9)
    assert result.problems and set(result.problems) == {
        "reward half gave no score for 4 of 8 images: a score was NaN or infinite",
        "reward half gave no score for 1 of 2 images: a score was NaN or infinite",
    }
    with pytest.raises(RewardError, match="images have no score"):
        run(0.2)


# ----- faults


class SmallMemory(TinyPolicy):
    """Runs out of memory above so many rows in a phase: sampling and estimates, updates, decoding."""

    def __init__(self, sampling=1000, updating=1000, decoding=1000, words=None):
        super().__init__(0.3)
        self.limits, self.words = (sampling, updating, decoding), words

    def check(self, rows, limit):
        if rows > limit:
            if self.words is not None:
                raise RuntimeError(self.words)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def velocity(self, x, sigma, cond):
        v = super().velocity(x, sigma, cond)
        self.check(len(x), self.limits[1 if torch.is_grad_enabled() else 0])
        return v

    def decode(self, latents):
        self.check(len(latents), self.limits[2])
        return super().decode(latents)


CPU_WORDS = "[enforce fail at alloc_cpu.cpp:130] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to ..."


@pytest.mark.parametrize("ahead", (0, 6))
@pytest.mark.parametrize("words", (None, CPU_WORDS))
@pytest.mark.parametrize(
    ("limits", "notes"),
    [
        ({"sampling": 3}, {"rollout_batch is 4", "rollout_batch is 2", "estimate_batch is 4", "estimate_batch is 2"}),
        ({"updating": 5}, {"update_batch is 4"}),
        ({"decoding": 1}, {"decode_batch is 4", "decode_batch is 2", "decode_batch is 1"}),
    ],
)
def test_memory_that_runs_out_halves_that_phases_batch_and_changes_nothing(limits, notes, words, ahead):
    settings = {"rollout_batch": 8, "estimate_batch": 8, "update_batch": 8, "decode_batch": 8, "substeps": 2}
    settings |= {"updates": 2, "score_ahead": ahead}
    policy, small = TinyPolicy(0.3), SmallMemory(**limits, words=words)
    _, expected, _ = trained((0, 1), policy=policy, **settings)
    _, result, loop = trained((0, 1), policy=small, **settings)
    torch.testing.assert_close(small.flat(), policy.flat(), rtol=0, atol=1e-6)
    torch.testing.assert_close(result.rewards, expected.rewards, rtol=0, atol=1e-6)
    assert set(result.notes) == {f"memory ran out: {note} from here on" for note in notes} and expected.notes == []
    # What was learned of the memory is kept: the next iteration does not run out again.
    assert loop.iterate(1, PROMPTS, [0, 1]).notes == []


def test_a_batch_of_one_that_does_not_fit_is_an_error():
    with pytest.raises(torch.OutOfMemoryError):
        trained((0, 1), policy=SmallMemory(updating=0))


def test_an_error_that_is_not_of_memory_is_not_tried_again():
    policy = SmallMemory(sampling=1, words="mat1 and mat2 shapes cannot be multiplied")
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        trained((0, 1), policy=policy)
    assert len(policy.rows["velocity"]) == 1


def test_rewards_that_run_out_of_memory_are_asked_for_fewer_images():
    asked = []

    def greedy(images, prompts, metadata):
        asked.append(len(images))
        if len(images) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return red(images, prompts, metadata)

    guard = Guard(FailurePolicy(retries=0))
    _, result, _ = trained((0, 1), score_fn=Mix((Term("greedy", greedy),), guard), decode_batch=8)
    _, expected, _ = trained((0, 1), score_fn=combine([Term("greedy", red)]), decode_batch=8)
    torch.testing.assert_close(result.rewards, expected.rewards)
    assert result.metrics["dropped_rewards"] == 0 and max(asked[2:]) <= 4
    assert result.notes[-1] == "memory ran out: decode_batch is 2 from here on"


class NoGradient(TinyPolicy):
    """Its velocity is NaN where it is differentiated, as after an overflow."""

    def velocity(self, x, sigma, cond):
        v = super().velocity(x, sigma, cond)
        return v * math.nan if torch.is_grad_enabled() else v


def test_updates_without_a_finite_gradient_are_skipped_and_end_the_training():
    policy = NoGradient(0.3)
    before = policy.flat()
    _, result, loop = trained((0, 1), policy=policy, updates=2, max_skipped=5)
    assert (result.metrics["updates"], result.metrics["updates_skipped"]) == (0, 2)
    loop.iterate(1, PROMPTS, [0, 1])
    with pytest.raises(GradientError, match="the gradients of 6 updates in a row were NaN or infinite"):
        loop.iterate(2, PROMPTS, [0, 1])
    assert torch.equal(policy.flat(), before)
