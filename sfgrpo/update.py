"""The update: optimizer steps on the trained steps of a rollout, in micro-batches that do not change the result."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .config import GRPOConfig
from .credit import Credit
from .objective import Loss, step_weights, surrogate_loss, trained_entries
from .policy import Policy
from .rollout import Trajectory, batches


def policy_loss(
    policy: Policy,
    trajectory: Trajectory,
    cond: Any,
    row: Tensor,
    step: Tensor,
    advantage: Tensor,
    weight: Tensor,
    config: GRPOConfig,
) -> tuple[Loss, Tensor | None]:
    """Loss of M steps (row, step) of the trajectories, with its graph, and their KL (M,), None without a KL term.

    row, step, advantage and weight are (M,) on the CPU. The policy's velocity is computed anew; the step's Gaussian and
    the latent that was drawn from it then are the rollout's.
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
    loss = surrogate_loss(
        transition.log_prob(x_next),
        trajectory.log_probs[row, step].to(device),
        advantage.to(device),
        clip_range=config.clip_range,
        weight=weight.to(device),
        kl=kl,
        kl_weight=config.kl_weight,
    )
    return loss, kl


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
    norms, skipped, first_error, done = [], 0, 0.0, 0
    for number, chunk in enumerate(order.tensor_split(min(config.updates, groups))):
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
            loss, kl = policy_loss(
                policy, trajectory, cond, row[part], step[part], advantage[part], weights[step[part]], config
            )
            scaler.scale(loss.loss.sum() / denominator).backward()
            seen["loss"].append(loss.loss.detach().cpu())
            seen["ratio"].append(loss.ratio.cpu())
            seen["clipped"].append(loss.clipped.float().cpu())
            if kl is not None:
                seen["kl"].append(kl.detach().cpu())
            done += part.stop - part.start
        if number == 0:
            first_error = float((torch.cat(seen["ratio"]) - 1).abs().max())
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
        "ratio/first_error": first_error,
        "clipped": float(torch.cat(seen["clipped"]).mean()) if seen["clipped"] else 0.0,
        "grad_norm": sum(norms) / len(norms) if norms else 0.0,
        "updates": len(norms),
        "updates_skipped": skipped,
    }
    return metrics | ({"kl": float(torch.cat(seen["kl"]).mean())} if seen["kl"] else {})
