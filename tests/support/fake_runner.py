"""A runner that trains nothing and makes one write at a time, so that it may end between any two.

It keeps the files of a job by the real code: the lock, the identity, the journals, the outcome.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from deploy.run.folder import lock_folder
from deploy.runner import attempt, job_folder
from deploy.runner.job_folder import AttemptIdentity, AttemptOutcome, End
from deploy.runner.journal import Entry, Journal, JournalReader
from deploy.service.states import JobState
from shards.errors import BadInput
from tests.support.fake_machine import FakeMachine, FakeProcess

SNAPSHOTS = f"{job_folder.RUN}/snapshots"
_CODES = {End.FAILED: "error", End.RETRY: "infrastructure"}


class FakeRunner:
    """One attempt. `state` is what the service must come to from its events, None before them."""

    def __init__(self, machine: FakeMachine, process: FakeProcess) -> None:
        assert process.folder is not None
        self.process = process
        self.folder = process.folder
        self.hangs = False
        self.state: JobState | None = None
        self.end: End | None = None
        """How it is going to end, once that is known."""
        self.number = 0
        self.answered: set[str] = set()
        self._machine = machine
        self._orders = JournalReader(self.folder / job_folder.ORDERS)
        self._pending: list[Entry] = []
        self._life = self._live()

    @property
    def alive(self) -> bool:
        return self.process.status is None

    @property
    def trains(self) -> bool:
        return self.alive and self.end is None and self.state in {
            JobState.RUNNING, JobState.DEGRADED,
        }  # fmt: skip

    def step(self) -> None:
        """Make the next write."""
        if self.alive and not self.hangs:
            next(self._life, None)
            alive = self.folder / job_folder.READINGS / job_folder.ALIVE
            alive.touch()
            os.utime(alive, (self._machine.now, self._machine.now))

    def report(self, kind: str, state: JobState) -> None:
        """Append an event that changes the job's state."""
        self._event(kind)
        self.state = state

    def snapshot(self) -> None:
        """Take a snapshot; its number says how many there are."""
        folder = self.folder / SNAPSHOTS
        folder.mkdir(parents=True, exist_ok=True)
        (folder / str(1 + sum(1 for _ in folder.iterdir()))).touch()

    def _live(self) -> Iterator[None]:
        try:
            self.process.lock = lock_folder(self.folder)
            yield
            identity = self._identity()
        except BadInput:
            self.process.end(2)
            return
        job_folder.save(self.folder / job_folder.ATTEMPT, identity)
        yield
        self.number = identity.attempt
        self._journal = Journal(self.folder / job_folder.EVENTS)
        self.report("checking", JobState.CHECKING)
        yield
        if self.end is None:
            self._spawn_others()
            self.report("starting", JobState.STARTING)
            yield
        if self.end is None:
            self.report("running", JobState.RUNNING)
            yield
        while self.end is None:
            self._obey()
            yield
        if self.end is End.STOPPED and self.state in {JobState.RUNNING, JobState.DEGRADED}:
            self.snapshot()
            yield
        job_folder.save(self.folder / job_folder.OUTCOME, self._outcome(identity, self.end))
        yield
        self._event("ended", end=self.end)
        yield
        self.process.end(attempt.STATUS[self.end])

    def _identity(self) -> AttemptIdentity:
        marks = dict(mark.partition("=")[::2] for mark in self.process.marks)
        variable = job_folder.ATTEMPT_VARIABLE
        with mock.patch.dict(os.environ, {variable: marks[variable]}):
            return attempt._identity(self.folder)

    def _outcome(self, identity: AttemptIdentity, end: End) -> AttemptOutcome:
        code = _CODES.get(end, "")
        if end is End.FAILED and self.state is JobState.CHECKING:
            code = "bad_input"
        return AttemptOutcome(
            attempt=identity.attempt, nonce=identity.nonce, end=end, ended=self._machine.now,
            code=code, message=f"it is {end}",
        )  # fmt: skip

    def _spawn_others(self) -> None:
        """The head of Ray, Spark's JVM: what may outlive a runner that is killed."""
        marks = {mark for mark in self.process.marks if mark.startswith(job_folder.JOB_VARIABLE)}
        for stubborn in (False, True):
            self._machine.spawn(marks, None, stubborn=stubborn)

    def _obey(self) -> None:
        """Take one order: the journal is read as the real runner reads it."""
        self._pending += self._orders.read()
        while self._pending:
            order = self._pending.pop(0)
            if order.attempt != self.number:
                continue
            if order.kind == "stop":
                self._event("stopping", mode=order.data.get("mode"))
                self.end = End.STOPPED
                return
            if order.kind == "set" and order.data.get("live"):
                self._event("settings", settings=order.data["changes"])
                self._event("answer", order_id=order.data["order_id"], ok=True)
                return
            if order.kind in {"snapshot", "reshard"}:
                if order.kind == "snapshot":
                    self.snapshot()
                else:
                    self._event("settings", settings={"shards": order.data["shards"]})
                self._event("answer", order_id=order.data["order_id"], ok=True)
                return

    def _event(self, kind: str, **data: object) -> None:
        self._journal.append(kind, self.number, **data)


def snapshots(folder: Path) -> list[dict[str, str]]:
    """The snapshots that fake runners have taken of a job."""
    try:
        return [{"name": path.name} for path in (folder / SNAPSHOTS).iterdir()]
    except FileNotFoundError:
        return []
