"""Training on clusters that others have started: Spark and Ray, each by its address."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deploy.run.data_tools import convert
from tests.support import tiny_job
from tests.support.cli_process import PATIENCE_S, check_folder, downpour
from tests.support.clusters import standalone_spark, start_master_again
from tests.support.eventually import eventually
from worker.caffe.inference import evaluate, features
from worker.caffe.model import CaffeModel
from worker.caffe.solver import read_solver
from worker.caffe.weight_files import write_weights
from worker.caffe.weights import read_weights
from worker.data.sources import ReadOptions, open_source

if TYPE_CHECKING:
    from tests.support.clusters import RunningRay

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
TRAIN = ("train", "--solver", "solver.prototxt", "--data", "data", "--out", "run", "--shards", 2)
IMPATIENT = """\
import sys
from worker.spark import lost_executors
lost_executors.WITHOUT_S = 5.0
from deploy.cli.app import main
sys.exit(main())
"""


def test_by_url(running_ray: "RunningRay", spark_master: str, tmp_path: Path) -> None:
    """A standalone master and a running Ray: the run is like any other, and leaves them as they
    were, without a shard and without a file of ours in the working directory."""
    tiny_job.write_job(tmp_path)
    spark, ray, token = spark_master, running_ray.address, running_ray.token
    where = "--spark", spark, "--ray", ray
    # Executors start while other tests use the cores.
    with downpour(tmp_path, *TRAIN, *where, "--start-s", PATIENCE_S, **token) as child:
        eventually(
            lambda: len(shards_of(token)) == 2 or child.process.poll() is not None,
            because="both shards are there",
            within_s=PATIENCE_S,
        )
        running = child.process.poll() is None
        status, out, err = child.end()
        assert (status, err, running) == (0, "", True)
        assert f"starting Ray at {ray}" in out
        assert f"starting Spark at {spark}" in out
        check_folder(tmp_path / "run", workers=2, shards=2, steps=100, bound=4, restarts=0)
    check_no_shard(token)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("net.prototxt", "solver.prototxt", "data", "run")
    }


def test_a_master_that_forgets(tmp_path: Path) -> None:
    """A run ends where its master starts again without applications, and says why and where to
    continue: it would wait for an executor for ever."""
    tiny_job.write_job(tmp_path, max_iter=1_000_000)
    with standalone_spark(tmp_path / "spark") as master:
        options = ("--spark", master, "--shards-in", "processes", "--start-s", PATIENCE_S)
        command = [sys.executable, "-c", IMPATIENT, *map(str, (*TRAIN, *options))]
        with (tmp_path / "printed").open("w") as printed:
            run = subprocess.Popen(command, cwd=tmp_path, stdout=printed, stderr=subprocess.STDOUT)
        try:
            said = (tmp_path / "printed").read_text
            eventually(lambda: "steps" in said(), because=said, within_s=PATIENCE_S)
            with start_master_again(master):
                run.wait(PATIENCE_S)
        finally:
            run.kill()
            run.wait()
    assert run.returncode == 2
    end = said().splitlines()[-1]
    assert end.startswith(
        f"downpour: error: Spark at {master}: expected an executor, got none for 5 s: its workers"
        " are gone, or its master has started again without spark.deploy.recoveryMode and has"
        f" forgotten the application (docs/how-to/clusters.md); resume from {tmp_path}/run/"
    )


def test_features_by_url(spark_master: str, tmp_path: Path) -> None:
    """Tasks of a standalone master read the parts of an LMDB themselves, and write the rows that
    this process computes."""
    tiny_job.write_job(tmp_path)
    model = CaffeModel(read_solver(tmp_path / "solver.prototxt").tests[0].net)
    arena = model.initial(1)
    write_weights(tmp_path / "w.caffemodel", model.net, arena)
    convert(tmp_path / "data", tmp_path / "lmdb", "lmdb", ReadOptions("test"))
    options = "--net", "net.prototxt", "--weights", "w.caffemodel", "--data", "lmdb"
    where = "--spark", spark_master, "--workers", 3, "--output", "o"
    command = "features", *options, "--blobs", "ip2", *where
    with downpour(tmp_path, *command) as child:
        assert child.end() == (0, "50 rows of ip2 in o\n", "")
    found = pq.read_table(tmp_path / "o").sort_by("SampleID")
    rows = open_source(tmp_path / "data", "test").batches()
    expected = pa.Table.from_batches(features(model, arena, rows, ["ip2"], 50))
    assert found["label"].to_pylist() == expected["label"].to_pylist()
    # Values near 0 differ in their last bits, as sums of other batches do.
    values = np.array(found["ip2"].to_pylist()), np.array(expected["ip2"].to_pylist())
    np.testing.assert_allclose(*values, rtol=1e-5, atol=1e-6)


def test_over_connect(running_ray: "RunningRay", connect_url: str, tmp_path: Path) -> None:
    """`worker.train` on a Connect DataFrame: three workers on two slots, told how many to be.

    `worker.test` and `worker.features` follow. Weights that are larger than a message reach tasks.
    """
    pytest.importorskip("grpc", reason="needs the extra `connect`")
    solver = tiny_job.write_job(tmp_path)
    where = connect_url, running_ray.address, str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.connect_training", *where],
        cwd=ROOT,
        env=os.environ | running_ray.token,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["refused"] == "train over Spark Connect: expected the number of workers, got none"
    assert seen["steps"] == [60, 60, 60]
    assert seen["versions"] == [180, 180]
    assert seen["gap"] <= 3
    assert seen["shared"] == seen["sums"]
    assert seen["features"] == 200
    check_no_shard(running_ray.token)
    model = CaffeModel(read_solver(solver).tests[0].net)
    weights, _ = read_weights(tmp_path / "weights.caffemodel", model.net, model.initial(0))
    rows = open_source(tmp_path / "data", "test").batches()
    assert evaluate(model, weights, rows, tiny_job.BATCH)["accuracy"] > 0.9
    trained_on = open_source(tmp_path / "data", "train").batches()
    expected = evaluate(model, weights, trained_on, tiny_job.BATCH)
    assert {name: value for name, (value,) in seen["means"].items()} == pytest.approx(expected)


def test_unreachable_ray(tmp_path: Path) -> None:
    """A dead address is one line and exit 2, before anything is started."""
    tiny_job.write_job(tmp_path)
    with downpour(tmp_path, *TRAIN, "--ray", "127.0.0.1:1") as child:
        status, out, err = child.end()
    assert status == 2
    assert err == (
        "downpour: error: Ray at 127.0.0.1:1: expected a server that accepts connections,"
        " got: Connection refused\n"
    )
    assert "Spark" not in out


def check_no_shard(token: dict[str, str]) -> None:
    """None stays: Ray ends an actor's process a little after it was told to."""
    eventually(lambda: not shards_of(token), because=lambda: f"no shard, got {shards_of(token)}")


def shards_of(token: dict[str, str]) -> list[str]:
    """The shards that live in the Ray of this token."""
    found = []
    for process in psutil.process_iter():
        try:
            command = " ".join(process.cmdline())
            if "ShardActor" in command and process.environ().items() >= token.items():
                found.append(command)
        except psutil.Error:
            continue  # It has just ended, or is another user's.
    return found
