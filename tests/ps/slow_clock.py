"""A shard whose driver is held up by a push, in the driver's own time: nobody waits for it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ps import AdminClient
from shards.messages import Standing
from shards.updates import Updates


@contextmanager
def held_up(driver: ModuleType, seconds: float) -> Iterator[list[float]]:
    """Each push that is applied takes so long by the clock that `driver` reads; gives them."""
    spent: list[float] = []

    def bring(*arguments: Any) -> Any:
        spent.append(seconds)
        return original(*arguments)

    original = Updates.apply_push
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + sum(spent))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Updates, "bring", bring)
        patch.setattr(driver, "time", clock)
        yield spent


def standings(console: AdminClient) -> dict[str, Standing]:
    """How each worker stands with the one shard."""
    (status,) = console.status()
    return {worker.worker: worker.standing for worker in status.workers}
