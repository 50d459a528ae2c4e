"""Secret files: readable only by the current user. Permissions are verified, not assumed."""

import os
import stat
from pathlib import Path

from ps.whole_files import Flush, whole_file
from shards.errors import BadInput

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def check_private(path: Path, label: str) -> None:
    """Raise BadInput unless `path` is this user's file and no other user may read or write it."""
    try:
        status = path.stat()
    except OSError as error:
        raise BadInput(f"{label}: {path}: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise BadInput(f"{label}: {path}", expected="a file", got="something else")
    if status.st_uid != os.geteuid() or status.st_mode & _OTHERS:
        mode = stat.S_IMODE(status.st_mode)
        raise BadInput(
            f"{label}: {path}",
            expected="a file of yours of mode 600",
            got=f"one of mode {mode:03o} of user {status.st_uid}: chmod 600 {path}",
        )


def replace_private(path: Path, content: bytes) -> None:
    """Replace a private file atomically and durably: it survives a power failure on return."""
    with whole_file(path, flush=Flush.NAME, private=True) as partial:
        partial.write_bytes(content)
