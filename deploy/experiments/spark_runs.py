"""A trial for real through Ray and Spark, against the simulated one.

The shard is a Ray actor (or a process) and each worker a Spark task, as in `downpour train`. A task
drives the same step machine as the simulator's workers and the real runs on loopback: it computes
the gradients of the trial's own batches, and sleeps up to the drawn times of its steps. Workers
wait for each other before the first step, because tasks do not start together.
"""

import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

import ps
from deploy.experiments.agreement import Agreement, agreement
from deploy.experiments.cluster import worker_name
from deploy.experiments.logistic import Proximal
from deploy.experiments.problem import Workload
from deploy.experiments.real_runs import Paced, RealRun, check_real, replay_run
from deploy.experiments.training_simulation import Course, TrainingSimulation
from deploy.experiments.trials import Trial
from deploy.run.evaluations_csv import EvaluationsFile
from deploy.run.folder import EVALUATIONS, UPDATES
from deploy.run.updates_parquet import UpdatesWriter
from ps.admin_client import AdminClient
from ps.launch.launcher import Placement
from shards.errors import BadInput, GiveUp
from shards.messages import LiveSettings
from shards.shard_status import ShardStatus, Standing
from worker import spark
from worker.job.function_run import RunOptions, first_values, function_job
from worker.job.runner import run_job
from worker.training.context import Context
from worker.training.evaluation import Evaluation

_START_S = 120.0
_POLL_S = 0.05

KS, WASSERSTEIN, POINTS = 0.05, 0.25, 0.5
"""The most that staleness and error may differ by: distances of distributions, and percent."""


class SparkComparison(NamedTuple):
    """A run through Spark, and the simulation of the same trial; `error` is the run's in percent.

    `replay_run` is whether its recorded turns lead the simulator to the same weights, bit for bit;
    None for a trial that cannot be replayed, such as one with several shards.
    """

    run: RealRun
    replayed: bool | None
    course: Course
    records: Agreement
    error: float

    @property
    def agrees(self) -> bool:
        """True if staleness and error differ by no more than the design's limits."""
        return (
            self.replayed is not False
            and self.records.distance <= KS
            and self.records.wasserstein <= WASSERSTEIN
            and abs(self.course.final.error - self.error) <= POINTS
        )

    def __str__(self) -> str:
        replay = {True: "the same weights, bit for bit", False: "OTHER WEIGHTS", None: "no replay"}
        real, simulated = self.run.records["staleness"], self.course.records["staleness"]
        return (
            f"{'agree' if self.agrees else 'DIFFER'}: staleness {real.mean():.2f} through Spark,"
            f" {simulated.mean():.2f} simulated, KS {self.records.distance:.3f}, Wasserstein"
            f" {self.records.wasserstein:.2f}; error {self.error:.2f} % and"
            f" {self.course.final.error:.2f} %; simulated throughput"
            f" {self.records.throughput:+.1%}, waits {self.records.wait_share:+.3f}; {len(real)}"
            f" updates, replayed: {replay[self.replayed]}; {self.run.pacing}"
        )


def compare_with_spark(
    trial: Trial, session: spark.SparkSession, shards_in: Placement
) -> SparkComparison:
    """Run a trial through Spark, and simulate it."""
    workload = trial.problem()
    run = run_with_spark(trial, workload, session, shards_in)
    with threadpool_limits(1):
        gradients = run.job.steps * trial.cluster.workers
        course = TrainingSimulation(run.job, workload).run(gradients)
        error = workload.measure(run.weights).error
        try:
            same = replay_run(run, workload).tobytes() == run.weights.tobytes()
        except BadInput:
            same = None
    measured = agreement(run.records, course.records)
    return SparkComparison(run, same, course, measured, error)


def run_with_spark(
    trial: Trial, workload: Workload, session: spark.SparkSession, shards_in: Placement
) -> RealRun:
    """Run a trial with a task of Spark for each worker; its gradients are shared out evenly.

    The session needs a slot for every worker. Raises BadInput for delays, joins, kills, links of
    single workers, and a rule that shards of their own processes do not have.
    """
    check_real(trial)
    workers = trial.cluster.workers
    if trial.cluster.links:
        raise BadInput("a run through Spark", expected="one link for all workers", got="several")
    job = structs.replace(trial.job(), steps=max(1, trial.gradients // workers))
    if isinstance(job.rule, Proximal):
        raise BadInput("a run through Spark", expected="a rule of the shards", got="proximal")
    table = workload.table
    start = {name: view.copy() for name, view in table.views(workload.start(job.seed)).items()}
    tables = ps.Tables(weights=ps.Dense.like(start, rule=job.rule, rate=trial.rate))
    options = RunOptions(
        params=tables,
        strategy=trial.strategy,
        staleness=job.real_bound,
        shards=trial.cluster.shards,
        shards_in=shards_in,
        seed=trial.seed,
        max_iter=job.steps,
        link=trial.cluster.link or None,
    )
    recorder = _Recorder()
    began = time.monotonic()
    outcome = run_job(
        spark.number_partitions(session, workers),
        function_job(
            _train, structs.replace(trial, gradients=job.steps * workers), tables, options, workers
        ),
        weights=first_values(tables),
        observer=recorder,
    )
    seconds = time.monotonic() - began
    records = _rename_workers(np.concatenate(recorder.records), workers)
    return RealRun(job, records, outcome.weights, seconds, _overruns(trial, records))


def write_run(comparison: SparkComparison, folder: Path) -> None:
    """Write the record and the error of a run as a run folder, for `exp import`."""
    folder.mkdir(parents=True)
    run = comparison.run
    with UpdatesWriter(folder / UPDATES, job=run.job.strategy.name, seed=run.job.seed) as writer:
        writer.write([run.records])
    samples = int(run.records["samples"].sum())
    figures = {"accuracy": 1 - comparison.error / 100}
    EvaluationsFile(folder / EVALUATIONS).add(
        Evaluation(run.job.steps, samples, run.seconds, figures)
    )


class _Recorder:
    """Observes a job: keeps the records of shard 0."""

    def __init__(self) -> None:
        self.records: list[NDArray[np.void]] = []

    def started(self, cluster: ps.Cluster, restored: list[int] | None) -> None:
        """Nothing to do."""

    def progressed(
        self, statuses: list[ShardStatus], records: list[NDArray[np.void]]
    ) -> bool | None:
        self.records.append(records[0])
        return None

    def evaluated(self, result: Evaluation, weights: NDArray[np.float32]) -> None:
        """Nothing to do."""

    def resharded(self, cluster: ps.Cluster) -> None:
        """Nothing to do."""

    def settings_changed(self, settings: LiveSettings) -> None:
        """Nothing to do."""

    def notice(self, text: str) -> None:
        """Nothing to do."""


def _train(trial: Trial, ctx: Context) -> None:
    """Run a task: the trial's worker of its rank."""
    workload = trial.problem()
    job = structs.replace(trial.job(), steps=trial.gradients // trial.cluster.workers)
    worker = Paced(
        job, workload, ctx.worker.client, ctx.rank, lambda: _await_workers(ctx, job.cluster.workers)
    )
    worker.train()


def _await_workers(ctx: Context, workers: int) -> None:
    """Wait until all workers are registered."""
    until = time.monotonic() + _START_S
    with AdminClient(ctx.job.cluster) as admin:
        while True:
            (status, *_) = admin.status()
            present = sum(
                worker_status.standing is Standing.ACTIVE for worker_status in status.workers
            )
            if present >= workers:
                return
            if time.monotonic() > until:
                raise GiveUp(f"expected {workers} workers within {_START_S:g} s, got {present}")
            time.sleep(_POLL_S)


def _rename_workers(records: NDArray[np.void], workers: int) -> NDArray[np.void]:
    """The records with the names that the simulator's workers have, for a replay."""
    for number in range(workers):
        records["worker"][records["worker"] == f"w{number}".encode()] = worker_name(number)
    return records


def _overruns(trial: Trial, records: NDArray[np.void]) -> float:
    """The share of steps in pushes that computed for longer than half of their drawn times."""
    overruns = 0
    for number in range(trial.cluster.workers):
        draws = trial.cluster.step_times(trial.seed, number)
        for row in records[records["worker"] == worker_name(number).encode()]:
            takes = sum(next(draws) for _ in range(int(row["steps"])))
            overruns += int(row["steps"]) * bool(row["compute_s"] > takes / 2)
    return overruns / max(1, int(records["steps"].sum()))
