"""Signals that end a run as Ctrl-C does: what there is gets saved, and the exit code is 128 + the signal."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator

NAMES = ("SIGINT", "SIGTERM", "SIGHUP")
REPEAT = 2.0
"""Seconds in which a launcher hands on to its processes what the terminal has sent them already."""


class Stopped(KeyboardInterrupt):
    """A signal asks the run to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def code(self) -> int:
        """The exit code: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP."""
        return 128 + self.number

    @property
    def words(self) -> str:
        """What to tell the user, after "sfgrpo: "."""
        return "interrupted" if self.number == signal.SIGINT else f"stopped by {signal.Signals(self.number).name}"


@contextlib.contextmanager
def stop_on_signals() -> Iterator[None]:
    """Within, the first SIGINT, SIGTERM or SIGHUP raises Stopped in the main thread; a second one exits at once.

    A signal that is ignored, as SIGHUP is under nohup, stays so. Does nothing outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    first: list[float] = []
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1

    def handle(number: int, frame) -> None:
        if not first:
            first.append(time.monotonic())
            raise Stopped(number)
        if not several or time.monotonic() - first[0] > REPEAT:
            os._exit(128 + number)

    numbers = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]
    # None is a handler that was not set from Python and could not be put back.
    before = {n: h for n in numbers if (h := signal.getsignal(n)) not in (signal.SIG_IGN, None)}
    try:
        for number in before:
            signal.signal(number, handle)
        yield
    finally:
        # After the first signal the run still has to say goodbye; a second must go on to exit at once.
        if not first:
            for number, handler in before.items():
                signal.signal(number, handler)
