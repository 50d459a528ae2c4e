"""Replicated shards in Ray actors that are killed: no acknowledged push is lost or doubled.

The weights prove it (pushing.py).
"""

import os
import signal
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psutil
import pytest

import ps
from ps.launch import ray_actors
from ps.launch.ray_actors import Actor
from ps.launch.ray_launcher import _InRay, node_for_copy, ray_replicas
from shards.errors import GiveUp
from tests.support.eventually import eventually
from tests.support.replicated_job import (
    BACKUP,
    COORDINATOR,
    LONG_SILENCE_S,
    PRIMARY,
    TABLE,
    Worker,
    check_applied_once,
    specs_of,
    whole_again,
)


@pytest.mark.timeout(300)
def test_actors_die_in_turn(ray_local: str) -> None:
    """Coordinator, primary and, at last, both copies are killed while two workers push.

    While the coordinator is dead training continues, and there is no failover. The next coordinator
    knows the decisions: when the primary is killed, its backup takes over, long before Ray has
    started an actor, and another actor becomes the backup. A shard without a copy is named. All
    links use CURVE, as on a cluster.
    """
    with (
        ray_replicas(specs_of(), silence_s=LONG_SILENCE_S, secure=True) as hosts,
        ps.AdminClient(hosts.cluster) as console,
    ):
        console.install(TABLE.empty())
        assert str(hosts.cluster.coordinator).startswith("curve://")
        pids = dict(hosts.pids)
        assert sorted(pids) == [COORDINATOR, BACKUP, PRIMARY]
        workers = [Worker(hosts.cluster, name) for name in ("a", "b")]
        for worker in workers:
            worker.await_progress()
        record = Path(tempfile.gettempdir()) / hosts._order.record
        assert record.parent.stat().st_mode & 0o777 == 0o700

        os.kill(pids[COORDINATOR], signal.SIGKILL)
        eventually(
            lambda: not psutil.pid_exists(pids[COORDINATOR]), because="the coordinator is gone"
        )
        for worker in workers:
            worker.await_progress()
        whole_again(hosts, COORDINATOR, pids[COORDINATOR])
        assert hosts.pids == pids | {COORDINATOR: hosts.pids[COORDINATOR]}

        os.kill(pids[PRIMARY], signal.SIGKILL)
        for worker in workers:
            worker.await_progress()
        whole_again(hosts, PRIMARY, pids[PRIMARY])
        assert hosts.pids[PRIMARY] == pids[BACKUP]
        assert hosts.pids[BACKUP] not in pids.values()
        check_applied_once(hosts.cluster, workers)

        for part in (PRIMARY, BACKUP):
            os.kill(hosts.pids[part], signal.SIGKILL)
        with pytest.raises(GiveUp, match=r"^shard 0 has no copy left that holds its pushes: shard"):
            eventually(hosts.check, because="the death is noticed")
        left = list(hosts.pids.values())
    eventually(lambda: not any(map(psutil.pid_exists, left)), because="no process is left")
    assert not record.parent.exists()


def test_a_copy_is_put_apart() -> None:
    """A copy goes to a node without the other copy, if there is one; of several to the emptiest."""
    assert node_for_copy(["a", "b"], {"a"}, {"a": 1, "b": 7}) == "b"
    assert node_for_copy(["a", "b", "c"], {"a"}, {"a": 1, "b": 2, "c": 1}) == "c"
    assert node_for_copy(["a", "b"], (), {"a": 1}) == "b"
    assert node_for_copy(["a"], {"a"}, {"a": 5}) == "a"


def test_who_would_die_with_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies known to be on one node die together; and whether there is another node is known."""
    starts, nodes = _InRay(), ["a"]
    monkeypatch.setattr(ray_actors, "nodes", lambda: nodes)
    places = {1: "a", 2: "a", 3: "b", 4: None, 5: None}
    copies = {boot: cast("Actor", SimpleNamespace(node=node)) for boot, node in places.items()}
    monkeypatch.setattr(starts, "_copies", copies)
    pairs = [(1, 2), (1, 3), (1, 4), (4, 5), (6, 7)]
    assert [starts.same_machine(*pair) for pair in pairs] == [True, False, False, False, False]
    assert not starts.has_other_machine(1)
    nodes.append("b")
    assert starts.has_other_machine(1)
