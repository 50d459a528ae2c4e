"""Files that are there whole or not at all, whenever their writer is killed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Another path to write to, for the code inside; at its end the file there becomes `path`.

    If that code fails, `path` holds what it held before. Raises the OSError of a rename that fails.
    """
    partial = path.with_suffix(f".{os.getpid()}.part")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
