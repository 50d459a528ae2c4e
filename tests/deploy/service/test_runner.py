"""The files that a runner writes: journals that survive a kill, series that stay small."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from deploy.run.folder import lock_folder
from deploy.run.progress_model import Readings, ShardReading, WorkerReading
from deploy.run.settings import TrainSettings
from deploy.runner import job_folder
from deploy.runner.attempt import run_attempt
from deploy.runner.journal import Journal, JournalReader, PatientJournal
from deploy.runner.readings import (
    MAX_POINTS,
    FigureTally,
    ReadingFiles,
    read_newest,
    read_series,
    thin_out,
)
from deploy.runner.recording import DEGRADED_AFTER_S, Health, RecordingProgress
from ps.snapshots import checked_json
from shards.errors import BadInput, GiveUp
from shards.update_records import RECORD
from tests.support import run_records, tiny_job
from tests.support.journal_reads import counted_bytes
from worker.training.evaluation import Evaluation
from worker.training.worker_times import WorkerTimes


def readings(
    *, waits: bool = False, lost: bool = False, loss: float = 1.0, steps: int = 1
) -> Readings:
    workers = tuple(
        WorkerReading(
            name=name,
            clock=clock,
            step=clock,
            standing=standing,
            waits=standing.startswith("waits"),
            loss=None,
            restarts=0,
        )
        for name, clock, standing in (
            ("w0", 1, "runs"),
            ("w1", 5, "waits at the bound" if waits else "runs"),
            ("w2", 5, "is silent, no longer waited for" if lost else "runs"),
        )
    )
    shard = ShardReading(
        shard=0,
        version=steps,
        updates_per_s=None,
        bytes_in_per_s=None,
        bytes_out_per_s=None,
        max_clock_gap=4,
    )
    return Readings(
        elapsed_s=1.0, steps=steps, planned=10, remaining_s=None, samples_per_s=None, loss=loss,
        rate=0.1, epoch=None, staleness_mean=None, staleness_max=None, bound=4, absent=0,
        workers=workers, shards=(shard,),
    )  # fmt: skip


def test_a_journal_continues_after_a_torn_line(tmp_path: Path) -> None:
    """A line that a kill has cut short is ignored by readers, and removed by the next writer."""
    path = tmp_path / "events.jsonl"
    with Journal(path) as journal:
        journal.append("first", 1, text="a")
    with path.open("ab") as file:
        file.write(b'{"number":2,"time":1.0,"att')
    reader = JournalReader(path)
    assert [entry.kind for entry in reader.read()] == ["first"]
    with Journal(path) as journal:
        assert journal.append("second", 2).number == 2
    assert [entry.kind for entry in reader.read()] == ["second"]
    assert [entry.number for entry in JournalReader(path, after=1).read()] == [2]
    assert JournalReader(tmp_path / "none").read() == []


def test_a_journal_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that knows where the file ended reads only what others have added since."""
    read = counted_bytes(monkeypatch)
    path = tmp_path / "orders.jsonl"
    end = None
    for number in range(1, 101):
        with Journal(path, end) as journal:
            assert journal.append("order", 0).number == number
            end = journal.end
    assert read == [0] * 100
    with Journal(path) as other:
        assert other.append("from elsewhere", 0).number == 101
    with path.open("ab") as file:
        file.write(b'{"number":102,"ti')
    with Journal(path, end) as journal:
        assert journal.append("order", 0).number == 102
    assert read[-1] < 200
    assert [entry.number for entry in JournalReader(path).read()] == list(range(1, 103))
    with path.open("rb+") as file:  # another file: what was known of it does not count
        file.truncate(150)
    with Journal(path, end) as journal:
        number = len(JournalReader(path).read())
        assert journal.append("order", 0).number == number + 1


def test_series_stay_small_and_cover_the_whole_job(tmp_path: Path) -> None:
    """However long a job is, its series has at most 4,000 points, from the first to the last."""
    files, tally = ReadingFiles(tmp_path), FigureTally()
    seconds = 3 * MAX_POINTS
    for second in range(1, seconds + 1):
        files.write(tally.reading(1, float(second), readings(steps=second), second, None))
    points = read_series(tmp_path / "series.jsonl")
    assert MAX_POINTS // 4 <= len(points) < MAX_POINTS
    assert points[0].time == 1.0
    assert seconds - points[-1].time < 8
    assert [point.time for point in points] == sorted(point.time for point in points)
    newest = read_newest(tmp_path)
    assert newest is not None
    assert newest.time == seconds


def test_points_that_a_rollback_made_void_are_left_out(tmp_path: Path) -> None:
    """An attempt that continues from step 60 of 100 voids the points above 60, and no others."""
    first, tally = ReadingFiles(tmp_path), FigureTally()
    for second in range(1, 101):
        first.write(tally.reading(1, float(second), readings(steps=second), second, None))
    later = ReadingFiles(tmp_path)
    for second in range(101, 111):
        steps = second - 41
        later.write(tally.reading(2, float(second), readings(steps=steps), steps, None))
    points = read_series(tmp_path / "series.jsonl")
    assert [point.steps for point in points] == [*range(1, 61), *range(60, 70)]
    assert [point.time for point in points] == [*range(1, 61), *range(101, 111)]


def test_the_first_and_the_last_of_many_values_are_kept() -> None:
    """Values are thinned evenly to a number of them; fewer stay as they are."""
    assert thin_out(range(100), 4) == [0, 33, 66, 99]
    assert thin_out(range(3), 4) == [0, 1, 2]
    assert all(thin_out(range(n), 2) == [0, n - 1] for n in range(2, 50))


def test_figures_of_update_records() -> None:
    """Staleness is counted by value, waits by worker, and who is slowest while others wait."""
    rows = np.zeros(4, RECORD)
    rows["staleness"] = [0, 1, 1, 90]
    rows["worker"] = [b"w0", b"w1", b"w1", b"w1"]
    rows["wait_s"] = [0.5, 1.0, 2.0, 0.0]
    rows["compute_s"] = 2.0
    rows["network_s"] = [0.25, 0.0, 0.0, 0.5]
    tally = FigureTally()
    tally.add(readings(waits=True), [rows])
    found = tally.reading(1, 5.0, readings(), 40, 0.5)
    assert found.staleness == [1, 2, *[0] * 62, 1]
    assert (found.point.staleness_p50, found.point.staleness_max) == (1.0, 90)
    assert found.times_s == {
        "w0": WorkerTimes(compute=2.0, wait=0.5, network=0.25),
        "w1": WorkerTimes(compute=6.0, wait=3.0, network=0.5),
    }
    assert found.holds == {"w0": 1}
    assert tally.every_shard_updated(1)
    assert not tally.every_shard_updated(2)


def test_health() -> None:
    """Short of workers for 30 s is degraded, until they are back; a loss of NaN is said once."""
    health = Health()
    assert health.update(readings(lost=True), 0.0) == []
    assert health.update(readings(lost=True), DEGRADED_AFTER_S - 1) == []
    assert health.update(readings(lost=True), DEGRADED_AFTER_S) == ["degraded"]
    assert health.update(readings(lost=True), DEGRADED_AFTER_S + 1) == []
    assert health.update(readings(), DEGRADED_AFTER_S + 2) == ["restored"]
    assert health.update(readings(loss=float("nan")), 50.0) == ["diverged"]
    assert health.update(readings(loss=float("nan")), 51.0) == []


def test_events_wait_for_a_disk_that_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fails ends no training: the events follow later, once each and in order."""
    with Journal(tmp_path / "events.jsonl") as events:
        shown = RecordingProgress(
            PatientJournal(events, 1), tmp_path, 1, steps=10, workers=1, bound=4, rows=10,
            display=0, average_loss=None,
        )  # fmt: skip
        with monkeypatch.context() as broken:

            def fail(*_: object) -> None:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))

            broken.setattr("deploy.runner.journal.os.fsync", fail)
            with pytest.raises(GiveUp):
                events.append("any", 1)
            shown.starting("Spark")
            shown.note("a notice")
        assert JournalReader(tmp_path / "events.jsonl").read() == []
        shown.starting("the shards and workers")
    found = [entry.data for entry in JournalReader(tmp_path / "events.jsonl").read()]
    assert found == [{"what": "Spark"}, {"text": "a notice"}, {"what": "the shards and workers"}]


def test_an_attempt_begins_with_the_accuracy_of_the_one_before(tmp_path: Path) -> None:
    """It is on the page until this attempt has tested the weights itself."""
    figures = {"steps": 10, "workers": 1, "bound": 4, "rows": 10, "display": 0}
    seen = []
    with Journal(tmp_path / "events.jsonl") as events:
        for attempt in (1, 2):
            recorded = PatientJournal(events, attempt)
            shown = RecordingProgress(recorded, tmp_path, attempt, average_loss=None, **figures)
            shown.update([run_records.status(version=1, steps=1)])
            for result in (0.5, 0.75):
                newest = read_newest(tmp_path / "readings")
                seen.append(None if newest is None else newest.point.accuracy)
                shown.show_evaluation(Evaluation(1, 8, 1.0, {"accuracy": result}))
    assert seen == [None, 0.5, 0.75, 0.5]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a job whose solver is missing."""
    folder = tmp_path / "job"
    folder.mkdir()
    settings = TrainSettings(solver=tmp_path / "none.prototxt", out=folder / "run")
    (folder / "settings.json").write_bytes(checked_json.encode(settings.plain()))
    return folder


def test_bad_input_is_the_outcome(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An attempt that cannot start leaves an outcome, events and a line in its log."""
    assert run_attempt(folder) == 1
    outcome = job_folder.load(folder / "outcome.json", job_folder.AttemptOutcome)
    assert outcome is not None
    assert (outcome.end, outcome.code, outcome.attempt) == ("failed", "bad_input", 1)
    assert "none.prototxt" in outcome.message
    assert "none.prototxt" in capsys.readouterr().err
    kinds = [entry.kind for entry in JournalReader(folder / "events.jsonl").read()]
    assert kinds == ["checking", "ended"]


def test_a_cluster_that_does_not_answer_is_tried_again(tmp_path: Path) -> None:
    """Its head may be starting, as after a power cut: the service orders another attempt."""
    folder = tmp_path / "job"
    folder.mkdir()
    solver = tiny_job.write_job(tmp_path)
    settings = TrainSettings(
        solver=solver, data=solver.parent / "data", out=folder / "run", ray="127.0.0.1:1"
    )
    (folder / "settings.json").write_bytes(checked_json.encode(settings.plain()))
    assert run_attempt(folder) == 75
    outcome = job_folder.load(folder / "outcome.json", job_folder.AttemptOutcome)
    assert outcome is not None
    assert (outcome.end, outcome.code) == ("retry", "infrastructure")
    assert "Connection refused" in outcome.message


def test_one_attempt_at_a_time(folder: Path) -> None:
    """A folder that another attempt has locked is refused, as is one without a job."""
    lock = lock_folder(folder)
    with pytest.raises(BadInput, match="in use"):
        run_attempt(folder)
    os.close(lock)
    with pytest.raises(BadInput, match="expected the folder of a job"):
        run_attempt(folder.parent)


def test_a_late_runner_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner of an earlier order does not start once a newer attempt has been ordered."""
    with Journal(folder / "orders.jsonl") as orders:
        orders.append("start", 1, nonce="old")
        orders.append("start", 2, nonce="new")
    monkeypatch.setenv(job_folder.ATTEMPT_VARIABLE, "old")
    with pytest.raises(BadInput, match="nonce of the newest attempt"):
        run_attempt(folder)
