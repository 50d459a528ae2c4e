"""Checks paths that callers pass, as shards/argument_checks.py checks other arguments."""

import os
from pathlib import Path

from shards.argument_checks import wrong
from shards.errors import BadInput

MAX_NAME_BYTES, MAX_PATH_BYTES = 255, 4095  # of Linux's file systems


def path(argument: str, value: object) -> Path:
    """The path of a file or folder, from a string or a path; raises BadInput naming `argument`."""
    if isinstance(value, str | os.PathLike):
        plain = os.fspath(value)
        if isinstance(plain, str) and plain and "\0" not in plain:
            _check_length(argument, plain)
            return Path(plain)
    raise wrong(argument, "a path", value)


def _check_length(argument: str, plain: str) -> None:
    try:
        encoded = os.fsencode(plain)
    except UnicodeEncodeError:  # half a surrogate pair
        raise wrong(argument, "a path", plain) from None
    if len(encoded) > MAX_PATH_BYTES:
        raise wrong(argument, f"a path of at most {MAX_PATH_BYTES} bytes", plain)
    if max(map(len, encoded.split(b"/"))) > MAX_NAME_BYTES:
        raise wrong(argument, f"a path with names of at most {MAX_NAME_BYTES} bytes", plain)


def refuse_pipe(file: Path) -> None:
    """Raise BadInput for a named pipe: to open one waits for its writer, perhaps for ever."""
    if file.is_fifo():
        raise BadInput(file, expected="a file", got="a pipe")


def place(argument: str, value: object) -> str | Path:
    """A path, or a URI unchanged; raises BadInput naming `argument`."""
    return value if isinstance(value, str) and "://" in value else path(argument, value)
