"""Files of a run folder, written whole or not at all."""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import UserError


class WriteError(UserError):
    """A file of the run folder could not be written; `words` says which and why."""

    code = 1

    def __init__(self, path: Path, why: OSError) -> None:
        self.words = f"cannot write {path}: {why.strerror or why}"
        super().__init__(self.words)

    def with_safe(self, safe: str) -> UserError:
        """The same error with what is safe and what to do."""
        error = UserError(f"{self.words}; {safe}; make room or mend the folder, then start again with another --out")
        error.code = self.code
        return error


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Within, an OSError becomes a WriteError of this path."""
    try:
        yield
    except OSError as error:
        raise WriteError(path, error) from error


def append_line(path: Path, line: str) -> None:
    """Append a line whole or not at all. Raises OSError."""
    data = memoryview((line + "\n").encode())
    with path.open("ab", buffering=0) as file:
        size = file.seek(0, io.SEEK_END)
        try:
            while data:
                data = data[file.write(data) :]
        except BaseException:
            file.truncate(size)
            raise


def write_whole(path: Path, data: bytes | str) -> None:
    """Write a file whole, or leave what was there. Raises OSError."""
    from sfgrpo.export import replace

    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(data.encode() if isinstance(data, str) else data)
        replace(part, path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def write_png(path: Path, image) -> None:
    """Write a PIL image as PNG, whole or not at all. Raises OSError."""
    data = io.BytesIO()
    image.save(data, "PNG")
    write_whole(path, data.getvalue())


def events_writer(folder: Path) -> Any:
    """A SummaryWriter of TensorBoard events in a folder, whose errors are raised where it is called and not printed."""
    from torch.utils.tensorboard import SummaryWriter

    tell = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        # Its thread hands the error on to the next call, and would print a traceback besides.
        if not (type(args.thread).__name__ == "_AsyncWriterThread" and isinstance(args.exc_value, OSError)):
            tell(args)

    threading.excepthook = hook
    return SummaryWriter(str(folder))
