"""A model of the training service: users, the scheduler, runners and crashes, in random order.

The scheduler, the job store, the transition table, the launcher, the journals and the recovery are
the real ones; processes and their clock are fake (tests/support/fake_machine.py). The service is
killed before any of its writes (journal, database, folder, process), or amid one. What must hold:

- No order is lost: a job or an order that was answered is there after every crash.
- No job has a second runner, and none has one in a state without an attempt.
- A cancelled job does not train again, and a terminal state is final.
- The state of a job is the one that its runner has reported.
- Every job can end, by itself or by a user, and leaves no process.
- Rebuilt from the folders, the database has the same rows.
"""

import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import msgspec
import sqlalchemy as sa
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deploy.run.settings import TrainSettings
from deploy.runner import job_folder
from deploy.runner.job_folder import End
from deploy.runner.journal import JournalReader
from deploy.service import database_tables
from deploy.service import supervisor as supervisor_module
from deploy.service.alerts import DiskWatch
from deploy.service.job_rows import JobRow, row_of
from deploy.service.job_store import JobStore, StateChanged
from deploy.service.launcher import Liveness, LocalLauncher
from deploy.service.states import ATTEMPTED, HOLDING, TERMINAL, TRAINING, JobState, Verb
from deploy.service.submissions import Submissions, Submitted
from deploy.service.supervisor import Supervisor
from deploy.service.uploads import Uploads
from tests.support.fake_machine import FakeMachine, ServiceKilled
from tests.support.fake_runner import FakeRunner, snapshots

SLOTS = 4
_PATIENCE = 300
_UNINDEXED = {"head", "contact"}  # the next reading has them
_FOLLOWED = {JobState.CHECKING, JobState.STARTING, JobState.RUNNING, JobState.DEGRADED}

_ALL = sa.select(database_tables.job).order_by(database_tables.job.c.id)

T = TypeVar("T")
JOBS = st.integers(0, 3)
KILLED = st.one_of(st.none(), st.tuples(st.integers(0, 9), st.booleans()))
"""After how many writes the service is killed, and whether the last of them is torn."""


class Expected:
    """What users know about a job."""

    def __init__(self) -> None:
        self.orders: dict[str, Verb] = {}
        self.settings: dict[str, Any] = {}
        self.cancelled = False
        self.attempts: set[str] = set()
        self.final: JobRow | None = None


class ServiceModel(RuleBasedStateMachine):
    """One home with a few jobs, and the service that comes and goes."""

    @initialize()
    def start(self) -> None:
        self.exit = ExitStack()
        memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # nothing waits for a disk
        base = self.exit.enter_context(
            tempfile.TemporaryDirectory(prefix="service-model-", dir=memory)
        )
        self.home = Path(base, "home")
        self.home.mkdir()
        self.solver = Path(base, "solver.prototxt")
        self.solver.write_text("max_iter: 100\n")
        self.machine = FakeMachine()
        self.exit.callback(self.machine.kill_all)
        self.exit.enter_context(self.machine.installed())
        found = mock.patch.object(
            supervisor_module, "list_complete_snapshots", lambda s: snapshots(s.out.parent)
        )
        self.exit.enter_context(found)
        self.runners: list[FakeRunner] = []
        self.jobs: dict[str, Expected] = {}
        self.keys: dict[str, str] = {}
        self.seen: list[JobRow] = []
        self.free = 10
        self.blind = False
        self.engine = memory_database()
        self.saved = self._connection().serialize()
        self.machine.listen(self.engine)
        self._serve()

    # The service.

    def _serve(self) -> None:
        """A new process of the service: it knows what is on the disk, and nothing else."""
        self.store = JobStore(self.home, self.engine)
        launcher = LocalLauncher()
        probe = launcher.probe
        launcher.probe = lambda *of: Liveness.UNKNOWN if self.blind else probe(*of)  # type: ignore[method-assign]
        self.supervisor = Supervisor(
            self.store, launcher, slots=SLOTS, retry_s=5.0, clock=lambda: self.machine.now
        )
        self.supervisor._disk = DiskWatch(3, free=lambda _: self.free)
        self.admission = Submissions(self.store, Uploads(self.home), slots=SLOTS)

    def _start_again(self) -> None:
        self.machine.writes_left = None
        self._serve()
        self.store.catch_up()
        self._meet_runners()
        for job in self.jobs:
            self._check_orders(job)

    def _act(self, killed: tuple[int, bool] | None, action: Callable[[], T]) -> T | None:
        """The result of an action of the service; None if it was killed before it answered."""
        if killed is not None:
            self.machine.writes_left, self.machine.torn = killed
        try:
            found = action()
        except ServiceKilled:
            found = None
        if self.machine.writes_left is None:
            self._meet_runners()
            return found
        died = self.machine.writes_left == 0 and killed is not None and killed[1]
        if found is None or died:  # it may have done all of it, and not answered
            self._start_again()
            return None
        self.machine.writes_left = None
        self._meet_runners()
        return found

    def _meet_runners(self) -> None:
        """The processes that were started begin to live: no attempt has two."""
        while self.machine.started:
            process = self.machine.started.pop(0)
            runner = FakeRunner(self.machine, process)
            name = runner.folder.name
            expected = self.jobs.get(name)
            variable = f"{job_folder.ATTEMPT_VARIABLE}="
            (nonce,) = [mark for mark in process.marks if mark.startswith(variable)]
            others = [each for each in self.runners if each.alive and each.folder == runner.folder]
            assert not others, f"a second runner of {name}"
            if expected is not None:
                assert nonce not in expected.attempts, f"attempt {nonce} of {name} starts twice"
                expected.attempts.add(nonce)
                assert not expected.cancelled, f"{name} starts although it is cancelled"
                written = TrainSettings.load(runner.folder / job_folder.SETTINGS).plain()
                for option, value in expected.settings.items():
                    assert written[option] == value, f"{name} starts without its new {option}"
            self.runners.append(runner)

    def _connection(self) -> sqlite3.Connection:
        with self.engine.connect() as connection:
            raw = connection.connection.driver_connection
        assert isinstance(raw, sqlite3.Connection)
        return raw

    # What users do.

    def _pick(self, place: int) -> str:
        return list(self.jobs)[place % len(self.jobs)]

    @rule(
        key=st.one_of(st.none(), st.sampled_from("ab")),
        workers=st.integers(1, 3),
        priority=st.integers(0, 1),
        killed=KILLED,
    )
    @precondition(lambda self: len(self.jobs) < 3)
    def submit(
        self, key: str | None, workers: int, priority: int, killed: tuple[int, bool] | None
    ) -> None:
        given = {"solver": str(self.solver), "workers": workers}
        request = Submitted(settings=given, priority=priority)
        self.machine.now += 1.0
        row = self._act(killed, lambda: self.admission.submit(request, key))
        if row is None and key is not None:  # its user repeats it until it is answered
            row = self.admission.submit(request, key)
        if row is not None:
            known = self.keys.setdefault(key, row.id) if key is not None else row.id
            assert row.id == known, f"key {key} made a second job"
            self.jobs.setdefault(row.id, Expected())
        for unanswered in self._rows():
            self.jobs.setdefault(unanswered, Expected())

    @rule(
        place=JOBS,
        verb=st.sampled_from([Verb.CANCEL, Verb.PAUSE, Verb.RESUME, Verb.SNAPSHOT, Verb.RESHARD]),
        now=st.booleans(),
        killed=KILLED,
    )
    @precondition(lambda self: self.jobs)
    def ask(self, place: int, verb: Verb, now: bool, killed: tuple[int, bool] | None) -> None:
        details: dict[str, Any] = {}
        if verb is Verb.CANCEL:
            details["mode"] = "now" if now else "drain"
        if verb is Verb.RESHARD:
            details["shards"] = 2
        self._ask(self._pick(place), verb, killed, **details)

    @rule(place=JOBS, staleness=st.integers(1, 3), others=st.booleans(), killed=KILLED)
    @precondition(lambda self: self.jobs)
    def change_settings(
        self, place: int, staleness: int, others: bool, killed: tuple[int, bool] | None
    ) -> None:
        job, changes = self._pick(place), {"staleness": staleness}
        changes |= {"snapshot_keep": staleness} if others else {}
        row = self.store.get(job)
        settings = self.admission.apply_changes(row, changes)
        answered = self._ask(job, Verb.SET, killed, settings=settings, changes=changes)
        if answered and (others or row.state not in TRAINING):
            self.jobs[job].settings |= changes
        elif answered:  # in force once the runner has said so, which may end first
            self.jobs[job].settings.pop("staleness", None)
        else:
            self.jobs[job].settings.clear()  # it may have been stored, and may not

    def _ask(self, job: str, verb: Verb, killed: tuple[int, bool] | None, **details: Any) -> bool:
        """Return whether the order was answered; its user may count on it from then on."""
        with suppress(StateChanged):
            found = self._act(killed, lambda: self.supervisor.ask(job, verb, **details))
            if found is not None:
                self.jobs[job].orders[found[0]] = verb
                self.jobs[job].cancelled |= verb is Verb.CANCEL
                return True
        self.machine.writes_left = None
        return False

    @rule(place=JOBS, to=st.sampled_from(JobState))
    @precondition(lambda self: self.seen)
    def act_on_an_old_view(self, place: int, to: JobState) -> None:
        """What has seen a job in an earlier state cannot change it."""
        row = self.seen[place % len(self.seen)]
        present = self.store.get(row.id)
        if (present.attempt, present.state_seq) == (row.attempt, row.state_seq):
            return
        try:
            self.store.move(row, to)
        except StateChanged:
            return
        raise AssertionError(f"{row.id} moved from {present.state} by an old view of {row.state}")

    # What the service and its runners do by themselves.

    @rule(seconds=st.sampled_from([0.0, 1.0, 40.0, -3600.0]), killed=KILLED)
    def look(self, seconds: float, killed: tuple[int, bool] | None) -> None:
        self.machine.now += seconds
        self.seen = [*self.seen[-3:], *self._rows().values()][-4:]
        self._act(killed, self.supervisor.reconcile)
        if killed is None:
            self._check_reports()

    @rule(rounds=st.integers(1, 8), seconds=st.sampled_from([0.0, 10.0]))
    def work(self, rounds: int, seconds: float) -> None:
        """The service and all runners do what is due."""
        for _ in range(rounds):
            self.machine.now += seconds
            self._act(None, self.supervisor.reconcile)
            self._check_reports()
            for runner in self.runners:
                runner.step()

    @rule(place=JOBS, steps=st.integers(1, 4))
    def advance(self, place: int, steps: int) -> None:
        """A runner is faster than the service."""
        runner = self._living(place)
        for _ in range(steps):
            if runner is not None:
                runner.step()

    @rule(
        place=JOBS,
        what=st.sampled_from(
            [End.SUCCEEDED, End.FAILED, End.RETRY, "degraded", "restored", "snapshot", "kill"]
        ),
    )
    def happen(self, place: int, what: str) -> None:
        """Something happens in a job, after which its runner reports it or ends."""
        runner = self._living(place)
        if runner is None or runner.end is not None or runner.state is None:
            return
        if what == "kill":
            runner.process.end(-9)
        elif what in set(End):
            runner.end = End(what)
        elif runner.trains and what == "snapshot":
            runner.snapshot()
        elif runner.state is JobState.RUNNING and what == "degraded":
            runner.report(what, JobState.DEGRADED)
        elif runner.state is JobState.DEGRADED and what == "restored":
            runner.report(what, JobState.RUNNING)

    @rule(place=JOBS, what=st.sampled_from(["hang", "restart", "power", "database"]))
    def break_something(self, place: int, what: str) -> None:
        runner = self._living(place)
        if what == "hang" and runner is not None:
            runner.hangs = not runner.hangs
        elif what == "restart":
            self._start_again()
        elif what == "power":  # the database may lose its last transactions
            self.machine.kill_all()
            self._connection().deserialize(self.saved)
            self._start_again()
        elif what == "database":  # `downpour service reindex` makes a new one
            self.engine.dispose()
            self.engine = memory_database()
            self.machine.listen(self.engine)
            self._serve()
            self.store.rebuild()
            self._start_again()

    @rule(blind=st.sampled_from([False, False, True]), free=st.sampled_from([1, 4, 10, 10, 10]))
    def change_the_machine(self, blind: bool, free: int) -> None:
        """Whether the launcher can say which processes live; how much of the disk is free."""
        self.blind, self.free = blind, free

    def _living(self, place: int) -> FakeRunner | None:
        living = [runner for runner in self.runners if runner.alive]
        return living[place % len(living)] if living else None

    # What must hold.

    @invariant()
    def no_promise_is_broken(self) -> None:
        rows = self._rows()
        for job, expected in self.jobs.items():
            assert job in rows, f"{job} is lost"
            self._check_row(rows[job], expected)
        held = sum(row.slots for row in rows.values() if row.state in HOLDING)
        assert held <= SLOTS, f"{held} slots are held"
        self.saved = self._connection().serialize()

    def _rows(self) -> dict[str, JobRow]:
        with self.engine.connect() as connection:
            rows = [row_of(row) for row in connection.execute(_ALL)]
        return {row.id: row for row in rows}

    def _check_row(self, row: JobRow, expected: Expected) -> None:
        processes = self.machine.alive(f"{job_folder.JOB_VARIABLE}={row.id}")
        runners = [each for each in processes if each.folder is not None]
        assert not runners or row.state in ATTEMPTED, f"{row.state} with a runner"
        if row.state in TERMINAL | {JobState.PAUSED, JobState.QUEUED}:
            assert not processes, f"{row.state} with {len(processes)} processes"
        if expected.final is not None:
            assert row == expected.final, f"{expected.final} became {row}"
        elif row.state in TERMINAL:
            expected.final = row
            assert not row.alerts, f"{row.state} with {row.alerts}"
        if expected.cancelled:
            assert row.cancelled, "a cancel is lost"
            assert row.state in TERMINAL | {JobState.STOPPING}, f"cancelled, and {row.state}"
        for option, value in expected.settings.items():
            assert row.settings[option] == value, f"the new {option} is lost"

    def _check_reports(self) -> None:
        """After a look, the state of a job is the one that its runner has reported."""
        rows = self._rows()
        for runner in self.runners:
            row = rows[runner.folder.name]
            present = runner.alive and runner.number == row.attempt and row.state in _FOLLOWED
            if present and runner.state not in {None, JobState.CHECKING}:  # STARTING comes first
                assert row.state is runner.state, f"{row.state}, not {runner.state}"

    def _check_orders(self, job: str) -> None:
        """Every answered order is in the journal and in the database."""
        orders = JournalReader(self.store.folder(job) / job_folder.ORDERS).read()
        numbers = [entry.number for entry in orders]
        assert numbers == list(range(1, len(orders) + 1)), f"gaps in {numbers}"
        stored = {entry.data.get("order_id") for entry in orders}
        indexed = {each["data"].get("order_id") for each in self.store.events([job], limit=10**6)}
        for order_id, verb in self.jobs[job].orders.items():
            assert order_id in stored, f"the order {verb} is lost"
            assert order_id in indexed, f"the order {verb} is not in the database"

    def _check_index(self) -> None:
        engine = memory_database()
        rebuilt = JobStore(self.home, engine)
        rebuilt.rebuild()
        present, found = contents(self.store), contents(rebuilt)
        assert found == present, f"rebuilt: {found}, not {present}"
        engine.dispose()

    def _orders_are_answered(self, job: str) -> None:
        events = self.store.events([job], limit=10**6)
        answers = [each["data"]["order_id"] for each in events if each["kind"] == "answer"]
        for order_id, verb in self.jobs[job].orders.items():
            if verb in {Verb.SNAPSHOT, Verb.RESHARD, Verb.SET}:
                assert answers.count(order_id) == 1, f"{verb} has {answers.count(order_id)} answers"

    def teardown(self) -> None:
        if not hasattr(self, "exit"):
            return
        try:
            self._end_all()
        finally:
            self.engine.dispose()
            self.exit.close()
            shutil.rmtree(self.home, ignore_errors=True)

    def _end_all(self) -> None:
        """Nothing fails any more: every job ends or is paused, and then its user can end it."""
        self.blind, self.free = False, 10
        for runner in self.runners:
            runner.hangs = False
        self._settle({*TERMINAL, JobState.PAUSED}, "ends by itself")
        for job in self.jobs:
            if self.store.get(job).state is JobState.PAUSED:
                self._ask(job, Verb.CANCEL, None, mode="drain")
        self.no_promise_is_broken()
        self._check_index()
        for job in self.jobs:
            assert self.store.get(job).state in TERMINAL
            self._check_orders(job)
            self._orders_are_answered(job)

    def _settle(self, states: set[JobState], what: str) -> None:
        for _ in range(_PATIENCE):
            self.supervisor.reconcile()
            self._meet_runners()
            self.no_promise_is_broken()
            found = {row.state for row in self._rows().values()}
            if found <= states:
                return
            self.machine.now += 20.0
            for runner in self.runners:
                if runner.trains:
                    runner.step()  # an order comes first
                    runner.end = runner.end or End.SUCCEEDED
                runner.step()
        raise AssertionError(f"no job {what}: {found}")


def memory_database() -> sa.Engine:
    """An empty database of the service in memory. One connection serves all."""
    engine = sa.create_engine(
        "sqlite://", poolclass=sa.StaticPool, connect_args={"check_same_thread": False}
    )
    database_tables.metadata.create_all(engine)
    return engine


def contents(store: JobStore) -> list[object]:
    """The rows of the index, without what the next reading brings."""
    with store._engine.connect() as connection:
        rows = [row_of(row) for row in connection.execute(_ALL)]
    jobs = [
        {name: value for name, value in msgspec.to_builtins(row).items() if name not in _UNINDEXED}
        for row in rows
    ]
    events = [
        {name: value for name, value in each.items() if name != "id"}
        for row in rows
        for each in store.events([row.id], limit=10**6)
    ]
    events.sort(key=lambda each: (each["job"], each["source"], each["number"]))
    return [jobs, [store.attempts(row.id) for row in rows], events]
