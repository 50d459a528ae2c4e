"""A fake device that runs work as late as possible, and records work that might run too early.

Copies and kernels are queued with what they read and write. Nothing runs before the host joins a
mark that it comes before; so host memory that is written while a copy from it is under way, or read
before one to it is done, gives wrong values. Between streams, and on the device, vector clocks
decide (Mattern 1989): two uses of one array, one of them a write, of which neither was made to come
before the other, are a hazard, whatever the outcome here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cupy_kernels.types import AnyArray
from worker.training.device import CannotCapture, Mark, Stream

Clock = dict[str, int]
HOST = "host"


@dataclass(frozen=True)
class Work:
    """A copy or a kernel."""

    name: str
    run: Callable[[], None]
    reads: Sequence[AnyArray]
    writes: Sequence[AnyArray]


@dataclass
class Queue:
    """A stream: its clock, and what waits in it behind the marks that must be reached first."""

    name: str
    clock: Clock
    waiting: list[tuple[Work, Clock]] = field(default_factory=list)
    done: int = 0


@dataclass
class _Uses:
    written: Clock = field(default_factory=dict)
    read: Clock = field(default_factory=dict)
    by: dict[str, str] = field(default_factory=dict)


class FakeDevice:
    """See `worker.device.Device`.

    `hazards` are those found, `made` counts its allocations, and `queued` lists each work with its
    clock: what it waits for.
    """

    def __init__(self) -> None:
        self.hazards: list[str] = []
        self.made = 0
        self.queued: list[tuple[str, Clock]] = []
        self.captures = self.replays = 0
        self.refuses_capture: str | None = None
        self._host: Clock = {HOST: 0}
        self._queues: dict[str, Queue] = {}
        self._uses: dict[int, _Uses] = {}
        self._kept: list[object] = []
        self._current: list[Queue | None] = []
        self._recording: list[Work] | None = None

    @contextmanager
    def use(self, stream: Stream | None = None) -> Iterator[None]:
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    def stream(self) -> Stream:
        assert self._current, "used outside `use`"
        name = ("up", "compute", "down")[len(self._queues) % 3] + str(len(self._queues) // 3 or "")
        self._queues[name] = Queue(name, {name: 0})
        return self._queues[name]

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> AnyArray:
        assert self._current, "used outside `use`"
        array = self.allocate(shape, dtype)
        array.fill(0)
        self._keep(array)
        return array

    def allocate(self, shape: tuple[int, ...], dtype: DTypeLike) -> AnyArray:
        """New memory of the device."""
        return np.empty(shape, dtype)

    def allocate_pinned(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        array: NDArray[Any] = np.ndarray(shape, dtype, buffer=bytearray(size))
        self._keep(array)
        return array

    def upload(self, source: NDArray[Any], target: AnyArray, stream: Stream) -> None:
        self._copy("upload", source, target, stream)

    def copy(self, source: AnyArray, target: AnyArray, stream: Stream) -> None:
        self._copy("copy", source, target, stream)

    def download(self, source: AnyArray, target: NDArray[Any], stream: Stream) -> None:
        self._copy("download", source, target, stream)

    def mark(self, stream: Stream) -> Mark:
        return dict(stream.clock)

    def wait(self, stream: Stream, mark: Mark) -> None:
        _merge(stream.clock, mark)

    def join(self, mark: Mark) -> None:
        _merge(self._host, mark)
        self._reach(mark)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        if self.refuses_capture is not None:
            raise CannotCapture(self.refuses_capture)
        self.captures += 1
        recorded = self._recording = []
        try:
            work()
        finally:
            self._recording = None
        stream = self._current[-1]

        def replay() -> None:
            assert self._current[-1] is stream
            self.replays += 1
            for each in recorded:
                self.queue(each)

        return replay

    @property
    def captures_now(self) -> bool:
        """Whether a step is being captured."""
        return self._recording is not None

    def queue(self, work: Work, stream: Queue | None = None) -> None:
        """Put work at the end of a stream (the one in use), or into the graph being captured."""
        queue = stream or self._current[-1]
        assert queue is not None, f"{work.name}: no stream is in use"
        if self._recording is not None:
            self._recording.append(work)
            return
        _merge(queue.clock, self._host)  # What the host did before it queued this came before it.
        queue.clock[queue.name] += 1
        for array in work.reads:
            self._use(queue, array, work.name, writes=False)
        for array in work.writes:
            self._use(queue, array, work.name, writes=True)
        queue.waiting.append((work, dict(queue.clock)))
        self.queued.append((work.name, dict(queue.clock)))

    def host_writes(self, array: NDArray[Any]) -> None:
        """Note that the host writes to page-locked memory just now."""
        self._host[HOST] += 1
        self._use_by(HOST, self._host, array, "the host", writes=True)

    def _copy(self, name: str, source: AnyArray, target: AnyArray, stream: Queue) -> None:
        assert source.shape == target.shape
        assert source.dtype == target.dtype
        assert self._recording is None, f"{name}: between host and device within a capture"
        into, out_of = np.asarray(target).view(np.ndarray), np.asarray(source).view(np.ndarray)

        def run() -> None:
            into[...] = out_of

        self.queue(Work(name, run, (source,), (target,)), stream)

    def _reach(self, mark: Mapping[str, int]) -> None:
        """Run what comes before a mark, each work after what it waits for."""
        for name, until in mark.items():
            queue = self._queues.get(name)
            while queue is not None and queue.done < until:
                work, clock = queue.waiting[0]
                self._reach({other: at for other, at in clock.items() if other != name})
                queue.waiting.pop(0)
                queue.done += 1
                work.run()

    def _use(self, queue: Queue, array: AnyArray, work: str, *, writes: bool) -> None:
        self._use_by(queue.name, queue.clock, array, f"{work} on {queue.name}", writes=writes)

    def _use_by(
        self, agent: str, clock: Clock, array: AnyArray, what: str, *, writes: bool
    ) -> None:
        uses = self._uses.setdefault(_root(array), _Uses())
        earlier = dict(uses.written)
        if writes:
            _merge(earlier, uses.read)
        for other, at in earlier.items():
            if clock.get(other, 0) < at:
                self.hazards.append(
                    f"{what} {'writes' if writes else 'reads'} while {uses.by[other]} may run"
                )
        (uses.written if writes else uses.read)[agent] = clock[agent]
        uses.by[agent] = what

    def _keep(self, array: AnyArray) -> None:
        """Keep its memory: arrays are identified by address, so no address may be reused."""
        self.made += 1
        self._kept.append(array.base if array.base is not None else array)


def _merge(clock: Clock, other: Mapping[str, int]) -> None:
    for name, at in other.items():
        clock[name] = max(clock.get(name, 0), at)


def _root(array: AnyArray) -> int:
    """The address of the allocation that an array is part of."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array.ctypes.data
