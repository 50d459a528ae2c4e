"""Measures the link to a shard: round trip, bandwidth each way, clock skew, CPU cost.

Small probes are timed for the round trip. For bandwidth, probes with a payload follow each other
closely, a few in flight, in rounds of growing size, until a larger round is no faster: then the
pipe is full, whatever its latency. A round's rate is measured from its first answer to its last,
which excludes the latency. Where one connection's window may be smaller than the pipe's content,
the measurement is repeated over several connections.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing

import msgspec

from ps.cluster import Cluster
from ps.security.enrolment import operator_key
from ps.security.keys import KeyPair
from ps.session.events import Unreachable
from ps.transport.shard_sockets import Links
from shards.messages import Probe, Probed, Refusal
from shards.refusals import error_of

STRIPES = 8
_ROUND_TRIPS = 9
_ROUND_TRIPS_S = 3.0
_SIZES = tuple((4 << 10) << 2 * n for n in range(6))  # 4 KiB to 4 MiB
_IN_FLIGHT = 8
_GROWTH = 1.2
_FILLS = 1.3
_MIN_S, _ENOUGH_S = 0.05, 1.0
_SHORT_BYTES = 64 << 10  # every TCP's window reaches this far
_REPEAT_S = 5.0


class LinkFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One shard's link as measured; rates in bytes a second, over one connection.

    `striped_up` and `striped_down` are the rates over STRIPES connections; equal to `up` and `down`
    where one was surely enough. `skew_s` is the shard's clock minus ours, give or take half of
    `rtt_s`. The CPU figures are seconds for a GB carried up and down again, ours and the shard's.
    """

    shard: int
    rtt_s: float
    jitter_s: float
    up: float
    down: float
    striped_up: float
    striped_down: float
    skew_s: float
    protocol: int
    schema: str
    own_cpu_s_per_gb: float
    shard_cpu_s_per_gb: float


class _Round(msgspec.Struct, frozen=True):
    size: int
    rate: float
    taken_s: float
    moved: int
    own_cpu_s: float
    shard_cpu_s: float


def measure_link(
    cluster: Cluster, shard: int, endpoints: Sequence[str], patience_s: float
) -> LinkFigures:
    """Measure the link to `shard`; takes some seconds, during which it is kept busy.

    `endpoints` are the cluster's, or local ones that lead there. Raises Unreachable naming the
    shard when it stays silent for `patience_s`, or the error that a refusal stands for.
    """

    keys = operator_key(cluster)

    def open_prober(connections: int) -> "closing[_Prober]":
        return closing(_Prober(cluster, shard, endpoints[shard], connections, patience_s, keys))

    with open_prober(1) as prober:
        trips = prober.round_trips()
        quickest = min(trips, key=lambda trip: trip.taken_s)
        rtt_s = quickest.taken_s
        up, down = prober.fill(_upwards, rtt_s), prober.fill(_downwards, rtt_s)
    most_up, most_down = up, down
    if max(up.rate, down.rate) * rtt_s > _SHORT_BYTES:
        with open_prober(STRIPES) as many:
            most_up, most_down = many.fill(_upwards, rtt_s, up), many.fill(_downwards, rtt_s, down)
    moved = up.moved + down.moved
    return LinkFigures(
        shard=shard,
        rtt_s=statistics.median(trip.taken_s for trip in trips),
        jitter_s=statistics.pstdev(trip.taken_s for trip in trips),
        up=up.rate,
        down=down.rate,
        striped_up=most_up.rate,
        striped_down=most_down.rate,
        skew_s=quickest.skew_s,
        protocol=quickest.answer.protocol,
        schema=quickest.answer.schema,
        own_cpu_s_per_gb=(up.own_cpu_s + down.own_cpu_s) / moved * 1e9,
        shard_cpu_s_per_gb=(up.shard_cpu_s + down.shard_cpu_s) / moved * 1e9,
    )


class _Trip(msgspec.Struct, frozen=True):
    taken_s: float
    skew_s: float
    answer: Probed


_Kind = Callable[[int], tuple[int, tuple[bytes, ...]]]


def _upwards(size: int) -> tuple[int, tuple[bytes, ...]]:
    """The answer's size and the frames to send, so that `size` bytes travel to the shard."""
    return 0, (bytes(size),)


def _downwards(size: int) -> tuple[int, tuple[bytes, ...]]:
    return size, ()


class _Prober:
    """Connections to one shard, and the probes in flight on them."""

    def __init__(
        self,
        cluster: Cluster,
        shard: int,
        endpoint: str,
        connections: int,
        patience_s: float,
        keys: KeyPair | None,
    ) -> None:
        self._cluster = cluster
        self._shard = shard
        self._patience_s = patience_s
        self._links = Links([endpoint] * connections, keys=keys)
        self._links.await_connections(patience_s)
        self._connections = connections
        self._request = 0
        self._sent: dict[int, tuple[int, Probe, tuple[bytes, ...]]] = {}
        self._answered: dict[int, Probed] = {}

    def close(self) -> None:
        self._links.close()

    def round_trips(self) -> list[_Trip]:
        """Time single small probes in sequence; the first is dropped, as its connection may be
        cold.
        """
        trips = [self._trip() for _ in range(2)]
        until = time.monotonic() + _ROUND_TRIPS_S
        while len(trips) <= _ROUND_TRIPS and time.monotonic() < until:
            trips.append(self._trip())
        return trips[1:]

    def _trip(self) -> _Trip:
        started, unix_s = time.monotonic(), time.time()
        request = self._send(0, 0, ())
        answer = self._await(request)
        taken_s = time.monotonic() - started
        return _Trip(taken_s, answer.unix_s - (unix_s + taken_s / 2), answer)

    def fill(self, kind: _Kind, rtt_s: float, best: _Round | None = None) -> _Round:
        """Run rounds of growing size until one fills the pipe; returns the fastest round.

        A round fills the pipe if more is in flight than rate times round trip, if it is no faster
        than the last, or if it takes long. The first size is that of an earlier `best`, which is
        returned unless a round is faster.
        """
        for size in _SIZES:
            if best is not None and size < best.size:
                continue
            this = self._round(kind, size)
            grew = best is None or this.rate >= _GROWTH * best.rate
            best = this if best is None or this.rate > best.rate else best
            filled = _IN_FLIGHT * size > _FILLS * this.rate * rtt_s
            if (filled and this.taken_s > _MIN_S) or not grew or this.taken_s > _ENOUGH_S:
                break
        assert best is not None, "there are sizes"
        return best

    def _round(self, kind: _Kind, size: int) -> _Round:
        asked, frames = kind(size)
        in_flight = max(_IN_FLIGHT, 2 * self._connections)
        probes = 2 * _IN_FLIGHT + in_flight
        started, cpu = time.monotonic(), time.process_time()
        waiting = [self._send(number, asked, frames) for number in range(in_flight)]
        first = last = self._await(waiting.pop(0))
        first_at = time.monotonic()
        for number in range(in_flight, probes):
            waiting.append(self._send(number, asked, frames))
            last = self._await(waiting.pop(0))
        for request in waiting:
            last = self._await(request)
        now = time.monotonic()
        moved = (probes - 1) * size
        return _Round(
            size=size,
            rate=moved / (now - first_at),
            taken_s=now - started,
            moved=moved,
            own_cpu_s=time.process_time() - cpu,
            shard_cpu_s=last.cpu_s - first.cpu_s,
        )

    def _send(self, number: int, asked: int, frames: tuple[bytes, ...]) -> int:
        self._request += 1
        probe = Probe(self._request, self._cluster.job, asked)
        self._sent[self._request] = number % self._connections, probe, frames
        self._links.send(*self._sent[self._request])
        return self._request

    def _await(self, request: int) -> Probed:
        """The answer to `request`.

        A probe may be lost with its connection: unanswered probes are sent again whenever nothing
        has arrived for a while.
        """
        until = time.monotonic() + self._patience_s
        while request not in self._answered:
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise Unreachable(
                    f"shard {self._shard} at {self._cluster.where(self._shard)} has not"
                    f" answered a probe for {self._patience_s:g} s",
                    self._shard,
                )
            heard = list(self._links.receive(min(left_s, _REPEAT_S)))
            for _, reply, _ in heard:
                if isinstance(reply, Refusal):
                    raise error_of(reply)
                if isinstance(reply, Probed) and reply.request in self._sent:
                    del self._sent[reply.request]
                    self._answered[reply.request] = reply
            if not heard and left_s > _REPEAT_S:
                for unanswered in self._sent.values():
                    self._links.send(*unanswered)
        return self._answered.pop(request)
