"""Which deaths of a process lead to a restart, and when restarts end. No real processes."""

import queue
import threading

import pytest

from ps.launch import restart
from ps.launch.process_handle import ExitReason, ProcessHandle, Stranded
from ps.launch.restart import RestartingProcess, RestartPolicy
from ps.logs import logger
from shards.errors import GiveUp
from tests.support.eventually import eventually

KILLED = ExitReason("died: its process was ended by signal 9 (Killed)", reported=False)
KILLED_LATER = ExitReason(
    "died: its process was ended by signal 9 (Killed)", reported=False, killed=True
)
FULL = ExitReason("failed: log x: No space left on device", reported=True)


class Fake(ProcessHandle):
    """A process that ends when the test says how.

    A `broken` one never serves. If it is broken by an `ExitReason`, it ended in that way.
    """

    pid = 0  # each has its own

    def __init__(self, pid: int, broken: str | Exception | ExitReason = "") -> None:
        self.name = "shard 3"
        self.pid = pid
        self.broken = broken
        self.fates: queue.Queue[ExitReason] = queue.Queue()
        if isinstance(broken, ExitReason):
            self.fates.put(broken)
        self.stopped = self.closed = False

    @property
    def alive(self) -> bool:
        return not isinstance(self.broken, ExitReason)

    def wait(self) -> ExitReason:
        return self.fates.get()

    def endpoint(self, until: float) -> str:
        if self.broken:
            raise self.broken if isinstance(self.broken, Exception) else GiveUp(str(self.broken))
        return "tcp://x"

    def ask_to_end(self) -> None:
        self.fates.put(ExitReason("ended", reported=False))

    def stop(self) -> None:
        self.stopped = True
        self.fates.put(ExitReason("ended", reported=False))

    def close(self) -> None:
        self.closed = True


class Shard:
    """A restartable shard: `made` lists all its processes; `served` receives each start."""

    def __init__(self, *broken: str | Exception | ExitReason) -> None:
        self.made = [Fake(0)]
        self._broken = [*broken]
        self.left: list[int] = []  # those that were left to themselves while another was started
        self.started = threading.Semaphore(0)
        self.kept = RestartingProcess(self.made[0], self._restart, 1.0, logger("restarts", shard=0))

    def _restart(self) -> Fake:
        self.left += [one.pid for one in self.made if one.broken and not one.stopped]
        self.made.append(Fake(len(self.made), self._broken.pop(0) if self._broken else ""))
        self.started.release()
        return self.made[-1]

    def dies(self, fate: ExitReason = KILLED) -> None:
        """End the current process; returns when the next is started."""
        self.made[-1].fates.put(fate)
        self.await_start()

    def await_start(self) -> None:
        assert self.started.acquire(timeout=30)
        with self.kept._lock:  # held until it is known to be the present one
            pass

    def ends(self) -> None:
        self.kept.ask_to_end()
        self.kept.end()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every life count as short, and the pauses short, too."""
    monkeypatch.setattr(restart, "QUICK_S", 1e6)
    monkeypatch.setattr(restart, "PAUSE_S", 0.001)


def test_one_that_was_killed_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    """So is the next one, each with a warning; leaving the block ends the last."""
    shard = Shard()
    for pid in (1, 2):
        shard.dies()
        assert shard.kept.pid == pid
        shard.kept.check()
    shard.ends()
    assert shard.kept.deaths == 2
    assert [one.closed for one in shard.made] == [True, True, True]
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warned == [f"shard 3 has {KILLED.text}; restarting it"] * 2


def test_quick_deaths_in_a_row_are_bounded() -> None:
    """Five crashes are enough, and the last one's cause is reported."""
    shard = Shard()
    for _ in range(4):
        shard.dies()
    shard.made[-1].fates.put(KILLED)
    shard.kept._thread.join(30)
    line = (
        r"^shard 3 has died 5 times in a row, each before it had served for 1e\+06 s; the last"
        r" time: died: its process was ended by signal 9 \(Killed\)$"
    )
    with pytest.raises(GiveUp, match=line):
        shard.kept.check()
    shard.ends()
    assert len(shard.made) == 5


def test_one_that_is_killed_while_it_serves_is_never_given_up() -> None:
    """However soon and often it is killed: that is not its own failure.

    A failure of its own still counts, and a kill resets the count.
    """
    shard = Shard()
    for _ in range(12):
        shard.dies(KILLED_LATER)
    for _ in range(3):
        for _ in range(4):
            shard.dies()
        shard.dies(KILLED_LATER)
    shard.kept.check()
    assert shard.kept.deaths == 27
    shard.ends()


def test_a_long_life_forgives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deaths count only while they follow each other quickly."""
    monkeypatch.setattr(restart, "QUICK_S", 0.0)
    shard = Shard()
    for _ in range(12):
        shard.dies()
    shard.kept.check()
    shard.ends()


@pytest.mark.parametrize(
    ("served", "too_many"),
    [
        ([0.3, 0.9, 0.0, 0.5, 0.9], True),
        ([None, 0.2, None, None, 0.2], True),
        ([0.3, 0.3, 0.3, 0.3], False),
        ([0.3, 0.3, 0.3, 1.0, 0.3, None], False),
        ([2.0, 1.1, 1.4, 2.8, 1.0, 4.5, 1.2, 3.0], False),
    ],
)
def test_what_counts_is_how_long_it_served(
    monkeypatch: pytest.MonkeyPatch, served: list[float | None], too_many: bool
) -> None:
    """Serving for less than a second, or never, five times in a row: the shard is given up.

    A shard that is killed every few seconds is not, though a busy machine may take most of them to
    start it.
    """
    monkeypatch.undo()
    deaths = RestartPolicy()
    for served_s in served:
        deaths.count_death(served_s)
    assert deaths.too_many is too_many
    assert deaths.all == len(served)


def test_pauses_between_quick_deaths_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pause is twice the one before; after a long life there is none."""
    monkeypatch.undo()
    deaths, pauses = RestartPolicy(), []
    for served_s in (8.0, 0.1, None, 0.1, 8.0, 0.1):
        deaths.count_death(served_s)
        pauses.append(deaths.pause_s)
    assert pauses == [0.0, 0.1, 0.2, 0.4, 0.0, 0.1]
    starts, pauses = RestartPolicy(), []
    for _ in range(8):
        starts.count_death(None, killed=True)
        pauses.append(starts.pause_s)
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 3.2, 3.2]
    assert not starts.too_many


def test_pauses_have_a_limit() -> None:
    """A coordinator is never given up: its pauses grow up to a limit, until one serves."""
    policy, pauses = RestartPolicy(2.0, 60.0), []
    for served_s in (*[None] * 7, 1e9):
        policy.count_death(served_s)
        pauses.append(policy.pause_s)
    assert pauses == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 0.0]


def test_one_that_does_not_come_to_serve() -> None:
    """It is tried again, too: its port may have been taken for a moment.

    It is ended first: a slow one still holds the WAL that the next one needs.
    """
    shard = Shard("shard 3 cannot listen")
    shard.dies()
    shard.await_start()
    assert shard.kept.pid == 2
    assert shard.kept.deaths == 2, "one that never served has died, too"
    shard.kept.check()
    shard.ends()
    hopeless = Shard(*["shard 3 cannot listen"] * 9)
    hopeless.made[0].fates.put(KILLED)
    hopeless.kept._thread.join(30)
    with pytest.raises(GiveUp, match=r"the last time: shard 3 cannot listen$"):
        hopeless.kept.check()
    hopeless.ends()
    assert len(hopeless.made) == 5
    assert shard.left == hopeless.left == []


def test_one_that_is_killed_while_it_starts_is_never_given_up() -> None:
    """Nor is one that is killed by turns as it serves: only its own failures count."""
    shard = Shard(*[KILLED_LATER] * 12)
    shard.dies(KILLED_LATER)
    for _ in range(12):
        shard.await_start()
    assert (shard.kept.pid, shard.kept.deaths) == (13, 13)
    shard.kept.check()
    shard.ends()


def test_one_that_says_why_it_cannot_start_is_given_up_at_once() -> None:
    """A damaged autosave is read once, and its error is the job's."""
    shard = Shard(ExitReason("failed: autosave x: damaged", reported=True))
    shard.dies()
    shard.kept._thread.join(30)
    with pytest.raises(GiveUp, match="autosave x: damaged"):
        shard.kept.check()
    shard.ends()
    assert len(shard.made) == 2


def test_one_that_says_what_failed_is_not() -> None:
    """A restart would fail in the same way."""
    shard = Shard()
    shard.made[0].fates.put(FULL)
    shard.kept._thread.join(30)
    with pytest.raises(GiveUp, match=r"^shard 3 has failed: log x: No space left on device$"):
        shard.kept.check()
    shard.ends()
    assert len(shard.made) == 1


def test_one_whose_machine_is_gone_is_not() -> None:
    """One attempt is made, as there is no machine for a restart; its error is reported as is."""
    shard = Shard(Stranded("shard 3 cannot continue: node 10.0.0.7 of Ray is gone"))
    shard.dies()
    shard.kept._thread.join(30)
    with pytest.raises(GiveUp, match=r"^shard 3 cannot continue: node 10\.0\.0\.7 of Ray is gone$"):
        shard.kept.check()
    shard.ends()
    assert len(shard.made) == 2


def test_what_a_death_has_cost() -> None:
    """Each restarted death is reported once, with its own cause: not how a restart failed."""
    shard = Shard("shard 3 cannot listen")
    assert shard.kept.lost_updates() == []
    shard.dies()
    shard.await_start()
    shard.dies()
    told: list[str] = []

    def both() -> bool:
        told.extend(shard.kept.lost_updates())
        return len(told) == 2

    eventually(both, because="each death is reported")
    assert told == ["shard 3 has died: its process was ended by signal 9 (Killed)"] * 2
    shard.ends()
    assert shard.kept.lost_updates() == []


def test_a_death_that_is_not_followed() -> None:
    """With restarts off, a death is final, and reported as for a shard without restarts.

    Restarts can be switched on again.
    """
    shard = Shard()
    shard.kept.restart_enabled = False
    shard.kept.restart_enabled = True
    shard.dies()
    assert shard.kept.pid == 1
    shard.kept.restart_enabled = False
    shard.made[-1].fates.put(KILLED)
    shard.kept._thread.join(30)
    line = r"^shard 3 has died: its process was ended by signal 9 \(Killed\)$"
    for _ in range(2):
        with pytest.raises(GiveUp, match=line):
            shard.kept.check()
        shard.kept.restart_enabled = True  # too late
    shard.ends()
    assert len(shard.made) == 2


def test_a_start_under_way_is_the_last() -> None:
    """If restarts are switched off during a start, that start may finish, but no other follows."""
    starts, may_start = threading.Semaphore(0), threading.Semaphore(0)

    class Slow(Fake):
        def endpoint(self, until: float) -> str:
            starts.release()
            assert may_start.acquire(timeout=30)
            return super().endpoint(until)

    for broken in ("", "shard 3 cannot listen"):
        shard = Shard()
        shard.made.append(Slow(1, broken))
        shard.kept._restart = lambda: shard.made[1]  # noqa: B023
        shard.made[0].fates.put(KILLED)
        assert starts.acquire(timeout=30)
        shard.kept.restart_enabled = False
        may_start.release()
        if not broken:
            shard.kept.check()
            shard.made[1].fates.put(KILLED)
        shard.kept._thread.join(30)
        assert not shard.kept._thread.is_alive()
        with pytest.raises(GiveUp, match=r"^shard 3 has died: its process was ended by signal 9"):
            shard.kept.check()
        shard.ends()


def test_what_nobody_has_thought_of() -> None:
    """An unexpected error is reported, too: an unsupervised shard must not look supervised."""
    shard = Shard(ConnectionError("Ray is away"))
    shard.dies()
    shard.kept._thread.join(30)
    line = r"^shard 3 is not restarted: ConnectionError: Ray is away$"
    with pytest.raises(GiveUp, match=line):
        shard.kept.check()
    shard.ends()
