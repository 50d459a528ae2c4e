"""Shards with a WAL in processes that are killed: no acknowledged push is lost or doubled.

Workers push whole numbers at rate 1, so the weights count the applied pushes, and a lost or doubled
push would show. Processes and signals are real; one test kills the driver, too.
"""

import os
import resource
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import ps
from ps import AdminClient, Cluster, Durability
from ps.client import Client
from ps.launch import launcher, restart
from ps.launch.launch_plan import LaunchPlan
from ps.launch.processes import process_shards
from ps.wal.recovery import read_spec, read_state
from shards.errors import BadInput, GiveUp
from shards.repartition import whole_weights
from tests.support.pushers import PATIENCE_S, TABLE, more, pushing, specs_of

PARENT = """
import sys, time
from pathlib import Path
from ps import Durability
from tests.support.pushers import specs_of
from ps.client import Client
from ps.launch.processes import process_shards

folder = Path(sys.argv[1])
with process_shards(specs_of(1), durability=Durability.LOGGED, logs=folder) as hosts:
    hosts.cluster.save(folder / "cluster.json.partial")
    (folder / "cluster.json.partial").rename(folder / "cluster.json")
    print(*hosts.pids, flush=True)
    time.sleep(600)
"""


def arena(folder: Path, cluster: Cluster) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """The weights recovered from the WALs below `folder`."""
    shards = range(cluster.map.shards)
    states = [read_state(folder / f"shard-{shard}")[1] for shard in shards]
    return whole_weights(states, cluster.layout, cluster.map)


@pytest.mark.timeout(600)  # a process starts in a second or two, on a busy machine in twenty
def test_kill_any_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One shard, then both, are killed amid pushes: training continues, each push counts once.

    The WALs hold exactly the same weights.
    """
    monkeypatch.setattr(restart, "QUICK_S", 0.0)
    with process_shards(specs_of(2), durability=Durability.PROCESS, logs=tmp_path) as hosts:
        with AdminClient(hosts.cluster, patience_s=PATIENCE_S) as console:
            console.install(TABLE.empty())
            with pushing(hosts.cluster) as pushers:
                for killed in ((1,), (0, 1)):
                    more(pushers, hosts)
                    for shard in killed:
                        os.kill(hosts.pids[shard], signal.SIGKILL)
                more(pushers, hosts)
            total = sum(one.acknowledged for one in pushers)
            weights = console.read()
            assert set(weights[:3000]) == {-float(total)}
            assert [status.version for status in console.status()] == [total, total]
            assert [status.pushes for status in console.status()] == [total, total]
            assert all(sum(status.apply_s.counts) for status in console.status()), "it measures"
            rows = console.records()[0]
            assert sorted(rows["apply_version"]) == list(range(1, total + 1)), "none is missing"
        assert hosts.deaths == 3
    assert (arena(tmp_path, hosts.cluster) == weights).all()


@pytest.mark.timeout(600)
def test_kill_everything(tmp_path: Path) -> None:
    """The driver and its shard are killed at once; another driver resumes the shard from its WAL.

    It serves on the same port, and the workers continue: they have noticed only a silence.
    """
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        (pid,) = map(int, parent.stdout.readline().split())
        cluster = Cluster.load(tmp_path / "cluster.json")
        with AdminClient(cluster, patience_s=PATIENCE_S) as console:
            console.install(TABLE.empty())
        with pushing(cluster) as pushers:
            more(pushers)
            os.kill(parent.pid, signal.SIGKILL)
            os.kill(pid, signal.SIGKILL)
            parent.wait()
            specs = [read_spec(tmp_path / "shard-0")]
            port = int(cluster.endpoints[0].rpartition(":")[2])
            again = process_shards(specs, port=port, durability=Durability.LOGGED, logs=tmp_path)
            hosts = again.__enter__()
            try:
                assert hosts.cluster == cluster
                more(pushers, hosts)
            except BaseException:
                again.__exit__(None, None, None)
                raise
        with AdminClient(cluster, patience_s=PATIENCE_S) as console:
            total = sum(one.acknowledged for one in pushers)
            assert set(console.read()[:3000]) == {-float(total)}
        again.__exit__(None, None, None)
    assert set(arena(tmp_path, cluster)[:3000]) == {-float(total)}


@pytest.mark.timeout(600)
def test_a_shard_whose_log_is_gone(tmp_path: Path) -> None:
    """If one of two WAL folders was removed, neither shard serves, and the error names the folder.

    With the folder back, both serve. If only the newest log was removed, the shard's own process
    names it.
    """
    specs = specs_of(2)
    with process_shards(specs, durability=Durability.PROCESS, logs=tmp_path) as hosts:
        with AdminClient(hosts.cluster, patience_s=PATIENCE_S) as console:
            console.install(TABLE.empty())
        with pushing(hosts.cluster, workers=1) as pushers:
            more(pushers, hosts)
    folder, aside = tmp_path / "shard-1", tmp_path / "aside"
    folder.rename(aside)

    def started() -> None:
        with process_shards(specs, durability=Durability.PROCESS, logs=tmp_path):
            pass

    with pytest.raises(BadInput) as caught:
        started()
    assert str(caught.value) == (
        f"logs {tmp_path}: expected weights of every shard or of none, got those of shard 0 and"
        f" none of shard 1: put back the missing logs, or remove {tmp_path} to start without them"
    )
    shutil.rmtree(folder)
    aside.rename(folder)
    started()
    newest = max(folder.glob("log-*"))
    newest.unlink()
    with pytest.raises(
        BadInput, match=rf"^log {newest}: expected this log, got none, or one without"
    ):
        started()


@pytest.mark.timeout(300)
def test_what_failed_is_not_started_again(tmp_path: Path) -> None:
    """A WAL that cannot be written (a limit on files stands for a full disk) ends the shard.

    The error names the file, and the file holds what was acknowledged.
    """
    specs = specs_of(1)
    with process_shards(specs, durability=Durability.PROCESS, logs=tmp_path) as hosts:
        resource.prlimit(hosts.pids[0], resource.RLIMIT_FSIZE, (100_000, 100_000))
        with AdminClient(hosts.cluster) as console:
            console.install(TABLE.empty())
        client, acknowledged = Client(hosts.cluster, worker="w", retry_s=0.2, patience_s=2), 0
        path = tmp_path / "shard-0" / "log-00000000"
        failed = rf"^shard 0 has failed: log {path}: File too large"
        rest = "; the log has all acknowledged updates; the job has ended: continue it with resume="
        line = failed + rest

        def push_on() -> None:
            nonlocal acknowledged
            while acknowledged < 100:
                with suppress(ps.Unreachable):  # or the machine is busy, and it answers yet
                    client.flush()
                    acknowledged = client.seq
                    client.pull()
                    client.push(np.ones(TABLE.size, np.float32))
                hosts.check()

        with pytest.raises(GiveUp, match=line):
            push_on()
        client.abort()
    assert arena(tmp_path, hosts.cluster)[0] == -acknowledged
    assert 0 < acknowledged < 10


@pytest.mark.parametrize("home", launcher.Placement)
def test_a_log_needs_a_folder(home: launcher.Placement) -> None:
    """A durability with a WAL but without a folder is refused, on every placement."""
    with pytest.raises(BadInput) as caught:
        launcher.start_shards(
            home, LaunchPlan(specs=specs_of(1), durability=Durability.PROCESS)
        ).__enter__()
    text = "durability process: expected a folder for the shards' logs, got none"
    assert str(caught.value) == text
