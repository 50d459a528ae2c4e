"""Training on clusters that others have started: Spark and Ray, each by its address."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests import tiny
from tests.clusters import QUICK_JAVA, connect_server, ray_head, standalone_spark
from tests.integration.command import check_folder, downpour
from worker.caffe.model import CaffeModel
from worker.caffe.solver import read_solver
from worker.inference import evaluate, read_weights
from worker.sources import open_source

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
TRAIN = ("train", "--solver", "solver.prototxt", "--data", "data", "--out", "run", "--shards", 2)


@pytest.fixture(scope="module")
def token() -> Iterator[dict[str, str]]:
    """The environment of those who may speak to the Ray below."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        file = Path(folder) / "token"
        file.write_text("0123456789abcdef" * 4)
        yield {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(file)}


@pytest.fixture(scope="module")
def ray(token: dict[str, str]) -> Iterator[str]:
    """A running Ray; its path must be short, for it holds sockets."""
    with ray_head(Path(token["RAY_AUTH_TOKEN_PATH"]).with_name("r"), token) as address:
        yield address


def test_by_url(ray: str, token: dict[str, str], tmp_path: Path) -> None:
    """A standalone master and a running Ray: the run is like any other, and leaves them as they
    were, without a shard and without a file of ours in the working directory."""
    tiny.write_job(tmp_path)
    with (
        standalone_spark(tmp_path / "spark") as spark,
        downpour(tmp_path, *TRAIN, "--spark", spark, "--ray", ray, **token, **QUICK_JAVA) as child,
    ):
        most = 0
        while child.process.poll() is None:
            most = max(most, len(shards_of(token)))
            time.sleep(0.5)
        status, out, err = child.end()
        assert (status, err, most) == (0, "", 2)
        assert f"starting Ray at {ray}" in out
        assert f"starting Spark at {spark}" in out
        check_folder(tmp_path / "run", workers=2, shards=2, steps=100, bound=4, restarts=0)
    check_no_shard(token)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("net.prototxt", "solver.prototxt", "data", "run", "spark")
    }


def test_over_connect(ray: str, token: dict[str, str], tmp_path: Path) -> None:
    """`worker.train` on a Connect DataFrame: three workers on two slots, told how many to be."""
    pytest.importorskip("grpc", reason="needs the extra `connect`")
    solver = tiny.write_job(tmp_path)
    with connect_server(tmp_path / "spark") as url:
        done = subprocess.run(
            [sys.executable, "-m", "tests.integration.over_connect", url, ray, str(tmp_path)],
            cwd=ROOT,
            env=os.environ | token,
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
    check_no_shard(token)
    model = CaffeModel(read_solver(solver).tests[0].net)
    weights = read_weights(tmp_path / "weights.caffemodel", model.table, model.initial(0))
    rows = open_source(tmp_path / "data", "test").batches()
    assert evaluate(model, weights, rows, tiny.BATCH)["accuracy"] > 0.9


def test_unreachable_ray(tmp_path: Path) -> None:
    """A dead address is one line and exit 1, before Spark is started."""
    tiny.write_job(tmp_path)
    with downpour(tmp_path, *TRAIN, "--ray", "127.0.0.1:1") as child:
        status, out, err = child.end()
    assert status == 1
    assert err == (
        "downpour: error: Ray at 127.0.0.1:1: expected a server that accepts connections,"
        " got: Connection refused\n"
    )
    assert "Spark" not in out


def check_no_shard(token: dict[str, str]) -> None:
    """None stays: Ray ends an actor's process a little after it was told to."""
    until = time.monotonic() + 60
    while left := shards_of(token):
        assert time.monotonic() < until, left
        time.sleep(0.1)


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
