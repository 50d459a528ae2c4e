"""Every transport carries the same job: the same bits, the same promises, and no leftovers."""

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

import ps
from ps import AdminClient, Cluster
from ps.client import Client
from ps.job_spec import make_cluster, shard_specs
from ps.launch.threads import local_shards
from ps.server.server import ShardServer
from ps.shared_memory import shm_files
from ps.transport.transports import Transport
from shards.aggregation import EACH, ROUND, Merge
from shards.errors import BadInput
from shards.rules import SGD, Adam, Rule
from shards.schedules import Fixed
from tests.support.ports import free_port
from tests.support.session_replies import Array

TABLE = ps.DenseTable("net", (ps.TensorSpec("a", (3072,)), ps.TensorSpec("b", (48, 64))))
LOCAL = [Transport.SHM, Transport.IPC]


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every name that a test creates in /dev/shm is gone when it ends."""
    made: list[Path] = []
    claim = shm_files.Claim.__init__

    def noting(self: shm_files.Claim, path: Path, *, folder: bool = False) -> None:
        claim(self, path, folder=folder)
        made.append(path)  # had, and nobody else's: other jobs have names there as well

    monkeypatch.setattr(shm_files.Claim, "__init__", noting)
    yield
    assert not [path for path in made if path.exists()]


def trained(transport: Transport, rule: Rule, shards: int, merge: Merge) -> Array:
    """All that one worker pulls in forty steps; some pushes' arrays are the caller's own."""
    start = np.random.default_rng(3).standard_normal(TABLE.size, np.float32)
    specs = shard_specs(
        TABLE, shards=shards, rule=rule, schedule=Fixed(base_rate=0.05), bound=0, merge=merge
    )
    seen = []
    with (
        local_shards(specs, start) as cluster,
        Client(cluster, worker="w", transport=transport) as client,
    ):
        assert client.transports == (transport,) * shards
        for step in range(40):
            weights = client.pull().weights
            seen.append(weights.copy())
            gradient = client.new_gradient() if step % 4 else TABLE.empty()
            np.tanh(weights, out=gradient)
            client.push(gradient)
    return np.stack(seen)


@pytest.mark.parametrize("merge", [EACH, ROUND])
@pytest.mark.parametrize("rule", [SGD(), Adam()], ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("shards", [1, 2])
def test_all_transports_give_the_same_bits(rule: Rule, shards: int, merge: Merge) -> None:
    """What a worker pulls, step by step, is the same over ipc and shared memory as over TCP."""
    expected = trained(Transport.TCP, rule, shards, merge)
    for transport in LOCAL:
        np.testing.assert_array_equal(trained(transport, rule, shards, merge), expected)


@pytest.mark.parametrize("transport", [Transport.TCP, *LOCAL])
@pytest.mark.parametrize("shards", [1, 2])
def test_no_read_is_torn(shards: int, transport: Transport) -> None:
    """Every push is constant, so each shard's part of every pull is constant: also the oldest pull
    still held, while two workers push as fast as they can.
    """
    pulls, held_at_once = 600, 6
    specs = shard_specs(TABLE, shards=shards, schedule=Fixed(base_rate=1.0))
    done = threading.Event()
    with local_shards(specs) as cluster:

        def push_on(name: str) -> None:
            with Client(cluster, worker=name, transport=transport, in_flight=3) as client:
                versions = client.pull().versions
                while not done.is_set():
                    gradient = client.new_gradient()
                    gradient[:] = 1
                    client.push(gradient, read_versions=versions)

        pushers = [threading.Thread(target=push_on, args=(f"p{n}",)) for n in range(2)]
        for thread in pushers:
            thread.start()
        try:
            with Client(cluster, worker="reader", transport=transport) as client:
                held, pulled = [client.pull()], 1
                # Until enough was pushed meanwhile.
                while pulled < pulls or min(held[-1].versions) < pulls / 10:
                    held, pulled = [*held, client.pull()][-held_at_once:], pulled + 1
                    for replica in (held[0], held[-1]):
                        check_whole(cluster, replica)
        finally:
            done.set()
            for thread in pushers:
                thread.join()


def check_whole(cluster: Cluster, replica: ps.PulledWeights) -> None:
    for shard, version in enumerate(replica.versions):
        part = cluster.map.cut(replica.weights, shard)
        assert part.min() == part.max() == -version


def test_what_is_pulled_cannot_be_written() -> None:
    """On every transport alike, because a shard's memory cannot be written."""
    for transport in Transport:
        with (
            local_shards(shard_specs(TABLE)) as cluster,
            Client(cluster, worker="w", transport=transport) as client,
            pytest.raises(ValueError, match="read-only"),
        ):
            client.pull().weights[0] = 1


def test_one_shard_is_read_where_it_writes() -> None:
    """The weights of one shard are its own memory: two workers' pulls of a version share it, and no
    arena is filled.
    """
    with (
        local_shards(shard_specs(TABLE)) as cluster,
        Client(cluster, worker="a") as first,
        Client(cluster, worker="b") as second,
    ):
        for client in (first, second):
            assert client.transports == ("shm",)
            assert client.pull().weights.base is not None
            client.push(client.new_gradient())
            assert len(client._arenas) == 0, "neither pull nor push took an array of ours"
            assert client._current.connection.sharing is not None
            assert len(client._current.connection.sharing.buffers) == 1


@pytest.mark.parametrize("shards", [2, 3])
def test_several_shards_are_read_as_one_array(shards: int) -> None:
    """A large table's parts are adjacent in a worker's address space, never copied, and equal those
    over TCP, also while older ones are held.
    """
    table = ps.DenseTable("large", (ps.TensorSpec("w", (3 * 65_536 + 500,)),))
    start = np.random.default_rng(5).standard_normal(table.size, np.float32)
    specs = shard_specs(table, shards=shards, schedule=Fixed(base_rate=0.5), bound=0)
    with (
        local_shards(specs, start) as cluster,
        Client(cluster, worker="w") as client,
        AdminClient(cluster) as console,
    ):
        held: list[tuple[Array, Array]] = []
        for _ in range(12):
            weights = client.pull().weights
            held = [*held, (weights, console.read())][-3:]
            for pulled, read in held:
                np.testing.assert_array_equal(pulled, read)
            gradient = client.new_gradient()
            np.tanh(weights, out=gradient)
            client.push(gradient)
            client.flush()
        assert len(client._arenas) == 0


def test_held_weights_last_longer_than_everything() -> None:
    """Client and shard end; the pulled weights stay as they were."""
    with local_shards(shard_specs(TABLE, schedule=Fixed(base_rate=1.0))) as cluster:
        client = Client(cluster, worker="w")
        held = client.pull().weights
        for _ in range(5):
            client.push(np.ones(TABLE.size, np.float32))
            client.pull()
        client.close()
        assert not held.any()
    assert not held.any()


def by_socket(replica: ps.PulledWeights) -> bool:
    """Whether its weights are in a message rather than in the shard's memory."""
    memory: object = replica.weights
    while isinstance(memory, np.ndarray | memoryview):
        memory = memory.base if isinstance(memory, np.ndarray) else memory.obj
    return isinstance(memory, zmq.Frame)


def test_who_holds_too_much_is_served_by_the_socket() -> None:
    """Twenty held pulls still work, the shard's memory stays bounded, and afterwards there is
    shared memory again.
    """
    specs = shard_specs(TABLE, schedule=Fixed(base_rate=1.0))
    with ShardServer(specs[0], boot=1) as server:
        cluster = make_cluster(specs, [server.endpoint])
        with AdminClient(cluster) as console:
            console.install(TABLE.empty())
        with Client(cluster, worker="w") as client:
            held = []
            for _ in range(20):
                held.append(client.pull())
                client.push(np.ones(TABLE.size, np.float32))
            for replica in held:
                check_whole(cluster, replica)
            assert sum(by_socket(replica) for replica in held) > 10
            assert len(server.shard.parameters._buffers) < 12
            copied = len(client._arenas)
            del held, replica
            for _ in range(20):
                client.pull()
                client.push(np.ones(TABLE.size, np.float32))
            assert len(client._arenas) == copied


def test_where_sharing_cannot_be_had(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without /dev/shm, with a full or another /dev/shm than the shard's, or with a shard that does
    not share: `auto` continues with what there is, `shm` and `ipc` report what is missing.
    """

    def attempt(cluster: Cluster, carried: str, lacks: dict[Transport, str]) -> None:
        with Client(cluster, worker="w") as client:
            assert client.transports == (carried,)
            client.pull()
            client.push(np.ones(TABLE.size, np.float32))
            assert client.pull().versions == (1,)
        for transport, reason in lacks.items():
            with pytest.raises(BadInput, match=f"transport {transport}: .*{reason}"):
                Client(cluster, worker="v", transport=transport)

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    specs = shard_specs(TABLE)
    unix = "found none"
    with ShardServer(specs[0], 1, transport=Transport.TCP) as server:
        attempt(installed(server), "tcp", {Transport.SHM: unix, Transport.IPC: unix})
    with ShardServer(specs[0], 1, transport=Transport.IPC) as server:
        attempt(installed(server), "ipc", {Transport.SHM: "the shard does not share memory"})
    with ShardServer(specs[0], 1) as server:
        cluster = installed(server)
        with monkeypatch.context() as patch:
            patch.setattr(shm_files, "ROOT", tmp_path)
            attempt(cluster, "tcp", {Transport.SHM: unix, Transport.IPC: unix})
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with ShardServer(specs[0], 1) as server:
            attempt(installed(server), "ipc", {Transport.SHM: "No space left on device"})
    with monkeypatch.context() as patch:
        patch.setattr(shm_files, "ROOT", tmp_path / "none")
        with ShardServer(specs[0], 1) as server:
            attempt(installed(server), "tcp", {Transport.SHM: unix, Transport.IPC: unix})


def installed(server: ShardServer) -> Cluster:
    cluster = make_cluster([server.shard.spec], [server.endpoint])
    with AdminClient(cluster) as console:
        console.install(TABLE.empty())
    return cluster


@pytest.mark.parametrize("transport", ["ipc", "shm"])
def test_a_shard_that_is_being_started_is_waited_for(transport: str) -> None:
    """A client that requires the Unix socket waits until there is one, within its patience."""
    (spec,) = shard_specs(TABLE)
    port = free_port()
    cluster = make_cluster([spec], [f"tcp://127.0.0.1:{port}"])
    server: list[ShardServer] = []

    def start() -> None:
        server.append(ShardServer(spec, 1, f"tcp://127.0.0.1:{port}").start())
        with ps.AdminClient(cluster) as console:
            console.install(TABLE.empty())

    late = threading.Timer(0.3, start)
    late.start()
    try:
        with Client(cluster, worker="w", transport=transport, patience_s=60.0) as client:
            assert client.transports == (transport,)
    finally:
        late.join()
        server[0].stop()


def test_a_shard_without_a_unix_socket_is_not_waited_for() -> None:
    """It listens without a socket, so the client fails at once, however long its patience."""
    (spec,) = shard_specs(TABLE)
    with ShardServer(spec, 1, transport=Transport.TCP) as server:
        cluster = make_cluster([spec], [server.endpoint])
        with pytest.raises(BadInput, match=r"transport ipc: shard 0 .*: expected its Unix socket"):
            Client(cluster, worker="w", transport="ipc", patience_s=1e6)
