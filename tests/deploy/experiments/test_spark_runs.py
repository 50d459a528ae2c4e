"""A trial through Ray and Spark: shipped launchers, the trial's own gradients, the same weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from deploy.experiments.agreement import Agreement
from deploy.experiments.cluster import ClusterModel, StepTimes, WorkerKill
from deploy.experiments.imported_runs import import_run, load_imported
from deploy.experiments.real_runs import RealRun
from deploy.experiments.shapes import SHAPES
from deploy.experiments.shapes.real_trials import REAL_TRIALS, real_trial
from deploy.experiments.spark_runs import (
    SparkComparison,
    compare_with_spark,
    run_with_spark,
    write_run,
)
from deploy.experiments.training_simulation import Course, CurvePoint
from deploy.experiments.trials import Trial
from deploy.experiments.workloads import workload_of
from ps.launch.launcher import Placement
from shards.errors import BadInput

TRIAL = Trial(
    workload="quad",
    strategy="softsync:n=1",
    rate=0.02,
    gradients=80,
    seed=3,
    cluster=ClusterModel(workers=2, times=StepTimes(mean_s=0.02, cv=0.2), link="rtt=2ms"),
)


@pytest.mark.usefixtures("ray_local")
def test_a_run_through_ray_and_spark_is_replayed(spark: Any, tmp_path: Path) -> None:
    """The recorded turns lead the simulator to the weights of the shard in Ray, bit for bit; no
    update is lost; and the run becomes a trial of an experiment."""
    found = compare_with_spark(TRIAL, spark, Placement.RAY)
    assert found.replayed is True
    assert len(found.run.records) == 80
    assert set(found.run.records["worker"]) == {b"worker-0", b"worker-1"}
    assert found.run.records["compute_s"].min() > 0
    write_run(found, tmp_path / "run")
    import_run(tmp_path / "run", tmp_path / "real", {})
    (kept,) = load_imported(tmp_path / "real")
    assert kept.result.error == pytest.approx(found.error, abs=0.01)
    assert sum(kept.result.staleness) == 80


@pytest.mark.parametrize(
    ("distance", "wasserstein", "error", "replayed", "agrees"),
    [
        (0.05, 0.25, 10.5, True, True),
        (0.05, 0.25, 10.5, None, True),
        (0.06, 0.1, 10.0, True, False),
        (0.01, 0.3, 10.0, True, False),
        (0.01, 0.1, 9.4, True, False),
        (0.01, 0.1, 10.0, False, False),
    ],
)
def test_it_agrees_within_the_limits(
    distance: float, wasserstein: float, error: float, replayed: bool | None, agrees: bool
) -> None:
    """Distances of staleness of at most .05 and .25, errors within .5 points, the same weights."""
    rows = np.zeros(1, [("staleness", "<i8")])
    run = RealRun(TRIAL.job(), rows, np.zeros(1, np.float32), 1.0, 0.0)
    course = Course([CurvePoint(1, 1, 1.0, 0.1, 10.0)], rows, 1.0, 1, None)
    records = Agreement(distance, wasserstein, 0.0, 0.0)
    found = SparkComparison(run, replayed, course, records, error)
    assert found.agrees == agrees
    assert str(found).startswith("agree:" if agrees else "DIFFER:")


def test_every_shape_has_a_trial() -> None:
    """Longer steps stretch the link as well; the experiments' own rule stays in the simulator."""
    assert set(REAL_TRIALS) == set(SHAPES) - set(range(14, 19))  # these are simulated alone
    stretched = real_trial(3, 2.0)
    assert stretched.rule == "sgd"
    assert (stretched.cluster.times.mean_s, stretched.cluster.link) == (0.08, "rtt=40ms")
    with pytest.raises(BadInput, match="shape: expected one of 1 to 13, got 14"):
        real_trial(14)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"links": {"worker-0": "rtt=1ms"}}, "expected one link for all workers, got several"),
        ({"kill": (WorkerKill(at_s=1.0, worker=0),)}, "without joins and kills, got some"),
        ({"delays": 2}, "expected no delays, got 2"),
    ],
)
def test_what_spark_cannot_run_is_refused(change: dict[str, Any], message: str) -> None:
    """Before a session is used."""
    trial = structs.replace(TRIAL, cluster=structs.replace(TRIAL.cluster, **change))
    with pytest.raises(BadInput, match=message):
        run_with_spark(trial, workload_of("quad"), None, Placement.RAY)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="expected a rule of the shards, got proximal"):
        run_with_spark(
            structs.replace(TRIAL, rule="proximal"),
            workload_of("quad"),
            None,  # type: ignore[arg-type]
            Placement.RAY,
        )
