"""Training on clusters that others have started: Spark and Ray, each by its address."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.support import tiny_job
from tests.support.cli_process import PATIENCE_S, check_folder, downpour
from tests.support.clusters import QUICK_JAVA
from tests.support.eventually import eventually
from worker.caffe.model import CaffeModel
from worker.caffe.solver import read_solver
from worker.caffe.weights import read_weights
from worker.inference import evaluate
from worker.sources import open_source

if TYPE_CHECKING:
    from tests.support.clusters import RunningRay

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
TRAIN = ("train", "--solver", "solver.prototxt", "--data", "data", "--out", "run", "--shards", 2)


def test_by_url(running_ray: "RunningRay", spark_master: str, tmp_path: Path) -> None:
    """A standalone master and a running Ray: the run is like any other, and leaves them as they
    were, without a shard and without a file of ours in the working directory."""
    tiny_job.write_job(tmp_path)
    spark, ray, token = spark_master, running_ray.address, running_ray.token
    where = "--spark", spark, "--ray", ray
    with downpour(tmp_path, *TRAIN, *where, **token, **QUICK_JAVA) as child:
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


def test_over_connect(running_ray: "RunningRay", connect_url: str, tmp_path: Path) -> None:
    """`worker.train` on a Connect DataFrame: three workers on two slots, told how many to be."""
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
    check_no_shard(running_ray.token)
    model = CaffeModel(read_solver(solver).tests[0].net)
    weights, _ = read_weights(tmp_path / "weights.caffemodel", model.net, model.initial(0))
    rows = open_source(tmp_path / "data", "test").batches()
    assert evaluate(model, weights, rows, tiny_job.BATCH)["accuracy"] > 0.9


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
