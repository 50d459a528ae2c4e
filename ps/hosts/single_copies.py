"""Shards of one copy each: started, waited for, started again where they have a log, and ended.

The same for processes (process_host.py) and for Ray actors (ray_host.py).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from msgspec.structs import replace

from ps.cluster import Cluster
from ps.hosts import supervision
from ps.hosts.hosting import START_S, bind_again, recovery_s
from ps.hosts.pipe import Order
from ps.hosts.supervision import Kept


class Child(supervision.Child, Protocol):
    """A shard's process or actor, which can be ended for good."""

    deaths: int
    """None, for it has but one life; whoever keeps it counts those of all."""

    def check(self) -> None:
        """Raise GiveUp with how it ended, if it has."""
        ...

    def end(self) -> None:
        """Wait until it has ended; kill it when that takes long."""
        ...


C = TypeVar("C", bound=Child)


class SingleCopies(Generic[C]):
    """The shards of one job, one child each, and the cluster they form."""

    risk = ""  # there are no second copies to miss

    def __init__(self, cluster: Cluster, children: Sequence[C | Kept[C]]) -> None:
        self.cluster = cluster
        self._children = children

    @property
    def deaths(self) -> int:
        """How often one has died, serving or about to, and another was to take its place."""
        return sum(child.deaths for child in self._children)

    def check(self) -> None:
        """Raise GiveUp naming a shard that has died for good or whose loop has failed, and how."""
        for child in self._children:
            child.check()

    def _present(self) -> list[C]:
        return [one.child if isinstance(one, Kept) else one for one in self._children]


Start = Callable[[Order, C | None], C]
"""Starts a shard without waiting for it: the first time, or in the place of one that has died."""


@contextmanager
def serving(
    orders: Sequence[Order], start: Start[C]
) -> Iterator[tuple[list[str], Sequence[C | Kept[C]]]]:
    """One child an order while the context lasts, and where each listens.

    One that keeps a log is followed by another on the same endpoint when it dies (supervision.py).
    Raises what a child's `endpoint` does, for one that does not come to serve.
    """
    children: list[C] = []
    kept: list[Kept[C]] = []
    try:
        for order in orders:
            # One by one, so that `finally` knows of each even if the next does not start.
            children.append(start(order, None))  # noqa: PERF401  # for that reason
        until = time.monotonic() + START_S
        endpoints = [child.endpoint(until) for child in children]
        if all(order.durability.keeps_log for order in orders):
            kept += [
                _kept(child, order, endpoint, start)
                for child, order, endpoint in zip(children, orders, endpoints, strict=True)
            ]
        yield endpoints, kept or children
    finally:
        for one in kept or children:
            one.ask_to_end()
        for one in kept or children:
            one.end()


def _kept(child: C, order: Order, endpoint: str, start: Start[C]) -> Kept[C]:
    again = replace(order, bind=bind_again(order.bind, endpoint))
    spec = order.spec
    values = sum(map(len, spec.map.ranges[spec.shard]))
    return Kept(child, lambda: start(again, child), recovery_s(values, spec.rule))
