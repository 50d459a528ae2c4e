"""`downpour train` as a user runs it: processes, signals, exit statuses, and the folder it leaves.

Each start of Ray and Spark costs some thirty CPU seconds, so the first run meets several things in
turn: a Python worker is killed, it goes on, Ctrl-C stops it, and another process resumes it. That
one is this very process, with the Spark that the tests share, where nothing depends on a start.
"""

import json
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pyarrow.parquet as pq
import pytest

from deploy.clusters import ray_cluster
from deploy.run.evaluations_csv import read_evaluations
from ps import Cluster, load_snapshot
from ps.launch import processes
from ps.launch.launch_plan import LaunchPlan
from ps.shared_memory import shm_files
from shards.errors import GiveUp
from tests.support import tiny_job
from tests.support.cli_in_process import Run, command
from tests.support.cli_process import (
    PATIENCE_S,
    Child,
    await_snapshots,
    check_folder,
    downpour,
    snapshots,
)
from tests.support.eventually import eventually
from tests.support.process_tree import list_commands
from worker import spark as door
from worker.job.shards import JobShards

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TRAIN = ("train", "--solver", "solver.prototxt", "--data", "data", "--out", "run", "--shards", 2)
FOR_EVER = ("--max-iter", 1_000_000)

Done = TypeVar("Done")


def blocked(pid: int) -> int:
    """The signals that a process's main thread blocks: bit 0 is the first signal."""
    found = re.search(r"^SigBlk:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None, "Linux says so"
    return int(found[1], 16)


@pytest.fixture
def here(
    spark: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Run]:
    """`downpour` in this process, on its Spark: the exit status, standard output and error."""
    # Tests that run in the background have it ignored.
    on_sigint = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(door, "start_session", lambda *_, **__: nullcontext(spark))

    yield command(capsys, monkeypatch)
    signal.signal(signal.SIGINT, on_sigint)


def test_a_run_that_meets_trouble(here: Run, tmp_path: Path) -> None:
    """kill -9 of a Python worker in mid-run only costs time; Ctrl-C exits with 130 and leaves a
    snapshot; --resume takes the steps that remain, though its shards live elsewhere, and the folder
    tells of one run."""
    tiny_job.write_job(tmp_path, extra="snapshot: 40")
    run = tmp_path / "run"
    # The killed worker's lease holds the other one at the bound, until its next life says hello.
    with downpour(tmp_path, *TRAIN, *FOR_EVER, "--lease-s", 60) as child:
        await_snapshots(run, 1, child)
        trains = spark_worker(child)
        # Spark's daemon ends its workers by SIGHUP, which their JVM was started without.
        assert not blocked(trains.pid) >> (signal.SIGHUP - 1) & 1
        trains.kill()
        # The first of these may have begun before the kill, the next two be close behind it.
        await_snapshots(run, len(snapshots(run)) + 4, child)
        prefix = shm_files.job_prefix(Cluster.load(run / "cluster.json").job)
        assert list(shm_files.ROOT.glob(f"{prefix}*"))
        pressed_at = time.time()
        child.interrupt()
        status, out, err = child.end()
    assert (status, err) == (130, "")
    assert last(out) == f"stopped; continue with: downpour train --resume {run}"
    # Spark has killed the workers, which could not remove their shared memory.
    assert list(shm_files.ROOT.glob(f"{prefix}*")) == []
    stopped_at = snapshots(run)[-1]
    told = json.loads((run / "summary.json").read_text())
    assert (told["test_accuracy"], told["worker_restarts"]) == (None, 1)
    assert (run / f"snapshots/{stopped_at}/manifest.json").stat().st_mtime >= pressed_at
    # What workers push until they end of it is counted, but not saved, however much it is. The last
    # push of each may have reached one shard of the two, and then counts in the number alone.
    assert told["updates"] - 2 * stopped_at >= -2

    # Between the hello of that life and its join, the other worker was held by nobody.
    _, states = load_snapshot(run / f"snapshots/{stopped_at}")
    entries = [entry for state in states for entry in state.saved.ledger.entries.values()]
    steps = max(entry.step for entry in entries) + 60
    # Where the shards live is not the run's affair: the second half needs no Ray.
    resume = ("train", "--resume", "run", "--max-iter", steps)
    status, out, err = here(*resume, "--shards-in", "processes")
    assert (status, err) == (0, "")
    # One push of the worker that was killed, and the last of each at the stop, may be partial.
    check_folder(run, workers=2, shards=2, steps=steps, bound=4, restarts=1, partial_pushes=3)
    updates = json.loads((run / "summary.json").read_text())["updates"]
    assert re.fullmatch(
        rf"test accuracy \S+%, {updates:,} updates in \d+ s, \d+ s of them since it was resumed;"
        rf" see {run}",
        last(out),
    )
    assert snapshots(run)[-1] == steps


def test_what_a_solver_asks_for(here: Run, tmp_path: Path) -> None:
    """Lines by `display`, tests by `test_interval`, no last snapshot, the seed, and a notice for
    what has no effect; and --resume continues the record of tests."""
    tiny_job.write_job(
        tmp_path,
        max_iter=400,
        extra="test_interval: 100 display: 200 snapshot: 9999 snapshot_after_train: false"
        ' random_seed: 7 snapshot_prefix: "tiny"',
    )
    run = tmp_path / "run"
    status, out, err = here(*TRAIN, "--workers", 1, "--shards-in", "processes")
    assert (status, err) == (0, "")
    lines = [line.partition("  ")[2] for line in out.splitlines()]
    assert lines[0].startswith(f"{tmp_path}/solver.prototxt: snapshot_prefix has no effect: ")
    # How often the driver looks decides how many of the others come, and how late.
    assert sum(line.startswith("test of the initial weights: ") for line in lines) == 1
    assert sum(line.startswith("test at iteration 400: ") for line in lines) == 1
    assert 1 <= sum(line.startswith("steps ") for line in lines) <= 3
    assert snapshots(run) == []
    assert set(pq.read_table(run / "updates.parquet").to_pandas().seed) == {7}
    found = [result.iteration for result in read_evaluations(run / "evaluations.csv")]
    assert found == sorted({0, 400, *found})
    last_test = read_evaluations(run / "evaluations.csv")[-1]
    told = json.loads((run / "summary.json").read_text())
    figures = {"accuracy": told["test_accuracy"], "loss": told["test_loss"]}
    assert last_test.figures == pytest.approx(figures, rel=1e-6)
    assert told["test_accuracy"] > 0.9


def test_a_shard_that_dies(
    here: Run, ray_local: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 of a shard ends the run with one line that names it and where to go on."""
    monkeypatch.setattr(ray_cluster, "connect", lambda *_, **__: nullcontext(ray_local))
    out = lose_a_shard(here, tmp_path, actors, "its Ray actor is gone")
    assert "starting Ray" in out


def test_a_ray_head_that_dies(
    here: Run, ray_local: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends at once with a line that names the head, and a new snapshot to go on from."""
    monkeypatch.setattr(ray_cluster, "connect", lambda *_, **__: nullcontext(ray_local))
    tiny_job.write_job(tmp_path)
    run = tmp_path / "run"
    checks: list[int] = []

    def check_head() -> None:
        checks.append(1)
        if len(checks) > 5:
            raise GiveUp("Ray's head has died")

    monkeypatch.setattr(ray_cluster, "check_head", check_head)
    status, _, err = here(*TRAIN, *FOR_EVER)
    (newest,) = snapshots(run)
    assert status == 1
    assert f"error: Ray's head has died; resume from {run}/snapshots/{newest}" in err


def test_a_shard_process_that_dies(here: Run, tmp_path: Path) -> None:
    """So does that of one which lives in a process, for which no Ray is started."""
    before, cause = set(shard_processes()), "its process was ended by signal 9 (Killed)"
    out = lose_a_shard(here, tmp_path, shard_processes, cause, "--shards-in", "processes")
    assert "Ray" not in out
    assert set(shard_processes()) == before


def test_a_shard_that_comes_back(
    here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what it saved last: the run says what that cost, goes on, and ends as any other does; no
    save is left, and the other shard has had every push."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    tiny_job.write_job(tmp_path, max_iter=1000)
    run, before, check = tmp_path / "run", set(shard_processes()), JobShards.check
    killed: list[psutil.Process] = []

    def kill_and_check(job_shards: JobShards) -> None:
        saves = len(list(temporary.glob("downpour-*/shard-*/save")))
        if not killed and saves == 2 and job_shards.admin.status()[0].steps > 0:
            killed.append(max(set(shard_processes()) - before, key=lambda process: process.pid))
            killed[0].kill()
        check(job_shards)

    monkeypatch.setattr(JobShards, "check", kill_and_check)
    status, out, err = here(*TRAIN, "--shards-in", "processes", "--transport", "tcp")
    assert status == 0
    assert len(deaths_in(err)) == 1
    (told,) = re.findall(r"shard [01] has died: .*", out)
    died = int(told[len("shard ")])
    assert told[len("shard N") :] == (
        " has died: its process was ended by signal 9 (Killed); restarted from its last autosave;"
        " updates since then are lost"
    )
    assert list(temporary.glob("downpour-*/shard-*")) == []
    assert set(shard_processes()) == before
    rows = pq.read_table(run / "updates.parquet").to_pandas()
    for (shard, _), own in rows.groupby(["shard", "worker"]):
        pushes = set(own["seq"])  # what it applied just before it died is in no row
        assert pushes <= set(range(1, 1001)) if shard == died else pushes == set(range(1, 1001))


def deaths_in(err: str) -> list[str]:
    """The lines of a log, each of which must be a warning of a death."""
    lines = err.splitlines()
    assert all(
        re.fullmatch(r"\S+ \[warning  \] .*shard \d has died: .* job=.*", one) for one in lines
    )
    return lines


def lose_a_shard(
    here: Run,
    folder: Path,
    shards: Callable[[], list[psutil.Process]],
    cause: str,
    *more: object,
) -> str:
    """Kill one of the run's own among `shards` once it has a snapshot, and look at how it ends;
    returns what was printed."""
    tiny_job.write_job(folder, extra="snapshot: 40")
    run, before = folder / "run", set(shards())

    def kill(ended: threading.Event) -> None:
        await_so_many(run, 1, ended)
        min(set(shards()) - before, key=lambda process: process.pid).kill()

    (status, out, err), _ = run_while(kill, here, "--rollback-s", 0, *more)
    check_told(status, err, run, cause)
    return out


def run_while(
    act: Callable[[threading.Event], Done], here: Run, *more: object
) -> tuple[tuple[int, str, str], Done]:
    """Run for ever while another thread calls `act` with an event that is set at the run's end;
    gives the results of both. If that thread fails, it interrupts the run."""
    ended = threading.Event()

    def act_or_interrupt() -> Done:
        try:
            return act(ended)
        except BaseException:
            if not ended.is_set():
                os.kill(os.getpid(), signal.SIGINT)
            raise

    with ThreadPoolExecutor(1) as pool:
        acting = pool.submit(act_or_interrupt)
        try:
            result = here(*TRAIN, *FOR_EVER, *more)
        finally:
            ended.set()
        return result, acting.result()


def test_a_run_that_is_moved(here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`downpour reshard` has a run go on with three shards, and says so, though one that keeps a
    log is killed meanwhile; every push counts once, and the folder tells of both sets of shards."""
    before = set(shard_processes())
    sets, _ = killing(monkeypatch, "start_single", 0)
    move_a_run(here, tmp_path, "process", 3)
    assert [hosts.cluster.map.shards for hosts in sets] == [2, 3]
    assert set(shard_processes()) == before


def test_a_replicated_run_that_is_moved(
    here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is with copies, though the primary of an old shard is killed as the move begins."""
    before = set(shard_processes())
    sets, plans = killing(monkeypatch, "start_replicated", "shard 1 primary")
    # By its connection a dead copy is told at once; a slow one is not to count as dead.
    quiet = ("--silence-s", 60, "--lease-s", 61)
    move_a_run(here, tmp_path, "replicated", 1, *quiet)
    assert [plan.silence_s for plan in plans] == [60.0, 60.0]
    assert [hosts.cluster.map.shards for hosts in sets] == [2, 1]
    assert set(shard_processes()) == before


def killing(
    monkeypatch: pytest.MonkeyPatch, start: str, who: Any
) -> tuple[list[Any], list[LaunchPlan]]:
    """Have one of the first shards that are started as processes die when further ones are, as a
    job begins to move; gives all that will be, and their plans."""
    sets, plans, real = list[Any](), list[LaunchPlan](), getattr(processes, start)

    @contextmanager
    def started(plan: LaunchPlan) -> Iterator[Any]:
        with real(plan) as hosts:
            sets.append(hosts)
            plans.append(plan)
            if len(sets) == 2:
                os.kill(sets[0].pids[who], signal.SIGKILL)
            yield hosts

    monkeypatch.setattr(processes, start, started)
    return sets, plans


def move_a_run(here: Run, folder: Path, durability: str, shards: int, *more: object) -> None:
    """Have a run of two shards move to so many, and look at what it leaves."""
    tiny_job.write_job(folder, extra="snapshot: 40")
    run = folder / "run"

    def move(ended: threading.Event) -> tuple[int, str, str]:
        await_so_many(run, 1, ended)
        with downpour(folder, "reshard", "run", "--shards", shards) as asking:
            answered = asking.end()
        # The later of these two holds what the new shards were pushed.
        await_so_many(run, len(snapshots(run)) + 2, ended)
        os.kill(os.getpid(), signal.SIGINT)
        return answered

    how = ("--shards-in", "processes", "--durability", durability)
    (status, out, err), answered = run_while(move, here, *how, *more)
    few = "shard" if shards == 1 else "shards"
    assert answered == (0, f"{run} continues with {shards} {few}\n", "")
    assert status == 130
    # Copies end regularly, too, so what is logged then is information and no warning.
    assert len(deaths_in(err)) == (durability == "process")
    assert f"moving from 2 to {shards} {few}" in out
    assert f"moved to {shards} {few}" in out
    summary = json.loads((run / "summary.json").read_text())
    settings = json.loads((run / "settings.json").read_text())
    assert (summary["shards"], settings["shards"]) == (shards, shards)
    rows = pq.read_table(run / "updates.parquet").to_pandas()
    first = rows[rows["shard"] == 0]
    for _, own in first.groupby("worker"):
        assert sorted(own["seq"]) == list(range(1, len(own) + 1))
    # Either set has a shard that the other lacks.
    if shards > 2:
        moved_at = rows[rows["shard"] == 2]["apply_version"].min() - 1
    else:
        moved_at = rows[rows["shard"] == 1]["apply_version"].max()
    assert 0 < moved_at < summary["updates"] <= len(first)


def await_so_many(run: Path, count: int, ended: threading.Event) -> None:
    """Return when a run has so many snapshots; fail when it has ended without."""

    def check() -> None:
        assert not ended.is_set(), f"it ended before its {count} snapshots"

    eventually(
        lambda: len(snapshots(run)) >= count,
        because=f"{count} snapshots",
        within_s=PATIENCE_S,
        check=check,
    )


def check_told(status: int, err: str, run: Path, cause: str) -> None:
    """It ended with this cause, the shard's number and a snapshot, in one line."""
    assert status == 1
    assert re.fullmatch(
        rf"downpour: error: shard [01] has died: {re.escape(cause)};"
        rf" resume from {run}/snapshots/\d+\n",
        err,
    ), err


def shard_processes() -> list[psutil.Process]:
    """The processes of shards below this one."""
    return below(lambda words: "ps.launch.child_main" in words)


def actors() -> list[psutil.Process]:
    """Shards in the Ray of this process."""
    return below(lambda words: "ray::ShardActor" in " ".join(words))


def below(wanted: Callable[[list[str]], bool]) -> list[psutil.Process]:
    """Processes below this one, by their command lines."""
    return [process for process, words in list_commands() if wanted(words)]


def spark_worker(child: Child) -> psutil.Process:
    """A process that trains: of those that Spark's daemon has forked, the one that worked most just
    now. The others wait for a next task, and nothing restarts when one of them dies."""
    daemons = child.descendants("spark.daemon")
    forked = [process for process in daemons if process.parent() in daemons]
    before = [sum(process.cpu_times()[:2]) for process in forked]
    time.sleep(0.5)
    worked = [sum(process.cpu_times()[:2]) for process in forked]
    return max(zip(forked, before, worked, strict=True), key=lambda each: each[2] - each[1])[0]


def last(text: str) -> str:
    return text.splitlines()[-1]
