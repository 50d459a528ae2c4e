"""The supervisor where a coordinator or a copy cannot live. No processes, and no waiting."""

from collections.abc import Callable, Collection, Iterator
from itertools import pairwise
from types import SimpleNamespace

import pytest

from ps.launch import replica_supervisor
from ps.launch.child_protocol import CoordinatorLaunch, CopyLaunch
from ps.launch.launch_plan import LaunchPlan
from ps.launch.process_handle import ExitReason, ProcessHandle
from ps.launch.replica_supervisor import ReplicatedShards
from ps.transport.coordinator_messages import PrimaryInfo
from shards.errors import WrongBuild
from tests.support.replicated_job import specs_of

BROKEN = "failed: coordinator's record r: file is not a database"
KILLED = "died: its process was ended by signal 9 (Killed)"


class Life(ProcessHandle):
    """A process that has `died` of something, or lives; without a `pid` it has not reported yet."""

    pid: int | None = None

    def __init__(
        self, died: str = "", pid: int | None = 1, build: str = "", name: str = "shard 0"
    ) -> None:
        self.died, self.pid, self.build, self.name = died, pid, build, name

    @property
    def alive(self) -> bool:
        return not self.died

    def endpoint(self, until: float) -> str:
        if self.build:
            raise WrongBuild(self.build)
        return "tcp://127.0.0.1:1"

    def wait(self) -> ExitReason:
        return ExitReason(self.died, reported=False)

    def ask_to_end(self) -> None:
        self.died = "ended"

    def stop(self) -> None: ...

    def close(self) -> None: ...


class Host:
    """Starts coordinators that all die of the same cause, and copies that live."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.dies_of = BROKEN
        self.began: list[float] = []
        self.copies: list[Life] = []
        self.next: Callable[[], Life] = Life
        self.primaries: dict[int, PrimaryInfo] = {}
        self.machines = 1
        self.places: dict[int, str] = {}  # of a copy, where it is not "old"
        self.goes = "new"  # where the next ones come up

    def coordinator(self, order: CoordinatorLaunch) -> Life:
        self.began.append(self.now)
        return Life(self.dies_of, name="coordinator")

    def copy(self, order: CopyLaunch, near: Collection[int]) -> Life:
        self.copies.append(self.next())
        self.places[order.boot] = self.goes
        return self.copies[-1]

    def same_machine(self, boot: int, other: int) -> bool:
        return self.places.get(boot, "old") == self.places.get(other, "old")

    def has_other_machine(self, boot: int) -> bool:
        return self.machines > 1

    # --- the guide to the coordinator ---

    def ask(self, *, again: bool) -> None: ...

    def listen(self, timeout_s: float) -> bool:
        self.now += timeout_s
        return not self.dies_of


class Kept:
    """A shard of two copies with a supervisor that the test drives, on a clock of its own."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.hosts = ReplicatedShards(LaunchPlan(specs=specs_of()), host, "r")
        self.hosts._resolver = host  # type: ignore[assignment]
        self.primary, self.backup = Life(), Life()
        self.hosts._coordinator = host.coordinator(self.hosts._order)
        self.hosts._copies = {1: (0, self.primary), 2: (0, self.backup)}
        self.hosts._boot = 2
        self.hosts._offered = {0: (2, host.now)}
        self.hosts._heard_at = host.now
        host.primaries = {0: PrimaryInfo(0, 1, 1, 2, [1, 2], "", under_replicated=False)}
        self.hosts._primaries = dict(host.primaries)

    def supervise_for(self, seconds: float) -> None:
        until = self.host.now + seconds
        while self.host.now < until:
            self.hosts._keep()


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    host = Host()
    clock = SimpleNamespace(monotonic=lambda: host.now, time_ns=lambda: 0)
    monkeypatch.setattr(replica_supervisor, "time", clock)
    kept = Kept(host)
    yield kept
    kept.hosts._stop()


def test_a_coordinator_that_cannot_live(kept: Kept) -> None:
    """It is restarted at growing intervals, and its cause of death reported until one lives."""
    assert kept.hosts.degraded_reason == ""
    kept.supervise_for(300.0)
    began = kept.host.began[1:]
    pauses = [after - before for before, after in pairwise(began)]
    assert [round(pause / 2) * 2 for pause in pauses] == [2, 4, 8, 16, 32, 60, 60, 60]
    assert kept.hosts.degraded_reason == f"no coordinator answers: coordinator has {BROKEN}"
    kept.hosts.check()
    kept.host.dies_of = ""
    kept.supervise_for(61.0)
    assert kept.hosts.degraded_reason == ""
    assert len(kept.host.began) == len(began) + 2


def test_a_copy_that_nobody_follows(kept: Kept) -> None:
    """The shard continues with one copy, and the report says how the other ended."""
    kept.host.dies_of = ""
    kept.supervise_for(3.0)
    assert kept.hosts.degraded_reason == ""
    kept.backup.died = KILLED
    kept.host.primaries = {0: PrimaryInfo(0, 1, 1, None, [1], "", under_replicated=True)}
    kept.supervise_for(3.0)
    assert len(kept.host.copies) == 1
    assert kept.hosts.degraded_reason == f"shard 0 has one copy only: shard 0 has {KILLED}"


def test_a_backup_goes_where_it_would_not_die_with_its_primary(kept: Kept) -> None:
    """A backup moves once there is another machine and a process there serves; not before.

    The primary is not interrupted, and when the new backup is in sync nothing more is done.
    """
    kept.host.dies_of = ""
    kept.supervise_for(120.0)
    assert kept.host.copies == [], "there is nowhere to go"
    kept.host.machines = 2
    kept.host.next = lambda: Life(pid=None)
    kept.supervise_for(60.0)
    (spare,) = kept.host.copies
    assert kept.hosts.redundant, "it has not reported that it serves"
    boot, _ = kept.hosts._offered[0]
    spare.pid = 2
    kept.supervise_for(6.0)
    assert (kept.primary.alive, kept.backup.alive, spare.alive) == (True, False, True)
    assert (
        kept.hosts.degraded_reason
        == "shard 0 has one copy only: the other moves to another machine"
    )
    kept.hosts.check()
    kept.host.primaries = {0: PrimaryInfo(0, 2, 1, boot, [1, boot], "", under_replicated=False)}
    kept.supervise_for(120.0)
    assert kept.host.copies == [spare]
    assert (kept.primary.alive, spare.alive, kept.hosts.degraded_reason) == (True, True, "")


@pytest.mark.parametrize(("comes_up", "build"), [("old", ""), ("new", "another build")])
def test_a_backup_stays_where_none_comes_elsewhere(kept: Kept, comes_up: str, build: str) -> None:
    """A spare on the same machine, or of another build, is useless: it is ended.

    The next one is tried half a minute later.
    """
    kept.host.dies_of, kept.host.machines = "", 2
    kept.host.next, kept.host.goes = (lambda: Life(build=build)), comes_up
    kept.supervise_for(100.0)
    assert len(kept.host.copies) == 3
    assert [one.alive for one in kept.host.copies] == [False, False, False]
    assert (kept.primary.alive, kept.backup.alive, kept.hosts.degraded_reason) == (True, True, "")


def test_copies_are_not_parted_while_something_else_is_at_risk(kept: Kept) -> None:
    """Without a coordinator no spare could become the backup."""
    kept.host.machines = 2
    kept.supervise_for(120.0)
    assert kept.host.copies == []
    assert kept.backup.alive
