"""This user's folder for files that can be made again."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from shards.errors import BadInput


def cache_folder(environ: Mapping[str, str]) -> Path:
    """The folder, which may not exist; raises BadInput if the user has no home."""
    try:
        return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "downpour"
    except RuntimeError:
        raise BadInput(
            "the cache folder",
            expected="XDG_CACHE_HOME or HOME to be set",
            got=f"neither, and no home of user {os.getuid()}",
        ) from None


def make_digest(text: str) -> str:
    """Twelve hexadecimal digits of a text, for the name of a file that is made from it."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@contextmanager
def report_unwritable(what: str, hint: str) -> Iterator[None]:
    """Turn an OSError of the block, which writes `what`, into a BadInput with this hint."""
    try:
        yield
    except OSError as error:
        raise BadInput(what, expected="to write it", got=error.strerror, hint=hint) from None
