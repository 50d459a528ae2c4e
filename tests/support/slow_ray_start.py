"""Ray as it starts on a machine with too much to do: `ray`'s own command, or in this process.

Ray gives a node 30 s to tell of itself, which can't be set; here it has minutes, as long as its
raylet lives: that one waits 15 s for its agents, and dies if they are late.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
from ray._private import services

_PATIENCE_S = 200.0


@contextmanager
def patient() -> Iterator[None]:
    """Whoever starts Ray meanwhile has patience with its node."""
    get_node = services.get_node

    def awaited(*arguments: Any) -> Any:
        until = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return get_node(*arguments)
            except RuntimeError:
                if time.monotonic() > until or _raylet_is_dead():
                    raise
                time.sleep(0.1)

    services.get_node = awaited
    try:
        yield
    finally:
        services.get_node = get_node


def _raylet_is_dead() -> bool:
    """Whether one that was started here has ended; its parent has yet to hear of it."""
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if child.name() == "raylet" and child.status() == psutil.STATUS_ZOMBIE:
                return True
    return False


if __name__ == "__main__":
    from ray.scripts.scripts import main

    with patient():
        main()
