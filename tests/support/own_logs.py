"""The set-up of logs in a block, undone at its end: it belongs to a whole process."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ps import logs


@contextmanager
def own_logs() -> Iterator[None]:
    root, hook = logging.getLogger(logs.ROOT), threading.excepthook
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers[:], threading.excepthook = handlers, hook
        root.setLevel(level)
