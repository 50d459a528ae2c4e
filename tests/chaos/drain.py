"""End runs by SIGTERM at random moments: no acknowledged push may be missing in what they leave.

    python -m tests.chaos.drain --runs 50 [--states] [--reshard]

Each run trains with two workers, which count in files what the shards have acknowledged to them:
every push adds one to the worker's own weight. After SIGTERM the run takes a snapshot and leaves.
Each weight there must be at least its worker's count, and at most one more, the push that was under
way. A traceback on standard error counts as a failure. With `--states` pushes are compressed, by a
codec that is exact here, so workers keep states: the snapshot must have both, of these pushes.
With `--reshard` the two shards become three from when both workers train, so SIGTERM comes before
that has ended, or soon after.
"""

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import patch

import numpy as np

import ps
import worker
from deploy.clusters.java import spark_environment
from ps.snapshots.catalog import LoadedSnapshot, SnapshotCatalog
from shards.repartition import whole_weights
from tests.support.eventually import eventually
from worker.job import runner
from worker.job.run_control import ReshardOrder, RunControl
from worker.spark import start_session
from worker.spark.signals import SafeExitStack, sigterm_too

_WORKERS = 2
_GOAL_S = 20.0
_BEGUN = 20  # acknowledged pushes of each worker before SIGTERM
_READY_S = 300.0


def main() -> int:
    """Run the check; the exit status is 1 if a run failed."""
    parser = argparse.ArgumentParser(description="End runs by SIGTERM; nothing may be lost.")
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--states", action="store_true")
    parser.add_argument("--reshard", action="store_true")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        return train(options.train, states=options.states, reshard=options.reshard)
    moments, failed, slowest = random.Random(options.seed), 0, 0.0
    for run in range(options.runs):
        after_s = moments.uniform(0.0, 2.0)
        seconds, faults = end_run(after_s, states=options.states, reshard=options.reshard)
        slowest, failed = max(slowest, seconds), failed + bool(faults)
        print(f"run {run}: left in {seconds:.1f} s: {faults or 'ok'}", flush=True)
    kept = options.runs - failed
    print(f"no acknowledged push lost: {kept} of {options.runs}")
    print(
        f"slowest {slowest:.1f} s, goal {_GOAL_S:g} s: {'met' if slowest <= _GOAL_S else 'short'}"
    )
    return 1 if failed else 0


def end_run(after_s: float, *, states: bool, reshard: bool) -> tuple[float, str]:
    """Start a run, end it by SIGTERM; returns its seconds from there, and what was wrong."""
    with tempfile.TemporaryDirectory(prefix="downpour-drain-") as name:
        folder = Path(name)
        command = [sys.executable, "-m", "tests.chaos.drain", "--train", name]
        command += ["--states"] if states else []
        command += ["--reshard"] if reshard else []
        process = subprocess.Popen(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)

        def is_training() -> bool:
            assert process.poll() is None, process.stderr and process.stderr.read().decode()
            return _has_begun(folder)

        eventually(is_training, because="both workers train", within_s=_READY_S)
        time.sleep(after_s)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, printed = process.communicate()
        seconds = time.monotonic() - began
        snapshot = SnapshotCatalog(folder / "snapshots").newest_good()
        faults = judge(_acknowledged(folder), _weights(snapshot))
        faults += judge_states(snapshot) if states else []
        if process.returncode != 130:
            faults.append(f"exit status {process.returncode}")
        if b"Traceback" in printed:
            faults.append(printed.decode(errors="replace"))
        return seconds, "; ".join(faults)


def judge(acknowledged: list[int], weights: list[float]) -> list[str]:
    """The faults of a snapshot with these weights, given each worker's acknowledged pushes."""
    return [
        f"worker {number}: {count} pushes acknowledged, {weight:g} in the snapshot"
        for number, (count, weight) in enumerate(zip(acknowledged, weights, strict=True))
        if not count <= weight <= count + 1
    ]


def judge_states(snapshot: LoadedSnapshot) -> list[str]:
    """The workers without a state in the snapshot, or with one of another push than the shards."""
    pushes = snapshot.states[0].saved.ledger.entries
    saved = {state.worker: state.seq for state in snapshot.manifest.residuals}
    return [
        f"{worker}: state of push {saved.get(worker)}, push {entry.seq} at the shards"
        for worker, entry in pushes.items()
        if saved.get(worker) != entry.seq
    ]


def _acknowledged(folder: Path) -> list[int]:
    """Each worker's acknowledged pushes: it appends a byte to a file for each."""
    files = [folder / f"acknowledged-{number}" for number in range(_WORKERS)]
    return [file.stat().st_size if file.exists() else 0 for file in files]


def _has_begun(folder: Path) -> bool:
    return all(count > _BEGUN for count in _acknowledged(folder))


def _weights(snapshot: LoadedSnapshot) -> list[float]:
    """Each worker's weight in a snapshot."""
    manifest = snapshot.manifest
    arena = whole_weights(snapshot.states, manifest.layout, manifest.map)
    return [float(weight) for weight in arena[:_WORKERS]]


def reshard_soon(folder: Path) -> None:
    """Have the run of this process get a third shard once both workers train."""
    control = RunControl()
    patch.object(runner, "RunControl", lambda: control).start()

    def order() -> None:
        eventually(lambda: _has_begun(folder), because="both workers train", within_s=_READY_S)
        control.submit(ReshardOrder(3))

    Thread(target=order, daemon=True).start()


def train(folder: Path, *, states: bool, reshard: bool) -> int:
    """Train until SIGTERM, in a process of its own; returns the exit status."""
    if reshard:
        reshard_soon(folder)
    compression = ps.Compression.parse("threshold:0.5" if states else "none")
    zeros = {"w": np.zeros(_WORKERS, np.float32)}
    params = ps.Dense.like(zeros, rate=1.0, compression=compression)
    with sigterm_too(_GOAL_S), suppress(KeyboardInterrupt), SafeExitStack() as stack:
        session = stack.enter_context(
            start_session(None, _WORKERS, app="drain", env=spark_environment())
        )
        worker.run(
            session.range(_WORKERS, numPartitions=_WORKERS),
            push_ones,
            {"folder": str(folder)},
            params=params,
            shards=2,
            shards_in="processes",
            snapshots=folder / "snapshots",
            staleness="inf",
            strategy="downpour:scale=1",
        )
    return 130  # its function never ends


def push_ones(args: Mapping[str, str], ctx: Any) -> None:
    """Push one after another; each adds 1 to the worker's own weight."""
    number = int(ctx.rank)
    gradient = np.zeros(_WORKERS, np.float32)
    gradient[number] = -1.0
    with (Path(args["folder"]) / f"acknowledged-{number}").open("ab", buffering=0) as counts:
        while True:
            with ctx.worker.step() as step:
                step.pull()
                step.push({"w": gradient})
            ctx.worker.flush()
            counts.write(b".")


if __name__ == "__main__":
    sys.exit(main())
