"""One thread that scores what several requests bring, together where they come together."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Condition, Event, Thread

import torch
from torch import Tensor

from sfgrpo.rewards import ScoreFn, Scores


class Busy(Exception):
    """The queue is full; `seconds` until there may be room."""

    def __init__(self, seconds: int) -> None:
        super().__init__(seconds)
        self.seconds = seconds


@dataclass(eq=False)
class Job:
    """The images of one request, and in the end their scores, or the exception that the reward raised."""

    images: Tensor
    """(B, 3, H, W)."""
    prompts: Sequence[str]
    metadata: Sequence[Mapping]
    done: Event = field(default_factory=Event)
    scores: Scores | None = None
    error: Exception | None = None
    abandoned: bool = False
    """Nobody waits for it any more; it is passed over."""


class Batcher:
    """Scores jobs in their order, those of one image size together.

    A job waits `max_wait` seconds for others, unless there are `max_batch` images. A job is never split, so that one
    with more images goes alone. Where a reward raises on jobs together, each is scored by itself.
    """

    def __init__(self, score: ScoreFn, *, max_batch: int, max_wait: float, max_queue: int) -> None:
        self.score, self.max_batch, self.max_wait, self.max_queue = score, max_batch, max_wait, max_queue
        self.batches: deque[int] = deque(maxlen=100)
        """Images of the last batches."""
        self._jobs: deque[Job] = deque()
        self._changed = Condition()
        self._closed = False
        self._seconds = 0.0
        """Of one image, on average lately."""
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether it takes jobs."""
        return self._thread.is_alive() and not self._closed

    @property
    def waiting(self) -> int:
        """Images that wait."""
        return sum(len(job.images) for job in list(self._jobs) if not job.abandoned)

    def submit(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping]) -> Job:
        """Queue a job. Raises Busy where more than `max_queue` images would wait; an empty queue takes any job."""
        job = Job(images, prompts, metadata)
        with self._changed:
            waiting = self.waiting
            if self._closed or (waiting and waiting + len(images) > self.max_queue):
                raise Busy(self.delay())
            self._jobs.append(job)
            self._changed.notify_all()
        return job

    def delay(self) -> int:
        """Seconds that the queue will take, as far as is known; 1 to 60."""
        return min(max(math.ceil(self.waiting * self._seconds), 1), 60)

    def close(self, grace: float = 10.0) -> bool:
        """Give up the jobs that wait, then wait `grace` seconds for the batch under way; whether the thread ended."""
        with self._changed:
            self._closed = True
            while self._jobs:
                job = self._jobs.popleft()
                job.error = Busy(1)
                job.done.set()
            self._changed.notify_all()
        self._thread.join(grace)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while jobs := self._take():
            start = time.monotonic()
            self._work(jobs)
            count = sum(len(job.images) for job in jobs)
            seconds = (time.monotonic() - start) / count
            self._seconds = seconds if not self._seconds else 0.8 * self._seconds + 0.2 * seconds
            self.batches.append(count)

    def _take(self) -> list[Job]:
        """The next jobs to score together; none when it is closed."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if self._closed:
                    return []
                end = time.monotonic() + self.max_wait
                while not self._closed and self.waiting < self.max_batch:
                    left = end - time.monotonic()
                    if left <= 0 or not self._changed.wait(left):
                        break
                taken, count = [], 0
                for job in list(self._jobs):
                    fits = not taken or (
                        job.images.shape[1:] == taken[0].images.shape[1:] and count + len(job.images) <= self.max_batch
                    )
                    if job.abandoned:
                        self._jobs.remove(job)
                    elif fits:
                        self._jobs.remove(job)
                        taken.append(job)
                        count += len(job.images)
                if taken:
                    return taken

    def _work(self, jobs: list[Job]) -> None:
        try:
            with torch.no_grad():
                scores = self.score(
                    torch.cat([job.images for job in jobs]),
                    [prompt for job in jobs for prompt in job.prompts],
                    [metadata for job in jobs for metadata in job.metadata],
                )
        except Exception as error:
            if len(jobs) > 1:
                for job in jobs:
                    self._work([job])
                return
            jobs[0].error = error
            jobs[0].done.set()
            return
        start = 0
        for job in jobs:
            rows = slice(start, start := start + len(job.images))
            job.scores = Scores(scores.total[rows], {name: part[rows] for name, part in scores.parts.items()})
            job.done.set()
