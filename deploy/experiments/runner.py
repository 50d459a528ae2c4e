"""Runs a sweep in a folder, and continues it after a kill at any moment.

A trial's result is one Parquet file, called by the trial's id. It is written under another name and
renamed when it is whole, so a file with the right name is the mark that the trial is done. A file
that cannot be read is redone. Costs are stored separately, so that interrupted and
uninterrupted sweeps write identical result files.

    sweep.toml          the sweep, as it was first run
    trials/ID.parquet   the measurements of a trial, and the rest of its result as metadata
    failed/ID.txt       why a trial failed twice
    rates.json          the rates that were chosen, if the sweep asks for some
    tuning/             the trials that chose them, in such a folder
    costs.csv           the CPU seconds of each trial
    lock                held by the runner; a second one is refused
"""

import fcntl
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import structs

from deploy.experiments.accept_rules import Judgement, PointResults
from deploy.experiments.sweeps import Sweep
from deploy.experiments.training_simulation import CurvePoint
from deploy.experiments.trial_limits import TrialLimits
from deploy.experiments.trials import Trial, TrialResult, run_trial
from ps.whole_files import PARTIAL, whole_file
from shards.errors import UNDECODABLE, BadInput, DownpourError

_RESULT = b"result"
_CURVE = pa.schema(
    [
        ("updates", pa.int64()),
        ("gradients", pa.int64()),
        ("seconds", pa.float64()),
        ("loss", pa.float64()),
        ("error", pa.float64()),
    ]
)


class SweepStatus(NamedTuple):
    """The progress of a sweep; `stale` files are of other settings or another build."""

    trials: int
    done: int
    failed: int
    stale: int

    def __str__(self) -> str:
        remaining = self.trials - self.done
        return (
            f"{self.done} of {self.trials} trials done, {remaining} left ({self.failed} failed)"
            + (f"; {self.stale} results of other settings or another build" if self.stale else "")
        )


class BadFolder(BadInput):
    """A folder that no result can be written to: no trial is at fault, so the sweep ends."""


class Folder:
    """The folder of a sweep."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def sweep(self) -> Path:
        return self.path / "sweep.toml"

    def result(self, trial: str) -> Path:
        return self.path / "trials" / f"{trial}.parquet"

    def failure(self, trial: str) -> Path:
        return self.path / "failed" / f"{trial}.txt"

    def create(self, sweep: Sweep) -> None:
        """Make the folder; raises BadInput if it is another sweep's."""
        self.make()
        if self.sweep.exists() and self.sweep.read_text() != sweep.text:
            raise BadInput(
                self.path,
                expected="the folder of this sweep",
                got="one with another sweep.toml",
                hint="choose another folder with --out",
            )
        self.sweep.write_text(sweep.text)

    def make(self) -> None:
        """Make the folders that trials are kept in."""
        for part in ("trials", "failed"):
            (self.path / part).mkdir(parents=True, exist_ok=True)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder; raises BadInput if another runner does."""
        with (self.path / "lock").open("w") as lock_file:
            try:
                fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BadInput(f"{self.path}: another runner is at work on this sweep") from None
            yield

    def save(self, result: TrialResult) -> None:
        """Write a result, and rename it when it is whole."""
        curve = [dict(zip(CurvePoint._fields, point, strict=True)) for point in result.curve]
        rest = structs.replace(result, curve=[], cpu_s=0.0)
        table = pa.Table.from_pylist(curve, _CURVE)
        table = table.replace_schema_metadata({_RESULT: msgspec.json.encode(rest)})
        target = self.result(result.trial.id)
        try:
            with whole_file(target, contended=True) as partial_file:
                pq.write_table(table, partial_file)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else error
            raise BadFolder(f"{target}: expected to write a result, got: {reason}") from None

    def load(self, trial: Trial) -> TrialResult | None:
        """The result of a trial; None if there is none, or its file is torn."""
        try:
            with pq.ParquetFile(self.result(trial.id)) as file:
                table = file.read(use_threads=False)
            metadata = table.schema.metadata or {}
            rest = msgspec.json.decode(metadata[_RESULT], type=TrialResult)
        except (OSError, KeyError, pa.ArrowInvalid, *UNDECODABLE):
            return None
        curve = [CurvePoint(**row) for row in table.to_pylist()]
        return structs.replace(rest, curve=curve) if rest.trial == trial and curve else None

    def status(self, sweep: Sweep) -> SweepStatus:
        """Count what is there."""
        known = {trial.id for trial in sweep.trials}
        done = sum(self.load(trial) is not None for trial in sweep.trials)
        failed = sum(self.failure(trial).exists() for trial in known)
        files = {path.stem for path in (self.path / "trials").glob("*.parquet")}
        return SweepStatus(len(known), done, failed, len(files - known))

    def cost(self) -> dict[str, float]:
        """The CPU seconds of trials, by id."""
        lines = (self.path / "costs.csv").read_text().splitlines() if self._has_costs() else []
        costs = {}
        for line in lines:
            trial, _, seconds = line.partition(",")
            with suppress(ValueError):  # a kill may have cut the last line
                costs[trial] = float(seconds)
        return costs

    def note_cost(self, trial: str, cpu_s: float) -> None:
        with (self.path / "costs.csv").open("a") as out:
            out.write(f"{trial},{cpu_s:.3f}\n")

    def _has_costs(self) -> bool:
        return (self.path / "costs.csv").exists()


def run_sweep(
    sweep: Sweep, path: Path, *, jobs: int = 1, note: Callable[[str], None] = print
) -> SweepStatus:
    """Run the trials that are not done yet; returns where the sweep then stands."""
    folder = Folder(path)
    folder.create(sweep)
    labels = sweep.labels
    with folder.lock():
        for torn in (path / "trials").glob(f".*{PARTIAL}"):
            torn.unlink()
        remaining = [trial for trial in sweep.trials if folder.load(trial) is None]
        done = len(sweep.trials) - len(remaining)
        if done:
            note(f"{done} of {len(sweep.trials)} trials are done already")
        for number, (trial, failure, cpu_s) in enumerate(
            run_in_folder(folder, sweep.limits, remaining, jobs), done + 1
        ):
            folder.note_cost(trial, cpu_s)
            ended = f"failed: {failure}" if failure else f"done in {cpu_s:.1f} CPU s"
            note(f"{number} of {len(sweep.trials)}: {labels[trial]}: {ended} ({trial})")
        return folder.status(sweep)


def estimate_s(sweep: Sweep, path: Path) -> float:
    """The CPU seconds that the trials left need, by what others cost, or by a short run."""
    folder = Folder(path)
    remaining = [trial for trial in sweep.trials if folder.load(trial) is None]
    if not remaining:
        return 0.0
    cost = folder.cost()
    known = [(trial.gradients, cost[trial.id]) for trial in sweep.trials if trial.id in cost]
    if not known:
        short = structs.replace(remaining[0], gradients=300, look_every=0)
        run_trial(structs.replace(short, gradients=1))  # loads the data
        known = [(300, run_trial(short).cpu_s)]
    per_gradient = sum(cpu_s for _, cpu_s in known) / sum(gradients for gradients, _ in known)
    return per_gradient * sum(trial.gradients for trial in remaining)


def judge_sweep(sweep: Sweep, path: Path) -> list[Judgement]:
    """Judge the sweep's accept rules by the results in its folder."""
    folder = Folder(path)
    points = []
    for point in sweep.points if sweep.expect else ():
        results = [folder.load(trial) for trial in point.trials]
        whole = [result for result in results if result is not None]
        points.append(PointResults(point.values, whole if len(whole) == len(results) else []))
    return [rule.judge(points) for rule in sweep.expect]


def run_in_folder(
    folder: Folder, limits: TrialLimits, trials: list[Trial], jobs: int
) -> Iterator[tuple[str, str, float]]:
    """Run trials: their ids, why they failed if they did, and their CPU seconds."""
    run = partial(run_and_save, folder.path, limits)
    if jobs <= 1 or len(trials) <= 1:
        yield from map(run, trials)
        return
    with multiprocessing.get_context("spawn").Pool(min(jobs, len(trials))) as pool:
        yield from pool.imap_unordered(run, trials)


def run_and_save(path: Path, limits: TrialLimits, trial: Trial) -> tuple[str, str, float]:
    """Run a trial and write its result; the reason, if it has failed twice."""
    folder, began = Folder(path), time.process_time()
    reason = ""
    for _ in range(2):
        try:
            with limits.enforce():
                result = run_trial(trial)
            folder.save(result)
        except BadFolder:
            raise
        except (DownpourError, MemoryError, TimeoutError, FloatingPointError) as error:
            reason = f"{type(error).__name__}: {error}"
        else:
            folder.failure(trial.id).unlink(missing_ok=True)
            return trial.id, "", time.process_time() - began
    folder.failure(trial.id).write_text(f"{reason}\n")
    return trial.id, reason, time.process_time() - began
