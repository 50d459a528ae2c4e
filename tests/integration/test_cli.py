"""`downpour train` as a user runs it: processes, signals, exit statuses, and the folder it leaves.

Each start of Ray and Spark costs some twenty seconds, so the first run meets several things in
turn: a Python worker is killed, it goes on, Ctrl-C stops it, and another process resumes it.
"""

import json
import re
from pathlib import Path

import psutil
import pytest

from tests import tiny
from tests.integration.command import Child, await_snapshots, check_folder, downpour, snapshots

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TRAIN = ("train", "--solver", "solver.prototxt", "--data", "data", "--out", "run", "--shards", 2)
FOR_EVER = ("--max-iter", 1_000_000)


def test_a_run_that_meets_trouble(tmp_path: Path) -> None:
    """kill -9 of a Python worker in mid-run only costs time; Ctrl-C exits with 130 and leaves a
    snapshot; --resume takes the steps that remain, though its shards live elsewhere, and the folder
    tells of one run."""
    tiny.write_job(tmp_path, extra="snapshot: 40")
    run = tmp_path / "run"
    # Until the killed worker's next life has joined, its lease holds the other one at the bound.
    with downpour(tmp_path, *TRAIN, *FOR_EVER, "--lease-s", 60) as child:
        await_snapshots(run, 1, child)
        spark_worker(child).kill()
        # The first of these may have begun before the kill, the next two be close behind it.
        await_snapshots(run, len(snapshots(run)) + 4, child)
        child.interrupt()
        status, out, err = child.end()
    assert (status, err) == (130, "")
    assert last(out) == f"stopped; go on with: downpour train --resume {run}"
    stopped_at = snapshots(run)[-1]
    told = json.loads((run / "summary.json").read_text())
    assert (told["test_accuracy"], told["worker_restarts"]) == (None, 1)
    # Workers end within moments of it; what they push meanwhile is counted, but not saved.
    assert 0 <= told["updates"] - 2 * stopped_at < 2 * 40

    steps = stopped_at + 60
    # Where the shards live is not the run's affair: the second half needs no start of Ray.
    resume = ("train", "--resume", "run", "--max-iter", steps, "--shards-in", "processes")
    with downpour(tmp_path, *resume) as child:
        status, out, err = child.end()
    assert (status, err) == (0, "")
    assert re.fullmatch(rf"test accuracy \S+%, {2 * steps} updates in \d+ s; see {run}", last(out))
    check_folder(run, workers=2, shards=2, steps=steps, bound=4, restarts=1)
    assert snapshots(run)[-1] == steps


@pytest.mark.parametrize(
    ("place", "process", "cause"),
    [
        ("ray", "ray::ShardActor", "its Ray actor is gone"),
        ("processes", "ps.shard_process", "its process was ended by signal 9 (Killed)"),
    ],
)
def test_a_shard_that_dies(place: str, process: str, cause: str, tmp_path: Path) -> None:
    """kill -9 of a shard ends the run with one line that names it and where to go on."""
    tiny.write_job(tmp_path, extra="snapshot: 40")
    with downpour(tmp_path, *TRAIN, *FOR_EVER, "--shards-in", place) as child:
        await_snapshots(tmp_path / "run", 1, child)
        assert bool(child.descendants("ray::")) == (place == "ray")
        child.descendants(process)[0].kill()
        status, _, err = child.end()
    assert status == 1
    assert re.fullmatch(
        rf"downpour: error: shard [01] has died: {re.escape(cause)};"
        rf" resume from {tmp_path}/run/snapshots/\d+\n",
        err,
    ), err


def spark_worker(child: Child) -> psutil.Process:
    """A process that runs Python tasks: Spark's daemon has forked it."""
    daemons = child.descendants("pyspark.daemon")
    return next(process for process in daemons if process.parent() in daemons)


def last(text: str) -> str:
    return text.splitlines()[-1]
