"""Drives every unfinished job: starts attempts, follows their events, and draws conclusions.

One thread calls `reconcile` repeatedly. Each call takes the evidence that there is (the runner's
journal, its outcome, its process) and makes the transitions that follow from it. It keeps nothing
in memory that a new service could not find out: what is decided is in the job's journal.
"""

import random
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from deploy.run.evaluations_csv import read_evaluations
from deploy.run.folder import EVALUATIONS
from deploy.run.settings import TrainSettings
from deploy.run.snapshot_ref import catalog_of
from deploy.runner import job_folder
from deploy.runner.job_folder import AttemptOutcome, End
from deploy.runner.journal import JournalReader
from deploy.runner.readings import Reading, read_newest, read_series, thin_out
from deploy.service.access_store import ProjectLimits, remaining_quota
from deploy.service.alerts import (
    RESERVE_BYTES,
    UNWRITABLE,
    AlertChange,
    DiskWatch,
    JobWatch,
    unwritable,
)
from deploy.service.job_rows import JobRow
from deploy.service.job_store import CAUSE, JobStore, StateChanged
from deploy.service.launcher import Launcher, Liveness
from deploy.service.retention import list_dependents
from deploy.service.snapshots import list_complete_snapshots
from deploy.service.states import (
    ATTEMPTED,
    LONGEST_RETRY_S,
    TERMINAL,
    TRAINING,
    Ending,
    JobState,
    QueuePosition,
    Quota,
    Verb,
    after_end,
    after_event,
    after_verb,
    next_state,
    obstacles,
    retry_delay_s,
    states_for,
)
from ps.logs import logger
from ps.shared_memory.shm_files import sweep_all
from shards.errors import BadInput
from shards.live_settings import LIVE

GRACE_S = 30.0
"""Seconds between the order to stop at once and SIGKILL."""
_SWEEP_S = 5.0  # for a job's processes to end by themselves once the runner is gone
_TAIL_BYTES, _TAIL_LINES = 16 << 10, 40
_LINE_POINTS = 40
_LIST_S = 2.0  # between two looks at the snapshots of a job that trains
_ANSWERED = {Verb.SNAPSHOT.value, Verb.RESHARD.value}
"""The orders that a runner answers by an event; it also answers those to `set` that are `live`."""


class Supervisor:
    """The scheduler, the follower of job folders and the reaper of one service."""

    def __init__(
        self,
        store: JobStore,
        launcher: Launcher,
        *,
        slots: int,
        retry_s: float,
        reserve_bytes: int = RESERVE_BYTES,
        silent_s: float = 30.0,
        limits: Callable[[], Mapping[str, ProjectLimits]] = dict,
        clock: Callable[[], float] = time.time,
        moved: Callable[[JobState, JobRow], object] = lambda *_: None,
    ) -> None:
        self._moved = moved
        self.slots = slots
        self._store = store
        self._launcher = launcher
        self._retry_s = retry_s
        self._silent_s = silent_s
        self._limits = limits
        self._clock = clock
        self._lock = threading.RLock()  # a user's verb never acts during a reconciliation
        self._events: dict[str, JournalReader] = {}
        self._swept: dict[str, float] = {}  # when the processes that a job left were signalled
        self._killed: dict[str, float] = {}
        self._urgent: dict[str, float] = {}  # when a job was first seen to have to end at once
        self._heard: dict[str, tuple[float, float]] = {}  # the last sign of life, and when seen
        self._shown: dict[str, float] = {}  # the time of the reading that `head` shows
        self._listed: dict[str, float] = {}  # when the snapshots of a job were listed last
        self._complaints: dict[str, str] = {}  # why a job could not be advanced, once in the log
        self._watch = JobWatch()
        self._disk = DiskWatch(reserve_bytes)
        # The store's version and the limits for which the queue has nothing more to start; None in
        # the place of limits if it was empty.
        self._scheduled: tuple[int, Mapping[str, ProjectLimits] | None] | None = None
        self.halted = ""
        """Why no queued job is started at present; empty if jobs are started."""
        self._log = logger("service")

    def reconcile(self) -> None:
        """Advance every unfinished job as far as the evidence allows, and start what fits."""
        self._store.settle()
        for job in self._store.active():
            with self._lock:
                try:
                    self._advance(self._store.get(job))
                    self._complaints.pop(job, None)
                except StateChanged:
                    continue  # the next reconciliation sees the present state
                except Exception as error:  # noqa: BLE001  # one job must not stop the others
                    if self._complaints.get(job) != repr(error):
                        self._log.warning("%s", f"job {job}: {error!r}")
                    self._complaints[job] = repr(error)
        with self._lock:
            self._start_queued()

    # What users ask for.

    def ask(self, job: str, verb: Verb, **details: Any) -> tuple[str, JobRow]:
        """Record an order in the job's journal and act on it; returns the order's id and the job.

        Raises KeyError for an unknown job, StateChanged if the verb does not apply in its state.
        """
        with self._lock:
            row = self._store.get(job)
            order_id = secrets.token_hex(6)
            if verb in {Verb.SNAPSHOT, Verb.RESHARD, Verb.SET}:
                self._expect(row, verb, applies=row.state in states_for(verb))
                if verb is Verb.SET:
                    self._set(row, order_id, details["settings"], details["changes"])
                else:
                    self._store.note(row, verb.value, order_id=order_id, **details)
                return order_id, self._store.get(job)
            # One that was cancelled to drain may be cancelled `now`: its runner may never drain.
            further = not row.cancelled or details.get("mode") == "now"
            if verb is Verb.CANCEL and row.state is JobState.STOPPING and further:
                self._store.note(
                    row, "stop", order_id=order_id, cancelled=True, mode=details["mode"]
                )
                return order_id, self._store.get(job)
            to = after_verb(row.state, verb)
            self._expect(row, verb, applies=to is not None)
            assert to is not None
            changes: dict[str, Any] = {"order_id": order_id, "asked": verb}
            if verb is Verb.CANCEL:
                changes |= {"cancelled": True, "code": "", "reason": "cancelled by a user"}
            if to in {JobState.STOPPING, JobState.PAUSING}:
                mode = details.get("mode", "drain")
                return order_id, self._store.move(row, to, kind="stop", mode=mode, **changes)
            if verb is Verb.RESUME:
                changes |= {"fruitless": 0, "code": "", "reason": ""}
            if to in TERMINAL:
                self._end_alerts(row)
            return order_id, self._store.move(row, to, **changes)

    def _set(
        self, row: JobRow, order_id: str, settings: Mapping[str, Any], changes: Mapping[str, Any]
    ) -> None:
        """Order the runner to change settings while the job trains, or start another attempt.

        The next attempt begins with changed settings, from a snapshot of the present one.
        """
        if row.state in TRAINING and may_change_live(row.settings, changes):
            # The settings follow when the runner reports that it trains with them.
            self._store.note(row, Verb.SET.value, order_id=order_id, changes=changes, live=True)
            return
        # Others may have changed since these were checked.
        new = row.settings | {name: settings[name] for name in changes}
        self._store.note(row, Verb.SET.value, order_id=order_id, settings=new, changes=changes)
        if row.state in TRAINING:
            self._store.note(row, "stop", order_id=order_id, mode="drain")
        text = "the next attempt has these settings"
        self._store.note(row, "answer", order_id=order_id, ok=True, text=text)

    def _expect(self, row: JobRow, verb: Verb, *, applies: bool) -> None:
        if not applies:
            states = ", ".join(states_for(verb))
            text = f"{verb}: expected a job in {states}; {row.id} is {row.state}"
            raise StateChanged(text, row.state, expected=states)

    # What follows from evidence.

    def _start_queued(self) -> None:
        """Start the queued jobs that fit into the free slots.

        A queue that had nothing to start is read again after a change of a job or of a limit.
        """
        folder = self._store.folder("")
        self.halted = self._disk.halts_queue(folder)
        if lost := unwritable(folder):
            self.halted = f"{lost}; jobs under way are left alone"
        if self.halted:
            self._scheduled = None
            return
        version = self._store.version
        if self._scheduled == (version, None):
            return
        limits = self._limits()  # another process may change them
        if self._scheduled == (version, limits):
            return
        queue = self._obstacles(limits)
        for job, obstacle in queue.items():
            if not obstacle:
                with suppress(StateChanged):
                    self._start(self._store.get(job), JobState.CHECKING)
        self._scheduled = version, limits if queue else None

    def _obstacles(self, limits: Mapping[str, ProjectLimits]) -> dict[str, str]:
        """The obstacle to the start of each queued job, in the order of the queue."""
        queued = self._store.list_queued()
        if not queued:
            return {}
        waiting = [job._replace(slots=min(job.slots, self.slots)) for job in queued]
        return obstacles(waiting, self.slots - self._store.slots_held(), self._quotas(limits))

    def with_position(self, row: JobRow) -> JobRow:
        """The job with its position in the queue, if it is queued."""
        queue = self._obstacles(self._limits()) if row.state is JobState.QUEUED else {}
        if row.id not in queue:
            return row
        waiting = QueuePosition(
            position=list(queue).index(row.id) + 1,
            length=len(queue),
            reason=f"no job is started: {self.halted}" if self.halted else queue[row.id],
        )
        return msgspec.structs.replace(row, waiting=waiting)

    def _quotas(self, limits: Mapping[str, ProjectLimits]) -> dict[str, Quota]:
        """The remaining quota of each project with limits."""
        quotas = {}
        for project, most in limits.items():
            used = self._store.usage(project)
            quotas[project] = Quota(
                remaining_quota(most.running, used.running),
                remaining_quota(most.workers, used.workers),
            )
        return quotas

    def _start(self, row: JobRow, to: JobState) -> None:
        """Start the next attempt. The order is on disk before the process exists."""
        self._store.write_settings(row)
        nonce, attempt = secrets.token_hex(8), row.attempt + 1
        row = self._store.move(
            row, to, kind="start", attempt=attempt, nonce=nonce, contact="", not_before=0.0
        )
        try:
            self._launcher.launch(self._store.folder(row.id), attempt, nonce)
        except OSError as error:
            self._log.warning("%s", f"job {row.id}: {error}")  # the next pass finds it gone

    def _advance(self, row: JobRow) -> None:
        if row.state is JobState.RECOVERING and self._is_due(row):
            row = self._alarm(row, None)
            if UNWRITABLE not in row.alerts and self._clean(row):
                self._start(row, JobState.STARTING)
            return
        if row.state not in ATTEMPTED:
            return
        folder = self._store.folder(row.id)
        # The process is probed first: what it wrote before its end is then read for certain.
        life = self._launcher.probe(folder, row.nonce)
        row = self._follow(row, folder)
        if row.state not in ATTEMPTED:
            return
        row = self._show(row, folder, life)
        if row.state in TRAINING and (full := self._disk.pauses(Path(row.settings["out"]))):
            row = self._store.move(
                row, JobState.PAUSING, kind="stop", mode="drain", code="disk", reason=full
            )
        outcome = self._outcome(row, folder)
        if life is Liveness.GONE:
            self._end(row, folder, outcome)
        elif outcome is not None and row.state not in {JobState.STOPPING, JobState.PAUSING}:
            ending = after_end(row.state, outcome, cancelled=row.cancelled)
            if ending.to is JobState.STOPPING:
                self._store.move(row, JobState.STOPPING, code=ending.code, reason=ending.reason)
        elif row.state is JobState.STOPPING:
            self._enforce(row, folder)

    def _is_due(self, row: JobRow) -> bool:
        """True if a job may start again. A longer wait than any delay is from another clock."""
        remaining_s = row.not_before - self._clock()
        return not 0 < remaining_s <= 2 * max(LONGEST_RETRY_S, self._retry_s)

    def _follow(self, row: JobRow, folder: Path) -> JobRow:
        """Take in the runner's new events, and make the transitions that they cause.

        The transitions come first: a service that is killed in between reads the events again,
        while those that were stored first would never have an effect.
        """
        path = folder / job_folder.EVENTS
        reader = self._events.setdefault(row.id, JournalReader(path, after=row.events_read))
        entries = reader.read()
        for entry in entries:
            to = after_event(row.state, entry.kind)
            if to is not None and entry.attempt == row.attempt:
                reason, before = str(entry.data.get("text", "")), row.state
                cause: dict[str, Any] = {CAUSE: entry.number}
                row = self._store.move(row, to, code="", reason=reason, **cause)
                self._moved(before, row)
            if entry.kind == "settings" and entry.attempt == row.attempt:
                row = self._record_settings(row, folder, entry.data["settings"])
        self._store.ingest(row, entries)
        return self._store.get(row.id) if entries else row

    def _record_settings(self, row: JobRow, folder: Path, changed: Mapping[str, Any]) -> JobRow:
        """Keep for the next attempt what has changed while this one trains.

        What a user has chosen for the next attempt meanwhile stays as it is.
        """
        later = {
            name
            for order in JournalReader(folder / job_folder.ORDERS).read()
            if order.kind == Verb.SET.value and order.attempt == row.attempt
            if not order.data.get("live")
            for name in order.data["changes"]
        }
        effective = {name: value for name, value in changed.items() if name not in later}
        self._store.note(row, "recorded", settings=row.settings | effective)
        return self._store.get(row.id)

    def _show(self, row: JobRow, folder: Path, life: Liveness) -> JobRow:
        """Show the newest figures, whether there is a sign of life, and what is alarming."""
        readings = folder / job_folder.READINGS
        reading = read_newest(readings)
        if reading is not None and self._shown.get(row.id) != reading.time:
            self._shown[row.id] = reading.time
            head = {
                "steps": reading.readings.steps,
                "planned": reading.readings.planned,
                "time": reading.time,
                **{name: getattr(reading.point, name) for name in _HEAD},
                "line": thin_out(
                    [point.loss for point in read_series(readings / job_folder.SERIES)[-2000:]],
                    _LINE_POINTS,
                ),
            }
            self._store.show(row.id, head=head)
        if row.state in TRAINING:
            row = self._show_snapshot(row)
        contact = self._contact(row, readings / job_folder.ALIVE, life)
        if contact != row.contact:
            self._store.show(row.id, contact=contact)
            row = self._store.get(row.id)
        return self._alarm(row, reading)

    def _show_snapshot(self, row: JobRow) -> JobRow:
        """Show a newer snapshot while the job trains; the attempt is then not fruitless.

        A remote store is read when the attempt ends: a slow one would hold up all jobs here.
        """
        settings, now = TrainSettings.of_plain(row.settings), self._clock()
        local = "://" not in catalog_of(settings, settings.out)
        if not local or abs(now - self._listed.get(row.id, -_LIST_S)) < _LIST_S:
            return row
        self._listed[row.id] = now
        newest = self._newest_snapshot(row)
        if newest is None or newest == row.snapshot:
            return row
        self._store.show(row.id, snapshot=newest, fruitless=0)
        return self._store.get(row.id)

    def _alarm(self, row: JobRow, reading: Reading | None) -> JobRow:
        """Record the alerts that begin or end now."""
        for change in self._watch.check(row, reading, self._clock()):
            self._store.note(row, "alert", **msgspec.to_builtins(change))
            row = self._store.get(row.id)
        return row

    def _contact(self, row: JobRow, path: Path, life: Liveness) -> str:
        """Since when a process that lives has given no sign of life; empty if it has lately.

        A sign of life is a new time of the file. Its age would depend on two clocks.
        """
        try:
            heard = path.stat().st_mtime
        except OSError:
            return ""
        known, seen = self._heard.get(row.id, (0.0, 0.0))
        if heard != known:
            seen = self._clock()
            self._heard[row.id] = heard, seen
        if life is not Liveness.RUNNING or self._clock() - seen <= self._silent_s:
            return ""
        return f"lost since {time.strftime('%H:%M:%S', time.gmtime(heard))} UTC"

    def _outcome(self, row: JobRow, folder: Path) -> AttemptOutcome | None:
        """The outcome of the present attempt; None if it has not written one."""
        try:
            outcome = job_folder.load(folder / job_folder.OUTCOME, AttemptOutcome)
        except BadInput:
            return None
        return outcome if outcome is not None and outcome.nonce == row.nonce else None

    def _end(self, row: JobRow, folder: Path, outcome: AttemptOutcome | None) -> None:
        """Conclude an attempt after its process has gone, once nothing of it is left."""
        if not self._clean(row):
            return
        self._answer_rest(row, folder)
        snapshot = self._newest_snapshot(row) or row.snapshot  # its disk may be lost
        fruitless = 1 if snapshot != row.snapshot else row.fruitless + 1
        lines = self._log_tail(row, folder)
        ending = after_end(
            row.state, outcome, cancelled=row.cancelled, last_words=job_folder.last_error(lines)
        )
        if ending.to is JobState.STOPPING:
            row = self._store.move(row, JobState.STOPPING, code=ending.code, reason=ending.reason)
            ending = after_end(row.state, outcome, cancelled=row.cancelled)
        via = next_state(ending, fruitless)
        if via.to is JobState.FAILED and row.state not in {JobState.CHECKING, JobState.STOPPING}:
            row = self._store.move(row, JobState.RECOVERING, code=ending.code, reason=ending.reason)
        asked = outcome is not None and outcome.end is End.STOPPED  # for other settings
        delay = 0.0 if asked else retry_delay_s(fruitless, random.random(), self._retry_s)
        if row.state is JobState.PAUSING and row.code:
            via = via._replace(code=row.code, reason=row.reason)
        if via.to in TERMINAL:
            self._end_alerts(row)
        before = row.state
        row = self._store.move(
            row,
            via.to,
            code=via.code,
            reason=via.reason,
            contact="",
            snapshot=snapshot,
            fruitless=fruitless,
            not_before=self._clock() + delay if via.to is JobState.RECOVERING else 0.0,
            attempt_end=self._attempt_end(row, lines, outcome, ending, snapshot),
        )
        self._moved(before, row)
        self._show_final(row, folder)
        self._launcher.forget(row.nonce)
        self._watch.forget(row.id)
        for by_job in (
            self._events,
            self._shown,
            self._listed,
            self._killed,
            self._urgent,
            self._heard,
            self._complaints,
        ):
            by_job.pop(row.id, None)

    def _answer_rest(self, row: JobRow, folder: Path) -> None:
        """Answer the orders that an attempt has left open: each gets one answer."""
        orders = JournalReader(folder / job_folder.ORDERS).read()
        events = JournalReader(folder / job_folder.EVENTS).read()
        answered = {
            entry.data.get("order_id") for entry in (*orders, *events) if entry.kind == "answer"
        }
        for order in orders:
            order_id = order.data.get("order_id")
            is_answered_here = order.kind in _ANSWERED or order.data.get("live")
            if order.attempt == row.attempt and is_answered_here and order_id not in answered:
                text = "the attempt ended before this was done"
                self._store.note(row, "answer", order_id=order_id, ok=False, text=text)

    def _end_alerts(self, row: JobRow) -> None:
        """A job that is about to end has no alert left: nobody looks at it afterwards."""
        present = list(row.alerts)
        while present:
            name = present.pop()
            change = AlertChange(name, on=False, text="over", alerts=list(present))
            self._store.note(row, "alert", **msgspec.to_builtins(change))

    def _attempt_end(
        self,
        row: JobRow,
        lines: list[str],
        outcome: AttemptOutcome | None,
        ending: Ending,
        snapshot: str | None,
    ) -> dict[str, Any]:
        """The columns of an attempt that has ended."""
        cause = outcome.end.value if outcome is not None else "gone"
        started = [
            attempt["started"]
            for attempt in self._store.attempts(row.id)
            if attempt["number"] == row.attempt
        ]
        ended = outcome.ended if outcome is not None else self._clock()
        return {
            # A clock that was set back would make an attempt end before it began.
            "ended": max([ended, *started]),
            "cause": cause,
            "message": outcome.message if outcome is not None else ending.reason,
            "exit_status": self._launcher.exit_status(row.nonce),
            "snapshot": snapshot,
            "log_tail": "\n".join(lines),
        }

    def _log_tail(self, row: JobRow, folder: Path) -> list[str]:
        """The last lines of the log of the present attempt."""
        tail = job_folder.tail_of(job_folder.driver_log(folder, row.attempt), _TAIL_BYTES)
        return tail.decode(errors="replace").splitlines()[-_TAIL_LINES:]

    def _show_final(self, row: JobRow, folder: Path) -> None:
        """Take the events and figures that the attempt has written last."""
        row = self._store.get(row.id)
        self._store.ingest(row, JournalReader(folder / job_folder.EVENTS, row.events_read).read())
        self._shown.pop(row.id, None)
        self._show(row, folder, Liveness.GONE)

    def _clean(self, row: JobRow) -> bool:
        """End the processes of the job that remain; returns whether none did."""
        folder = self._store.folder(row.id)
        first = self._swept.get(row.id)
        overdue = first is not None and self._clock() - first > _SWEEP_S
        remaining = self._launcher.kill(folder, signal.SIGKILL if overdue else signal.SIGTERM)
        if remaining:
            self._swept.setdefault(row.id, self._clock())
            return False
        sweep_all()
        self._swept.pop(row.id, None)
        return True

    def _enforce(self, row: JobRow, folder: Path) -> None:
        """End a job that was cancelled `now` and is still there after its grace."""
        stops = [
            entry
            for entry in JournalReader(folder / job_folder.ORDERS).read()
            if entry.kind == "stop" and entry.attempt == row.attempt
        ]
        if not any(entry.data.get("mode") == "now" for entry in stops):
            return
        since = self._urgent.setdefault(row.id, self._clock())
        if self._clock() - since > GRACE_S and row.id not in self._killed:
            self._launcher.kill(folder, signal.SIGKILL)  # repeated if this raises
            self._killed[row.id] = self._clock()

    def _newest_snapshot(self, row: JobRow) -> str | None:
        names = [
            snapshot["name"]
            for snapshot in list_complete_snapshots(TrainSettings.of_plain(row.settings))
        ]
        return max(names, key=int) if names else None


_HEAD = (
    "loss", "accuracy", "goodput", "samples_per_s", "samples", "waiting",
    "staleness_p50", "staleness_p99", "staleness_max", "clock_gap",
)  # fmt: skip


def evaluations(settings: TrainSettings) -> list[dict[str, Any]]:
    """The tests of a run's weights so far, in order."""
    try:
        results = read_evaluations(settings.out / EVALUATIONS)
    except BadInput:
        return []
    return [msgspec.to_builtins(result) for result in results]


def may_change_live(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> bool:
    """Return whether a job with these settings can follow the changes without another attempt.

    The rate cannot change where workers take steps at a rate of their own.
    """
    if not changes.keys() <= set(LIVE):
        return False
    present = TrainSettings.of_plain(settings)
    half = present.build_strategy().for_shards(present.workers, prefetch=present.prefetch)
    return "rate_factor" not in changes or not (half.local_rate or half.deltas)


def delete_folder(store: JobStore, row: JobRow) -> None:
    """Delete a job in a terminal state with its folder. A run folder elsewhere stays."""
    if row.state not in TERMINAL:
        states = ", ".join(state for state in JobState if state in TERMINAL)
        text = f"delete: expected {states}; {row.id} is {row.state}"
        raise StateChanged(text, row.state, expected=states)
    if needed := list_dependents(store, row):
        text = f"delete: expected no job that begins with a snapshot of {row.id}, got {needed[0]}"
        raise StateChanged(text, row.state)
    folder = store.folder(row.id)
    grave = folder.with_name(f".deleted-{folder.name}")
    folder.rename(grave)
    store.remove(row)
    shutil.rmtree(grave, ignore_errors=True)
