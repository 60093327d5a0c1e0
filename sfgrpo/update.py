"""The update: optimizer steps on the trained steps of a rollout, in micro-batches that do not change the result."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .config import GRPOConfig
from .credit import Credit
from .halving import halving
from .objective import Loss, step_weights, surrogate_loss, trained_entries
from .policy import Policy
from .processes import ALONE, Processes
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
    """(M,) KL to the adapter-off model, as `Transition.kl` has it; None without a KL term."""
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
        kl = transition.kl(reference, t - s)
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
    processes: Processes = ALONE,
    on_batch: Callable[[int, int], None] = lambda done, total: None,
    after_update: Callable[[], None] = lambda: None,
    on_halved: Callable[[int], None] = lambda size: None,
) -> dict[str, float]:
    """config.updates optimizer steps, each on its share of the groups in `order` (G,); returns their metrics.

    trajectory and cond hold this process's share of the G * N rows, credit all of them; gradients are summed over the
    processes once a step. A step whose gradient is NaN or infinite is skipped and counted. on_batch(done, total) comes
    before each micro-batch and may raise to stop, after_update after each optimizer step; on_halved(size) where memory
    ran out and the micro-batches become smaller.
    """
    groups, members, steps = credit.advantages.shape
    rows = processes.share(groups * members)
    weights = step_weights(trajectory.stds, config.step_weight)
    entries = trained_entries(credit, trajectory.stds, config.kl_weight).view(-1, steps)
    advantages, group = credit.advantages.view(-1, steps)[rows], torch.arange(groups).repeat_interleave(members)
    noisy, mine = int((trajectory.stds > 0).sum()), int(entries[rows].sum())
    parameters = list(policy.trainable_parameters())
    seen: list[dict[str, list[Tensor]]] = []
    norms, skipped, done, size = [], 0, 0, config.update_batch

    def halved(new: int) -> None:
        nonlocal size
        size = new
        on_halved(new)

    for chunk in order.tensor_split(min(config.updates, groups)):
        chosen = entries & torch.isin(group, chunk).unsqueeze(1)
        if not bool(chosen.any()):
            continue
        # Sorted by step, so that a micro-batch holds many trajectories at few noise levels.
        step, row = chosen[rows].T.nonzero(as_tuple=True)
        entries_of = partial(
            accumulate_gradient,
            policy,
            trajectory,
            cond,
            row,
            step,
            advantages[row, step],
            weights[step],
            config,
            scaler,
            denominator=len(chunk) * members * noisy,
            unchanged=not norms,
            on_batch=partial(_from, on_batch, done, mine),
        )
        seen.append(halving(entries_of, size, halved))
        done += len(row)
        processes.sum_gradients(parameters)
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

    def every(name: str) -> Tensor:
        """What all processes saw of something."""
        return processes.gather_rows(torch.cat([torch.zeros(0), *(v for found in seen for v in found[name])]))

    ratio, kl = every("ratio"), every("kl")
    ratio = ratio if len(ratio) else torch.ones(1)
    metrics = {
        "loss": _mean(every("loss")),
        "ratio/mean": float(ratio.mean()),
        "ratio/max": float(ratio.max()),
        "ratio/rounding": float(torch.cat([torch.zeros(1), every("drift")]).max()),
        "clipped": _mean(every("clipped")),
        "grad_norm": sum(norms) / len(norms) if norms else 0.0,
        "updates": len(norms),
        "updates_skipped": skipped,
    }
    return metrics | ({"kl": _mean(kl)} if len(kl) else {})


def accumulate_gradient(
    policy: Policy,
    trajectory: Trajectory,
    cond: Any,
    row: Tensor,
    step: Tensor,
    advantage: Tensor,
    weight: Tensor,
    config: GRPOConfig,
    scaler: torch.amp.GradScaler,
    size: int,
    *,
    denominator: int,
    unchanged: bool,
    on_batch: Callable[[int], None],
) -> dict[str, list[Tensor]]:
    """The gradient of the summed loss of M entries by the denominator, from zero, in micro-batches of `size`.

    row, step, advantage and weight are (M,), as for `policy_loss`; returns what was seen on the way, name -> tensors.
    """
    parameters = list(policy.trainable_parameters())
    for parameter in parameters:
        parameter.grad = None
    scaler.scale(parameters[0].new_zeros(()))  # prepares it where there is no entry, as in a process without any
    found: dict[str, list[Tensor]] = defaultdict(list)
    for part in batches(len(row), size):
        on_batch(part.start)
        losses = policy_loss(
            policy,
            trajectory,
            cond,
            row[part],
            step[part],
            advantage[part],
            weight[part],
            config,
            unchanged=unchanged,
        )
        surrogate = losses.surrogate
        scaler.scale(surrogate.loss.sum() / denominator).backward()
        found["loss"].append(surrogate.loss.detach().cpu())
        found["ratio"].append(surrogate.ratio.cpu())
        found["clipped"].append(surrogate.clipped.float().cpu())
        if losses.kl is not None:
            found["kl"].append(losses.kl.detach().cpu())
        if unchanged:
            found["drift"].append(losses.drift.cpu())
    return found


def _from(on_batch: Callable[[int, int], None], before: int, total: int, start: int) -> None:
    on_batch(before + start, total)


def _mean(values: Tensor) -> float:
    return float(values.mean()) if len(values) else 0.0
