"""`worker.train`: a DataFrame and a solver in, weights out; and what it refuses at once."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import ps
import worker
from shards.errors import BadInput
from tests.support import tiny_job
from tests.support.process_tree import list_commands
from worker.caffe import caffe_kind
from worker.caffe.inference import evaluate
from worker.caffe.model import CaffeModel
from worker.caffe.weights import read_weights
from worker.data.sources import open_source
from worker.job import train as api
from worker.job.training_job import Job
from worker.training.evaluation import Evaluation


@pytest.fixture
def solver(tmp_path: Path) -> Path:
    return tiny_job.write_job(tmp_path, max_iter=60, extra="test_interval: 20")


@pytest.mark.slow
@pytest.mark.usefixtures("ray_local")
def test_a_data_frame_is_trained_on(spark: Any, solver: Path, tmp_path: Path) -> None:
    """Each partition is a worker; the weights are better than chance, are saved as both kinds of
    file, and a second training can start from them."""
    df = spark.createDataFrame(tiny_job.image_table(120)).repartition(2)
    trained = worker.train(
        df,
        model=worker.Caffe(solver, test_data=tmp_path / "data"),
        shards=2,
        staleness=2,
        snapshots=tmp_path / "s",
    )
    # A machine may be too busy for one in between.
    assert [trained.evaluations[at].iteration for at in (0, -1)] == [0, 60]
    assert trained.evaluations[-1].figures["accuracy"] > 0.9
    assert sorted(report.steps for report in trained.outcome.reports) == [60, 60]
    assert trained.outcome.snapshot == str(tmp_path / "s" / "60")
    kind: Any = trained.model
    model = CaffeModel(kind.solver.tests[0].net)
    named = model.table.views(trained.weights)
    assert trained.params.keys() == named.keys()
    for name, values in trained.params.items():
        np.testing.assert_array_equal(values, named[name])
    rows = open_source(tmp_path / "data", "test").batches()
    assert evaluate(model, trained.weights, rows, tiny_job.BATCH)["accuracy"] > 0.9

    for name in ("w.caffemodel", "w.h5", "w.safetensors"):
        path = trained.save(tmp_path / name)
        found, _ = read_weights(path, model.net, model.initial(1))
        np.testing.assert_array_equal(found, trained.weights)

    still = tmp_path / "still.prototxt"
    still.write_text(solver.read_text().replace("base_lr: 0.1", "base_lr: 1e-30"))
    again = worker.train(
        df,
        model=worker.Caffe(
            still,
            weights=tmp_path / "w.caffemodel",
            test_data=spark.createDataFrame(tiny_job.image_table(50, seed=2)),
        ),
        workers=3,
        max_iter=2,
        shards_in="processes",
    )
    assert [result.iteration for result in again.evaluations] == [0, 2]
    for result in again.evaluations:
        assert result.figures == pytest.approx(trained.evaluations[-1].figures)
    np.testing.assert_array_equal(again.weights, trained.weights)
    assert [report.steps for report in again.outcome.reports] == [2, 2, 2]

    with pytest.raises(
        BadInput, match=r"expected \.caffemodel, \.h5 or \.safetensors, got '\.pt'$"
    ):
        trained.save(tmp_path / "w.pt")


def frame(spark: Any, **columns: Any) -> Any:
    """Four rows; a column is replaced by what is given, and dropped for None."""
    table = tiny_job.image_table(4)
    for name, values in columns.items():
        if name in table.column_names:
            table = table.drop_columns(name)
        if values is not None:
            table = table.append_column(name, pa.array(values))
    return spark.createDataFrame(table)


SHAPE = {"channels": [1] * 4, "height": [4] * 4, "width": [16] * 4}


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        ({"label": None}, "the DataFrame: expected a column label, got image"),
        ({"image": None}, "the DataFrame: expected a column data or image, got label"),
        (SHAPE, r"layer rows .*: expected images of shape \(1, 8, 8\), the data has \(1, 4, 16\)"),
        (SHAPE | {"width": [None, 8, 8, 8]}, "the first row, got 1, 4, None"),
    ],
    ids=["no label", "no image", "another shape", "no shape"],
)
def test_a_data_frame_that_does_not_fit(
    columns: dict[str, Any], line: str, spark: Any, solver: Path
) -> None:
    """Columns and shapes are checked before a shard is started."""
    with pytest.raises(BadInput, match=line):
        worker.train(frame(spark, **columns), model=worker.Caffe(solver))


def test_an_empty_data_frame(spark: Any, solver: Path) -> None:
    """Whether or not its columns say a shape, it is refused before anything is started."""
    for columns in (SHAPE, {}):
        with pytest.raises(BadInput, match=r"^the DataFrame: expected rows, got none$"):
            worker.train(frame(spark, **columns).limit(0), model=worker.Caffe(solver))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"workers": 0}, "train: workers: expected at least 1, got 0"),
        ({"workers": 2.5}, "train: workers: expected a whole number, got 2.5"),
        ({"staleness": -1}, "train: staleness: expected at least 0, got -1"),
        ({"max_iter": 0}, "train: max_iter: expected at least 1, got 0"),
        ({"max_iter": -3}, "train: max_iter: expected at least 1, got -3"),
        ({"model": "nowhere"}, r"expected a kind of model, .*\), got 'nowhere'"),
        (
            {"shards_in": "threads"},
            "train: shards_in: expected ray or processes, got 'threads'",
        ),
        ({"transport": "mail"}, "train: transport: expected auto or tcp or ipc or shm, got 'mail'"),
        ({"shard_device": "tpu"}, "train: shard_device: expected cpu or gpu, got 'tpu'"),
        ({"shards": 9999}, "expected 1 to .* shards, got 9999"),
    ],
    ids=str,
)
def test_options_that_make_no_sense(
    options: dict[str, Any], line: str, spark: Any, solver: Path
) -> None:
    """They are refused before anything is started, too."""
    with pytest.raises(BadInput, match=f"{line}$"):
        worker.train(frame(spark), **({"model": worker.Caffe(solver)} | options))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"solver": "nowhere"}, "nowhere: cannot be read: No such file or directory"),
        ({"weights": "nowhere.h5"}, "nowhere.h5: cannot be read: No such file or directory"),
        (
            {"test_data": [1, 2]},
            "Caffe: test_data: expected a Spark DataFrame or a path, got a list of 2",
        ),
        ({"test_data": "nowhere"}, "data nowhere: expected .*, got nothing there"),
    ],
    ids=str,
)
def test_a_caffe_model_that_makes_no_sense(
    arguments: dict[str, Any], line: str, spark: Any, solver: Path
) -> None:
    """It is refused before anything is started, too."""
    with pytest.raises(BadInput, match=f"{line}$"):
        worker.train(frame(spark), model=worker.Caffe(**({"solver": solver} | arguments)))


def test_notices_are_logged(
    solver: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What the solver asks for and does not get is a warning, and no error."""
    solver.write_text(solver.read_text() + "device_id: 2")
    _job_of(monkeypatch, solver=solver)
    device, tests = [record.getMessage() for record in caplog.records]
    assert "device_id has no effect: --device gpu:N chooses a GPU" in device
    assert tests.endswith("test_interval has no effect: no test_data was given")


def test_what_the_solver_says_holds_unless_it_is_given(
    solver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seed, device, display and the last snapshot."""
    solver.write_text(
        solver.read_text() + "random_seed: 7 solver_mode: CPU display: 5 average_loss: 3"
        " snapshot_after_train: false"
    )
    job = _job_of(monkeypatch, solver=solver)
    assert (job.plan.seed, str(job.device)) == (7, "cpu")
    assert (job.display, job.average_loss, job.snapshot_at_end) == (5, 3, False)
    job = _job_of(monkeypatch, solver=solver, seed=3, device="auto")
    assert (job.plan.seed, str(job.device)) == (3, "auto")


def _job_of(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Job:
    """The job that `worker.train` would run with these options."""
    jobs: list[Job] = []

    def run_job(_: Any, job: Job, **__: Any) -> Any:
        jobs.append(job)
        return SimpleNamespace(weights=None, evaluations=[], interrupted=False)

    monkeypatch.setattr(api, "run_job", run_job)
    monkeypatch.setattr(api, "check_frame", lambda *_: None)
    monkeypatch.setattr(caffe_kind, "check_columns", lambda _: None)
    monkeypatch.setattr(caffe_kind, "shapes_of", lambda *_: ((1, 8, 8), {}))
    df: Any = SimpleNamespace(columns=["image", "label"])
    worker.train(df, model=worker.Caffe(options.pop("solver")), **({"workers": 2} | options))
    return jobs[0]


def test_whole_numbers_may_be_numpys(solver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They become Python's own, which can be sent and saved."""
    two: Any = np.int64(2)
    job = _job_of(
        monkeypatch, solver=solver, workers=two, shards=two, staleness=two, seed=two, max_iter=two
    )
    numbers = [job.workers, job.runtime.shards, job.bound, job.plan.seed, job.plan.steps]
    assert numbers == [2] * 5
    assert {type(number) for number in numbers} == {int}


def test_a_table_of_the_evaluations() -> None:
    """It has a row for each, in order, and a null for a figure that one lacks; also for none."""
    evaluations = (
        Evaluation(0, 0, 0.5, {"accuracy": 0.25}),
        Evaluation(10, 160, 1.5, {"accuracy": 0.75, "loss": 0.5}),
    )
    trained: Any = worker.Trained(None, None, None, evaluations)  # type: ignore[arg-type]
    assert trained.evaluation_table().to_pylist() == [
        {"iteration": 0, "samples": 0, "seconds": 0.5, "accuracy": 0.25, "loss": None},
        {"iteration": 10, "samples": 160, "seconds": 1.5, "accuracy": 0.75, "loss": 0.5},
    ]
    untested: Any = worker.Trained(None, None, None)  # type: ignore[arg-type]
    assert untested.evaluation_table().column_names == ["iteration", "samples", "seconds"]


def test_importing_worker_is_light() -> None:
    """All public names are shown and there; what is not is said as Python says it."""
    assert {"train", "Trained", "Caffe"} <= set(dir(worker)) == set(worker.__all__)
    named = {name: getattr(worker, name) for name in worker.__all__}
    assert all(getattr(found, "__name__", name) == name for name, found in named.items())
    with pytest.raises(AttributeError, match="module worker has no attribute trian"):
        worker.trian  # noqa: B018


def test_without_pytorch_its_module_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is imported like any other; a call says in one line what is missing."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(
        BadInput, match=r'expected PyTorch \(pip install "/path/to/downpour\[torch\]"\)'
    ):
        worker.torch.params(None)


@pytest.mark.parametrize("on_interrupt", ["raise", "return"])
def test_ctrl_c_in_train(on_interrupt: str, monkeypatch: pytest.MonkeyPatch, solver: Path) -> None:
    """It raises with what `train` would return, unless that is to be returned."""
    status = SimpleNamespace(steps=12)
    outcome: Any = SimpleNamespace(
        weights=None, evaluations=[], interrupted=True, statuses=[status], snapshot="snapshots/6"
    )
    _job_of(monkeypatch, solver=solver)
    monkeypatch.setattr(api, "run_job", lambda *_, **__: outcome)
    df: Any = SimpleNamespace(columns=["image", "label"])
    options: Any = {"model": worker.Caffe(solver), "workers": 2, "on_interrupt": on_interrupt}
    if on_interrupt == "return":
        assert worker.train(df, **options).outcome is outcome
        return
    with pytest.raises(KeyboardInterrupt, match=r"after 12 steps.* resume from snapshots/6$") as it:
        worker.train(df, **options)
    assert it.value.result.outcome is outcome  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.usefixtures("ray_local", "spark")
def test_no_argument_holds_a_secret() -> None:
    """Other users see the arguments of Ray's, Spark's and the shards' processes: no secret is among
    those of a guarded job, although each of them is protected by one."""
    weights = {"w": np.zeros(3, np.float32)}
    with (
        ps.start(weights, on="ray", secure=True) as actors,
        ps.start(weights, on="processes", secure=True) as processes,
    ):
        secrets = [os.environ["RAY_AUTH_TOKEN"]]
        for job in (actors, processes):
            access = job.cluster.access
            assert access is not None
            secrets += [access.token, str(access.operator)]
        lines = "\n".join(" ".join(words) for _, words in list_commands())
    for process in ("gcs_server", "SparkSubmit", "ps.launch.child_main"):
        assert process in lines
    assert all(len(secret) >= 32 for secret in secrets)
    assert [secret for secret in secrets if secret in lines] == []
