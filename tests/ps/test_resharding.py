"""A job that is resharded while its workers train."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

import ps
from ps import AdminClient, Cluster, Compression
from ps.admin_client import carry_out
from ps.client import Client
from ps.job_spec import reshard_specs, shard_specs
from ps.launch.threads import local_shards
from ps.resharding import reshard
from ps.session import admin_plans
from shards.errors import GiveUp
from shards.live_settings import newest_settings
from shards.rules import SGD, Adam, Momentum, Rule
from shards.schedules import Fixed
from shards.shard_status import Standing
from shards.spec import ShardSpec
from tests.support.eventually import eventually
from tests.support.session_replies import Array

TABLE = ps.DenseTable("net", (ps.TensorSpec("a", (3000,)), ps.TensorSpec("b", (3, 100))))


class Home:
    """The job's present shards, and its operator, which can reshard it."""

    def __init__(self, stack: ExitStack, specs: Sequence[ShardSpec]) -> None:
        self._stack = stack
        self.first, self.console = self._settle(specs)
        self._specs = specs

    @property
    def cluster(self) -> Cluster:
        return self.console.cluster

    def move(self, shards: int) -> None:
        self._specs = reshard_specs(self._specs, shards)
        _, successor = self._settle(self._specs)
        reshard(self.console, successor)
        self.console = successor

    def await_pushes(self, further: int) -> None:
        """Wait until shard 0 has applied this number of further pushes."""
        reached = self.console.status()[0].version + further
        eventually(lambda: self.console.status()[0].version >= reached, because="workers train")

    def weights(self) -> Array:
        """The weights of the tensors, without the padding between them."""
        views = TABLE.views(self.console.read())
        return np.concatenate([view.ravel() for view in views.values()])

    def _settle(self, specs: Sequence[ShardSpec]) -> tuple[Cluster, AdminClient]:
        cluster = self._stack.enter_context(local_shards(specs))
        return cluster, self._stack.enter_context(AdminClient(cluster))


@contextmanager
def job(
    shards: int, rule: Rule | None = None, bound: int | None = None, lease_s: float = 30.0
) -> Iterator[Home]:
    """A fresh job at rate 1."""
    specs = shard_specs(
        TABLE,
        shards=shards,
        rule=rule,
        schedule=Fixed(base_rate=1.0),
        bound=bound,
        workers=3,
        lease_s=lease_s,
    )
    with ExitStack() as stack:
        yield Home(stack, specs)


def everywhere(value: float) -> Array:
    return np.full(TABLE.size, value, np.float32)


@pytest.mark.parametrize("shards", [(2, 3), (3, 1), (1, 4)])
@pytest.mark.parametrize("bound", [1, None])
def test_nothing_is_lost_or_doubled(shards: tuple[int, int], bound: int | None) -> None:
    """Three workers push before, between and after two reshards: the sum proves the count."""
    names = ("w0", "w1", "w2")
    joined, resharded = threading.Barrier(len(names) + 1), threading.Event()
    pushed: dict[str, int] = {}

    def work(cluster: Cluster, worker: str) -> None:
        with Client(cluster, worker=worker) as client:
            # Before the first push: later, workers that wait here would hold back, by the bound,
            # one that has started late.
            joined.wait(60)
            while not resharded.is_set():
                client.pull()
                client.push(everywhere(1.0))
            pushed[worker] = client.seq

    with job(shards[0], bound=bound) as home:
        threads = [threading.Thread(target=work, args=(home.first, name)) for name in names]
        for thread in threads:
            thread.start()
        try:
            joined.wait(60)
            home.await_pushes(10)
            for count in (shards[1], shards[0]):
                home.move(count)
                home.await_pushes(10)
        finally:
            resharded.set()
            for thread in threads:
                thread.join(120)
        assert pushed.keys() == set(names)
        total = sum(pushed.values())
        assert (home.weights() == -total).all()
        for status in home.console.status():
            assert status.version == total
            stands = {(w.worker, w.seq, w.standing) for w in status.workers}
            assert stands == {(name, pushed[name], Standing.LEFT) for name in names}


@pytest.mark.parametrize("rule", [SGD(), Momentum(momentum=0.5), Adam()], ids=str)
def test_a_move_changes_no_bit(rule: Rule) -> None:
    """One worker learns the same with reshards in between, including optimiser slots."""

    def learned(moves: dict[int, int]) -> Array:
        rng = np.random.default_rng(5)
        with job(2, rule) as home, Client(home.first, worker="w") as client:
            for step in range(8):
                if step in moves:
                    home.move(moves[step])
                weights = client.pull().weights
                drawn = rng.standard_normal(TABLE.size, np.float32)
                client.push(np.float32(1e-3) * (drawn + weights))
            client.flush()
            return home.weights()

    assert learned({3: 5, 6: 1}).tobytes() == learned({}).tobytes()


@pytest.mark.parametrize("push", ["int8", "topk:0.1", "4bit,zstd"])
def test_a_residual_goes_along(push: str) -> None:
    """Compressed pushes that no shard had applied arrive once, and their residual is kept."""
    how = Compression.parse(push)
    rng = np.random.default_rng(5)
    gradients = rng.standard_normal((6, TABLE.size), np.float32)
    with (
        job(2) as home,
        # The shards compile at the first push, for it was not announced.
        Client(home.first, worker="w", compression=how, in_flight=8, patience_s=120.0) as client,
    ):
        client.pull()
        home.console.quiesce(60)
        for gradient in gradients[:4]:
            client.push(gradient)
        assert client._current.session.pending_pushes == 4
        home.move(3)
        for gradient in gradients[4:]:
            client.push(gradient)
        client.flush()
        feedback = client._current.session.encoder.feedback
        assert feedback is not None
        views = TABLE.views(gradients.sum(0) - feedback.state()["net/error"])
        sent = np.concatenate([view.ravel() for view in views.values()])
        assert home.weights() == pytest.approx(-sent, abs=1e-4)


def test_a_worker_that_starts_late_is_sent_on() -> None:
    """A worker that only knows the first cluster finds the present one."""
    with job(2) as home:
        home.move(3)
        home.move(1)
        with Client(home.first, worker="late") as client:
            assert client.cluster == home.cluster
            client.pull()
            client.push(everywhere(1.0))
        assert (home.weights() == -1).all()


def test_what_was_asked_for_early_arrives() -> None:
    """A prefetched pull is requested again at the new shards, at the same clock."""
    with job(1, bound=4) as home, Client(home.first, worker="w") as client:
        client.pull()
        client.push(everywhere(1.0), prefetch=client.clock + 1)
        home.move(2)
        assert (TABLE.views(client.pull().weights.copy())["a"] == -1).all()
        client.push(everywhere(1.0))
        client.flush()
        assert (home.weights() == -2).all()


def test_a_standstill_ends_by_itself() -> None:
    """A dead operator does not stop the workers; one that is too late changes nothing."""
    with job(2) as home, Client(home.first, worker="w") as client:
        client.pull()
        cut = home.console.quiesce(0.5)
        client.push(everywhere(1.0))
        client.flush()
        with pytest.raises(GiveUp, match="the old shards resumed before"):
            home.console.hand_over(home.cluster, cut)
        home.console.resume()
        client.push(everywhere(1.0))
        client.flush()
        assert (home.weights() == -2).all()


def test_changed_settings_move_with_the_job() -> None:
    """New shards train with them, and a change that the new shards would lack ends the move."""
    with job(2, bound=1) as home, Client(home.first, worker="w") as client:
        changed = home.console.set(staleness=3, rate_factor=0.5)
        home.move(3)
        assert [status.settings for status in home.console.status()] == [changed] * 3
        client.pull()
        client.push(everywhere(1.0))
        client.flush()
        assert (home.weights() == -0.5).all()
        states = export_after_a_quiesce(home.console)
        home.console.set(rate_factor=2.0)
        cuts = [state.saved.ledger.cut for state in states]
        plan = admin_plans.hand_over(
            home.console.side, home.cluster.encode(), cuts, newest_settings(states)
        )
        with pytest.raises(GiveUp, match="an operator has changed the job's settings meanwhile"):
            carry_out(plan, home.console)
        assert home.console.status()[0].rate == 2.0


def export_after_a_quiesce(console: AdminClient) -> list[ps.ShardState]:
    """What an operator has of the shards, whose quiesce has ended since."""
    console.quiesce(60.0)
    states = console.export()
    console.resume()
    return states


def test_the_shards_of_a_standstill_agree() -> None:
    """Their exports form one cut: the same pushes of every worker at each of them."""
    ended, begun = threading.Event(), threading.Barrier(3)

    def work(cluster: Cluster, worker: str) -> None:
        with Client(cluster, worker=worker) as client:
            client.pull()
            begun.wait(60)
            while not ended.is_set():
                client.push(everywhere(1.0))

    with job(3) as home:
        threads = [threading.Thread(target=work, args=(home.first, f"w{n}")) for n in range(2)]
        for thread in threads:
            thread.start()
        try:
            begun.wait(60)  # a shard knows of a worker before it has pushed anything
            for _ in range(5):
                cut = home.console.quiesce(60)
                states = home.console.export()
                home.console.resume()
                assert [state.saved.ledger.cut for state in states] == [cut] * 3
                assert {state.saved.version for state in states} == {sum(cut.values())}
        finally:
            ended.set()
            for thread in threads:
                thread.join(60)


def test_a_push_that_died_half_way_is_never_applied_twice() -> None:
    """Of a dead worker's last push one shard has its part and one lacks it: the next life continues
    after it, and no part counts twice.
    """
    with job(2, lease_s=4.0) as home:
        client = Client(home.first, worker="w")
        client.pull()
        client.push(everywhere(1.0))
        client.flush()
        # The next one reaches only shard 0.
        links = client._current.links
        whole, links.send_together = links.send_together, lambda *_: None  # type: ignore[method-assign]
        client.push(everywhere(1.0))
        for shard, message, frames in list(client._current.session.outstanding()):
            if shard == 0:
                whole(shard, [(message, frames)])
        eventually(lambda: home.console.status()[0].version == 2, because="shard 0 applies it")
        client.abort()
        home.move(3)
        with Client(home.cluster, worker="w", incarnation=1) as successor:
            assert (successor.seq, successor.step) == (2, 2)
        assert set(home.weights()) == {-1.0, -2.0}


def test_a_residual_is_kept_after_a_move(tmp_path: Path) -> None:
    """The residual is written for snapshots of the new shards, too."""
    compression = Compression.parse("topk:0.01", "none")
    with job(2) as home:
        with Client(home.first, worker="w", compression=compression, keep=tmp_path) as client:
            client.pull()
            client.push(everywhere(1.0))
            client.flush()
            home.move(3)
            client.pull()
            client.push(everywhere(1.0))
        notes = [path.name for path in tmp_path.rglob("w.0.2.*")]
        assert len(notes) == 2, "its arrays, and what they are"
