"""Shards with a WAL in Ray actors that are killed: no acknowledged push is lost or doubled.

The workers, and what they and the WALs prove, are those of test_durability.py.
"""

import os
import secrets
import signal
import tempfile
from pathlib import Path

import numpy as np
import pytest
import ray

from ps import AdminClient, Durability
from ps.launch import single_copies
from ps.launch.ray_launcher import ray_shards
from shards.errors import BadInput, GiveUp
from tests.support.eventually import eventually
from tests.support.pushers import PATIENCE_S, TABLE, losses, more, pushing, specs_of


class Unmade:
    """A folder that is created on another machine."""

    def make(self) -> None:
        pass


@pytest.mark.timeout(300)
def test_kill_both_actors(ray_local: str, tmp_path: Path) -> None:
    """Both actors are killed amid pushes: new ones resume from the WALs, and each push counts once.

    Ports and keys stay the same. The nodes' own WALs are deleted when they are no longer needed.
    """
    logs = tmp_path / "logs"
    started = ray_shards(
        specs_of(2), secure=True, durability=Durability.LOGGED, logs=logs, logs_apart=True
    )
    with started as hosts:
        assert all(endpoint.startswith("curve://") for endpoint in hosts.cluster.endpoints)
        with AdminClient(hosts.cluster, patience_s=PATIENCE_S, check=hosts.check) as console:
            console.install(TABLE.empty())
            with pushing(hosts.cluster.for_workers()) as pushers:
                more(pushers, hosts)
                for pid in hosts.pids:
                    os.kill(pid, signal.SIGKILL)
                more(pushers, hosts)
            total = sum(one.acknowledged for one in pushers)
            assert set(console.read()[:3000]) == {-float(total)}
            assert [status.pushes for status in console.status()] == [total, total]
        assert hosts.deaths == 2
        assert [(logs / f"shard-{n}/key").stat().st_mode & 0o777 for n in range(2)] == [0o600] * 2
        hosts.delete_logs()
    assert not logs.exists()


@pytest.mark.timeout(300)
def test_an_actor_that_comes_back_with_its_save(
    ray_local: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At `memory` an actor is restarted on its node and port with its last autosave.

    The loss is reported, and the autosaves are removed at the end.
    """
    drawn = secrets.token_hex(16)
    monkeypatch.setattr(secrets, "token_hex", lambda _: drawn)
    folder = Path(tempfile.gettempdir()) / f"downpour-{drawn}"
    with ray_shards(specs_of(2), secure=True, rollback_s=600.0) as hosts:
        with AdminClient(hosts.cluster, patience_s=PATIENCE_S, check=hosts.check) as console:
            console.install(np.full(TABLE.size, 7.0, np.float32))
            eventually(
                (folder / "shard-1" / "save").exists,
                because="it is saved",
                within_s=PATIENCE_S,
                check=hosts.check,
            )
            os.kill(hosts.pids[1], signal.SIGKILL)
            (told,) = losses(hosts)
            assert told == (
                "shard 1 has died: its Ray actor is gone; restarted from its last autosave;"
                " updates since then are lost"
            )
            assert set(console.read()[:3000]) == {7.0}
        assert hosts.deaths == 1
    assert not folder.exists()


def test_a_node_that_is_gone(
    ray_local: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job ends at once with a line that names shard and node.

    Here Ray only stops listing the node; tests/chaos/nodes.py removes real nodes.
    """
    with ray_shards(specs_of(1), durability=Durability.PROCESS, logs=tmp_path) as hosts:
        (node,) = ray.nodes()
        monkeypatch.setattr(ray, "nodes", lambda: [node | {"Alive": False}])
        gone = "0" * len(node["NodeID"])
        monkeypatch.setattr(hosts._shards[0].child, "_node", gone)
        os.kill(hosts.pids[0], signal.SIGKILL)
        with pytest.raises(GiveUp) as caught:
            eventually(hosts.check, because="it fails", within_s=PATIENCE_S)
        assert str(caught.value) == f"shard 0 cannot continue: node {gone} of Ray is gone"
        assert hosts.deaths == 1


def test_a_node_that_does_not_see_the_folder(
    ray_local: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node is another machine, and no folder of its own was named."""
    monkeypatch.setattr(single_copies, "LogFolder", lambda _: Unmade())
    with pytest.raises(BadInput) as caught:
        ray_shards(specs_of(1), durability=Durability.PROCESS, logs=tmp_path).__enter__()
    folder = tmp_path / "shard-0"
    assert str(caught.value) == (
        f"shard 0 on node 127.0.0.2: the node lacks the folder for its log, {folder}, so it is"
        " another machine: name a folder that each node has locally (--logs)"
    )


def test_what_cannot_be_had(ray_local: str) -> None:
    """A WAL needs a folder; replicated shards have a launcher of their own."""
    with pytest.raises(BadInput, match=r"^durability logged: expected a folder for the shards' l"):
        ray_shards(specs_of(1), durability=Durability.LOGGED).__enter__()
    with pytest.raises(BadInput, match=r"expected `replicated_ray_shards`, got `ray_shards`$"):
        ray_shards(specs_of(1), durability=Durability.REPLICATED).__enter__()
