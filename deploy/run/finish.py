"""Finishes a training run: writes its results into the run folder, tests and draws them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from deploy.run.evaluations_csv import EvaluationsFile
from deploy.run.folder import CAFFEMODEL, SETTINGS, SUMMARY, WEIGHTS, RunFolder, writer_of
from deploy.run.observer import RunObserver
from deploy.run.plots import plot_loss, plot_staleness
from deploy.run.prepare import Inputs
from deploy.run.progress import Progress
from deploy.run.settings import TrainSettings
from deploy.run.snapshot_ref import catalog_of
from deploy.run.summary import Summary, summarise
from ps.snapshots.catalog import LoadedSnapshot, SnapshotCatalog
from shards.errors import UNDECODABLE, GiveUp
from shards.plurals import format_count
from shards.repartition import whole_weights
from worker.caffe.weight_files import write_weights
from worker.job.outcome import Outcome
from worker.training.evaluation import Evaluation


class AlreadyFinished(Exception):
    """The run to resume has taken all its steps and written all its results."""


def finish(
    inputs: Inputs, outcome: Outcome, folder: RunFolder, observer: RunObserver
) -> Summary | None:
    """Write the results into the run folder and test the weights; None if Ctrl-C ended the run."""
    assert observer.updates is not None
    observer.close()
    summary = summarise(
        outcome.statuses,
        observer.updates.fresh,
        outcome.reports,
        workers=inputs.settings.workers,
        staleness_bound=inputs.settings.staleness,
        seconds=outcome.seconds,
        earlier=observer.updates.earlier,
        earlier_s=observer.updates.earlier_s,
        fresh_samples=observer.updates.fresh_samples,
        former=outcome.former_statuses,
        times_s=observer.times.times_s,
    )
    observers = {"rows": observer.cpu_s, "tests": outcome.tests_cpu_s}
    summary = replace(summary, start=observer.start.moments, observers_cpu_s=observers)
    # Remove the weights of an earlier stop, which would not belong to the new summary.
    for path in (folder.weights, folder.caffemodel):
        path.unlink(missing_ok=True)
    with with_hint(inputs.settings, outcome):
        folder.write_summary(summary)
        summary = _conclude(
            inputs,
            outcome.weights,
            summary,
            folder,
            observer.evaluations,
            observer.evaluated_in_all,
            observer.tested,
            test=not outcome.interrupted,
            draw=not observer.updates.lost,
        )
    return None if outcome.interrupted else summary


def _conclude(
    inputs: Inputs,
    weights: NDArray[np.float32],
    summary: Summary,
    folder: RunFolder,
    evaluations: EvaluationsFile,
    report: Callable[[Evaluation], None],
    tested: Callable[[int, int], None],
    *,
    test: bool,
    draw: bool,
) -> Summary:
    """Write the weights, test them, and draw the plots even if Ctrl-C ends the test.

    `tested` is called with the rows that are tested so far, and the rows to test. Returns the
    summary with the figures of the test, after writing it.
    """
    for path in (folder.weights, folder.caffemodel):
        write_weights(path, inputs.model.net, weights)
    try:
        if test and inputs.test is not None:
            figures = inputs.test.whole(weights, lambda rows: tested(rows, inputs.test_rows))
            steps = inputs.job.plan.steps
            report(Evaluation(steps, summary.samples, summary.seconds, figures))
            summary = replace(
                summary, test_accuracy=figures.get("accuracy"), test_loss=figures.get("loss")
            )
            folder.write_summary(summary)
    finally:
        if draw:
            plot_loss(folder.updates, summary, folder.loss_plot, evaluations.results)
            plot_staleness(folder.updates, summary, folder.staleness_plot)
    return summary


@contextmanager
def with_hint(settings: TrainSettings, outcome: Outcome) -> Iterator[None]:
    """Add to an error what was saved and how to continue."""
    try:
        yield
    except (GiveUp, OSError) as error:
        if outcome.snapshot is not None:
            where = f"the progress is saved in {outcome.snapshot}"
        elif SnapshotCatalog(catalog_of(settings, settings.out)).entries():
            where = "the progress since the last snapshot is lost"
        else:
            raise
        again = f"downpour train --resume {settings.out}"
        raise GiveUp(f"{error}; {where}; make room, then continue with: {again}") from None


# --- a run to resume that has taken all its steps -------------------------------------------------


def summary_of_end(run: Path, snapshot: LoadedSnapshot) -> Summary | None:
    """The summary of the run that ended with this snapshot; None if it has not written one."""
    try:
        summary = msgspec.json.decode((run / SUMMARY).read_bytes(), type=Summary)
    except (OSError, *UNDECODABLE):
        return None
    updates = min(part.version for part in snapshot.manifest.parts)
    return summary if summary.updates == updates and writer_of(run) is None else None


def complete(
    inputs: Inputs,
    snapshot: LoadedSnapshot,
    summary: Summary,
    display: Callable[[], AbstractContextManager[Progress]],
) -> Summary:
    """Write what is missing after a full disk or Ctrl-C; raises AlreadyFinished if none."""
    out = inputs.settings.out
    written = all((out / name).is_file() for name in (WEIGHTS, CAFFEMODEL))
    tested = inputs.test is None or summary.test_loss is not None
    if written and (tested or summary.test_accuracy is not None):
        raise AlreadyFinished(
            f"{out} is finished: each worker has taken its"
            f" {format_count(inputs.job.plan.steps, 'step')};"
            " to train further, give a larger --max-iter"
        )
    with (
        RunFolder.resume(out, TrainSettings.load(out / SETTINGS).plain()) as folder,
        display() as progress,
    ):
        if inputs.test is not None:
            progress.starting("the test")
        weights = whole_weights(snapshot.states, snapshot.manifest.layout, snapshot.manifest.map)
        tests = EvaluationsFile(folder.evaluations, upto=inputs.job.plan.steps)
        drawable = folder.updates.is_dir()
        return _conclude(
            inputs,
            weights,
            summary,
            folder,
            tests,
            tests.add,
            progress.show_test_progress,
            test=True,
            draw=drawable,
        )
