"""Shards that other hosts can reach: which clients they admit, and what refused ones learn."""

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import zmq

import ps
from ps.client import Client
from ps.cluster import Access, Cluster
from ps.job_spec import make_cluster, reshard_specs, shard_specs
from ps.launch.threads import local_shards
from ps.links.benchmark import measure_link
from ps.resharding import reshard
from ps.security import handshake_diagnostics
from ps.security.authorization import Admission, Invitation
from ps.security.enrolment import Enrol, join
from ps.security.handshake_diagnostics import fault_at
from ps.security.keys import KeyPair, address_of, expect, pin_key
from ps.server.server import ShardServer
from ps.transport.transports import Transport
from shards import wire_format
from shards.errors import BadInput, Fenced, GiveUp
from shards.messages import PROTOCOL, AskStatus, Hello
from shards.schema_digest import SCHEMA
from tests.support.curve_clients import as_worker, say, text

TABLE = ps.DenseTable("net", (ps.TensorSpec("w", (512,)),))
ONES = np.ones(512, np.float32)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Two shards with CURVE on TCP, and the access of an operator and a worker."""
    specs = shard_specs(TABLE, shards=2)
    with local_shards(specs, transport=Transport.TCP, secure=True) as running:
        yield running


def as_operator(cluster: Cluster) -> None:
    with ps.AdminClient(cluster, patience_s=60) as console:
        console.status()


def as_doctor(cluster: Cluster) -> None:
    measure_link(cluster, 0, cluster.endpoints, patience_s=60)


COMERS = pytest.mark.parametrize("come", [as_worker, as_operator, as_doctor])
AWAY = r"shard [01] at tcp://127\.0\.0\.1:\d+: turned away: it does not know our key"


def test_training_over_curve(cluster: Cluster) -> None:
    """Workers with only the token push and pull; the operator, with both keys, reads."""
    with Client(cluster.for_workers(), worker="w0") as client:
        client.pull()
        client.push(ONES)
        assert client.pull().versions == (1, 1)
        assert client.transports == ("tcp", "tcp")
    with ps.AdminClient(cluster) as console:
        np.testing.assert_allclose(console.read(), -0.01)


def test_large_messages_over_several_connections() -> None:
    """Each connection shows the same key, and a message cut in stripes is one message."""
    table = ps.DenseTable("large", (ps.TensorSpec("w", (300_000,)),))
    specs = shard_specs(table)
    with (
        local_shards(specs, transport=Transport.TCP, secure=True) as cluster,
        Client(cluster, worker="w0", stripes=3) as client,
    ):
        client.pull()
        client.push(np.ones(table.size, np.float32))
        np.testing.assert_allclose(client.pull().weights[:300_000], -0.01)


def test_behind_a_slow_link(cluster: Cluster) -> None:
    """A link in between has no key: the far end's key is the one expected."""
    with Client(
        cluster, worker="w0", link=ps.transport.link_model.parse_link("rtt=10ms")
    ) as client:
        assert client.pull().versions == (0, 0)


def test_a_worker_on_the_shards_own_host_needs_no_key() -> None:
    """The Unix socket in a folder of its user stays plain, and memory is shared."""
    with local_shards(shard_specs(TABLE), secure=True) as cluster:
        anybody = msgspec.structs.replace(cluster, access=None)
        with Client(anybody, worker="w0") as client:
            client.pull()
            client.push(ONES)
            assert client.pull().versions == (1,)
            assert client.transports in {("shm",), ("ipc",)}  # by how much /dev/shm there is


# --- the four bad credentials, and their errors ---------------------------------------------------


@COMERS
def test_no_curve(cluster: Cluster, come: Callable[[Cluster], None]) -> None:
    """A client in plain text gets no answer, and learns the cause at its own end."""
    plain = tuple(address_of(endpoint).plain for endpoint in cluster.endpoints)
    reason = "shard [01] at tcp.*: expected plain text, as the endpoint says, .* that speaks CURVE"
    with pytest.raises(GiveUp, match=reason):
        come(msgspec.structs.replace(cluster, endpoints=plain))
    as_worker(cluster)


@COMERS
def test_wrong_server_key(cluster: Cluster, come: Callable[[Cluster], None]) -> None:
    """A client sends nothing to a server that cannot prove the pinned key."""
    others = KeyPair.new().public
    moved = tuple(pin_key(address_of(at).plain, others) for at in cluster.endpoints)
    with pytest.raises(GiveUp, match="broke off the handshake: the server key does not match"):
        come(msgspec.structs.replace(cluster, endpoints=moved))
    as_worker(cluster)


@COMERS
def test_unknown_client_key(cluster: Cluster, come: Callable[[Cluster], None]) -> None:
    """A key that was not enrolled, or is another job's token, is refused."""
    other = Access(KeyPair.new().secret, KeyPair.new().secret)
    with pytest.raises(GiveUp, match=AWAY):
        come(msgspec.structs.replace(cluster, access=other))
    as_worker(cluster)


def test_admitted_key_but_another_name(cluster: Cluster) -> None:
    """A worker speaks only for itself, and sends no operator message."""
    own = join(cluster, "w0", cluster.endpoints, 60)
    assert own is not None
    (endpoint, _) = cluster.endpoints
    as_another = Hello(1, cluster.job, "w1", 0, PROTOCOL, SCHEMA)
    assert text(say(endpoint, own, as_another)) == (
        "hello: expected worker w0, whose key this is, got worker w1"
    )
    assert text(say(endpoint, own, AskStatus(1, cluster.job))) == (
        "askstatus: expected the operator's key, got that of worker w0"
    )
    as_itself = Hello(1, cluster.job, "w0", 0, PROTOCOL, SCHEMA)
    assert "welcome" in str(say(endpoint, own, as_itself)).lower()


def test_expired_and_used_up_tokens() -> None:
    """Both are explained in words, because the holder of the token may know why."""
    (spec,) = shard_specs(TABLE)
    token, operator = KeyPair.new(), KeyPair.new()
    for invitation, reason in (
        (Invitation(token.public, 5, lasts_s=0.0), "shard 0: worker w1: .* token has expired"),
        (
            Invitation(token.public, 1, joins_a_second=0.0),
            "has not let in w1 for 0.5 s: worker w1: too many have joined .* for 1 joins at once",
        ),
    ):
        admission = Admission(operator.public, invitation)
        with ShardServer(spec, 1, transport=Transport.TCP, admission=admission) as server:
            access = Access(token.secret, operator.secret)
            told = make_cluster([spec], [server.endpoint], access)
            if invitation.lasts_s:
                join(told, "w0", told.endpoints, 60)
            with pytest.raises(GiveUp, match=reason):
                Client(told, worker="w1", patience_s=0.5)


def test_a_worker_waits_for_a_join_to_be_earned() -> None:
    """When all joins are used up, a worker is admitted a moment later, by the token alone."""
    (spec,) = shard_specs(TABLE)
    token, operator = KeyPair.new(), KeyPair.new()
    admission = Admission(operator.public, Invitation(token.public, 1, joins_a_second=5.0))
    with ShardServer(spec, 1, transport=Transport.TCP, admission=admission) as server:
        told = make_cluster([spec], [server.endpoint], Access(token.secret, operator.secret))
        for worker in ("w0", "w1", "w2"):
            assert join(told, worker, told.endpoints, 60) is not None


def test_an_invitation_lets_nobody_do_anything_else(cluster: Cluster) -> None:
    """The token's holder may only enrol; any other message is denied, and it stays outside."""
    assert cluster.access is not None
    own = KeyPair.of(cluster.access.token)
    context = zmq.Context()
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    try:
        plain, key = address_of(cluster.endpoints[0])
        expect(socket, key, own)
        socket.setsockopt(zmq.RCVTIMEO, 60_000)
        socket.connect(plain)
        status = AskStatus(1, cluster.job)
        odd = Enrol("w0", 0, "no key")
        for said in (
            wire_format.enclose([(status, ())]),
            [wire_format.encode_state(odd)],
            [b""],
            [b"x"] * 5,
        ):
            socket.send_multipart(said)
            assert b"denied" in socket.recv()
    finally:
        context.destroy(linger=0)


def test_a_later_life_takes_over_and_the_earlier_one_is_told(cluster: Cluster) -> None:
    """A retried task joins with a key of its own; messages of its zombie are refused."""
    zombie = Client(cluster, worker="w0")
    try:
        with Client(cluster, worker="w0", incarnation=1) as client:
            client.pull()
            with pytest.raises(Fenced, match="a later incarnation of this worker has joined"):
                zombie.pull()
    finally:
        zombie.abort()


def test_a_description_without_secrets(cluster: Cluster) -> None:
    """The error says what is missing, and where it is; workers get no operator's key."""
    without = msgspec.structs.replace(cluster, access=None)
    with pytest.raises(BadInput, match="cluster job: expected a join token in it, got none"):
        as_worker(without)
    for lacking in (without, cluster.for_workers()):
        with pytest.raises(BadInput, match="cluster job: expected the operator's key"):
            as_operator(lacking)


def test_a_server_is_never_open_by_oversight() -> None:
    """Beyond loopback it needs keys, or an explicit choice of plain text."""
    (spec,) = shard_specs(TABLE)
    with pytest.raises(BadInput, match=r"shard 0 on tcp://0.0.0.0.*: expected keys to admit, or"):
        ShardServer(spec, 1, bind="tcp://0.0.0.0:*")
    with ShardServer(spec, 1, bind="tcp://0.0.0.0:*", plaintext=True) as server:
        assert server.endpoint.startswith("tcp://0.0.0.0:")


def test_a_look_outlasts_a_pause(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was suspended during the probe, at any moment, reports no fault."""
    clock = SimpleNamespace(monotonic=itertools.count(step=1000.0).__next__)
    monkeypatch.setattr(handshake_diagnostics, "time", clock)
    monkeypatch.setattr(handshake_diagnostics, "_POLL_S", 60.0)
    monkeypatch.setattr(handshake_diagnostics, "_WORD_S", 60.0)
    plain = address_of(cluster.endpoints[0]).plain
    assert fault_at(plain, None).startswith("expected plain text, as the endpoint says, got a serv")


def test_nobody_there() -> None:
    """A port that answers nothing is not a fault of any key."""
    assert fault_at("tcp://127.0.0.1:1", None) == ""


def test_a_job_moves_with_its_workers() -> None:
    """They join the new shards by the token that the old ones pass on, and learn nothing more."""
    specs = shard_specs(TABLE, shards=2)
    with (
        local_shards(specs, transport=Transport.TCP, secure=True) as old,
        local_shards(reshard_specs(specs, 1), transport=Transport.TCP, secure=True) as new,
        Client(old.for_workers(), worker="w0", transport="tcp") as client,
    ):
        client.pull()
        client.push(ONES)
        client.flush()
        with ps.AdminClient(old) as before, ps.AdminClient(new) as after:
            reshard(before, after)
            client.push(ONES)
            client.flush()
            np.testing.assert_allclose(after.read(), -0.02)
        assert client.cluster.endpoints == new.endpoints
        assert client.cluster.access is not None
        assert client.cluster.access.operator == ""
