"""How each kind of fault is done to real processes: begun, kept up for its time, healed.

A fault is a context: entering it breaks something, leaving it heals. A kill is healed at once: its
victim's next life is ordered in the same breath.
"""

import os
import resource
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ps.snapshots.manifest import load_snapshot, save_snapshot
from shards.errors import GiveUp
from tests.chaos.cluster import DRIVER, Broken, Party
from tests.chaos.oracle import Stop
from tests.chaos.schedule import KILLS, LINK_KINDS, Fault, Kind, Round

_SPARE_DESCRIPTORS = 2
_OF_WORKERS = (Kind.KILL_WORKER, Kind.ABSENCE, Kind.LEAVE, Kind.STOP_WORKER, *LINK_KINDS)


class Met(NamedTuple):
    """A worker that met a fault.

    `again_s` is from the healing to the next acknowledgement, `silent_s` the longest time without
    one, from the fault's beginning to then.
    """

    kind: Kind
    worker: str
    again_s: float
    silent_s: float


def play(party: Party, told: Round) -> list[Met]:
    """Do what a round says, and wait until everyone is acknowledged again; raises Broken."""
    time.sleep(told.pause_s)
    started = time.monotonic()
    began: dict[Fault, float] = {}
    healed: dict[Fault, float] = {}
    moments = [(fault.after_s, 0, fault) for fault in told.faults]
    moments += [(fault.after_s + fault.for_s, 1, fault) for fault in told.faults]
    with ExitStack() as left:
        under_way: dict[Fault, ExitStack] = {}
        for at, healing, fault in sorted(moments):
            time.sleep(max(0.0, started + at - time.monotonic()))
            if healing:
                under_way[fault].close()
                healed[fault] = time.monotonic()
            else:
                began[fault] = time.monotonic()
                under_way[fault] = left.enter_context(ExitStack())
                under_way[fault].enter_context(_carry_out(party, fault, _seed_of(fault)))
    met = []
    for fault in told.faults:
        workers, acks = touched(party, fault), acknowledgements(fault)
        party.await_acknowledged(dict.fromkeys(workers, healed[fault]), acks)
        for worker in workers:
            again = party.records[worker].around(began[fault], healed[fault], acks)
            met.append(Met(fault.kind, worker, *again))
    party.await_whole()
    return met


def touched(party: Party, fault: Fault) -> Sequence[str]:
    """The workers that a fault may keep waiting."""
    if fault.kind is Kind.FORK:
        return [name for name in party.names if fault.target in (name, DRIVER)]
    return [fault.target] if fault.kind in _OF_WORKERS else party.names


def acknowledgements(fault: Fault) -> int:
    """How many a worker must have to be served again.

    One that was on its way when a process was killed may come after; the next is asked of the
    living.
    """
    return 2 if fault.kind in KILLS else 1


def _seed_of(fault: Fault) -> int:
    return round(1e6 * fault.for_s)


@contextmanager
def _carry_out(party: Party, fault: Fault, seed: int) -> Iterator[None]:
    match fault.kind:
        case Kind.KILL_WORKER:
            party.kill(party.pids[fault.target])
            party.await_end(party.pids[fault.target])
            party.begin(fault.target)
            yield
        case Kind.ABSENCE:
            party.kill(party.pids[fault.target])
            party.await_end(party.pids[fault.target])
            party.await_others(fault.target)
            party.begin(fault.target)
            yield
        case Kind.KILL_SHARD | Kind.KILL_BACKUP | Kind.KILL_COORDINATOR:
            party.kill_serving(fault.target)
            yield
        case Kind.LEAVE:
            party.leave(fault.target)
            party.begin(fault.target)
            yield
        case Kind.FORK:
            party.fork(fault.target)
            yield
        case Kind.MOVE:
            party.reshard()
            yield
        case Kind.STOP_WORKER:
            with _stopped(party.pids[fault.target]):
                yield
        case Kind.STOP_SHARD:
            since = time.monotonic()
            with _stopped(party.serving[fault.target]):
                yield
            _, number = fault.target.split()
            party.stops.append(Stop(int(number), since, time.monotonic()))
        case Kind.FULL_DISK:
            with _full_disk(party):
                yield
        case Kind.FUZZ | Kind.SLOW_READERS:
            with party.strangers(fault.kind, seed):
                yield
        case Kind.DESCRIPTORS:
            limited = _few_descriptors(party.serving[fault.target])
            with limited, party.strangers(fault.kind, seed):
                yield
        case _:
            with party.links[fault.target].cut(fault.kind):
                yield


@contextmanager
def _stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextmanager
def _few_descriptors(pid: int) -> Iterator[None]:
    """Leave a process hardly any file descriptor beyond those that it has open."""
    former = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    taken = 1 + max(int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir())
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (taken + _SPARE_DESCRIPTORS, former[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, former)


@contextmanager
def _full_disk(party: Party) -> Iterator[None]:
    """Fill the small disk, and try a snapshot; then make room, and try again.

    The one that did not fit must say so and leave the one before it as it was.
    """
    good, bad = party.disk / "1", party.disk / "2"
    _snapshot(party, good)
    ballast = party.disk / "ballast"
    free = shutil.disk_usage(party.disk).free
    with ballast.open("wb") as file, suppress(OSError):
        file.write(bytes(max(0, free - 4096)))
    try:
        _snapshot(party, bad)
    except GiveUp as error:
        expected = f"snapshot {bad}: No space left on device; earlier snapshots are intact"
        if str(error) != expected:
            raise Broken(f"expected {expected!r}, got {str(error)!r}") from None
    else:
        raise Broken(f"snapshot {bad} fits on a full disk of {free} free bytes")
    party.check_snapshot(load_snapshot(good)[1])
    try:
        yield
    finally:
        ballast.unlink()
    _snapshot(party, bad)
    party.check_snapshot(load_snapshot(bad)[1])


def _snapshot(party: Party, folder: Path) -> None:
    told = party.hosts.cluster
    save_snapshot(
        folder,
        party.states(),
        layout=told.layout,
        shard_map=told.map,
        rules=("sgd",),
        workers=party.plan.workers,
    )
