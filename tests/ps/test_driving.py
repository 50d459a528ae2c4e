"""The caller drives the client: everything happens in its thread while it waits."""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest

from ps import AdminClient
from ps.client import Client
from ps.job_spec import make_cluster, reshard_specs, shard_specs
from ps.launch.threads import local_shards
from ps.resharding import reshard
from ps.server.server import ShardServer
from ps.session import reshard_client
from ps.session.flow_control import PrefetchTable
from ps.session.inflight import InflightRequests, _make_pushed
from ps.session.membership import Membership
from ps.session.payload_encoder import PayloadEncoder
from ps.session.retransmit import RetransmitTable
from ps.session.session import Session
from ps.transport import cluster_connection
from ps.transport.cluster_connection import ClusterConnection, LeaseKeepAlive
from ps.transport.shard_sockets import Links
from ps.transport.transports import Transport
from shards.errors import BadInput
from shards.shard import Shard
from tests.support.eventually import eventually
from tests.support.two_shards import TABLE, UNIT, everywhere, shards_for


@contextmanager
def ctrl_c(console: AdminClient, worker: str) -> Iterator[None]:
    """Press Ctrl-C as a user would, once `worker` waits at the gate of every shard."""
    main = threading.main_thread().ident
    assert main is not None

    def waits() -> bool:
        known = [one for status in console.status() for one in status.workers]
        return all(one.waiting for one in known if one.worker == worker)

    def press() -> None:
        try:
            eventually(waits, because=f"{worker} waits at the gate of every shard")
        finally:  # or the main thread would wait for it
            signal.pthread_kill(main, signal.SIGINT)

    # A shell that runs us in the background has it ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=press)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)


def test_a_client_has_no_thread_but_that_of_its_lease() -> None:
    """So no call is handed to another thread, and no thread has to be woken when it ends."""
    with shards_for() as cluster:
        before = set(threading.enumerate())
        with Client(cluster, worker="w") as client:
            for _ in range(3):
                client.pull()
                client.push(everywhere(1), prefetch=client.clock + 1)
            others = set(threading.enumerate()) - before
            assert [thread.name for thread in others] == ["lease"]
        assert not set(threading.enumerate()) - before


def test_ctrl_c_during_a_pull_leaves_the_client_of_use() -> None:
    """The request stays outstanding: the next pull completes it, and every push counts once."""
    with (
        shards_for(bound=0) as cluster,
        AdminClient(cluster) as console,
        Client(cluster, worker="fast") as fast,
        Client(cluster, worker="slow") as slow,
    ):
        fast.pull()
        fast.push(everywhere(1))
        with pytest.raises(KeyboardInterrupt), ctrl_c(console, "fast"):
            fast.pull()
        slow.pull()
        slow.push(everywhere(10))
        slow.flush()
        assert fast.pull().weights[0] == -11
        fast.push(everywhere(100))
        fast.flush()
        assert set(console.read()[:700]) == {-111}
        assert [status.pushes for status in console.status()] == [3, 3]


# The functions that an answer passes between the links and the caller.
NOTING = [
    step.__code__
    for step in (
        *(Client._turn, ClusterConnection.turn, Client._note, Client.pull, Client.flush),
        *(Session.receive, InflightRequests.record_answer, _make_pushed, PayloadEncoder.read),
        *(
            RetransmitTable.record_answer,
            RetransmitTable.remove,
            PrefetchTable.record_pulled,
            PrefetchTable.take,
        ),
    )
]


@contextmanager
def interrupted(code: CodeType, line: int) -> Iterator[None]:
    """Raise Ctrl-C before this line, if it is reached."""

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code is not code:
            return None
        if event == "line" and frame.f_lineno == line:
            raise KeyboardInterrupt
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(former)


@pytest.mark.timeout(600)
def test_ctrl_c_before_any_line_that_notes_an_answer() -> None:
    """Whatever was not recorded is requested again: the next calls return, all pushes count once.

    Two shards answer a push and two pulls, and their answers are recorded during the test, so that
    no line is skipped because an answer came late.
    """
    reached, wanted = set(), lines_of(NOTING)
    with (
        shards_for() as cluster,
        AdminClient(cluster) as console,
        Client(cluster, worker="w", retry_s=0.05) as client,
    ):
        client.pull()
        for pushes, (code, line) in enumerate(wanted, 1):
            client.push(everywhere(1), prefetch=client.clock + 1)
            client.prefetch(client.clock + 1)
            try:
                with interrupted(code, line):
                    client.pull()
                    client.flush()
                    client.pull(client.clock + 1)
            except KeyboardInterrupt:
                reached.add(code)
                client.pull()
                client.flush()
            assert client.pull().weights[0] == -pushes
        assert reached == set(NOTING)
        assert set(console.read()[:700]) == {-len(wanted)}
        assert [status.pushes for status in console.status()] == [len(wanted)] * 2


def lines_of(codes: Sequence[CodeType]) -> list[tuple[CodeType, int]]:
    lines = {(code, line) for code in codes for _, _, line in code.co_lines() if line}
    return sorted(lines, key=lambda one: (one[0].co_qualname, one[1]))


def begin_next_life(server: ShardServer) -> None:
    """Start the shard's next life from this one's state, while no requests arrive."""
    former = server.shard
    shard = Shard(former.spec, former.boot + 1)
    shard.restore(former.copy())
    shard.take_over(time.monotonic())
    server.shard = server._acts = shard


@contextmanager
def deaf(links: Links) -> Iterator[None]:
    """Answers in this block are received after it: a push then handles what has come."""
    heard, links.receive = links.receive, nothing  # type: ignore[method-assign]
    try:
        yield
    finally:
        links.receive = heard  # type: ignore[method-assign]


def nothing(timeout_s: float, at_once: int = 1) -> Iterator[Any]:
    del timeout_s
    return iter(())


def lead_elsewhere(links: Links, servers: Sequence[ShardServer]) -> None:
    """As the coordinator does, where the former copies died with two answers each."""
    lost: list[Any] = []

    def all_lost() -> bool:
        lost.extend(links.receive(1.0))
        return len(lost) >= 2 * len(servers)

    eventually(all_lost, because="each shard has answered twice")
    links._moved.update(range(len(servers)))
    links.changed = True

    def nothing_soon(timeout_s: float, at_once: int = 1) -> Iterator[Any]:
        links.receive = heard  # type: ignore[method-assign]
        return nothing(timeout_s, at_once)

    heard, links.receive = links.receive, nothing_soon  # type: ignore[method-assign]


# The functions that greet a shard's next life, however the client learns of it: by a refusal, by
# redirected links, or by repeating what Ctrl-C has interrupted.
GREETING: dict[str, tuple[Callable[..., object], ...]] = {
    "refused": (
        *(ClusterConnection.turn, Session.receive, Session._on_refusal),
        *(Session._on_joined, Session._catch_up, Session._readdress),
        *(Membership.greet, Membership.on_welcome, Membership.on_rejoined),
        *(RetransmitTable.drop_greetings, RetransmitTable.readdress),
    ),
    "led": (ClusterConnection.turn, Session.greet_new_primary, Membership.greet),
    "torn": (
        Client._turn,
        Client.prefetch,
        ClusterConnection.ask_again,
        Session.hello,
        Membership.greet,
    ),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("heard", ["refused", "led", "torn"])
def test_ctrl_c_before_any_line_that_greets_a_shard_anew(heard: str) -> None:
    """Both shards have restarted, and the others have continued without this worker: it is
    registered again, level with them, its next calls return, and all its pushes count once.
    """
    codes = [step.__code__ for step in GREETING[heard]]
    reached, wanted = set(), lines_of(codes)
    with ExitStack() as stack:
        specs = shard_specs(TABLE, shards=2, schedule=UNIT)
        servers = [
            stack.enter_context(ShardServer(spec, boot=1, transport=Transport.TCP))
            for spec in specs
        ]
        cluster = make_cluster(specs, [server.endpoint for server in servers])
        console = stack.enter_context(AdminClient(cluster))
        console.install(TABLE.empty())
        client = stack.enter_context(Client(cluster, worker="w", retry_s=0.05, stripes=1))
        client.pull()
        for pushes, (code, line) in enumerate(wanted, 1):
            for server in servers:
                begin_next_life(server)
            servers[0].shard.ledger.entries["w"].clock += 2
            with deaf(client._current.links):
                client.push(everywhere(1), prefetch=client.clock + 1)
            if heard == "led":
                lead_elsewhere(client._current.links, servers)
            client._current.torn = heard == "torn"
            try:
                with interrupted(code, line):
                    client.pull()
                    client.flush()
            except KeyboardInterrupt:
                reached.add(code)
                client.flush()
            assert client.pull().weights[0] == -pushes
            clocks = {server.shard.ledger.entries["w"].clock for server in servers}
            assert clocks == {client.clock + client._current.session.ahead}
        assert reached == set(codes)
        assert set(console.read()[:700]) == {-len(wanted)}


# The functions that take a client from one cluster's shards to another's.
MOVING = [
    step.__code__
    for step in (
        *(
            Client._turn,
            Client._follow_reshard,
            Client._switch_to,
        ),
        *(
            ClusterConnection.begin,
            ClusterConnection.close,
            cluster_connection.establish,
            cluster_connection.connect_successor,
            LeaseKeepAlive.begin,
            LeaseKeepAlive.stop,
            reshard_client.resume_at,
            Session.follow,
        ),
    )
]


def leases_since(before: set[threading.Thread]) -> int:
    return [thread.name for thread in set(threading.enumerate()) - before].count("lease")


def moved_while_interrupted(code: CodeType, line: int) -> bool:
    """Whether the line is reached in a reshard after two pushes that no shard had applied before
    it.

    The client has to continue, and each of its pushes to count once.
    """
    before = set(threading.enumerate())  # threads of other tests may end by themselves
    specs = shard_specs(TABLE, shards=2, schedule=UNIT)
    with ExitStack() as stack:
        cluster = stack.enter_context(local_shards(specs))
        console = stack.enter_context(AdminClient(cluster))
        settled = stack.enter_context(local_shards(reshard_specs(specs, 1)))
        successor = stack.enter_context(AdminClient(settled))
        client = stack.enter_context(Client(cluster, worker="w", retry_s=0.05, in_flight=4))
        client.pull()
        console.quiesce(60)
        client.push(everywhere(1), prefetch=client.clock + 2)
        client.push(everywhere(1))
        reshard(console, successor)
        try:
            with interrupted(code, line):
                client.pull()
                client.flush()
            return False
        except KeyboardInterrupt:
            client.flush()
            return True
        finally:
            assert client.pull().weights[0] == -2
            assert client.cluster == settled
            client.push(everywhere(1))
            client.flush()
            assert set(successor.read()[:700]) == {-3}
            # A connection dropped between two calls ends when nothing refers to it any more.
            eventually(lambda: leases_since(before) == 1, because="only one lease is renewed")


@pytest.mark.timeout(600)
def test_ctrl_c_before_any_line_of_a_move() -> None:
    """An interrupted client keeps its outstanding pushes and follows the reshard at its next call:
    no push is lost or counts twice, and no abandoned connection renews its lease.
    """
    reached = {code for code, line in lines_of(MOVING) if moved_while_interrupted(code, line)}
    assert reached == set(MOVING)


def test_an_error_that_a_shard_tells_has_nothing_asked_twice() -> None:
    """The rest of its message is recorded first: weights in it are not requested again, and a
    second fault is raised at the next call.
    """
    spoilt = everywhere(1)
    spoilt[0] = np.nan
    with (
        shards_for(shards=1) as cluster,
        AdminClient(cluster) as console,
        Client(cluster, worker="w", retry_s=30.0, patience_s=90.0) as client,
    ):
        client.pull()
        client.push(spoilt, prefetch=client.clock + 1)
        with pytest.raises(BadInput, match="holds NaN"):
            client.flush()
        client.flush()
        assert client.pull().weights[0] == 0
        assert [status.pulls for status in console.status()] == [2]
