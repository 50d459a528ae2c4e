"""`downpour` as a child process, and what must hold of the folder that it leaves."""

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

from tests.support import tiny_job
from tests.support.eventually import eventually
from tests.support.process_tree import list_commands
from tests.support.quick_start import import_path
from worker.caffe.inference import evaluate
from worker.caffe.model import CaffeModel
from worker.caffe.solver import read_solver
from worker.caffe.weight_files import read_blobs
from worker.caffe.weights import read_weights
from worker.data.sources import open_source

# Tests may run where Ctrl-C is ignored, as in the background of a shell.
_START = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
    "from deploy.cli.app import main; main()"
)
_ROOT = Path(__file__).parents[2]
_MARK = "DOWNPOUR_TEST_CLI"
PATIENCE_S = 600.0
"""For what takes a run less than a minute; a machine may be ten times slower, with much to do."""


class Child:
    """A `downpour` in a session of its own, as a terminal would have it."""

    def __init__(self, folder: Path, *arguments: object, **environ: str) -> None:
        self._mark = secrets.token_hex(8)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START, *map(str, arguments)],
            cwd=folder,
            env=os.environ | {_MARK: self._mark} | import_path(_ROOT) | environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def descendants(self, word: str) -> list[psutil.Process]:
        """The processes below this one whose command line contains `word`."""
        commands = list_commands(self.process.pid)
        return [process for process, words in commands if word in " ".join(words)]

    def interrupt(self) -> None:
        """Ctrl-C: the terminal sends it to the whole foreground group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self) -> tuple[int, str, str]:
        """Wait; returns the exit status, standard output and error, once nothing is left."""
        out, err = self.process.communicate(timeout=PATIENCE_S)
        eventually(lambda: not self.left(), because=lambda: f"nothing is left, got {self.left()}")
        return self.process.returncode, out, err

    def left(self) -> list[str]:
        """The command lines of what has outlived it, wherever it has gone."""
        commands = []
        for process in psutil.process_iter():
            try:
                living = process.status() != psutil.STATUS_ZOMBIE
                if living and process.environ().get(_MARK) == self._mark:
                    commands.append(" ".join(process.cmdline())[:120])
            except psutil.Error:
                continue  # It has just ended, or is another user's.
        return commands

    def kill(self) -> None:
        self.process.kill()
        self.told = self.process.communicate()


@contextmanager
def downpour(folder: Path, *arguments: object, **environ: str) -> Iterator[Child]:
    """A `downpour` started in `folder`, and killed if it is still there at the end."""
    child = Child(folder, *arguments, **environ)
    try:
        yield child
    finally:
        if child.process.poll() is None:
            child.kill()


def snapshots(run: Path) -> list[int]:
    """The numbers of those that are whole."""
    try:
        folders = list((run / "snapshots").iterdir())
    except FileNotFoundError:  # a run that starts makes it, to see whether it may, and removes it
        return []
    return sorted(
        int(folder.name)
        for folder in folders
        if folder.name.isdecimal() and (folder / "manifest.json").exists()
    )


def await_snapshots(run: Path, count: int, child: Child) -> None:
    """Return when there are `count` snapshots or more."""

    def state() -> str:
        child.kill()
        return f"{count} snapshots: {child.told}"

    def check() -> None:
        assert child.process.poll() is None, state()

    eventually(
        lambda: len(snapshots(run)) >= count, because=state, within_s=PATIENCE_S, check=check
    )


def check_folder(
    run: Path,
    *,
    workers: int,
    shards: int,
    steps: int,
    bound: int,
    restarts: int,
    partial_pushes: int = 0,
) -> None:
    """The files of a finished run agree with each other and with its plan.

    Where a worker died, or a snapshot was resumed whose shards were saved one by one, a push may
    stand at some shards only: at most `partial_pushes` of all pushes do.
    """
    summary = json.loads((run / "summary.json").read_text())
    rows = pq.read_table(run / "updates.parquet").to_pandas()
    applied = rows.groupby("shard").size()
    assert len(applied) == shards
    for shard, of_shard in rows.groupby("shard"):
        assert sorted(of_shard["apply_version"]) == list(range(1, applied[shard] + 1))
    pushes = rows.groupby(["worker", "seq"])["shard"]
    assert (pushes.nunique() == pushes.size()).all(), "a push was applied twice"
    assert (pushes.size() < shards).sum() <= partial_pushes
    assert rows["worker"].nunique() == workers
    for _, of_worker in rows.groupby("worker"):
        assert sorted(of_worker["seq"].unique()) == list(range(1, steps + 1))
    updates = int(applied.min())
    assert rows["clock_gap"].max() <= bound + 1
    expected = {
        "workers": workers,
        "shards": shards,
        "staleness_bound": bound,
        "updates": updates,
        "samples": updates * tiny_job.BATCH,
        "worker_restarts": restarts,
        "max_clock_gap": rows["clock_gap"].max(),
        "staleness_max": rows["staleness"].max(),
        "staleness_mean": pytest.approx(rows["staleness"].mean()),
    }
    assert {name: summary[name] for name in expected} == expected
    assert (rows["samples"] == tiny_job.BATCH).all()

    solver = read_solver(run.parent / "solver.prototxt")
    model = CaffeModel(solver.tests[0].net)
    weights, _ = read_weights(run / "weights.safetensors", model.net, model.initial(0))
    blobs = read_blobs(run / "weights.caffemodel")
    tensors = load_file(run / "weights.safetensors")
    assert tensors.keys() == blobs.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor, blobs[name])
    figures = evaluate(model, weights, open_source(run.parent / "data", "test").batches(), 7)
    assert summary["test_accuracy"] == pytest.approx(figures["accuracy"])
    # The longer a run, the smaller its loss, until float32 has few digits of it.
    assert summary["test_loss"] == pytest.approx(figures["loss"], rel=1e-5, abs=1e-6)
    assert summary["test_accuracy"] > 0.9
    for picture in ("loss.png", "staleness.png"):
        assert (run / picture).read_bytes().startswith(b"\x89PNG")
