"""The service as a state machine, with crashes between any two writes; and defects that it finds.

`make check C=service-model` plays it for long.
"""

import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from deploy.runner.journal import JournalReader
from deploy.service.job_rows import JobRow
from deploy.service.job_store import JobStore
from deploy.service.launcher import Liveness, LocalLauncher
from deploy.service.states import JobState, Verb
from deploy.service.supervisor import Supervisor
from tests.support.service_model import ServiceModel

RUNS, STEPS = 50, 30
Plant = Callable[[pytest.MonkeyPatch], None]
DEFECTS: dict[str, Plant] = {}


def defect(plant: Plant) -> Plant:
    DEFECTS[plant.__name__] = plant
    return plant


def play(
    runs: int, phases: Iterable[Phase] = (Phase.generate, Phase.shrink), number: int = 1
) -> None:
    chosen = settings(
        max_examples=runs, stateful_step_count=STEPS, deadline=None, database=None,
        derandomize=False, phases=tuple(phases), suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    run_state_machine_as_test(seed(number)(ServiceModel), settings=chosen)


def test_no_order_is_lost_and_no_job_has_two_runners() -> None:
    """Whatever users, runners and crashes do, every promise of the model holds."""
    play(RUNS)


@defect
def an_old_view_may_move_a_job(patch: pytest.MonkeyPatch) -> None:
    """The transition does not compare (attempt, state_seq)."""

    def move(self: JobStore, seen: JobRow, to: JobState, **more: Any) -> JobRow:
        return real(self, self.get(seen.id), to, **more)

    real = JobStore.move
    patch.setattr(JobStore, "move", move)


@defect
def a_cancel_is_answered_before_it_is_stored(patch: pytest.MonkeyPatch) -> None:
    """The order is kept in memory until the next look."""
    waiting: list[tuple[Supervisor, str, dict[str, Any]]] = []

    def ask(self: Supervisor, job: str, verb: Verb, **details: Any) -> tuple[str, JobRow]:
        if verb is not Verb.CANCEL:
            return real_ask(self, job, verb, **details)
        waiting.append((self, job, details))
        return "0" * 12, self._store.get(job)

    def reconcile(self: Supervisor) -> None:
        while waiting:
            own, job, details = waiting.pop()
            if own is self:
                real_ask(self, job, Verb.CANCEL, **details)
        real_reconcile(self)

    real_ask, real_reconcile = Supervisor.ask, Supervisor.reconcile
    patch.setattr(Supervisor, "ask", ask)
    patch.setattr(Supervisor, "reconcile", reconcile)


@defect
def what_another_service_started_counts_as_gone(patch: pytest.MonkeyPatch) -> None:
    """A restarted service starts a second runner."""

    def probe(self: LocalLauncher, folder: Path, nonce: str) -> Liveness:
        return real(self, folder, nonce) if nonce in self._children else Liveness.GONE

    real = LocalLauncher.probe
    patch.setattr(LocalLauncher, "probe", probe)
    patch.setattr(LocalLauncher, "kill", lambda *_: 0)


@defect
def a_runner_starts_before_its_order_is_stored(patch: pytest.MonkeyPatch) -> None:
    """Killed in between, the service starts that attempt again."""

    def move(self: JobStore, seen: JobRow, to: JobState, **more: Any) -> JobRow:
        if more.get("kind") == "start":
            launcher.launch(self.folder(seen.id), more["attempt"], more["nonce"])
        return real_move(self, seen, to, **more)

    launcher = LocalLauncher()
    real_move = JobStore.move
    patch.setattr(JobStore, "move", move)


@defect
def a_restart_drops_what_only_the_journal_has(patch: pytest.MonkeyPatch) -> None:
    """The journal is not compared with the database when the service starts."""
    patch.setattr(JobStore, "catch_up", lambda _: 0)


@defect
def events_are_stored_before_they_take_effect(patch: pytest.MonkeyPatch) -> None:
    """Killed in between, the service never makes the transition. It did this once."""

    def follow(self: Supervisor, row: JobRow, folder: Path) -> JobRow:
        entries = JournalReader(folder / "events.jsonl").read()
        self._store.ingest(row, entries)
        return real(self, self._store.get(row.id), folder)

    real = Supervisor._follow
    patch.setattr(Supervisor, "_follow", follow)


@defect
def an_attempt_ends_while_processes_of_it_live(patch: pytest.MonkeyPatch) -> None:
    """The reaper is content with a signal."""

    def clean(self: Supervisor, row: JobRow) -> bool:
        self._launcher.kill(self._store.folder(row.id), signal.SIGTERM)
        return True

    patch.setattr(Supervisor, "_clean", clean)


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model would notice it: with the defect planted, some run breaks a promise."""
    DEFECTS[name](monkeypatch)
    with pytest.raises((AssertionError, sa.exc.IntegrityError)):
        play(400, (Phase.generate,), number=5)  # soon finds the rarest of them, as few seeds do
