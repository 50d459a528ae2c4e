"""Checks paths that callers pass, as shards/argument_checks.py checks other arguments."""

import os
from pathlib import Path

from shards.argument_checks import wrong


def path(what: str, value: object) -> Path:
    """The path of a file or folder, from a string or a path; raises BadInput naming `what`."""
    if isinstance(value, str | os.PathLike):
        plain = os.fspath(value)
        if isinstance(plain, str) and plain and "\0" not in plain:
            return Path(plain)
    raise wrong(what, "a path", value)


def place(what: str, value: object) -> str | Path:
    """A path, or a URI unchanged; raises BadInput naming `what`."""
    return value if isinstance(value, str) and "://" in value else path(what, value)
