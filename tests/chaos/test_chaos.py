"""Real processes are killed, stopped, cut off and bothered; weights and reads prove what happened.

Each run is the command that `make check C=chaos` runs, bounded by a number of kills and not by a
time: what is asserted is what the weights and all reads prove, however long a busy machine takes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.levels import LEVELS
from tests.chaos.oracle import Breach
from tests.support.quick_start import import_path

ROOT = Path(__file__).parents[2]
# A worker's next life takes a millisecond, a shard's a second of a core.
KILLS = {"memory": 30, "process": 9, "logged": 4, "replicated": 5}
OPTIONS = [
    *("--tour", "--kinds", "kills", "--workers", "8", "--longest-s", "0.3", "--seconds", "86400"),
    *("--light", "--floats", "1024", "--rest-ms", "40", "--bound", "4"),
]
SEED = 1


def chaos(folder: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    """Run the command in `folder`: its exit status, its report, and what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos.run", "--seed", str(SEED), *options],
        cwd=folder,
        env=os.environ | import_path(ROOT),
        capture_output=True,
        text=True,
        check=False,
    )
    output = done.stdout + done.stderr
    (report,) = folder.glob("runs/chaos/*/report.json")
    return done.returncode, json.loads(report.read_text()), output


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("level", LEVELS)
def test_nothing_acknowledged_is_lost_or_doubled(level: str, tmp_path: Path) -> None:
    """One fault of each kind that can be had here, then kills: what a level promises is kept.

    No read is torn, older than the one before, or lacks what it must hold.
    """
    kills = KILLS[level]
    options = ["--level", level, "--kills", str(kills), *OPTIONS]
    status, report, output = chaos(tmp_path, *options)
    assert (status, report["broken"], report["kept"]) == (0, "", True), output
    assert sum(n for kind, n in report["faults"].items() if kind.startswith("kill")) >= kills, (
        output
    )
    assert {(one["lost"], one["doubled"]) for one in report["verdicts"]} == {(0, 0)}, output
    assert min(one["acknowledged"] for one in report["verdicts"]) > 0, output
    assert report["reads"]["findings"] == [], output
    assert report["reads"]["judged"] > 0, output


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nor_is_a_window_over_two_tables(tmp_path: Path) -> None:
    """Workers, a shard, a backup and the coordinator are killed while a strategy with windows
    trains two tables: each window counts once, in both, and the sums prove it.

    The tour alone kills up to six processes. Other levels: make check C=chaos WINDOW=4 LEVEL=...
    """
    few = ("--workers", "3", "--kills", "7", "--window", "4")
    status, report, output = chaos(tmp_path, "--level", "replicated", *OPTIONS, *few)
    assert (status, report["broken"], report["kept"]) == (0, "", True), output
    assert all(report["faults"].get(kind) for kind in LEVELS["replicated"].survives), output
    assert {(one["lost"], one["doubled"]) for one in report["verdicts"]} == {(0, 0)}, output
    assert min(one["acknowledged"] for one in report["verdicts"]) > 0, output
    assert report["reads"]["findings"] == [], output


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_reports_are_merged_once_or_named_as_dropped(tmp_path: Path) -> None:
    """Learners and shards are killed between reports on two fragments: each merge has the shares of
    its reports, and each report is in one merge or was acknowledged as dropped.

    No lease runs out. While a learner is dead the others exchange more often than they could if a
    merge waited for it. Other levels: make check C=chaos QUORUM=2 LEVEL=...
    """
    kinds = ("kill -9 of a worker", "kill -9 and absence of a worker", "kill -9 of a shard")
    options = ("--quorum", "2", "--kinds", ",".join(kinds), "--kills", "5", "--seconds", "86400")
    size = ("--light", "--floats", "65536", "--rest-ms", "10", "--level", "process", "--seed", "3")
    status, report, output = chaos(tmp_path, *options, *size)
    assert (status, report["broken"], report["kept"]) == (0, "", True), output
    assert all(report["faults"].get(kind) for kind in kinds), output
    # In all: of a learner that was killed early a shard may have acknowledged nothing.
    assert sum(one["acknowledged"] for one in report["verdicts"]) > 0, output
    assert report["joins"], output


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_reads_keep_the_bound_past_a_join(tmp_path: Path) -> None:
    """A worker that joins over a link that is slow to one shard alone is waited for there, too.

    That shard once counted the joiner at a higher clock than the joiner did, and let the others
    read up to 2 s + 1 steps ahead of it under bound s.
    """
    joins = ("--level", "memory", "--kinds", "kill -9 of a worker", "--kills", "6", "--bound", "2")
    slow = ("--workers", "3", "--burst", "1", "--slow-ms", "60", "--light", "--seconds", "86400")
    status, report, output = chaos(tmp_path, *joins, *slow)
    assert report["reads"]["findings"] == [], output
    assert (status, report["broken"], report["kept"]) == (0, "", True), output
    assert report["reads"]["judged"] > 0, output


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_half_a_push_that_another_completes_is_found(tmp_path: Path) -> None:
    """A worker's next life begins after the smallest push of any shard, not the largest: over a
    link that is slow to one shard, deaths leave half pushes, and the oracle names that shard.

    Four of ten deaths of the worker behind that link leave one, and a run has about four.
    """
    plant = ("--mutant", "a_new_incarnation_begins_after_the_smallest_push", "--level", "process")
    joins = ("--kinds", "kill -9 of a worker", "--kills", "12", "--workers", "3", "--rest-ms", "1")
    slow = ("--slow-ms", "60", "--light", "--seconds", "86400", "--floats", "1024")
    for seed in range(1, 6):
        (run := tmp_path / str(seed)).mkdir()
        status, report, output = chaos(run, *plant, *joins, *slow, "--seed", str(seed))
        if status:
            break
    assert (status, report["kept"]) == (1, False), output
    breaches = {finding.partition(":")[0] for finding in report["reads"]["findings"]}
    assert Breach.DOUBLED in breaches, output
    assert any("shard 0" in finding for finding in report["reads"]["findings"]), output


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nor_is_it_over_curve(tmp_path: Path) -> None:
    """Shards that come back have their keys, and each life of a worker joins with a new one."""
    few = ("--workers", "2", "--shards", "1", "--kills", "2")
    status, report, output = chaos(tmp_path, "--curve", "--level", "process", *OPTIONS, *few)
    assert (status, report["broken"], report["kept"]) == (0, "", True), output
    assert report["faults"]["kill -9 of a shard"] > 0, output
    assert report["faults"]["kill -9 of a worker"] > 0, output
    assert {(one["lost"], one["doubled"]) for one in report["verdicts"]} == {(0, 0)}, output
