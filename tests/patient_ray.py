"""Ray as it starts on a machine with too much to do: `ray`'s own command, or in this process.

Ray gives a node 30 s to tell of itself, which can't be set; here it has minutes.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
                if time.monotonic() > until:
                    raise

    services.get_node = awaited
    try:
        yield
    finally:
        services.get_node = get_node


if __name__ == "__main__":
    from ray.scripts.scripts import main

    with patient():
        main()
