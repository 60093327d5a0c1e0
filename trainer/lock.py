"""One run at a time in a folder: a lock that the kernel frees when the process ends, however it ends."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path

from .errors import UserError

FILE = ".lock"
BYTE = 1 << 30
"""Windows locks bytes against reading too: one far behind the text."""


class FolderLock:
    """The lock of a run folder, taken by `take` and freed at the end of the `with` block."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / FILE
        self._number: int | None = None
        if hasattr(os, "register_at_fork"):
            # A child shares the open file: one that outlives a killed run, as a reward's worker may, would hold it.
            os.register_at_fork(after_in_child=self._let_go)

    def take(self) -> None:
        """Make the folder and lock it. Raises UserError, with its holder's name, where another run has it.

        Goes on without a lock where the folder cannot be written, or its file system has no locks.
        """
        while self._number is None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                number = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            except OSError:
                return
            try:
                free = _lock(number)
            except OSError:
                os.close(number)
                return
            if not free:
                holder = _read(number)
                os.close(number)
                raise UserError(
                    f"{self.folder} is in use by another run ({holder}); wait until it ends, or choose another --out"
                )
            if _is(number, self.path):
                self._number = number
            else:
                os.close(number)  # its last holder has removed the file meanwhile
        with contextlib.suppress(OSError):
            os.ftruncate(self._number, 0)
            begun = time.strftime("%Y-%m-%d %H:%M:%S")
            os.write(self._number, f"process {os.getpid()} on {socket.gethostname()}, begun {begun}".encode())

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *error: object) -> None:
        if self._number is None:
            return
        with contextlib.suppress(OSError):
            if _is(self._number, self.path):
                self.path.unlink()
        self._let_go()

    def _let_go(self) -> None:
        number, self._number = self._number, None
        if number is not None:
            with contextlib.suppress(OSError):
                os.close(number)


def _lock(number: int) -> bool:
    """Whether an open file could be locked. Raises OSError where files cannot be locked at all."""
    if os.name == "nt":
        import msvcrt

        os.lseek(number, BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(number, msvcrt.LK_NBLCK, 1)
        except PermissionError:
            return False
        finally:
            os.lseek(number, 0, os.SEEK_SET)
        return True
    import fcntl

    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(number: int) -> str:
    try:
        return os.pread(number, 200, 0).decode(errors="replace") if os.name != "nt" else os.read(number, 200).decode()
    except OSError:
        return ""


def _is(number: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(number), path.stat())
    except OSError:
        return False
