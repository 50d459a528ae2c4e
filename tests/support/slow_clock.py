"""A shard whose driver is delayed by a push on the driver's own clock: no test waits for it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ps import AdminClient
from shards.shard_status import Standing
from shards.updates import Updates


@contextmanager
def held_up(driver: ModuleType, seconds: float) -> Iterator[list[float]]:
    """Each applied push takes `seconds` by the clock that `driver` reads; yields their list."""
    spent: list[float] = []

    def apply(*arguments: Any) -> Any:
        spent.append(seconds)
        return original(*arguments)

    original = Updates.apply
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + sum(spent))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Updates, "apply", apply)
        patch.setattr(driver, "time", clock)
        yield spent


def standings(console: AdminClient) -> dict[str, Standing]:
    """How each worker stands with the one shard."""
    (status,) = console.status()
    return {worker.worker: worker.standing for worker in status.workers}
