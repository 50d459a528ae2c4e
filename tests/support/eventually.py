"""One way to wait for what other threads and processes do."""

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")

_PAUSE_S, _LONGEST_S = 0.01, 0.25


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

    A pause is three times as long as the call: asking a service, or looking through all processes,
    would otherwise keep busy the core that what is awaited needs.
    """
    give_up_at = time.monotonic() + within_s
    asked_at = time.monotonic()
    while not (found := condition()):
        pause_s = 3 * (time.monotonic() - asked_at)
        if check is not None:
            check()
        if time.monotonic() > give_up_at:
            awaited = because if isinstance(because, str) else because()
            raise AssertionError(f"not within {within_s:g} s: {awaited}")
        time.sleep(min(max(pause_s, _PAUSE_S), _LONGEST_S))
        asked_at = time.monotonic()
    return found
