"""One way to wait for what other threads and processes do."""

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")

_PAUSE_S = 0.01


def eventually(
    condition: Callable[[], Found],
    *,
    because: str | Callable[[], str],
    within_s: float = 120.0,
    check: Callable[[], object] | None = None,
) -> Found:
    """Call `condition` until its result is true, and return that.

    `because` says what is awaited. Where it has not come within `within_s` seconds, which leave
    time for a busy machine, that is the message of an AssertionError. `check`, if any, is called
    before each pause, and raises when the wait is in vain.
    """
    give_up_at = time.monotonic() + within_s
    while not (found := condition()):
        if check is not None:
            check()
        if time.monotonic() > give_up_at:
            awaited = because if isinstance(because, str) else because()
            raise AssertionError(f"not within {within_s:g} s: {awaited}")
        time.sleep(_PAUSE_S)
    return found
