"""Runs that trained for real as trials of an experiment, with their records.

An imported run is one Parquet file in the folder `imported` of an experiment: its record, the rows
of updates.parquet, and as metadata what a simulated trial has as well, its settings and its result.
The file is whole or not there, and the run folder is not needed any more.

What a real run has not measured is NaN: the error of a run without tests.
"""

import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from deploy.experiments.cluster import ClusterModel
from deploy.experiments.run_records import read_record
from deploy.experiments.runner import Folder
from deploy.experiments.sweeps import Point, read_sweep
from deploy.experiments.training_simulation import CurvePoint
from deploy.experiments.trials import Trial, TrialResult
from deploy.run.evaluations_csv import read_evaluations
from deploy.run.folder import EVALUATIONS, SETTINGS, SUMMARY
from deploy.run.summary import Summary
from deploy.run.updates_parquet import SCHEMA
from ps.whole_files import whole_file
from shards.errors import UNDECODABLE, BadInput

Kind = TypeVar("Kind")

IMPORTED = "imported"
_RUN = b"run"
_OPTIONS = ("n_push", "n_fetch", "warm_steps")


class ImportedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A real run as a trial: its name, the values of its point, and its result."""

    name: str
    point: dict[str, Any]
    result: TrialResult

    @property
    def label(self) -> str:
        return Point(self.point, []).label


class _Settings(msgspec.Struct, frozen=True):
    """The options in a settings.json that a trial has as well."""

    solver: str = ""
    strategy: str = "downpour"
    staleness: int | str | None = None
    link: str | None = None
    seed: int | None = None
    n_push: int | None = None
    n_fetch: int | None = None
    warm_steps: int | None = None


Columns = dict[str, NDArray[Any]]
"""The columns of shard 0, in the order in which it judged the pushes."""


def import_run(
    run: Path, folder: Path, point: Mapping[str, Any], name: str | None = None
) -> ImportedRun:
    """Copy a finished run into an experiment's folder as a trial of the point with these values.

    Where the folder has a sweep, the values select one of its points. Raises BadInput for a run
    without updates, for values of no point or of several, and for a name that is there already.
    """
    target = folder / IMPORTED / f"{_name(name or run.resolve().name)}.parquet"
    if target.exists():
        raise BadInput(
            target, expected="a new name", got="one that is there", hint="choose another --name"
        )
    table = read_record(run, SCHEMA.names)
    run_imported = ImportedRun(
        name=target.stem, point=_point(folder, point), result=_result(run, table)
    )
    metadata = {_RUN: msgspec.msgpack.encode(run_imported)}
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(target, contended=True) as partial:
            pq.write_table(table.replace_schema_metadata(metadata), partial)
    except OSError as error:
        raise BadInput(f"{target}: expected to write the run, got: {error.strerror}") from None
    return run_imported


def load_imported(folder: Path) -> list[ImportedRun]:
    """The imported runs of an experiment, by name; raises BadInput for a file that is not one."""
    runs = []
    for path in sorted((folder / IMPORTED).glob("*.parquet")):
        try:
            metadata = pq.read_schema(path).metadata or {}
            runs.append(msgspec.msgpack.decode(metadata[_RUN], type=ImportedRun))
        except (OSError, KeyError, pa.ArrowException, *UNDECODABLE):
            raise BadInput(path, expected="an imported run", got="another file") from None
    return runs


def point_values(texts: Sequence[str]) -> dict[str, Any]:
    """The values in texts such as rate=0.1 or kind=asp: TOML's values, or else plain texts."""
    values: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals or key in values:
            raise BadInput("point", expected="KEY=VALUE, each key once", got=f"{text!r}")
        try:
            values[key] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            values[key] = value
    return values


def _name(name: str) -> str:
    if not name or not all(letter.isalnum() or letter in "-_" for letter in name):
        raise BadInput(
            "name", expected="letters, digits, - and _", got=f"{name!r}", hint="choose --name"
        )
    return name


def _point(folder: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the sweep's one point with those wanted; or these, where there is no sweep."""
    sweep = Folder(folder).sweep
    if not sweep.exists():
        return dict(values)
    points = [
        point
        for point in read_sweep(sweep, consent=True).points
        if values.items() <= point.values.items()
    ]
    if len(points) != 1:
        number = f"{len(points)} points have" if points else "no point has"
        raise BadInput(
            "point",
            expected=f"values of one point of {sweep}",
            got=f"{Point(dict(values), []).label}, which {number}",
        )
    return points[0].values


def _result(run: Path, table: pa.Table) -> TrialResult:
    """The result of a run by its files, in the figures of a trial."""
    first = table.filter(pc.equal(table["shard"], 0))
    counts: Columns = {n: first[n].to_numpy(zero_copy_only=False) for n in SCHEMA.names}
    if not len(counts["time"]):
        raise BadInput(run, expected="a run with updates", got="none")
    settings = _read(run / SETTINGS, _Settings) or _Settings()
    summary = _read(run / SUMMARY, Summary)
    workers = len(set(counts["worker"].tolist()))
    steps = int(counts["steps"].sum())
    applied = counts["staleness"][counts["dropped"] == 0]
    options = [
        f"{name}={getattr(settings, name)}"
        for name in _OPTIONS
        if getattr(settings, name) is not None
    ]
    spent = workers * _seconds(counts)
    waited = float(np.nansum(counts["wait_s"]))
    trial = Trial(
        workload=Path(settings.solver).stem or str(counts["job"][0]),
        batch=max(1, round(int(counts["samples"].sum()) / max(1, steps))),
        strategy=":".join(filter(None, (settings.strategy, ",".join(options)))),
        rate=float(counts["rate"][0]),
        staleness=settings.staleness if isinstance(settings.staleness, int) else None,
        gradients=steps,
        seed=int(counts["seed"][0]),
        cluster=ClusterModel(
            workers=workers,
            shards=int(np.asarray(table["shard"]).max()) + 1,
            link=settings.link or "",
        ),
    )
    return TrialResult(
        trial=trial,
        curve=_curve(run, counts, summary),
        staleness=np.bincount(applied).tolist() if len(applied) else [],
        updates=int(counts["apply_version"].max()),
        gradients=steps,
        dropped=int(counts["dropped"].sum()),
        clock_gap=int(counts["clock_gap"].max()),
        seconds=_seconds(counts) if summary is None else summary.seconds,
        compute_share=float(np.nansum(counts["compute_s"])) / spent if spent else 0.0,
        wait_share=waited / spent if spent else 0.0,
    )


def _curve(run: Path, counts: Columns, summary: Summary | None) -> list[CurvePoint]:
    """The tests of the weights, and the end."""
    steps, samples = int(counts["steps"].sum()), int(counts["samples"].sum())
    tests = read_evaluations(run / EVALUATIONS) if (run / EVALUATIONS).exists() else []
    curve = [
        CurvePoint(
            updates=_version_at(counts, test.samples),
            gradients=round(steps * test.samples / max(1, samples)),
            seconds=test.seconds,
            loss=test.figures.get("loss", math.nan),
            error=_error(test.figures.get("accuracy")),
        )
        for test in tests
    ]
    end = CurvePoint(
        int(counts["apply_version"].max()), steps, _seconds(counts), math.nan, math.nan
    )
    if summary is not None and summary.test_accuracy is not None:
        loss = math.nan if summary.test_loss is None else summary.test_loss
        end = end._replace(loss=loss, error=_error(summary.test_accuracy))
    elif curve:
        end = end._replace(loss=curve[-1].loss, error=curve[-1].error)
    return [*curve, end]


def _seconds(counts: Columns) -> float:
    """The time from the first update to the last one."""
    return float(counts["time"][-1] - counts["time"][0])


def _version_at(counts: Columns, samples: int) -> int:
    """The version once this number of samples had been applied."""
    index = int(np.searchsorted(np.cumsum(counts["samples"]), samples, side="right"))
    return int(counts["apply_version"][index - 1]) if index else 0


def _error(accuracy: float | None) -> float:
    return math.nan if accuracy is None else 100 * (1 - accuracy)


def _read(path: Path, kind: type[Kind]) -> Kind | None:
    """A JSON file of a run folder; None if the run has none."""
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError, UnicodeError) as error:
        raise BadInput(f"{path}: expected a run's {path.name}, got: {error}") from None
