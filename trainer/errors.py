"""The one error that a user can mend: its message is printed as it is, and the program exits with its code, 2."""

from pathlib import Path


class UserError(Exception):
    """Something that the user typed or set up is wrong; the message says what, and what to do."""

    code = 2
    """The exit code."""

    def __init__(self, message: str, *, of_all: bool = False) -> None:
        """of_all: every process of the run raises the same."""
        super().__init__(message)
        self.of_all = of_all


def out_folder(text: str) -> Path:
    """The folder of `--out`. Raises UserError where none is named, which would be the working directory."""
    if not text.strip():
        raise UserError("--out needs a folder; name one")
    return Path(text)
