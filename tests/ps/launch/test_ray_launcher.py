"""Shards as Ray actors: they serve, a death is reported, and nothing is left when they end."""

import socket
from typing import Any

import pytest
import ray

import ps
from ps import AdminClient
from ps.job_spec import reshard_specs, shard_specs
from ps.launch import process_handle
from ps.launch.ray_actors import Actor
from ps.launch.ray_launcher import ray_shards
from ps.launch.restart import RestartingProcess
from ps.resharding import reshard
from ps.security.keys import address_of
from shards.errors import BadInput, GiveUp, WrongBuild
from shards.schedules import Fixed
from tests.support.eventually import eventually
from tests.support.replicated_job import Worker, check_applied_once
from tests.support.sample_job import TABLE, specs_of, train


def actor_of(shard: RestartingProcess) -> Actor:
    assert isinstance(shard.child, Actor)
    return shard.child


def listening(cluster: ps.Cluster) -> list[bool]:
    """Whether each shard's endpoint accepts connections."""
    found = []
    for endpoint in cluster.endpoints:
        host, port = address_of(endpoint).plain.removeprefix("tcp://").split(":")
        with socket.socket() as probe:
            probe.settimeout(30)
            found.append(probe.connect_ex((host, int(port))) == 0)
    return found


def test_two_actors_serve_a_job_until_one_dies(ray_local: str) -> None:
    """A job trains and is read; a death is reported by name; then no actor listens any more.

    Shards that listen on every address are published under their node's own: 0.0.0.0 leads nowhere.
    They use CURVE. An actor on the dead shard's node answers in its place with cause and remedy.
    """
    with ray_shards(specs_of(), host="0.0.0.0", rollback_s=0.0) as hosts:
        cluster = hosts.cluster
        with AdminClient(cluster) as console:
            train(cluster, console)
        hosts.check()
        ray.kill(actor_of(hosts._shards[1])._actor)
        with pytest.raises(GiveUp, match=r"^shard 1 has died: its Ray actor is gone$"):
            eventually(hosts.check, because="the death is noticed")
        text = r"shard 1 has died: its Ray actor is gone; the job has ended: with rollback_s=10 "
        with AdminClient(cluster, patience_s=600) as console, pytest.raises(GiveUp, match=text):
            console.read()
        with pytest.raises(GiveUp, match=text):
            ps.connect(cluster.for_workers()).worker("w9", patience_s=600)
    assert listening(cluster) == [False, False]


def test_a_job_moves_to_more_actors(ray_local: str) -> None:
    """Resharding from one to two while a worker pushes: the sum proves that each counts once."""
    specs = shard_specs(TABLE, shards=1, schedule=Fixed(base_rate=1.0), lease_s=60.0, workers=1)
    with (
        ray_shards(specs) as old,
        ray_shards(reshard_specs(specs, 2)) as new,
        AdminClient(old.cluster) as console,
        AdminClient(new.cluster) as successor,
    ):
        console.install(TABLE.empty())
        worker = Worker(old.cluster, "w")
        worker.await_progress()
        reshard(console, successor)
        (moved_at,) = {status.version for status in console.status()}  # where nothing moves now
        worker.await_progress()
        check_applied_once(new.cluster, [worker])
        assert 0 < moved_at < successor.status()[1].version == worker.acknowledged
        assert {status.version for status in console.status()} == {moved_at}


def test_a_port_in_use(ray_local: str) -> None:
    """The error is the shard's own line."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BadInput) as caught, ray_shards(specs_of(1), port=port):
            pass
    address = f"tcp://127.0.0.1:{port}"
    assert str(caught.value) == f"shard 0 cannot listen on {address!r}: Address already in use"


def test_a_node_with_other_code(ray_local: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that runs another build than this process is refused before anyone speaks to it."""
    theirs = ps.build_id()
    monkeypatch.setattr(process_handle, "build_id", lambda: "0" * 16)
    with pytest.raises(WrongBuild) as caught, ray_shards(specs_of(1)):
        pass
    assert str(caught.value) == f"shard 0: expected build {'0' * 16} where it runs, got {theirs}"


def test_too_few_gpus(ray_local: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher refuses: Ray would wait for ever for a node with a GPU."""
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0, "GPU": 1.0})
    with pytest.raises(BadInput) as caught, ray_shards(specs_of(2), device=ps.ShardDevice.GPU):
        pass
    assert str(caught.value) == (
        "shard device gpu: expected a Ray with 2 GPUs, one per shard, got one with 1"
    )


def fail(actor: Any) -> None:
    """End the loop of the server in this actor by an error."""

    def tick(*_: object) -> list[object]:
        raise OverflowError("planted")

    actor._server.shard.tick = tick


def test_a_loop_that_failed_is_told(ray_local: str) -> None:
    """An actor that lives while its loop has died is no shard."""
    with ray_shards(specs_of(1)) as hosts:
        (shard,) = hosts._shards
        ray.get(actor_of(shard)._actor.__ray_call__.remote(fail))
        with pytest.raises(GiveUp, match=r"^shard 0 has failed: OverflowError: planted"):
            eventually(hosts.check, because="the death is noticed")
