"""The key of a shard that comes back, on disk beside its log or saves: each life proves the same.

Workers know a shard by the key in its endpoint (keys.py). The pair is made where the shard runs, by
its first life, and its secret half never leaves that machine; the file is its user's alone. It
holds both halves, so that a damaged one is not taken for another key.
"""

from pathlib import Path

from ps.security.keys import KeyPair
from ps.snapshots.secure_files import check_private, replace_private
from shards.errors import BadInput

_NAME, _WHAT = "key", "shard's key"


def load_or_create_keys(folder: Path) -> KeyPair:
    """The pair in a shard's `folder`, whose lock the caller holds; made if there is none.

    Raises BadInput naming the file where others may read it, or it holds no key.
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
