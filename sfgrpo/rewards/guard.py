"""What happens where a reward fails: its images are asked for again, then dropped and counted; never a silent zero.

A failure is an exception, an answer that does not come in time, an answer of the wrong length or kind, or a score that
is NaN or infinite. A dropped image has the score NaN, which credit leaves out of every statistic.
"""

from __future__ import annotations

import copy
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..background import POLL, Late, Worker, wait

HUNG = 3
"""So many batches in a row without an answer in time, and the reward is taken to hang."""

FAILED = 3
"""So many images in a row that fail by themselves, and the rest of a batch is not tried one by one."""


class WrongScores(ValueError):
    """A reward returned something that is no score for each image."""


class RewardError(RuntimeError):
    """A reward failed and the run cannot go on."""


@dataclass(frozen=True, kw_only=True)
class FailurePolicy:
    """What is done about a reward that fails, `[failures]`. Raises ValueError for a value outside its range."""

    __pydantic_config__ = {"extra": "forbid"}

    retries: int = 1
    """Times that the images that failed are asked for again."""
    retry_wait: float = 1.0
    """Seconds before the first time; twice as long before each further one."""
    timeout: float = 600.0
    """Seconds that a reward may take for one batch, its weights' loading included; 0 waits for ever."""
    then: Literal["drop", "stop"] = "drop"
    """What follows: the images are left out of the update, or the run stops."""
    max_dropped: float = 0.25
    """Share of an iteration's or evaluation's images that may be dropped, 0 to 1; above it the run stops, with the
    LoRA of the last whole iteration on disk."""

    def __post_init__(self) -> None:
        if self.retries < 0:
            raise ValueError("retries must be 0 or more")
        for name in ("retry_wait", "timeout"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be 0 or more seconds")
        if self.then not in ("drop", "stop"):
            raise ValueError(f"then must be drop or stop, got {self.then!r}")
        if not 0 <= self.max_dropped <= 1:
            raise ValueError("max_dropped must be from 0 to 1")

    def check_share(self, dropped: int, total: int, problems: Sequence[str]) -> None:
        """Raise RewardError where more than the allowed share of `total` images is dropped."""
        if dropped > self.max_dropped * total:
            raise RewardError(
                f"{dropped} of {total} images have no score, more than failures.max_dropped = {self.max_dropped:g} "
                f"allows; the last reason: {problems[-1] if problems else 'a score was NaN or infinite'}"
            )


def as_scores(answer: Any, count: int) -> Tensor:
    """What a reward returned as (count,) float32 on the CPU: a tensor of any device, an array, or a list of numbers.

    None in a list is NaN. Raises WrongScores for anything else, or for another number of them.
    """
    try:
        if not isinstance(answer, Tensor):
            answer = torch.as_tensor(
                [math.nan if v is None else v for v in answer] if isinstance(answer, (list, tuple)) else answer
            )
        scores = answer.detach().to("cpu", torch.float32)
    except (TypeError, ValueError, RuntimeError):
        raise WrongScores(f"returned {type(answer).__name__} in place of {count} numbers") from None
    if scores.ndim == 2 and scores.shape[1] == 1:
        scores = scores.squeeze(1)
    if scores.shape != (count,):
        raise WrongScores(f"returned scores of shape {tuple(scores.shape)} for {count} images")
    return scores


def own_copy(
    images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping]
) -> tuple[Tensor, list[str], list[Mapping]]:
    """Images, prompts and metadata that a reward may write into without changing what others see.

    A copy before every call: the version counter of a tensor would tell of a write only after it is done, and not of
    one through numpy. It costs one batch of images (sfgrpo.scoring's decode batch) while the reward runs.
    """
    return images.clone(), list(prompts), [copy.deepcopy(m) for m in metadata]


class Guard:
    """Asks rewards under a policy, each on a thread of its own, so that one that hangs does not hang the run."""

    def __init__(self, policy: FailurePolicy, on_wait: Callable[[], None] = lambda: None) -> None:
        """on_wait is called while an answer is awaited and may raise to stop, as Cancel does."""
        self.policy, self.on_wait = policy, on_wait
        self._workers: dict[str, Worker] = defaultdict(Worker)
        self._hung: dict[str, int] = defaultdict(int)

    def ask(
        self, name: str, fn: Callable, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping]
    ) -> tuple[Tensor, list[str]]:
        """Scores (B,) float32 on the CPU, NaN where they are dropped, and what went wrong in words.

        A batch that raises to the last is tried image by image, so that one bad image costs no others. Raises
        RewardError where the policy is to stop, or where a reward hangs on every batch.
        """
        policy, count = self.policy, len(images)
        scores, reason = torch.full((count,), math.nan), ""

        def attempt(rows: list[int]) -> str:
            """Fill in the scores of some images; says why some are still missing, or nothing."""
            whole = len(rows) == count
            given = (images if whole else images[rows], [prompts[i] for i in rows], [metadata[i] for i in rows])
            call = self._workers[name].submit(fn, *own_copy(*given))
            try:
                wait(call, timeout=policy.timeout, on_wait=self.on_wait)
            except Late:
                self._workers.pop(name).close()
                return f"no answer within {policy.timeout:g} s"
            error = call.exception()
            if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
                raise error
            if error is not None:
                return _words(error)
            try:
                answer = as_scores(call.result(), len(rows))
            except WrongScores as wrong:
                return _words(wrong)
            scores[rows] = torch.where(torch.isfinite(answer), answer, math.nan)
            return "" if bool(torch.isfinite(answer).all()) else "a score was NaN or infinite"

        for n in range(policy.retries + 1):
            if n:
                self._pause(policy.retry_wait * 2 ** (n - 1))
            missing = scores.isnan().nonzero().flatten().tolist()
            reason = attempt(missing)
            if not reason:
                break
        late = reason.startswith("no answer")
        self._hung[name] = self._hung[name] + 1 if late else 0
        if reason and scores.isnan().all() and count > 1 and not late:
            failed = 0
            for i in range(count):
                again = attempt([i])
                reason, failed = again or reason, failed + 1 if again else 0
                if failed == FAILED:
                    break
        dropped = int(scores.isnan().sum())
        if not dropped:
            return scores, []
        problem = f"reward {name} gave no score for {dropped} of {count} images: {reason}"
        if policy.then == "stop":
            raise RewardError(problem)
        if self._hung[name] >= HUNG:
            raise RewardError(f"reward {name} hangs: no answer within {policy.timeout:g} s, {HUNG} batches in a row")
        return scores, [problem]

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.on_wait()
            time.sleep(min(left, POLL))


def _words(error: BaseException) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
