"""Prepares a training run: reads and checks everything that it needs, before anything starts."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from deploy.run.folder import LOGS, SETTINGS, check_unused
from deploy.run.places import check_own
from deploy.run.settings import TrainSettings
from deploy.run.snapshot_ref import SnapshotRef, newest
from ps.launch.launch_plan import place_of
from ps.snapshots.catalog import LoadedSnapshot
from ps.snapshots.manifest import Manifest
from ps.wal.job_logs import is_job, newest_logs
from shards.errors import BadInput
from shards.plurals import format_count
from shards.schedules import Poly
from shards.tables import Layout
from worker.caffe.evaluator import Evaluator, classes_of, needs_test_net
from worker.caffe.job import caffe_job, model_of
from worker.caffe.net_data import NetData, data_of
from worker.caffe.net_sources import open_net_data
from worker.caffe.solver import read_solver
from worker.caffe.weights import starting_weights
from worker.data.image_files import ImageListSource, check_classes
from worker.data.sources import ImageSource, Split, has_test, part_to_test, row_shapes
from worker.job.initial_state import check_fit
from worker.job.training_job import Job
from worker.spark import settings as spark_settings
from worker.training.device_selection import check_here
from worker.training.evaluation import EvaluationPlan, Target


class Prepared(NamedTuple):
    """A run that may start: its inputs, and the state that it continues from, if any.

    `in_place` is whether it continues in its own folder; `is_over` whether `snapshot` has all the
    steps already.
    """

    inputs: "Inputs"
    snapshot: LoadedSnapshot | None
    in_place: bool
    is_over: bool


def prepare(
    settings: TrainSettings, origin: SnapshotRef | None, *, may_be_past_end: bool = False
) -> Prepared:
    """Read and check everything that a run needs; raises BadInput.

    A run in its own folder that has taken more steps than max_iter is an error, unless it
    `may_be_past_end`: then it ends at the steps that a worker has taken on average, rounded up.
    """
    in_place = origin is not None and origin.name is None and origin.run == settings.out
    if in_place:  # first of all: a run that has just begun has no snapshot yet
        check_unused(settings.out)
    inputs = Inputs(settings)
    if not in_place:
        check_own(settings)
    snapshot = _load_snapshot(origin, inputs) if origin is not None else None
    if snapshot is not None and in_place and may_be_past_end:
        inputs.job = _at_least(inputs.job, _steps_taken(inputs, snapshot))
    is_over = snapshot is not None and _is_over(inputs, snapshot)
    if snapshot is not None and is_over and not in_place:
        raise BadInput(
            f"--resume {snapshot.place}",
            expected="a snapshot with steps left to take",
            got=f"one that has taken all {inputs.job.plan.steps}",
            hint="give a larger --max-iter",
        )
    return Prepared(inputs, snapshot, in_place, is_over)


class Inputs:
    """The solver, data, weights and job of a run, all read and checked before anything starts."""

    def __init__(self, settings: TrainSettings) -> None:
        self.settings = settings
        solver = read_solver(settings.solver)
        solver.steps(settings.max_iter)
        self.data = data_of(solver.train)
        if settings.data is None and self.data.source is None:
            raise BadInput(
                "--data",
                expected=(
                    f"data, as no data layer of {solver.train.file} names a source to train on"
                ),
                got="none",
            )
        source = self._train(None)
        if source.rows < settings.workers:
            raise BadInput(
                "--workers",
                expected=(
                    f"at most {source.rows}, as {self.place} has "
                    f"{format_count(source.rows, 'row')} to train on and each worker "
                    "needs one"
                ),
                got=settings.workers,
            )
        self.solver = solver.with_data_shape(source.shape, row_shapes(source))
        job = caffe_job(
            self.solver,
            settings,
            workers=settings.workers,
            logs_apart=settings.logs is not None,
        )
        # What an operator has changed is in the settings, where --resume may change it again.
        self.job = structs.replace(job, rate_factor=settings.rate_factor or 1.0)
        if spark_settings.parse_local_master(settings.spark, 1):
            check_here(self.job.device)
        if settings.ray is None:  # the shards will run on this machine
            place_of(settings.shard_device)
        self.model = model_of(self.job)
        # Open the data again, now with the range of labels, which only the net defines.
        self.classes = classes_of(self.model.net)
        self.train = self._train(self.classes)
        self.weights, self.copied = starting_weights(self.model, self._files(), self.job.plan.seed)
        self.test_rows = 0  # of all test nets
        self.test = self._test()
        self.evaluation = self._evaluation()

    @property
    def place(self) -> Path:
        """Where the data to train on is: --data, or what the net's data layer names."""
        location = self.settings.data or self.data.source
        assert location is not None, "checked at the start"
        return location

    def _train(self, classes: int | None) -> ImageSource:
        return self._open(self.data, self.settings.data, "train", classes)

    def _open(
        self, data: NetData, location: Path | None, split: Split, classes: int | None
    ) -> ImageSource:
        options = self.settings
        return open_net_data(data, location, split, classes, options.seed, options.skip_images)

    def _evaluation(self) -> EvaluationPlan | None:
        """The tests during training that the solver asks for; None without data to test on."""
        target = self._target()
        if self.test is None or not self.solver.test_interval:
            return None
        return EvaluationPlan(
            self.test.sample,
            self.solver.test_interval,
            self.solver.test_initialization,
            target,
        )

    def _target(self) -> Target | None:
        """The target of --until, if any; raises BadInput where no test could reach it."""
        if self.settings.until is None:
            return None
        target = Target.parse("--until", self.settings.until)
        figures = self.test.figures if self.test and self.solver.test_interval else []
        if target.figure not in figures:
            raise BadInput(
                f"--until {self.settings.until}",
                expected="a figure of the tests while training",
                got=", ".join(figures) or "no such tests: set the solver's test_interval",
            )
        return target

    @property
    def notices(self) -> list[str]:
        """One line for each file of weights, and for each setting that has no effect."""
        notices = [str(copied) for copied in self.copied]
        notices += self.solver.notices
        if self.solver.active_tests and self.solver.test_interval and self.test is None:
            notices.append(
                f"{self.settings.solver}: test_interval has no effect: {self.place} has no test"
                " part, and no --test-data was given"
            )
        schedule, steps = self.solver.schedule, self.settings.max_iter
        ends = isinstance(schedule, Poly) and self.solver.max_iter > 0
        if ends and steps is not None and steps > self.solver.max_iter:
            notices.append(
                f"{self.settings.solver}: lr_policy poly reaches 0 at the file's max_iter,"
                f" {self.solver.max_iter}: nothing is learned from there to --max-iter {steps}"
            )
        return notices

    def _test_sources(self) -> list[ImageSource]:
        """The data of each test net: --test-data, else the test part of --data or the net's own.

        None at all if there is no such data.
        """
        tests, test_data = self.solver.active_tests, self.settings.test_data
        if test_data is not None:
            needs_test_net(self.solver, "--test-data", test_data)
            return self._open_for_tests(test_data, part_to_test(test_data))
        if self.settings.data is not None:
            return (
                self._open_for_tests(self.settings.data, "test")
                if tests and has_test(self.place)
                else []
            )
        named = [data_of(test.net) for test in tests]
        lacking = [number for number, description in enumerate(named) if description.source is None]
        if len(lacking) == len(tests):
            return []
        if lacking:
            raise BadInput(
                self.settings.solver,
                expected="test nets that all name a source",
                got=f"number {lacking[0] + 1} of {len(tests)} without",
                hint="give --test-data",
            )
        return [
            self._open(description, None, part_to_test(description.source or ""), self.classes)
            for description in named
        ]

    def _open_for_tests(self, data: Path, split: Split) -> list[ImageSource]:
        """Open data for each test net, once if all read it in the same way."""
        opened: list[tuple[NetData, ImageSource]] = []
        for description in (data_of(test.net) for test in self.solver.active_tests):
            alike = [source for other, source in opened if other.options == description.options]
            source = alike[0] if alike else self._open(description, data, split, self.classes)
            opened.append((description, source))
        return [source for _, source in opened]

    def _test(self) -> Evaluator | None:
        """The test nets with their data, or None. They run on one row now, to find faults early."""
        sources = self._test_sources()
        if not sources:
            return None
        lists = [x for x in (self.train, *sources) if isinstance(x, ImageListSource)]
        check_classes(source.path for source in lists if source.path.is_dir())
        self.test_rows = sum(source.rows for source in sources)
        tests = [
            (test.with_data_shape(source.shape, row_shapes(source)), source.batches)
            for test, source in zip(self.solver.active_tests, sources, strict=True)
        ]
        start = self.weights if self.weights is not None else self.model.initial(1)
        location = self.settings.test_data or self.settings.data
        try:
            test = Evaluator(tests, self.model, self.settings.skip_images)
            test.check(start)
        except BadInput as error:
            raise error.within(f"test on {location or 'what the test nets name'}") from None
        return test

    def _files(self) -> Sequence[str | Path]:
        """The files of starting weights: --weights, else those that the solver names."""
        return self.solver.weights if self.settings.weights is None else (self.settings.weights,)


def _load_snapshot(origin: SnapshotRef, inputs: Inputs) -> LoadedSnapshot:
    """Load and check the state to continue from: a snapshot, or the shards' logs."""

    def check(location: str, manifest: Manifest) -> None:
        check_fit(location, manifest, Layout((inputs.model.table,)), inputs.job)

    catalog = origin.open()
    if origin.name is None:
        logs = _logs_left(origin.run, inputs.settings) if origin.run is not None else None
        return newest(catalog, newest_logs(logs) if logs is not None else None, check)
    snapshot = catalog.load(origin.name)
    check(snapshot.place, snapshot.manifest)
    return snapshot


def _logs_left(run: Path, settings: TrainSettings) -> Path:
    """The folder in which a resumed run has its earlier logs, if any, and keeps its new ones.

    Raises BadInput if the settings name another folder: the earlier logs would be ignored.
    """
    logs, earlier = (
        settings.logs or run / LOGS,
        TrainSettings.load(run / SETTINGS).logs or run / LOGS,
    )
    if logs != earlier and any(is_job(job) for job in earlier.glob("*")):
        raise BadInput(
            f"--logs {logs}",
            expected=f"the folder where the run has left its logs, {earlier}",
            hint=f"or move what that holds to {logs}",
        )
    return logs


def _is_over(inputs: Inputs, snapshot: LoadedSnapshot) -> bool:
    """True if a snapshot has all the steps; raises BadInput if it has more than --max-iter."""
    planned, steps_taken = inputs.job.plan.steps, _steps_taken(inputs, snapshot)
    if steps_taken > planned:
        raise BadInput(
            "--max-iter",
            expected=f"at least {steps_taken}, which the run has already taken",
            got=planned,
        )
    return snapshot.manifest.steps == planned * inputs.settings.workers


def _steps_taken(inputs: Inputs, snapshot: LoadedSnapshot) -> int:
    """The steps that a worker has taken on average by a snapshot, rounded up."""
    return -(-snapshot.manifest.steps // inputs.settings.workers)


def _at_least(job: Job, steps: int) -> Job:
    """A job with at least `steps` of each worker, or more if more were planned."""
    plan = structs.replace(job.plan, steps=max(job.plan.steps, steps))
    return structs.replace(job, plan=plan)
