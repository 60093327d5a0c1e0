"""The update: optimizer steps on the trained steps of a rollout, in micro-batches that do not change the result."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .config import GRPOConfig
from .credit import Credit
from .objective import Loss, step_weights, surrogate_loss, trained_entries
from .policy import Policy
from .rollout import Trajectory, batches


def learning_rate(lr: float, iteration: int, iterations: int, *, warmup: int = 0, final: float = 1.0) -> float:
    """Learning rate of iteration 0 .. iterations - 1: up to `lr` over `warmup`, then linearly down to `final * lr`."""
    if iteration < warmup:
        return lr * (iteration + 1) / warmup
    share = (iteration - warmup) / max(iterations - 1 - warmup, 1)
    return lr * (1 - share * (1 - final))


def set_learning_rate(optimizer: torch.optim.Optimizer, *args: Any, **keywords: Any) -> None:
    """Set `learning_rate` of the same arguments in every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(*args, **keywords)


@dataclass
class StepLosses:
    """Losses of M steps."""

    surrogate: Loss
    kl: Tensor | None
    """(M,) KL to the adapter-off model; None without a KL term."""
    drift: Tensor
    """(M,) |log-probability here - that of the rollout|, detached; rounding alone while the policy is unchanged."""


def policy_loss(
    policy: Policy,
    trajectory: Trajectory,
    cond: Any,
    row: Tensor,
    step: Tensor,
    advantage: Tensor,
    weight: Tensor,
    config: GRPOConfig,
    *,
    unchanged: bool = False,
) -> StepLosses:
    """Losses of M steps (row, step) of the trajectories, with their graph.

    row, step, advantage and weight are (M,) on the CPU. The policy's velocity is computed anew, at the latents of the
    rollout. unchanged: the policy is still that of the rollout. Its old log-probability then is what is computed here,
    not what the rollout computed in other micro-batches: rounding of the velocity grows by 1 / std in the log-ratio, to
    1e-5 and more where the steps are quiet, and the ratio must be 1.
    """
    device = trajectory.latents.device
    x, x_next = trajectory.latents[row, step], trajectory.latents[row, step + 1]
    t, s = trajectory.sigmas[step].to(device), trajectory.sigmas[step + 1].to(device)
    c = cond[row.to(cond.device)]
    transition = config.kernel.transition(x, policy.velocity(x, t, c), t, s)
    kl = None
    if config.kl_weight > 0:
        with torch.no_grad():
            reference = config.kernel.transition(x, policy.reference_velocity(x, t, c), t, s)
        kl = transition.kl(reference)
    log_prob, rollout_log_prob = transition.log_prob(x_next), trajectory.log_probs[row, step].to(device)
    loss = surrogate_loss(
        log_prob,
        log_prob.detach() if unchanged else rollout_log_prob,
        advantage.to(device),
        clip_range=config.clip_range,
        weight=weight.to(device),
        kl=kl,
        kl_weight=config.kl_weight,
    )
    return StepLosses(loss, kl, (log_prob.detach() - rollout_log_prob).abs())


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    trajectory: Trajectory,
    cond: Any,
    credit: Credit,
    config: GRPOConfig,
    *,
    order: Tensor,
    scaler: torch.amp.GradScaler,
    on_batch: Callable[[int, int], None] = lambda done, total: None,
    after_update: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """config.updates optimizer steps, each on its share of the groups in `order` (G,); returns their metrics.

    A step whose gradient is NaN or infinite is skipped and counted. on_batch(done, total) comes before each micro-batch
    and may raise to stop, after_update after each optimizer step.
    """
    groups, members, _ = credit.advantages.shape
    weights = step_weights(trajectory.stds, config.step_weight)
    entries = trained_entries(credit, trajectory.stds, config.kl_weight)
    parameters = list(policy.trainable_parameters())
    seen: dict[str, list[Tensor]] = defaultdict(list)
    norms, skipped, done = [], 0, 0
    for chunk in order.tensor_split(min(config.updates, groups)):
        chosen = torch.zeros(groups, dtype=torch.bool)
        chosen[chunk] = True
        # Sorted by step, so that a micro-batch holds many trajectories at few noise levels.
        step, group, member = (entries & chosen.view(-1, 1, 1)).permute(2, 0, 1).nonzero(as_tuple=True)
        if not len(step):
            continue
        row, advantage = group * members + member, credit.advantages[group, member, step]
        denominator = len(chunk) * members * int((trajectory.stds > 0).sum())
        optimizer.zero_grad(set_to_none=True)
        for part in batches(len(row), config.update_batch):
            on_batch(done, int(entries.sum()))
            losses = policy_loss(
                policy,
                trajectory,
                cond,
                row[part],
                step[part],
                advantage[part],
                weights[step[part]],
                config,
                unchanged=not norms,
            )
            surrogate = losses.surrogate
            scaler.scale(surrogate.loss.sum() / denominator).backward()
            seen["loss"].append(surrogate.loss.detach().cpu())
            seen["ratio"].append(surrogate.ratio.cpu())
            seen["clipped"].append(surrogate.clipped.float().cpu())
            if losses.kl is not None:
                seen["kl"].append(losses.kl.detach().cpu())
            if not norms:
                seen["drift"].append(losses.drift.cpu())
            done += part.stop - part.start
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
        if torch.isfinite(norm):
            scaler.step(optimizer)
            after_update()
            norms.append(float(norm))
        else:
            skipped += 1
        scaler.update()
    optimizer.zero_grad(set_to_none=True)
    ratio = torch.cat(seen["ratio"]) if seen["ratio"] else torch.ones(1)
    metrics = {
        "loss": float(torch.cat(seen["loss"]).mean()) if seen["loss"] else 0.0,
        "ratio/mean": float(ratio.mean()),
        "ratio/max": float(ratio.max()),
        "ratio/rounding": float(torch.cat(seen["drift"]).max()) if seen["drift"] else 0.0,
        "clipped": float(torch.cat(seen["clipped"]).mean()) if seen["clipped"] else 0.0,
        "grad_norm": sum(norms) / len(norms) if norms else 0.0,
        "updates": len(norms),
        "updates_skipped": skipped,
    }
    return metrics | ({"kl": float(torch.cat(seen["kl"]).mean())} if seen["kl"] else {})
