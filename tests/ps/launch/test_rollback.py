"""Shards at `memory` that are killed and restarted from autosaves: what is reported and kept.

Processes and signals are real. Workers push whole numbers at rate 1, so the weights count the
pushes that were applied and not lost.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ps import AdminClient, Cluster, Durability
from ps.client import Client
from ps.launch import launcher, restart
from ps.launch.launch_plan import LaunchPlan
from ps.launch.processes import process_shards
from ps.launch.single_copies import SingleCopies
from ps.transport.transports import Transport
from shards.errors import BadInput, GiveUp
from tests.support.eventually import eventually
from tests.support.pushers import PATIENCE_S, TABLE, losses, more, pushing, specs_of
from worker.job.options import ShardRuntime

PARENT = """
import time
from tests.support.pushers import specs_of
from ps.client import Client
from ps.launch.processes import process_shards

with process_shards(specs_of(1), rollback_s=600.0) as hosts:
    print(*hosts.pids, flush=True)
    time.sleep(600)
"""
KILLED = "its process was ended by signal 9 (Killed)"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary files; nothing is left there."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield tmp_path
    assert list(tmp_path.iterdir()) == []


def push(cluster: Cluster, worker: str, pushes: int, incarnation: int = 0) -> None:
    with Client(
        cluster, worker=worker, incarnation=incarnation, retry_s=0.2, patience_s=PATIENCE_S
    ) as client:
        for _ in range(pushes):
            client.pull()
            client.push(np.ones(TABLE.size, np.float32))
            client.flush()


def parts(console: AdminClient) -> list[set[float]]:
    """Each shard's distinct weights."""
    whole, cluster = console.read(), console.cluster
    return [
        {float(value) for value in cluster.map.cut(whole, shard) if value}
        for shard in range(cluster.map.shards)
    ]


def killed(hosts: SingleCopies, shard: int) -> None:
    """Kill a shard's process; returns once the next one serves, and its loss is reported."""
    before = hosts.pids[shard]
    os.kill(before, signal.SIGKILL)
    eventually(
        lambda: hosts.pids[shard] != before,
        because="another process follows",
        within_s=PATIENCE_S,
        check=hosts.check,
    )


@pytest.mark.timeout(600)  # a process starts in a second or two, on a busy machine in twenty
def test_kill_one_of_two(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the killed shard rolls back to its last autosave, which is reported once.

    The next incarnation of a worker begins after the pushes that the other shard has, so both
    shards apply its own.

    It keeps its address and key, for workers that had joined and for new ones. Other users cannot
    read its autosaves. With restarts off, the next death is final. Then no autosave is left.
    """
    monkeypatch.setattr(restart, "QUICK_S", 0.0)
    started = process_shards(specs_of(2), secure=True, transport=Transport.TCP, rollback_s=600.0)
    with started as hosts:
        with AdminClient(hosts.cluster, patience_s=PATIENCE_S) as console:
            console.install(TABLE.empty())
            (job,) = temporary.iterdir()
            assert job.name.startswith("downpour-")
            assert {path.stat().st_mode & 0o777 for path in (job, *job.iterdir())} == {0o700}
            for shard in range(2):
                eventually(
                    (job / f"shard-{shard}" / "save").exists,
                    because=f"shard {shard} is saved",
                    within_s=PATIENCE_S,
                    check=hosts.check,
                )
            key = (job / "shard-1" / "key").read_bytes()
            push(hosts.cluster.for_workers(), "w0", 3)
            assert parts(console) == [{-3.0}, {-3.0}]
            assert hosts.lost_updates() == []
            killed(hosts, 1)
            (told,) = losses(hosts)
            assert told == (
                f"shard 1 has died: {KILLED}; restarted from its last autosave; updates since"
                " then are lost"
            )
            assert parts(console) == [{-3.0}, set()]
            assert (job / "shard-1" / "key").read_bytes() == key
            push(hosts.cluster.for_workers(), "w1", 1)
            assert parts(console) == [{-4.0}, {-1.0}]
            push(hosts.cluster.for_workers(), "w0", 1, incarnation=1)
            assert parts(console) == [{-5.0}, {-2.0}]
            hosts.check()
        assert (hosts.deaths, hosts.lost_updates()) == (1, [])
        hosts.restart_enabled = False
        os.kill(hosts.pids[0], signal.SIGKILL)
        with pytest.raises(GiveUp) as caught:
            eventually(hosts.check, because="the end is reported", within_s=PATIENCE_S)
        assert str(caught.value) == f"shard 0 has died: {KILLED}"
        assert hosts.lost_updates() == []


@pytest.mark.timeout(600)
def test_workers_go_on(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers continue through deaths amid pushes: what one shard loses the others keep.

    Workers learn how much it is, and no applied push counts twice or is pushed again.
    """
    monkeypatch.setattr(restart, "QUICK_S", 0.0)
    with process_shards(specs_of(2), transport=Transport.TCP, rollback_s=0.2) as hosts:
        with AdminClient(hosts.cluster, patience_s=PATIENCE_S) as console:
            console.install(TABLE.empty())
            (job,) = temporary.iterdir()
            eventually(
                (job / "shard-1" / "save").exists,
                because="shard 1 is saved",
                within_s=PATIENCE_S,
                check=hosts.check,
            )
            with pushing(hosts.cluster) as pushers:
                for _ in range(3):
                    more(pushers, hosts)
                    killed(hosts, 1)
                more(pushers, hosts)
            total = sum(one.acknowledged for one in pushers)
            lost = sum(one.lost for one in pushers)
            assert parts(console) == [{-float(total)}, {float(lost - total)}]
            assert [status.version for status in console.status()] == [total, total - lost]
        assert 0 <= lost < total
        assert hosts.deaths == 3


@pytest.mark.timeout(300)
def test_a_parent_that_is_killed_leaves_no_saves(temporary: Path) -> None:
    """Its shards end, and remove the autosaves that are no longer needed."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        assert any(temporary.glob("downpour-*/shard-0"))
        parent.kill()
        eventually(lambda: not any(temporary.iterdir()), because="the saves are removed")


@pytest.mark.parametrize("home", launcher.Placement)
@pytest.mark.parametrize(
    ("durability", "rollback_s", "line"),
    [
        (Durability.PROCESS, 5.0, "rollback_s 5: expected durability memory, got process"),
        (Durability.REPLICATED, 5.0, "rollback_s 5: expected durability memory, got replicated"),
        (
            Durability.MEMORY,
            -1.0,
            "rollback_s: expected 0 s or more, and finite, got -1",
        ),
    ],
)
def test_where_nothing_is_taken_back(
    home: launcher.Placement, durability: Durability, rollback_s: float, line: str
) -> None:
    """Autosaves are refused with other durabilities, on every placement."""
    with pytest.raises(BadInput) as caught:
        launcher.start_shards(
            home, LaunchPlan(specs=specs_of(1), durability=durability, rollback_s=rollback_s)
        )
    assert str(caught.value) == line
    with pytest.raises(BadInput), process_shards(specs_of(1), rollback_s=float("nan")):
        pass


def test_one_default_everywhere() -> None:
    """At `memory` shards save every 10 s unless told otherwise, as a training job's do."""
    specs = specs_of(1)
    assert LaunchPlan(specs=specs).autosave_s == ShardRuntime().autosave_s == 10.0
    assert LaunchPlan(specs=specs, rollback_s=0.0).autosave_s == 0.0
    logged = LaunchPlan(specs=specs, durability=Durability.LOGGED, logs=Path("logs"))
    assert logged.autosave_s == 0.0
