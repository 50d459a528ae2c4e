"""The line about how far a run is: what it says, and where it is shown."""

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import worker
from ps import Cluster
from worker.callbacks import progress_line
from worker.callbacks.base import RunStatus, WatchedRun
from worker.callbacks.progress_line import ProgressLine, progress_of
from worker.training.evaluation import Evaluation


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def status(iteration: int, seconds: float, loss: float | None) -> RunStatus:
    return RunStatus(
        iteration=iteration,
        samples=64 * iteration,
        seconds=seconds,
        updates=1,
        loss=loss,
        staleness=None,
        rate=0.1,
        samples_s=1.0,
        workers=2,
    )


def watched(steps: int | None, *, in_place: bool) -> str:
    """What is written of a short run, with a second between two reports."""
    file, seconds = io.StringIO(), iter(range(100))
    line = ProgressLine(
        file, steps=steps, in_place=in_place, columns=70, clock=lambda: float(next(seconds))
    )
    run = WatchedRun(2, {}, tests=True)
    run.cluster = cast(Cluster, SimpleNamespace(layout=SimpleNamespace(sparse=())))
    line.started(run)
    line.progressed(status(0, 1.0, None))
    line.progressed(status(10, 2.0, 0.5))
    line.evaluated(Evaluation(10, 640, 2.5, {"accuracy": 0.75}), None)  # type: ignore[arg-type]
    line.progressed(status(20, 4.0, None))
    line.ended(None)
    return file.getvalue()


def test_the_line_says_how_far_the_run_is() -> None:
    """It replaces itself, and stays when the run is over; the last loss that is known counts."""
    written = watched(40, in_place=True)
    drawn = [part.strip() for part in written.replace("\n", "").split("\r") if part.strip()]
    assert drawn == [
        "0:01  starting",
        "0:02  waiting for 2 workers",
        "0:03  waiting for 2 workers",
        "0:04  [=====               ] 10 of 40  loss 0.5",
        "0:05  [==========          ] 20 of 40  loss 0.5  accuracy 75.00%  320",
        "0:06  [==========          ] 20 of 40  loss 0.5  accuracy 75.00%  320",
    ]
    assert written.count("\n") == 1
    assert written.endswith("\n")
    assert "iteration 20  loss 0.5  accuracy 75.00%  320 rows/s" in watched(None, in_place=True)


def test_beside_a_bar_of_sparks_the_line_is_printed_now_and_then() -> None:
    """No two programs redraw one line; seconds of silence lie between two of ours."""
    lines = watched(40, in_place=False).splitlines()
    assert [line.strip()[:4] for line in lines if line.strip()] == ["0:01", "0:06"]


def test_only_a_terminal_has_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe or a file has none, and nobody who does not want it; a notebook has one."""
    frame: Any = SimpleNamespace()
    assert progress_of(frame, 3, enabled=True) == ()
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setattr(progress_line, "shows_progress", lambda _: False)
    assert len(progress_of(frame, 3, enabled=True)) == 1
    assert progress_of(frame, 3, enabled=False) == ()
    notebook = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})
    monkeypatch.setattr(sys, "stdout", notebook())
    assert len(progress_of(frame, 3, enabled=True)) == 1


def test_a_closed_terminal_does_not_end_a_run() -> None:
    file = io.StringIO()
    line = ProgressLine(file, steps=None, in_place=True, columns=80)
    file.close()
    line.progressed(status(1, 1.0, 0.5))
    assert file.closed


def test_results_are_shown_in_one_line(tmp_path: Path) -> None:
    """No weights, no network and no secret of the job."""
    outcome: Any = worker.Outcome(
        cluster=SimpleNamespace(job="secret"),  # type: ignore[arg-type]
        weights=None,  # type: ignore[arg-type]
        statuses=[SimpleNamespace(steps=800)],  # type: ignore[list-item]
        former_statuses=[],
        reports=[],
        snapshot=None,
        seconds=12.34,
        interrupted=True,
    )
    tests = (Evaluation(400, 640, 2.5, {"accuracy": 0.98}),)
    figures = "800 steps of all workers in 12.3 s"
    assert repr(outcome) == f"Outcome({figures}, interrupted)"
    result = worker.RunResult({}, outcome, tests, {"net": None})  # type: ignore[arg-type]
    assert repr(result) == f"RunResult(net: {figures}, accuracy 98.00%, interrupted)"
    trained = worker.Trained("model", outcome.weights, outcome)  # type: ignore[arg-type]
    assert repr(trained) == f"Trained('model': {figures}, interrupted)"
