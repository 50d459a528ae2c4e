"""The build id: a digest of the code that both ends of a connection must share.

Two ends with different code may agree on every header and still interpret it differently, so a
Hello names the build and a shard refuses any other. Files are read through `importlib.resources`,
so the id is the same from a checkout, a wheel and a zip on an executor's path.
"""

import hashlib
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

_PACKAGES = ("cupy_kernels", "shards", "ps", "worker")


@cache
def build_id() -> str:
    """Sixteen hexadecimal digits over the source of every package that runs on both sides."""
    digest = hashlib.sha256()
    for package in _PACKAGES:
        _add(digest, files(package), package)
    return digest.hexdigest()[:16]


def _add(digest: "hashlib._Hash", folder: Traversable, path: str) -> None:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        name = f"{path}/{entry.name}"
        if entry.is_dir() and entry.name != "__pycache__":
            _add(digest, entry, name)
        elif entry.name.endswith((".py", ".cu", ".cuh")):
            digest.update(name.encode() + b"\0" + entry.read_bytes())
