"""TensorBoard, MLflow and Prometheus: what each records of a run, read by another reader."""

import sys
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import worker
from shards.errors import BadInput
from shards.shard_status import ShardStatus
from shards.update_records import RECORD
from worker.callbacks.base import watching
from worker.tfrecord.framing import read_blocks
from worker.training.evaluation import Evaluation

CLUSTER: Any = SimpleNamespace(job="j1")
SETTINGS: dict[str, Any] = {"shards": 2, "args.size": 64}


def parameters(weights: Any) -> worker.Parameters:
    return worker.Parameters(
        weights, lambda arena: {"w": arena}, lambda path, arena: save_file({"w": arena}, path)
    )


def watched(callback: worker.Callback) -> Generator[None, None, None]:
    """A run of two updates, a test, and a status without updates; stops before its end."""
    records = np.zeros(2, RECORD)
    records["loss"], records["staleness"], records["worker"] = [1.0, 3.0], [0, 1], b"w0"
    records["compute_s"], records["wait_s"] = [1.0, 2.0], [2.0, 1.0]
    run = worker.WatchedRun(2, SETTINGS, tests=True)
    with watching([callback], run, parameters) as watch:
        watch.started(CLUSTER, None)
        for number, rows in ((2, records), (2, records[:0])):
            counters = ShardStatus(0, 2, number, 20, 0.5, 0, 0, 0, 0, 0, 0, 0, 0, ())
            watch.progressed([counters], [rows])
        watch.evaluated(Evaluation(1, 20, 0.1, {"accuracy": 0.75}), np.ones(1, np.float32))
        yield
        watch.finish(np.full(1, 7, np.float32), [])


def test_events_of_tensorboard(tmp_path: Path) -> None:
    """Losses, staleness and rates over the samples, and the figures of tests; a file a run."""
    pytest.importorskip("tensorboardX", reason="needs the extra `tensorboard`")
    from tensorboardX.proto.event_pb2 import Event

    board = worker.TensorBoard(tmp_path)
    for _ in watched(board):
        pass
    (file,) = tmp_path.iterdir()
    found: dict[str, list[tuple[int, float]]] = {}
    with file.open("rb") as stream:
        for block in read_blocks(stream, file.name):
            for start, end in zip(block.starts, block.ends, strict=True):
                for value in Event.FromString(block.data[start:end]).summary.value:
                    found.setdefault(value.tag, []).append((20, value.simple_value))
    assert found.pop("train/samples_s")[0][1] > 0
    assert found == {
        "train/loss": [(20, 2.0)],
        "train/staleness": [(20, 0.5)],
        "train/rate": [(20, 0.5)],
        "train/goodput": [(20, 0.5)],
        "test/accuracy": [(20, 0.75)],
    }


def test_a_run_in_mlflow(tmp_path: Path) -> None:
    """Settings, metrics by step, the model as an artefact; a run that fails is marked."""
    pytest.importorskip("mlflow", reason="needs the extra `mlflow`")
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(uri)
    client.create_experiment("digits", artifact_location=str(tmp_path / "artefacts"))
    callback = worker.MLflow("digits", uri=uri)
    for _ in watched(callback):
        pass
    assert callback.run_id is not None
    found = client.get_run(callback.run_id)
    assert found.info.status == "FINISHED"
    assert found.data.params == {"shards": "2", "args.size": "64", "workers": "2"}
    assert found.data.metrics.pop("train/samples_s") > 0
    assert found.data.metrics == {
        "train/loss": 2.0,
        "train/staleness": 0.5,
        "train/rate": 0.5,
        "train/goodput": 0.5,
        "test/accuracy": 0.75,
    }
    assert [each.step for each in client.get_metric_history(callback.run_id, "train/loss")] == [20]
    saved = client.download_artifacts(callback.run_id, "model.safetensors", str(tmp_path))
    assert load_file(saved)["w"] == 7
    failing = watched(callback)
    next(failing)
    failing.close()
    assert client.get_run(callback.run_id).info.status == "FAILED"


def test_figures_for_prometheus() -> None:
    """Each job has its own; the address is free again after `close`."""
    pytest.importorskip("prometheus_client", reason="needs the extra `prometheus`")
    callback = worker.Prometheus(0)
    for _ in watched(callback):
        with urlopen(f"http://127.0.0.1:{callback.port}/metrics") as page:
            lines = page.read().decode().splitlines()
        for line in (
            'downpour_job_updates_total{job="j1"} 2.0',
            'downpour_job_samples_total{job="j1"} 20.0',
            'downpour_job_loss{job="j1"} 2.0',
            'downpour_job_staleness_updates{job="j1"} 0.5',
            'downpour_job_goodput_ratio{job="j1"} 0.5',
            'downpour_job_test{figure="accuracy",job="j1"} 0.75',
        ):
            assert line in lines
    taken = worker.Prometheus(callback.port)
    with pytest.raises(BadInput, match=f"Prometheus: 127.0.0.1:{callback.port}: Address already"):
        next(watched(taken))
    callback.close()
    callback.close()


@pytest.mark.parametrize(
    ("library", "make", "message"),
    [
        ("tensorboardX", lambda: worker.TensorBoard("x"), r"/path/to/downpour\[tensorboard\]"),
        ("mlflow", worker.MLflow, r"MLflow: expected mlflow-skinny .*/path/to/downpour\[mlflow\]"),
        ("prometheus_client", lambda: worker.Prometheus(0), r"/path/to/downpour\[prometheus\]"),
    ],
)
def test_a_missing_library_is_named(
    library: str, make: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(BadInput, match=message):
        make()


def test_the_server_of_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It listens on loopback; without it a sentence names the extra."""
    pytest.importorskip("tensorboardX", reason="needs the extra `tensorboard`")
    board = worker.TensorBoard(tmp_path)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "tensorboard", None)
        with pytest.raises(BadInput, match=r"/path/to/downpour\[tensorboard-server\]"):
            board.serve()
    pytest.importorskip("tensorboard", reason="needs the extra `tensorboard-server`")
    url = board.serve()
    assert url.startswith("http://127.0.0.1:")
    with urlopen(url) as page:
        assert b"TensorBoard" in page.read()
    with pytest.raises(BadInput, match="serve: port"):
        board.serve(int(url.rstrip("/").rpartition(":")[2]))
