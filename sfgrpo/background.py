"""Calls on a thread of their own: with a time limit, or beside other work."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

import torch

POLL = 0.1
"""Seconds between calls of on_wait."""


class Late(Exception):
    """A call has not ended in time; it may still be running."""


class Worker:
    """Runs calls one after the other on one thread, without gradients and on the CUDA device of its maker.

    The thread is a daemon, so that a call that hangs keeps no process alive; it ends with its Worker.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue = queue.SimpleQueue()
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        threading.Thread(target=_run, args=(self._calls, device), daemon=True).start()

    def submit(self, function: Callable[..., Any], *args: Any) -> futures.Future:
        """The future result of function(*args)."""
        future: futures.Future = futures.Future()
        self._calls.put((future, function, args))
        return future

    def close(self) -> None:
        """End the thread after the call that it is at, and cancel what waits behind that. Does not wait."""
        try:
            while True:
                call = self._calls.get_nowait()
                if call is not None:
                    call[0].cancel()
        except queue.Empty:
            self._calls.put(None)

    __del__ = close


def _run(calls: queue.SimpleQueue, device: int | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)
    with torch.no_grad():
        while (call := calls.get()) is not None:
            future, function, args = call
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*args))
                except BaseException as error:
                    future.set_exception(error)
            # An idle thread must not hold the images of its last call.
            del call, future, function, args


def wait(future: futures.Future, *, timeout: float = 0.0, on_wait: Callable[[], None] = lambda: None) -> None:
    """Wait for a future to end, well or badly; on_wait is called meanwhile and may raise to stop waiting.

    Raises Late after `timeout` seconds; 0 waits for ever.
    """
    start = time.monotonic()
    while not futures.wait([future], POLL).done:
        on_wait()
        if timeout and time.monotonic() - start > timeout:
            raise Late
