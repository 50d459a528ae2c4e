"""Secret files: readable only by the current user. Permissions are verified, not assumed."""

import os
import stat
from pathlib import Path

from ps.storage import flush
from shards.errors import BadInput

_PARTIAL = ".partial"
_REPLACE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def check_private(path: Path, what: str) -> None:
    """Raise BadInput unless `path` is this user's file and no other user may read or write it."""
    try:
        found = path.stat()
    except OSError as error:
        raise BadInput(f"{what}: {path}: {error.strerror}") from None
    if not stat.S_ISREG(found.st_mode):
        raise BadInput(f"{what}: {path}", expected="a file", got="something else")
    if found.st_uid != os.geteuid() or found.st_mode & _OTHERS:
        mode = stat.S_IMODE(found.st_mode)
        raise BadInput(
            f"{what}: {path}",
            expected="a file of yours of mode 600",
            got=f"one of mode {mode:03o} of user {found.st_uid}: chmod 600 {path}",
        )


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only this user can read at any moment."""
    path.touch(mode=0o600)
    path.chmod(0o600)  # it may have existed with another mode
    path.write_bytes(content)


def replace_private(path: Path, content: bytes) -> None:
    """Replace such a file atomically and durably: it survives a power failure on return."""
    partial = path.with_name(path.name + _PARTIAL)
    try:
        with os.fdopen(os.open(partial, _REPLACE, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    flush(path.parent)
