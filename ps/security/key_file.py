"""Stores the key of a restartable shard next to its WAL or autosaves, so that a restart keeps it.

Workers know a shard by the key in its endpoint (keys.py). The shard's first process makes the pair
on the machine where it runs, and the secret half never leaves that machine. The file is readable by
its user only. It holds both halves, so that a damaged file is not mistaken for another key.
"""

from pathlib import Path

from ps.security.keys import KeyPair
from ps.snapshots.secure_files import check_private, replace_private
from shards.errors import BadInput

_NAME, _WHAT = "key", "shard's key"


def load_or_create_keys(folder: Path) -> KeyPair:
    """The key pair in a shard's `folder`, created if missing; the caller holds the folder's lock.

    Raises BadInput naming the file if others may read it, or if it holds no key.
    """
    path = folder / _NAME
    try:
        if path.exists():
            check_private(path, _WHAT)
            return _read(path)
        keys = KeyPair.new()
        replace_private(path, f"{keys.secret} {keys.public}".encode())
    except OSError as error:
        raise BadInput(f"{_WHAT}: {path}: {error.strerror}") from None
    return keys


def _read(path: Path) -> KeyPair:
    secret, _, public = path.read_text(errors="replace").partition(" ")
    try:
        keys = KeyPair.of(secret)
        if keys.public != public:
            raise BadInput("key: expected two halves of one pair, got others: it is damaged")
        return keys
    except BadInput as error:
        raise BadInput(f"{_WHAT}: {path}: {str(error).removeprefix('key: ')}") from None
