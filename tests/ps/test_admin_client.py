"""The admin client's questions: each bypasses the gate, and refusals keep their error type."""

import socket
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

import ps
from ps import AdminClient, Cluster, ShardState
from ps.client import Client
from ps.job_spec import make_cluster, shard_specs
from ps.launch.threads import local_shards
from ps.server.server import ShardServer
from ps.session import admin_plans
from ps.session.admin_plans import Answers, Ask, SettingsChange
from ps.session.events import ClockTimeout
from shards.errors import BadInput, BadMessage, GiveUp, Retry
from shards.ledger import Ledger
from shards.rules import Momentum
from shards.schedules import Fixed
from shards.shard_state import SavedProgress
from shards.shard_status import Standing
from shards.tables import Layout
from tests.support.eventually import eventually
from tests.support.ports import free_port
from tests.support.session_replies import Array

TABLE = ps.DenseTable("net", (ps.TensorSpec("a", (500,)), ps.TensorSpec("b", (500,))))


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Two shards with momentum and bound 0; their weights are the numbers of their keys."""
    schedule = Fixed(base_rate=1.0)
    specs = shard_specs(TABLE, shards=2, bound=0, rule=Momentum(0.5), schedule=schedule)
    with local_shards(specs, np.arange(TABLE.size, dtype=np.float32)) as served:
        yield served


@pytest.fixture
def console(cluster: Cluster) -> Iterator[AdminClient]:
    with AdminClient(cluster) as asking:
        yield asking


def train(cluster: Cluster, steps: int, worker: str = "w") -> None:
    # The patience is long, so that a busy machine repeats nothing: that would be counted.
    with Client(cluster, worker=worker, retry_s=10.0) as client:
        for _ in range(steps):
            client.pull()
            client.push(np.ones(TABLE.size, np.float32), samples=10, loss=0.25)


def test_the_weights(cluster: Cluster, console: AdminClient) -> None:
    """All shards' parts in one arena, even while workers wait at the gate."""
    np.testing.assert_array_equal(console.read(), np.arange(TABLE.size))
    slow, fast = Client(cluster, worker="slow"), Client(cluster, worker="fast")
    fast.pull()
    fast.push(np.ones(TABLE.size, np.float32))
    fast.prefetch(1)
    fast.flush()
    assert console.read()[7] == 6.0
    for client in (slow, fast):
        client.abort()


def test_the_status(cluster: Cluster, console: AdminClient) -> None:
    """Counters and workers of each shard."""
    train(cluster, 3)
    for shard, status in enumerate(console.status()):
        assert (status.shard, status.version, status.steps, status.samples) == (shard, 3, 3, 30)
        assert (status.pushes, status.pulls, status.duplicates, status.refused) == (3, 3, 0, 0)
        (worker,) = status.workers
        assert (worker.worker, worker.standing, worker.clock, worker.loss) == (
            "w",
            Standing.LEFT,
            3,
            0.25,
        )


def test_records_come_once(cluster: Cluster, console: AdminClient) -> None:
    """Each call returns what was applied since the last, from every shard."""
    assert [len(rows) for rows in console.records()] == [0, 0]
    train(cluster, 3, "a")
    assert [rows["seq"].tolist() for rows in console.records()] == [[1, 2, 3]] * 2
    assert [len(rows) for rows in console.records()] == [0, 0]
    train(cluster, 2, "b")
    assert [rows["worker"].tolist() for rows in console.records()] == [[b"b", b"b"]] * 2


def test_states_are_of_one_version(cluster: Cluster, console: AdminClient) -> None:
    """Weights, slots and ledger of an export belong to the same version."""
    train(cluster, 2)
    for shard, state in enumerate(console.export()):
        keys = cluster.map.ranges[shard]
        start = np.arange(keys.start, keys.stop, dtype=np.float32)
        real = (start < 500) | ((start >= 512) & (start < 1012))
        # Two steps of one: h = 1, then 1.5; w falls by 1, then by 1.5.
        np.testing.assert_array_equal(state.arrays["net/weights"], start - 2.5 * real)
        np.testing.assert_array_equal(state.arrays["net/history"], 1.5 * real)
        assert (state.saved.version, state.saved.ledger.entries["w"].seq) == (2, 2)


@pytest.mark.parametrize(
    "arena", [np.zeros(9, np.float32), np.zeros(TABLE.size), np.zeros((TABLE.size, 1), np.float32)]
)
def test_weights_of_another_shape(console: AdminClient, arena: Array) -> None:
    """They are refused before any shard is asked, naming both shapes."""
    with pytest.raises(
        BadInput, match=r"install in table net: expected float32 of shape \(1024,\)"
    ):
        console.install(arena)


def test_a_state_that_does_not_fit(console: AdminClient) -> None:
    """A shard's refusal is raised as the error that it stands for."""
    saved, right = SavedProgress(0, 0, 0, Ledger()), np.zeros(512, np.float32)
    with pytest.raises(BadInput, match=r"the slots \['history'\] of rule Momentum"):
        console.restore(0, ShardState(saved, {"net/weights": right, "net/mean": right}))
    with pytest.raises(BadInput, match="table net: weights: expected 512 float32 for keys"):
        console.restore(1, ShardState(saved, {"net/weights": np.zeros(9, np.float32)}))
    assert console.read()[3] == 3.0, "nothing has changed"


def test_a_shard_at_work_takes_no_new_weights(cluster: Cluster, console: AdminClient) -> None:
    """They would undo acknowledged updates."""
    train(cluster, 1)
    with pytest.raises(GiveUp, match="install: shard 0 serves workers by now"):
        console.install(TABLE.empty())


def test_a_shard_without_weights() -> None:
    """It asks for a later retry; its counters are available meanwhile."""
    (spec,) = shard_specs(TABLE)
    with (
        ShardServer(spec, boot=1) as server,
        AdminClient(make_cluster([spec], [server.endpoint])) as console,
    ):
        for question in (console.read, console.export):
            with pytest.raises(Retry, match="shard 0 has no weights yet"):
                question()
        assert console.status()[0].version == 0


def test_another_job_and_another_table(cluster: Cluster) -> None:
    """Both are refused, and the job's own id is not revealed."""
    other = msgspec.structs.replace(cluster, job="other-job")
    shown = "another job than other-[0-9a-f]{16}"
    with AdminClient(other) as console, pytest.raises(BadMessage, match=shown):
        console.read()
    (table,) = cluster.layout.tables
    ten = msgspec.structs.replace(table, name="ten")
    renamed = msgspec.structs.replace(cluster, layout=Layout((ten,)))
    client = Client(renamed, worker="w")
    with pytest.raises(BadMessage, match=r"pull: expected tables among net of shard \d, got ten"):
        client.pull()
    client.abort()


def test_a_question_that_no_shard_can_read(cluster: Cluster) -> None:
    """The error is raised at once, and not taken for silence."""
    nameless = msgspec.structs.replace(cluster, job="")
    with (
        AdminClient(nameless) as console,
        pytest.raises(BadMessage, match="header: Expected `str`"),
    ):
        console.read()


def test_it_is_told_that_nobody_will_answer() -> None:
    """The launcher of the shards may know it long before the client's patience ends."""
    asked = 0

    def check() -> None:
        nonlocal asked
        asked += 1
        if asked == 2:
            raise GiveUp("shard 0 has ended")

    specs = shard_specs(TABLE)
    nowhere = make_cluster(specs, [f"tcp://127.0.0.1:{free_port()}"])
    with (
        AdminClient(nowhere, patience_s=600, check=check) as console,
        pytest.raises(GiveUp, match=r"^shard 0 has ended$"),
    ):
        console.status()
    assert asked == 2


def test_states_travel_in_pieces(
    cluster: Cluster, console: AdminClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many small pieces over real sockets; the states that come back are the same bit for bit."""
    train(cluster, 3)
    whole = console.export()
    small = property(lambda self: side.fget(self)._replace(piece_bytes=256))  # type: ignore[attr-defined]
    side = AdminClient.side
    monkeypatch.setattr(AdminClient, "side", small)
    specs = shard_specs(TABLE, shards=2, bound=0, rule=Momentum(0.5))
    with local_shards(specs) as served, AdminClient(served) as other:
        for shard, state in enumerate(console.export()):
            other.restore(shard, state, keep_workers=True)
        copies = other.export(then_resume=True)
    for state, copied in zip(whole, copies, strict=True):
        assert sum(array.nbytes for array in state.arrays.values()) > 8 * 256
        assert copied.saved.ledger.cut == state.saved.ledger.cut == {"w": 3}
        assert copied.arrays.keys() == state.arrays.keys()
        for name, array in state.arrays.items():
            np.testing.assert_array_equal(copied.arrays[name], array)


def test_the_shards_process_measures_its_turns(cluster: Cluster, console: AdminClient) -> None:
    """Each push is in the histogram of apply times, each turn in that of the queues."""
    train(cluster, 5)
    for status in console.status():
        assert sum(status.apply_s.counts) == 5
        assert 0 < status.apply_s.total <= status.busy_s
        assert sum(status.queues.counts) == sum(status.parked.counts) >= 5
        assert status.queues.total >= 10


def test_settings_change_while_workers_train(cluster: Cluster, console: AdminClient) -> None:
    """A raised bound lets a worker continue that waits, a factor holds at the next update, and what
    is not given stays."""
    slow, fast = Client(cluster, worker="slow"), Client(cluster, worker="fast")
    fast.pull()
    fast.push(np.ones(TABLE.size, np.float32))
    with pytest.raises(ClockTimeout):
        fast.pull(timeout_s=0.2)
    assert console.set(staleness=2).bound == 2
    assert fast.pull().weights[1] == 0.0
    found = console.set(rate_factor=0.5)
    assert (found.bound, found.rate_factor, found.revision) == (2, 0.5, 2)
    assert [status.settings for status in console.status()] == [found, found]
    assert [status.rate for status in console.status()] == [0.5, 0.5]
    fast.push(np.zeros(TABLE.size, np.float32))
    fast.flush()
    assert console.read()[1] == 1.0 - 1.0 - 0.5
    assert console.set(staleness=None).bound is None
    for client in (slow, fast):
        client.close()


def test_settings_that_cannot_be_are_refused(console: AdminClient) -> None:
    """Before any shard is asked, and by each shard that cannot follow."""
    with pytest.raises(BadInput, match=r"^staleness: expected at least 0, got -1"):
        console.set(staleness=-1)
    for factor in (0, -1.0, float("nan"), 2e6):
        with pytest.raises(BadInput, match=r"^rate_factor: expected more than 0, up to 1e\+06"):
            console.set(rate_factor=factor)
    specs = shard_specs(TABLE, shards=2, bound=0, merge="round")
    with local_shards(specs) as rounds, AdminClient(rounds) as other:
        with pytest.raises(BadInput, match="expected 0, as pushes are merged in rounds, got 1"):
            other.set(staleness=1)
        assert [status.settings.revision for status in other.status()] == [0, 0]


def test_of_two_operators_one_is_first(cluster: Cluster, console: AdminClient) -> None:
    """Both have read the same settings: shard 0 obeys the first, and the other one is refused."""
    with AdminClient(cluster) as other:
        plan = admin_plans.change_settings(other.side, SettingsChange(rate_factor=2.0))
        asked = next(plan)
        assert isinstance(asked, Ask)
        read = other._ask_each(asked.queries)
        first = console.set(rate_factor=0.5)
        asked = plan.send(Answers(0.0, read))
        assert isinstance(asked, Ask)
        with pytest.raises(GiveUp, match="another operator has changed the settings"):
            plan.send(Answers(0.0, other._ask_each(asked.queries)))
        assert [status.settings for status in other.status()] == [first, first]


def test_a_shard_that_lacks_a_change_is_given_it(cluster: Cluster, console: AdminClient) -> None:
    """An operator died when it had asked shard 0 alone: another one completes the change."""
    plan = admin_plans.change_settings(console.side, SettingsChange(rate_factor=2.0))
    asked = next(plan)
    assert isinstance(asked, Ask)
    asked = plan.send(Answers(0.0, console._ask_each(asked.queries)))
    assert isinstance(asked, Ask)
    console._ask_each(asked.queries)
    first, second = (status.settings for status in console.status())
    assert (first.rate_factor, second.rate_factor) == (2.0, 1.0)
    console.spread(first)
    assert [status.settings for status in console.status()] == [first, first]


def test_a_change_waits_for_a_quiesce(cluster: Cluster, console: AdminClient) -> None:
    """It is made when the quiesce has ended, or is refused when that takes too long."""
    with AdminClient(cluster, patience_s=0.3) as other:
        console.quiesce(60.0)
        with pytest.raises(Retry, match="quiesced by an operator"):
            other.set(rate_factor=0.5)
        console.resume()
        console.quiesce(0.5)
    with AdminClient(cluster) as other:
        assert other.set(rate_factor=0.5).rate_factor == 0.5


def test_renewals_report_the_link() -> None:
    """The status has the host of each shard and worker, and the round trip that the system of the
    worker has measured."""
    specs = shard_specs(TABLE, shards=2, lease_s=1.0)
    with (
        local_shards(specs, TABLE.empty()) as cluster,
        AdminClient(cluster) as console,
        Client(cluster, worker="w", transport="tcp"),
    ):
        eventually(
            lambda: all(status.workers[0].rtt_s > 0 for status in console.status()),
            because="it renews its lease",
        )
        for status in console.status():
            assert status.host == status.workers[0].host == socket.gethostname()[:128]
            assert status.workers[0].rtt_s < 10
