"""Copies, their coordinator and clients over real sockets, all in this process.

test_groups.py simulates the rules; these tests cover what the drivers add: the messages between the
parts, and clients that follow. A copy that is stopped drops its connections, as a killed one does.
"""

import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

import ps
from ps import admin_client
from ps.client import Client
from ps.job_spec import make_cluster, reshard_specs, shard_specs
from ps.replication import replica_server
from ps.replication.coordinator_server import CoordinatorServer
from ps.resharding import reshard
from ps.session import admin_plans
from ps.transport.coordinator_messages import (
    Heartbeat,
    LocatePrimaries,
    PrimaryList,
    decode_primaries,
)
from ps.transport.link_model import parse_link
from shards.dense_part import DensePart
from shards.errors import BadInput, BadMessage
from shards.replica import ShardReplica
from shards.replication_messages import Beat
from shards.rules import Adam
from shards.shard import Shard
from shards.shard_status import Standing
from shards.spec import ShardSpec
from tests.support.eventually import eventually
from tests.support.replica_group import ONE, TABLE, Group, push
from tests.support.slow_clock import held_up, standings


def test_a_client_follows_the_primary_through_two_deaths(group: Group) -> None:
    """Weights installed after the backup joined, pushes and their workers: the successor has all.

    The next process catches up, and succeeds in its turn. The admin client follows, too, and
    collects the record of each update once.
    """
    with ps.AdminClient(group.cluster) as admin_client:
        admin_client.install(TABLE.empty())
        client = Client(group.cluster, worker="w")
        client.pull()
        push(client, 10)
        assert len(admin_client.records()[0]) == 10
        group.copies[0].stop()
        push(client, 10)
        group.join()
        group.await_holders(2, 3)
        push(client, 10)
        assert len(admin_client.records()[0]) == 20
        group.copies[1].stop()
        push(client, 10)
        assert client.pull().versions == (40,)
        assert len(admin_client.records()[0]) == 10
        assert set(admin_client.read()) == {-40.0}
        client.close()
    assert group.holders() == (3,)


def test_the_copy_that_answers_measures_its_turns(group: Group) -> None:
    """Each push is in the primary's histogram of apply times, each turn in that of the queues. The
    successor, which had the pushes from its peer, counts those that it answers itself."""
    with ps.AdminClient(group.cluster) as admin_client:
        admin_client.install(TABLE.empty())
        with Client(group.cluster, worker="w") as client:
            client.pull()
            for pushes in (5, 3):
                push(client, pushes)
                (status,) = admin_client.status()
                assert sum(status.apply_s.counts) == pushes
                assert 0 < status.apply_s.total <= status.busy_s
                assert sum(status.queues.counts) == sum(status.parked.counts) >= pushes
                assert status.queues.total >= pushes
                group.copies[0].stop()
            assert status.pushes == 8


def test_a_state_of_many_pieces_reaches_a_new_copy(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker pushes meanwhile; the new copy then holds every push."""
    small = partial(ShardReplica, piece_bytes=256)
    monkeypatch.setattr(replica_server, "ShardReplica", small)
    with ps.AdminClient(group.cluster) as admin_client:
        admin_client.install(TABLE.empty())
        with Client(group.cluster, worker="w") as client:
            client.pull()
            for boot in (3, 4):
                group.copies[boot - 3].stop()
                push(client, 5)
                group.join()
                group.await_holders(boot - 1, boot)
                push(client, 5)
        assert set(admin_client.read()) == {-20.0}


def test_a_coordinator_that_comes_back_goes_on(group: Group) -> None:
    """While it is away training continues; then it knows which copy to promote, and clients find
    it.
    """
    with ps.AdminClient(group.cluster) as admin_client:
        admin_client.install(TABLE.empty())
    with Client(group.cluster, worker="w") as client:
        client.pull()
        group.coordinator.stop()
        push(client, 10)
        group.coordinator = group.coordinate(group.coordinator.endpoint)
        eventually(lambda: set(group.coordinator._reports) == {1, 2}, because="both copies report")
        group.copies[0].stop()
        push(client, 10)
        assert client.pull().versions == (20,)


def test_a_client_that_is_told_an_old_address(group: Group) -> None:
    """It asks the coordinator first; without an answer it uses the cluster's description."""
    with ps.AdminClient(group.cluster) as admin_client:
        admin_client.install(TABLE.empty())
        cluster = group.cluster
        group.coordinator.stop()
        known = msgspec.structs.replace(cluster, endpoints=(group.copies[0].endpoint,))
        with Client(known, worker="w") as client:
            assert client.pull().versions == (0,)


def test_a_copy_without_a_part_ends_by_itself(group: Group) -> None:
    """When the coordinator reports that others hold the shard, its loop ends without an error."""
    boot, now = group.copies[1].replica.boot, time.monotonic()
    carry_out, bury = group.coordinator._carry_out, group.coordinator._coordinator.report_death
    group.coordinator.end()
    group.coordinator.wait()
    carry_out(bury(boot, now))  # a false suspicion
    group.coordinator._socket.close()
    group.coordinator._record.close()
    group.coordinator = group.coordinate(group.coordinator.endpoint)
    group.copies[1].wait()
    assert group.copies[1].replica.retired
    group.copies[1].check()
    assert group.holders() == (1,)


def test_strangers_at_the_coordinator(group: Group) -> None:
    """Malformed messages, and those for another job or an unknown shard, change nothing."""
    job = group.specs[0].job
    stranger = Heartbeat("another", Beat(0, 99, 0), "tcp://127.0.0.1:1", "tcp://127.0.0.1:1")
    beyond = Heartbeat(job, Beat(7, 99, 0), "tcp://127.0.0.1:1", "tcp://127.0.0.1:1")
    context = zmq.Context()
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 30_000)
        socket.connect(group.coordinator.endpoint)
        for frames in ([b""], [b"\xc1"], [b"x"] * 5, [msgspec.msgpack.encode(stranger)]):
            socket.send_multipart(frames)
        socket.send(msgspec.msgpack.encode(LocatePrimaries("another")))
        socket.send(msgspec.msgpack.encode(beyond))
        socket.send(msgspec.msgpack.encode(LocatePrimaries(job)))
        (info,) = decode_primaries(socket.recv()).primaries
        assert (info.primary, info.backup, info.promotable) == (1, 2, [1, 2])
        assert info.endpoint == group.copies[0].endpoint
    context.destroy(linger=0)
    with pytest.raises(BadMessage):
        decode_primaries(msgspec.msgpack.encode(LocatePrimaries("no seats")))
    assert decode_primaries(msgspec.msgpack.encode(PrimaryList([]))).primaries == []


class Waiting:
    """A coordinator's connections, over which these reports have come."""

    def __init__(self, reports: Sequence[Heartbeat]) -> None:
        self._reports = list(reports)

    def take_messages(self, most: int) -> Iterator[list[zmq.Frame]]:
        for report in self._reports[:most]:
            yield [zmq.Frame(b"sender"), zmq.Frame(msgspec.msgpack.encode(report))]

    def trust(self, _: zmq.Frame) -> None:
        pass


def test_saving_what_one_copy_says_is_no_silence_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saving one copy's beat does not count as silence of another.

    Four other shards start, and each save takes 0.2 s; then come the beats of a primary and its
    backup, which had waited with them. Silence means death after 0.5 s, and no copy is suspected.
    """
    now = 100.0
    told: list[int] = []

    def save(record: Any) -> None:
        nonlocal now
        now += 0.2
        told.append(len(record))

    monkeypatch.setattr(
        "ps.replication.coordinator_server.time", SimpleNamespace(monotonic=lambda: now)
    )
    server = CoordinatorServer("job", 5, tmp_path / "record", silence_s=0.5)
    try:
        monkeypatch.setattr(server._record, "save", save)
        beats = [Beat(0, 1, 0), Beat(0, 1, 1), Beat(0, 2, 0), Beat(0, 1, 2), Beat(0, 1, 2, True)]
        for beat in beats:
            server._coordinator.receive_beat(beat, now)
        whole = server._coordinator.groups[0]
        assert whole.promotable == (1, 2)
        waiting = [Beat(shard, 2 + shard, 0) for shard in (1, 2, 3, 4)]
        waiting += [Beat(0, 1, 2, True), Beat(0, 2, 2)]
        nowhere = "tcp://127.0.0.1:1"
        reports = [Heartbeat("job", beat, nowhere, nowhere) for beat in waiting]
        monkeypatch.setattr(server, "_accepted", Waiting(reports))
        server._listen()
        server._tick()
        assert len(told) == 4
        assert server._coordinator.groups[0] == whole
    finally:
        server.stop()


def test_a_shard_that_has_found_its_backup_is_not_lonely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients and the shards' parent are sent what holds now, though no tick has come since."""
    server = CoordinatorServer("job", 1, tmp_path / "record", silence_s=30.0)
    nowhere = "tcp://127.0.0.1:1"

    def hear(*beats: Beat) -> bool:
        reports = [Heartbeat("job", beat, nowhere, nowhere) for beat in beats]
        with monkeypatch.context() as patch:
            patch.setattr(server, "_accepted", Waiting(reports))
            server._listen()
        (info,) = server._primaries()
        return info.under_replicated

    settled = Beat(0, 1, 1)
    try:
        assert hear(Beat(0, 1, 0), settled)
        server._tick()
        assert hear(settled)
        assert not hear(Beat(0, 2, 0), Beat(0, 1, 2))
    finally:
        server.stop()


def test_an_address_that_is_none(tmp_path: Path) -> None:
    """The error names it as it was given."""
    with pytest.raises(BadInput, match=r"^coordinator cannot listen on 'tcp://nowhere:x'"):
        CoordinatorServer("job", 1, tmp_path / "record", bind="tcp://nowhere:x")
    cluster = make_cluster(shard_specs(TABLE), ["tcp://127.0.0.1:1"])
    cluster = msgspec.structs.replace(cluster, coordinator="nonsense")
    with pytest.raises(BadInput, match=r"^coordinator: expected tcp://HOST:PORT, got 'nonsense'"):
        Client(cluster, worker="w")


def test_what_replicated_shards_cannot_do_yet(group: Group) -> None:
    """A modelled link leads to one place, and these move."""
    with pytest.raises(BadInput, match="expected shards with one copy each, got replicated ones"):
        Client(group.cluster, worker="w", link=parse_link("rtt=10ms"))


def test_a_copy_is_prepared_before_it_is_reached(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A primary that compiled for seconds would count as dead."""
    prepared: list[ShardSpec] = []

    def prepare(spec: ShardSpec) -> None:
        prepared.append(spec)

    monkeypatch.setattr(ShardSpec, "prepare", prepare)
    group = Group(tmp_path)
    try:
        group.join()
        assert prepared == group.specs
    finally:
        group.stop()


def test_a_stall_is_nobodys_silence(group: Group) -> None:
    """A push of a primary takes many leases, and all workers count as before."""
    with ps.AdminClient(group.cluster) as admin_client:
        admin_client.install(TABLE.empty())
        with Client(group.cluster, worker="a") as client, Client(group.cluster, worker="b"):
            client.pull()
            with held_up(replica_server, 1000.0) as spent:
                push(client, 1)
                found = standings(admin_client)
            assert len(spent) >= 1
            assert found == dict.fromkeys("ab", Standing.ACTIVE)


def test_a_group_moves_to_another(group: Group, tmp_path: Path) -> None:
    """A worker follows the resharding, and each push counts once.

    Every copy of the old group redirects newcomers: its backup, and one that joined after the
    resharding.
    """
    (tmp_path / "next").mkdir()
    following = Group(tmp_path / "next", specs=reshard_specs(group.specs, 1))
    try:
        following.join()
        following.await_holders(1)
        with ps.AdminClient(group.cluster) as old, ps.AdminClient(following.cluster) as new:
            old.install(TABLE.empty())
            with Client(group.cluster, worker="w") as client:
                client.pull()
                push(client, 5)
                reshard(old, new)
                push(client, 5)
                assert client.cluster == following.cluster
            assert set(new.read()) == {-10.0}
            group.copies[0].stop()
            group.join()
            group.await_holders(2, 3)
            check_sent_on(group, following, "late")
            group.copies[1].stop()
            group.await_holders(3)
            check_sent_on(group, following, "later")
    finally:
        following.stop()


@pytest.mark.parametrize("question", ["Quiesce", "Export", "Install", "HandOver"])
def test_a_primary_dies_in_the_midst_of_a_move(
    question: str, group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A primary dies just before it receives this message for the first time.

    A worker has pushes in flight that no shard has applied. The backup, or that of the new group,
    continues the resharding, and each push counts once.
    """
    (tmp_path / "next").mkdir()
    following = Group(tmp_path / "next", specs=reshard_specs(group.specs, 1))
    dies = following if question == "Install" else group
    asked: list[str] = []

    def done(step: Any, by_side: Any) -> Any:
        kind = step.kind.__name__ if isinstance(step, admin_plans.Ask) else ""
        if kind == question and not asked:
            asked.append(kind)
            dies.copies[0].stop()
        return carried_out(step, by_side)

    carried_out = admin_client._carry_out_step
    monkeypatch.setattr(admin_client, "_carry_out_step", done)
    try:
        following.join()
        following.await_holders(1)
        following.join()
        following.await_holders(1, 2)
        with ps.AdminClient(group.cluster) as old, ps.AdminClient(following.cluster) as new:
            old.install(TABLE.empty())
            with Client(group.cluster, worker="w", in_flight=4) as client:
                client.pull()
                push(client, 5)
                old.quiesce(60.0)
                for _ in range(3):
                    client.push(ONE)
                reshard(old, new)
                push(client, 5)
                assert client.cluster == following.cluster
            assert asked == [question]
            assert set(new.read()) == {-13.0}
    finally:
        following.stop()


def check_sent_on(group: Group, following: Group, worker: str) -> None:
    with Client(group.cluster, worker=worker) as late:
        assert late.cluster == following.cluster
        assert set(late.pull().weights) == {-10.0}


def test_copies_use_free_moments(tmp_path: Path) -> None:
    """The primary and its backup copy slots that are being read while no message comes."""
    group = Group(tmp_path, specs=shard_specs(TABLE, rule=Adam(), lease_s=60.0))
    try:
        group.join()
        group.await_holders(1)
        group.join()
        group.await_holders(1, 2)
        with ps.AdminClient(group.cluster) as admin_client:
            admin_client.install(TABLE.empty())
        shards = [copy.replica.shard for copy in group.copies]
        eventually(lambda: not shards[1].parameters.empty, because="the backup has the weights")
        held = [shard.copy() for shard in shards]
        eventually(lambda: all(shard.is_prepared for shard in shards), because="both are prepared")
        assert [_moved(shard) for shard in shards] == [TABLE.size] * 2
        del held
    finally:
        group.stop()


def _moved(shard: Shard) -> int:
    """The floats of each slot that the shard has copied ahead."""
    (part,) = shard.parameters.parts.values()
    assert isinstance(part, DensePart)
    return part._moved
