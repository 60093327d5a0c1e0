"""Output that may lose its reader: a run goes on when `| head`, a terminal or a notebook has gone."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import TextIO


class Output:
    """A text stream whose write errors end its output and nothing else; all else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | None = None
        """What went wrong first, where it was not that the reader went away."""

    def write(self, text: str) -> int:
        """Write, or drop the text where nobody can read it; returns its length."""
        try:
            self._stream.write(text)
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            self._drop(error)
        return len(text)

    def writelines(self, lines) -> None:
        """Write each line."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush, or drop what is left where nobody can read it."""
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._drop(error)

    def _drop(self, error: Exception) -> None:
        """Send what follows, and what is still in buffers, to nowhere."""
        if isinstance(error, (UnicodeError, BlockingIOError)):
            return  # this text is lost; the next may be written
        if isinstance(error, OSError) and error.errno not in (errno.EPIPE, errno.EIO, errno.EBADF):
            self.error = self.error or error
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(nowhere, self._stream.fileno())
            finally:
                os.close(nowhere)
            self._stream.flush()

    def __getattr__(self, name: str):
        return getattr(self._stream, name)


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Within, and at the interpreter's end, writing to stdout and stderr never fails, were they closed or None."""
    before = sys.stdout, sys.stderr
    if None in before:
        # Files that the run opens must not become descriptors 1 and 2, where libraries print.
        while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(number)
    sys.stdout, sys.stderr = (
        Output(open(os.devnull, "w", encoding="utf-8") if stream is None else stream) for stream in before
    )
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before
