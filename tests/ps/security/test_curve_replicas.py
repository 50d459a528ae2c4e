"""Replicated shards that other hosts can reach: which keys each of their sockets admits.

There are three sockets: the coordinator's, a copy's for clients, and a copy's for its peer.
test_replicated_processes.py tests where keys are needed, test_coordinator_server.py what each may
send.
"""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

import ps
from ps.client import Client
from ps.cluster import Access
from ps.launch.processes import process_replicas
from ps.replication.coordinator_server import CoordinatorServer
from ps.replication.peer_link import PeerLink
from ps.replication.replica_server import ReplicaServer
from ps.security.authorization import Admission, Invitation, issue
from ps.security.enrolment import join
from ps.security.handshake_diagnostics import fault_at
from ps.security.keys import KeyPair, address_of, expect, pin_key
from ps.transport import coordinator_messages
from ps.transport.advertised_address import Advertised
from ps.transport.coordinator_messages import Heartbeat, LocatePrimaries, PeerMessage, PrimaryList
from ps.transport.primary_resolver import PrimaryResolver
from shards import wire_format
from shards.errors import BadInput, GiveUp
from shards.messages import PROTOCOL, AskStatus, Hello
from shards.replica import Post
from shards.replication_messages import Beat, Replicated
from shards.schema_digest import SCHEMA
from tests.support import replicated_job
from tests.support.curve_clients import say, text
from tests.support.eventually import eventually
from tests.support.replica_group import ANYWHERE, TABLE, Group, push
from tests.support.replicated_job import (
    COORDINATOR,
    LONG_SILENCE_S,
    PRIMARY,
    Worker,
    check_applied_once,
    specs_of,
)

LONG_S = 60.0


def enter(group: Group) -> None:
    """Register the copies' keys with the coordinator, as the supervisor does."""
    assert group.access is not None
    context = zmq.Context()
    guide = PrimaryResolver(group.cluster, context, KeyPair.of(group.access.operator))
    assert guide.poll(LONG_S)
    guide.admit({copy.replica.boot: address_of(copy.endpoint).key for copy in group.copies})
    assert guide.poll(LONG_S)  # what came before it has been heard, too
    context.destroy(linger=0)


def pair(folder: Path, keys: tuple[Access, Admission]) -> Group:
    """A primary, boot 1, and its backup, boot 2, in sync."""
    group = Group(folder, keys)
    group.join()
    enter(group)
    group.await_holders(1)
    group.join()
    enter(group)
    group.await_holders(1, 2)
    return group


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    """Such a pair with zeros installed."""
    group = pair(tmp_path, issue(2))
    with ps.AdminClient(group.cluster) as console:
        console.install(TABLE.empty())
    yield group
    group.stop()


def test_a_client_follows_the_primary(group: Group) -> None:
    """The token alone admits it wherever it is redirected; so does the operator's key, without
    joining.

    A restarted coordinator proves the same key, and knows the copies once they are registered.
    """
    with ps.AdminClient(group.cluster) as console:
        client = Client(group.cluster.for_workers(), worker="w")
        client.pull()
        push(client, 10)
        group.copies[0].stop()
        push(client, 10)
        group.coordinator.stop()
        push(client, 10)
        at = group.coordinator.endpoint
        group.coordinator = group.coordinate(address_of(at).plain)
        assert group.coordinator.endpoint == at
        group.join()
        enter(group)
        group.await_holders(2, 3)
        group.copies[1].stop()
        push(client, 10)
        assert client.pull().versions == (40,)
        assert set(console.read()) == {-40.0}
        client.close()


def test_a_copy_that_comes_too_early_is_let_in_later(tmp_path: Path) -> None:
    """It is refused, notices that, and tries again until its key is known."""
    group = Group(tmp_path, issue(1))
    group.join()
    porter = group.coordinator._authenticator
    assert porter is not None
    eventually(lambda: porter.refused >= 3, because="it is refused three times")
    assert group.holders() == ()
    enter(group)
    group.await_holders(1)
    group.stop()


def test_a_later_life_takes_over(group: Group) -> None:
    """A retried task joins again, and a successor fences its zombie, too."""
    zombie = Client(group.cluster, worker="w")
    zombie.pull()
    push(zombie, 1)
    with Client(group.cluster, worker="w", incarnation=1) as client:
        client.pull()
        push(client, 1)
        group.copies[0].stop()
        push(client, 1)
        with pytest.raises(GiveUp, match="incarnation 0 comes too late: incarnation 1 has joined"):
            push(zombie, 1)
        assert client.pull().versions == (3,)
    zombie.abort()


# --- the four bad credentials, at each of the three kinds of sockets ------------------------------

PLAIN = "expected plain text, as the endpoint says, got a server that speaks CURVE"
BROKEN_OFF = "it broke off the handshake: the server key does not match the endpoint"
AWAY = "turned away: it does not know our key"


def sockets(group: Group) -> list[str]:
    copy = group.copies[0]
    return [group.coordinator.endpoint, copy.endpoint, copy._peers.endpoint]


def test_no_key(group: Group) -> None:
    """No socket answers plain text."""
    assert [fault_at(address_of(at).plain, None) for at in sockets(group)] == [PLAIN] * 3
    plain = address_of(group.coordinator.endpoint).plain
    with pytest.raises(GiveUp, match=rf"^coordinator at {plain}: {PLAIN}"):
        Client(msgspec.structs.replace(group.cluster, coordinator=plain), worker="w")


def test_another_servers_key(group: Group) -> None:
    """A server that cannot prove the pinned key is not accepted as a coordinator or copy."""
    other = KeyPair.new()
    for at in sockets(group):
        assert BROKEN_OFF in fault_at(pin_key(address_of(at).plain, other.public), other)


def test_an_unknown_key(group: Group) -> None:
    """Another job's token and operator's key are unknown here."""
    coordinator, clients, _ = sockets(group)  # at a peer's a stranger waits: see below
    for at in (coordinator, clients):
        assert AWAY in fault_at(at, KeyPair.new())
    others = Access(KeyPair.new().secret, KeyPair.new().secret)
    told = msgspec.structs.replace(group.cluster, access=others)
    with pytest.raises(GiveUp, match=rf"^coordinator at tcp:.*: {AWAY}"):
        Client(told, worker="w")
    with pytest.raises(GiveUp, match=rf"^coordinator at tcp:.*: {AWAY}"):
        ps.AdminClient(told)


def test_a_right_key_under_anothers_name_at_the_coordinator(group: Group) -> None:
    """Neither a worker nor a copy can redirect clients, or register a copy."""
    assert group.access is not None
    job = group.specs[0].job
    token, copy = KeyPair.of(group.access.token), group.copies[1]._reporter._keys
    assert copy is not None
    context = zmq.Context()
    ends = [pin_key("tcp://127.0.0.1:1", copy.public)] * 2
    as_primary = Heartbeat(job, Beat(0, 1, 0), *ends)
    for own, forged in (
        (token, as_primary),
        (copy, as_primary),
        (token, coordinator_messages.AdmitCopies(job, {9: token.public})),
        (copy, coordinator_messages.AdmitCopies(job, {9: copy.public})),
    ):
        speak(context, group.coordinator.endpoint, own, msgspec.msgpack.encode(forged))
    # What came before the answer by the same connection has been heard.
    with speak(
        context, group.coordinator.endpoint, token, msgspec.msgpack.encode(as_primary)
    ) as one:
        one.send(msgspec.msgpack.encode(LocatePrimaries(job)))
        (info,) = msgspec.msgpack.decode(one.recv(), type=PrimaryList).primaries
    assert info.endpoint == group.copies[0].endpoint
    assert group.coordinator._registry is not None
    assert set(group.coordinator._registry._copies) == {1, 2}
    context.destroy(linger=0)


def speak(
    context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, own: KeyPair, said: bytes
) -> "zmq.Socket[bytes]":
    """Send a message to the server there, once admitted; yields the socket."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.RCVTIMEO, int(LONG_S * 1000))
    expect(socket, address_of(endpoint).key, own)
    socket.connect(address_of(endpoint).plain)
    socket.send(said)
    return socket


def test_a_right_key_under_anothers_name_at_a_copy(group: Group) -> None:
    """A worker speaks only for itself, and sends no operator message."""
    cluster, at = group.cluster, group.copies[0].endpoint
    own = join(cluster, "w0", [at], LONG_S)
    assert own is not None
    as_another = Hello(1, cluster.job, "w1", 0, PROTOCOL, SCHEMA)
    assert text(say(at, own, as_another)) == (
        "hello: expected worker w0, whose key this is, got worker w1"
    )
    assert text(say(at, own, AskStatus(1, cluster.job))) == (
        "askstatus: expected the operator's key, got that of worker w0"
    )


def test_a_token_that_has_run_out(tmp_path: Path) -> None:
    """A late worker learns the cause from any copy."""
    token, operator = KeyPair.new(), KeyPair.new()
    admission = Admission(operator.public, Invitation(token.public, 1, 0.0))
    group = pair(tmp_path, (Access(token.secret, operator.secret), admission))
    with pytest.raises(GiveUp, match="shard 0: worker w: the job's join token has expired"):
        Client(group.cluster, worker="w", patience_s=LONG_S)
    group.stop()


class Copies:
    """The peer links of two copies, 1 and 2, of one shard."""

    def __init__(self) -> None:
        self.coordinator = KeyPair.new().public
        self.one, self.two = self.end(1), self.end(2)

    def end(self, boot: int) -> PeerLink:
        return PeerLink("job", boot, 512, ANYWHERE, KeyPair.new(), self.coordinator)

    @property
    def told(self) -> dict[int, str]:
        return {1: self.one.endpoint, 2: self.two.endpoint}

    def heard_by_one(self, enough: Callable[[], bool]) -> list[tuple[int, object]]:
        """Which copies it has heard, with what, until there is enough."""
        heard: list[tuple[int, object]] = []

        def came() -> bool:
            heard.extend((origin, message) for origin, message, _ in self.one.arrivals())
            return bool(heard) or enough()

        eventually(came, because="a message arrives", within_s=LONG_S)
        return heard


@pytest.fixture
def copies() -> Iterator[Copies]:
    """Two copies that do not know each other yet."""
    copies = Copies()
    yield copies
    for end in (copies.one, copies.two):
        end.close()


def never() -> bool:
    return False


def test_a_copy_waits_until_its_peer_knows_it(copies: Copies) -> None:
    """The copy that knows its peer connects first, and is admitted when the peer knows it, too."""
    copies.two.set_members({1, 2}, copies.told)
    copies.two.send(Post(1, Replicated(1, 7)))
    porter = copies.one._authenticator
    assert porter is not None
    assert copies.heard_by_one(lambda: bool(porter._waiting)) == []
    copies.one.set_members({1, 2}, copies.told)
    assert copies.heard_by_one(never) == [(2, Replicated(1, 7))]
    copies.one.set_members({1}, {})
    assert not copies.one.admits(address_of(copies.two.endpoint).key)


def test_a_right_key_under_anothers_name_at_a_peer(copies: Copies) -> None:
    """A copy speaks only for itself, and a stranger with a copy's number is ignored."""
    copies.one.set_members({1, 2}, copies.told)
    copies.two.set_members({1, 2}, copies.told)
    for origin in (1, 3):
        forged = PeerMessage("job", origin, 1, Replicated(1, 9))
        copies.two._links[1].send(wire_format.encode_state(forged))
    stranger = copies.end(2)
    stranger.set_members({1, 2}, {1: copies.one.endpoint})
    stranger.send(Post(1, Replicated(1, 8)))
    porter = copies.one._authenticator
    assert porter is not None
    assert copies.heard_by_one(lambda: bool(porter._waiting)) == []
    copies.two.send(Post(1, Replicated(1, 7)))
    assert copies.heard_by_one(never) == [(2, Replicated(1, 7))]
    stranger.close()


# --- by default, and as processes -----------------------------------------------------------------


def test_nothing_is_open_by_oversight(tmp_path: Path) -> None:
    """Beyond loopback coordinator and copy need keys, or an explicit choice of plain text.

    A copy that listens everywhere publishes one address.
    """
    (spec,) = specs_of()
    everywhere, wanted = "tcp://0.0.0.0:*", "other hosts can reach it: expected keys to admit"
    with pytest.raises(BadInput, match=rf"^coordinator on tcp://0\.0\.0\.0.*: {wanted}"):
        CoordinatorServer(spec.job, 1, tmp_path / "c", bind=everywhere)
    with pytest.raises(BadInput, match=rf"^shard 0 on tcp://0\.0\.0\.0.*: {wanted}"):
        ReplicaServer(spec, 1, "tcp://127.0.0.1:1", everywhere)
    _, admission = issue(1)
    coordinator = CoordinatorServer(
        spec.job, 1, tmp_path / "c", bind=everywhere, admission=admission
    )
    assert address_of(coordinator.endpoint).key
    copy = ReplicaServer(
        spec, 1, coordinator.endpoint, everywhere, admission, advertised=Advertised("192.0.2.7")
    )
    for at in (copy.endpoint, copy._report.peer):
        plain, key = address_of(at)
        assert plain.startswith("tcp://192.0.2.7:")
        assert key == address_of(copy._peers.endpoint).key
    copy.stop()
    coordinator.stop()


@pytest.mark.timeout(400)
def test_processes_are_killed() -> None:
    """The coordinator, then the primary, while two workers push: each push is applied exactly once.

    Neither their command lines nor their environments hold a secret.
    """
    with (
        process_replicas(specs_of(), silence_s=LONG_SILENCE_S, secure=True) as hosts,
        ps.AdminClient(hosts.cluster) as console,
    ):
        console.install(replicated_job.TABLE.empty())
        workers = [Worker(hosts.cluster.for_workers(), name) for name in ("a", "b")]
        before = dict(hosts.pids)
        for victim in (COORDINATOR, PRIMARY):
            for worker in workers:
                worker.await_progress()
            os.kill(before[victim], signal.SIGKILL)
            for worker in workers:
                worker.await_progress()
            if victim == COORDINATOR:
                replicated_job.whole_again(hosts, victim, before[victim])
        eventually(
            lambda: hosts.pids.get(PRIMARY, before[PRIMARY]) != before[PRIMARY],
            because="there is another primary",
            within_s=LONG_S,
        )
        check_applied_once(hosts.cluster, workers)
        access = hosts.cluster.access
        assert access is not None
        told = b"".join(
            Path(f"/proc/{pid}/{what}").read_bytes()
            for pid in {*before.values(), *hosts.pids.values()}
            - {before[COORDINATOR], before[PRIMARY]}
            for what in ("cmdline", "environ")
        )
        assert b"ps.launch.child_main" in told
        for secret in (access.token, access.operator):
            assert secret.encode() not in told
