"""A client's errors for bad arguments, dead endpoints and shards that disagree: one line each."""

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

import ps
from ps import AdminClient, Cluster
from ps.client import Client
from ps.job_spec import make_cluster, shard_specs
from ps.launch.threads import local_shards
from ps.server.server import ShardServer
from ps.transport.cluster_connection import LeaseKeepAlive
from shards.errors import BadInput, BadMessage, Fenced, GiveUp, Retry
from shards.schedules import Fixed
from shards.shard_status import Standing
from tests.support.eventually import eventually
from tests.support.ports import free_port
from tests.support.shard_dsl import blank

TABLE = ps.DenseTable("net", (ps.TensorSpec("w", (512,)),))


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Two shards, bound 0, plain SGD at rate 1."""
    specs = shard_specs(TABLE, shards=2, bound=0, schedule=Fixed(base_rate=1.0))
    with local_shards(specs) as served:
        yield served


@pytest.fixture
def nowhere(cluster: Cluster) -> Cluster:
    """The same cluster, but nothing listens at shard 1's endpoint."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    return msgspec.structs.replace(cluster, endpoints=(cluster.endpoints[0], endpoint))


def one_line(error: BaseException) -> str:
    text = str(error)
    assert text
    assert "\n" not in text
    return text


def test_a_shard_that_is_not_there(nowhere: Cluster) -> None:
    """The client gives up when its patience ends, naming the shard; and so does the admin client.

    The patience is short, but enough for the other shard to answer on a busy machine.
    """
    with pytest.raises(ps.Unreachable) as caught:
        Client(nowhere, worker="w", patience_s=2.0)
    endpoint = nowhere.endpoints[1]
    assert one_line(caught.value) == f"shard 1 has not answered w's hello for 2 s at {endpoint}"
    with AdminClient(nowhere, patience_s=2.0) as console, pytest.raises(ps.Unreachable) as caught:
        console.read()
    assert one_line(caught.value) == f"shard 1 at {endpoint} has not answered read for 2 s"


@pytest.mark.parametrize("having", [0, 1])
def test_weights_that_nobody_installs(having: int) -> None:
    """When its patience ends, the client names the shards without weights and the remedy; whether
    no shard has weights or some have.
    """
    specs = shard_specs(TABLE, shards=2)
    with ExitStack() as stack:
        servers = [stack.enter_context(ShardServer(spec, 1)) for spec in specs]
        empty = make_cluster(specs, [server.endpoint for server in servers])
        with AdminClient(empty) as console:
            for shard in range(having):
                console.restore(shard, blank(spec=servers[shard].shard.spec))
            names = "shard 1" if having else "shards 0, 1"
            with pytest.raises(ps.NotReady) as caught:
                Client(empty, worker="w", patience_s=1.0)
            assert one_line(caught.value) == (
                f"worker w has waited 1 s for {names}: shard {having} has no weights yet: give all"
                " shards theirs by AdminClient.install"
            )
            with pytest.raises(Retry, match="has no weights yet: give all shards theirs by Adm"):
                console.read()


def test_weights_that_are_installed_later() -> None:
    """A client that waits for weights within its patience starts with them."""
    (spec,) = shard_specs(TABLE)
    with ShardServer(spec, 1) as server:
        cluster = make_cluster([spec], [server.endpoint])

        def install() -> None:
            with AdminClient(cluster) as console:
                console.install(np.ones(TABLE.size, np.float32))

        late = threading.Timer(0.5, install)
        late.start()
        with Client(cluster, worker="w", retry_s=0.1, patience_s=60.0) as shards:
            assert shards.pull().weights.sum() == 512
        late.join()


@pytest.mark.parametrize("endpoint", ["", "127.0.0.1:1", "tcp://127.0.0.1", "carrier://pigeon"])
def test_an_endpoint_that_is_none(cluster: Cluster, endpoint: str) -> None:
    """The error quotes it, with what was expected."""
    wrong = msgspec.structs.replace(cluster, endpoints=(cluster.endpoints[0], endpoint))
    for connect in (lambda: Client(wrong, worker="w"), lambda: AdminClient(wrong)):
        with pytest.raises(BadInput, match="shard endpoint: expected tcp://HOST:PORT") as caught:
            connect()
        assert repr(endpoint) in one_line(caught.value)


def test_something_else_that_listens(nowhere: Cluster) -> None:
    """An answer that is not a shard's ends the client, or the admin client, in one line."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as other:
        other.setsockopt(zmq.LINGER, 0)
        other.setsockopt(zmq.RCVTIMEO, 50)
        other.bind(nowhere.endpoints[1])
        heard_enough = threading.Event()

        def answer() -> None:
            """Answer however often it is asked: on a busy machine a client asks again."""
            while not heard_enough.is_set():
                with suppress(zmq.Again):
                    other.send_multipart([other.recv_multipart()[0], b"\xc1 hello there"])

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            for connect in (
                lambda: Client(nowhere, worker="w"),
                lambda: AdminClient(nowhere).read(),
            ):
                named = f"{nowhere.endpoints[1]}: envelope: its headers take"
                with pytest.raises(BadMessage, match=named) as c:
                    connect()
                one_line(c.value)
        finally:
            heard_enough.set()
            thread.join()


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"job": "other-77"}, BadMessage, "serves another job than other-[0-9a-f]{16}"),
    ],
)
def test_a_cluster_that_is_not_ours(
    cluster: Cluster, change: dict[str, Any], error: type[Exception], text: str
) -> None:
    """Another job is refused at the first message, and no worker is registered."""
    with pytest.raises(error, match=text) as caught:
        Client(msgspec.structs.replace(cluster, **change), worker="w")
    assert cluster.job not in one_line(caught.value)
    with AdminClient(cluster) as console:
        assert [status.workers for status in console.status()] == [(), ()]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"in_flight": 0}, "in_flight: expected 1 to 1024, got 0"),
        ({"retry_s": 0}, "retry_s: expected more than 0 s, and finite, got 0"),
        ({"patience_s": -1}, "patience_s: expected more than 0 s, got -1"),
        ({"patience_s": float("nan")}, "patience_s: expected more than 0 s, got nan"),
    ],
)
def test_arguments(cluster: Cluster, options: dict[str, Any], text: str) -> None:
    """An invalid number is refused before anything is sent."""
    with pytest.raises(BadInput, match=text):
        Client(cluster, worker="w", **options)


@pytest.mark.parametrize(
    ("worker", "incarnation", "text"),
    [
        ("", 0, "worker: expected a name of printable characters, got ''"),
        ("a\nb", 0, r"worker: expected a name of printable characters, got 'a\\nb'"),
        ("w" * 129, 0, "worker: expected a name of at most 128 bytes, got 'www"),
        ("w", -1, "incarnation: expected at least 0, got -1"),
        ("w", 2**63, f"incarnation: expected at most {2**62}, got {2**63}"),
    ],
)
def test_names_that_no_message_may_carry(
    cluster: Cluster, worker: str, incarnation: int, text: str
) -> None:
    """A name or a life that no message can carry is refused before anything is sent."""
    with pytest.raises(BadInput, match=f"^{text}"):
        Client(cluster, worker=worker, incarnation=incarnation)


def test_a_push_that_is_refused_here(cluster: Cluster) -> None:
    """It neither takes a number nor advances the clock: the loop continues unchanged."""
    with Client(cluster, worker="w") as client:
        with pytest.raises(BadInput, match="push: expected a pull before the first push, got none"):
            client.push(TABLE.empty())
        client.pull()
        wrongs: list[Any] = [
            np.zeros(9, np.float32),
            np.zeros(512),
            np.zeros(1024, np.float32)[::2],
        ]
        for wrong in wrongs:
            with pytest.raises(BadInput, match="push to table net: expected"):
                client.push(wrong)
        with pytest.raises(BadInput, match="push: expected 2 read versions"):
            client.push(TABLE.empty(), read_versions=(0,))
        assert (client.clock, client.seq) == (0, 0)
        client.push(np.ones(512, np.float32))
        assert client.pull().versions == (1, 1)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
def test_a_gradient_without_a_number_goes_to_no_shard(cluster: Cluster, value: float) -> None:
    """It is refused before it is sent, with table and worker, so that no shard applies a part; the
    push takes no number, and the next one counts everywhere."""
    gradient = np.ones(512, np.float32)
    gradient[300] = value  # at the second shard only
    with Client(cluster, worker="w") as client, AdminClient(cluster) as console:
        client.pull()
        with pytest.raises(BadInput, match=r"^push 1: table net (holds NaN|has a norm)") as told:
            client.push(gradient)
        one_line(told.value)
        assert (told.value.table, told.value.worker) == ("net", "w")
        assert (client.seq, client.clock) == (0, 0)
        client.push(np.ones(512, np.float32))
        assert client.pull().versions == (1, 1)
        assert set(console.read()) == {-1.0}


def test_a_single_shard_refuses_what_is_no_number() -> None:
    """It has the whole push, so nothing is looked at before; the push counts as zeros."""
    with (
        local_shards(shard_specs(TABLE, schedule=Fixed(base_rate=1.0))) as cluster,
        Client(cluster, worker="w") as client,
        AdminClient(cluster) as console,
    ):
        client.pull()
        client.push(np.full(512, np.nan, np.float32), loss=float("nan"))
        told = "shard 0: push 1 of worker w: table net holds NaN or infinity"
        with pytest.raises(BadInput, match=told):
            client.flush()
        client.push(np.ones(512, np.float32))
        assert client.pull().versions == (2,)
        assert set(console.read()) == {-1.0}


@pytest.mark.parametrize("spoilt", [(300,), (5, 300)])
def test_a_gradient_above_the_cap(spoilt: tuple[int, ...]) -> None:
    """It goes to no shard if the description of the cluster names the cap. If an older one does
    not, each shard refuses its own part, which counts as zeros; the error is raised once, and the
    next push counts everywhere.
    """
    gradient = np.ones(512, np.float32)
    gradient[list(spoilt)] = 1e6
    rate = Fixed(base_rate=1.0)
    specs = shard_specs(TABLE, shards=2, schedule=rate, guard=ps.Guard(max_norm=1e3))
    with local_shards(specs) as cluster, Client(cluster, worker="w") as client:
        client.pull()
        with pytest.raises(BadInput, match=r"^push 1: table net has norm 1e.06: expected at most"):
            client.push(gradient)
        client.push(np.ones(512, np.float32))
        assert client.pull().versions == (1, 1)
        assert set(client.pull().weights) == {-1.0}
    with (
        local_shards(specs) as cluster,
        Client(msgspec.structs.replace(cluster, max_norms={}), worker="w") as client,
        AdminClient(cluster) as console,
    ):
        client.pull()
        client.push(gradient, loss=float("nan"))
        told = "shard [01]: push 1 of worker w: table net has norm 1e.06"
        with pytest.raises(BadInput, match=told) as caught:
            client.flush()
        one_line(caught.value)
        client.flush()
        assert client.pull().versions == (1, 1)
        first = [0.0 if len(spoilt) == 2 else -1.0, 0.0]
        assert console.read()[[0, 511]].tolist() == first
        client.push(np.ones(512, np.float32))
        assert client.pull().versions == (2, 2)
        assert console.read()[[0, 511]].tolist() == [first[0] - 1, first[1] - 1]


def test_two_clients_of_one_name(cluster: Cluster) -> None:
    """Only one of two pushes with the same number can count; the other's client gets an error."""
    gradient = np.ones(512, np.float32)
    clients = [Client(cluster, worker="w", retry_s=10.0) for _ in range(2)]
    for client in clients:
        client.pull()
    clients[0].push(gradient)
    clients[0].flush()
    clients[1].push(gradient)
    with pytest.raises(Fenced, match="worker w: another client uses incarnation 0") as told:
        clients[1].flush()
    one_line(told.value)
    for client in clients:
        client.abort()
    with AdminClient(cluster) as console:
        assert set(console.read()) == {-1.0}


def push_one(client: Client) -> None:
    client.push(np.ones(512, np.float32))
    client.flush()


@pytest.mark.parametrize("ask", [Client.pull, push_one])
def test_an_older_life_is_told_at_its_next_word(
    cluster: Cluster, ask: Callable[[Client], object]
) -> None:
    """At its next request of any kind, not at the first lost push; and none of it counts."""
    older = Client(cluster, worker="w")
    older.pull()
    with Client(cluster, worker="w", incarnation=1) as newer, AdminClient(cluster) as console:
        newer.pull()
        with pytest.raises(Fenced, match="worker w: incarnation 1 has taken over from 0"):
            ask(older)
        older.abort()
        assert set(console.read()) == {0.0}


def test_an_older_life_that_computes_is_told_when_it_renews_its_lease() -> None:
    """Its thread hears of the newer incarnation and stops renewing; the next call raises that."""
    specs = shard_specs(TABLE, shards=2, lease_s=2.0, schedule=Fixed(base_rate=1.0))
    with local_shards(specs) as cluster:
        older = Client(cluster, worker="w")
        older.pull()
        renewal = older._current._renewal
        assert renewal is not None
        with Client(cluster, worker="w", incarnation=1):
            renewal._thread.join(60)
            assert isinstance(renewal.failure, Fenced)
        with pytest.raises(Fenced, match="worker w: incarnation 1 has taken over from 0"):
            older.pull()
        older.abort()


def test_a_client_is_closed_once(cluster: Cluster) -> None:
    """Closing it again changes nothing; any other call raises an error."""
    with Client(cluster, worker="w") as client:
        client.pull()
        client.close()
        client.close()
    calls: list[Callable[[], object]] = [
        client.pull,
        client.flush,
        lambda: client.prefetch(1),
        lambda: client.push(TABLE.empty()),
    ]
    for call in calls:
        with pytest.raises(BadInput, match=r"^worker w: it is closed$"):
            call()
    client.abort()


def test_a_lease_that_nobody_renews_is_told(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever ends the thread that renews it, the next call raises it."""
    with Client(cluster, worker="w") as client:

        def none_left() -> None:
            raise zmq.ZMQError(errno.EMFILE)

        monkeypatch.setattr(client._current.connection, "more_links", none_left)
        renewal = LeaseKeepAlive(client._current.connection, client._current.session, 60.0)
        renewal.begin()
        renewal._thread.join()
        client._current._renewal, own = renewal, client._current._renewal
        assert own is not None
        own.stop()
        with pytest.raises(zmq.ZMQError, match="Too many open files"):
            client.pull()
        client.abort()


def test_a_body_that_fails_leaves_as_a_crash_would(cluster: Cluster) -> None:
    """Its error is raised unchanged, at once, and the lease frees the others."""

    def train() -> None:
        with Client(cluster, worker="w") as client:
            client.pull()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    with AdminClient(cluster) as console:
        (worker,) = console.status()[0].workers
        assert worker.standing is Standing.ACTIVE


def test_a_long_computation_keeps_its_lease() -> None:
    """Another thread renews it; without it, the shard forgets the worker, then takes it back."""
    specs = shard_specs(TABLE, shards=2, lease_s=4.0, schedule=Fixed(base_rate=1.0))
    with ExitStack() as stack:
        servers = [stack.enter_context(ShardServer(spec, boot=1)) for spec in specs]
        cluster = make_cluster(specs, [server.endpoint for server in servers])
        console = stack.enter_context(AdminClient(cluster))
        console.install(TABLE.empty())

        def leases() -> list[float]:
            return [server.shard.ledger.entries["w"].lease_until for server in servers]

        def standing() -> list[Standing]:
            return [one.standing for status in console.status() for one in status.workers]

        with Client(cluster, worker="w") as client:
            client.pull()
            for _ in range(2):
                before = leases()
                eventually(
                    lambda: all(now > was for was, now in zip(before, leases(), strict=True)),  # noqa: B023  # it is called at once
                    because="each shard's lease is renewed",
                )
            assert standing() == [Standing.ACTIVE, Standing.ACTIVE]
            assert isinstance(client._current._renewal, LeaseKeepAlive)
            client._current._renewal.stop()
            eventually(
                lambda: standing() == [Standing.EXPIRED, Standing.EXPIRED],
                because="both leases run out",
            )
            client.push(np.ones(512, np.float32))
            assert client.pull().versions == (1, 1)
            assert standing() == [Standing.ACTIVE, Standing.ACTIVE]
        assert set(console.read()) == {-1.0}


def test_what_ends_the_renewing_thread_is_told(cluster: Cluster) -> None:
    """The next call raises it; no trace is printed while the caller computes."""
    client = Client(cluster, worker="w")
    assert client._current._renewal is not None
    client._current._renewal.failure = GiveUp("no more renewals")
    with pytest.raises(GiveUp, match="no more renewals"):
        client.pull()
    client.abort()
