"""The blocking client against real shards over real sockets: the sum of its pushes."""

import gc
import threading
from collections.abc import Callable

import numpy as np
import pytest

import ps
from ps import AdminClient, Cluster
from ps.client import Client
from ps.job_spec import shard_specs
from ps.launch.threads import local_shards
from shards.aggregation import ROUND
from shards.errors import BadInput
from shards.rules import SGD, Momentum, Rule
from shards.schedules import Fixed
from shards.shard_status import Standing
from tests.support.eventually import eventually
from tests.support.two_shards import TABLE, UNIT, everywhere, shards_for


def in_threads(workers: int, work: Callable[[int], None]) -> None:
    """Run `work` for each worker in a thread of its own; raise what any of them raised."""
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=run, args=(n,)) for n in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(250)
    assert not failures, failures
    assert not any(thread.is_alive() for thread in threads), "it takes too long"


@pytest.mark.parametrize("bound", [0, 2, None])
def test_every_push_counts_once(bound: int | None) -> None:
    """Four threads push integers; the sum proves the count, and no clock is ahead by more than the
    bound and one.
    """
    workers, steps = 4, 40
    with shards_for(bound=bound) as cluster, AdminClient(cluster) as console:
        together = threading.Barrier(workers)

        def work(number: int) -> None:
            # Nothing is repeated because the machine was busy.
            with Client(cluster, worker=f"w{number}", in_flight=3, retry_s=10.0) as client:
                together.wait()
                for _ in range(steps):
                    client.pull()
                    client.push(everywhere(number + 1), samples=1)

        in_threads(workers, work)
        wanted = -steps * sum(range(1, workers + 1))
        assert set(console.read()[:700]) == {wanted}
        for status, rows in zip(console.status(), console.records(), strict=True):
            assert (status.version, status.pushes, status.duplicates) == (160, 160, 0)
            assert (status.steps, status.samples) == (160, 160)
            assert {one.standing for one in status.workers} == {Standing.LEFT}
            assert [one.seq for one in status.workers] == [steps] * workers
            for one in range(workers):
                mine = rows[rows["worker"] == f"w{one}".encode()]
                assert mine["seq"].tolist() == list(range(1, steps + 1))
            if bound is not None:
                assert 1 <= status.max_clock_gap <= bound + 1
                assert rows["clock_gap"].max() == status.max_clock_gap


def test_rounds_of_four_workers() -> None:
    """Synchronous training applies the mean of four pushes as one version, forty times."""
    with shards_for(bound=0, merge=ROUND) as cluster, AdminClient(cluster) as console:
        together = threading.Barrier(4)

        def work(number: int) -> None:
            with Client(cluster, worker=f"w{number}") as client:
                together.wait()
                for step in range(40):
                    assert set(client.pull().weights[:700]) == {-2.5 * step}
                    client.push(everywhere(number + 1))

        in_threads(4, work)
        assert [status.version for status in console.status()] == [40, 40]
        assert set(console.read()[:700]) == {-100.0}


def test_no_read_is_torn() -> None:
    """Each pushed array is constant, so every shard's part of every pull is constant, too."""
    table = ps.DenseTable("big", (ps.TensorSpec("w", (204_800,)),))
    done = threading.Event()
    with local_shards(shard_specs(table, shards=2, schedule=UNIT)) as cluster:

        def push_on(client: Client) -> None:
            versions = client.pull().versions
            while not done.is_set():
                gradient = client.new_gradient()
                gradient[:] = 1
                client.push(gradient, read_versions=versions)

        def read(client: Client) -> None:
            held, pulls = [client.pull() for _ in range(3)], 0
            while (
                pulls < 100 or min(held[-1].versions) < 100
            ):  # until enough has been pushed meanwhile
                held, pulls = [*held[1:], client.pull()], pulls + 1
                for replica in held:
                    for shard, version in enumerate(replica.versions):
                        part = cluster.map.cut(replica.weights, shard)
                        assert part.min() == part.max() == -version

        def work(number: int) -> None:
            try:
                with Client(cluster, worker=f"w{number}", in_flight=4) as client:
                    push_on(client) if number < 2 else read(client)
            finally:
                done.set()

        in_threads(3, work)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("rule", [SGD(), Momentum(0.9)], ids=lambda rule: type(rule).__name__)
def test_one_worker_equals_a_serial_loop(rule: Rule, shards: int) -> None:
    """With bound 0 the weights are those of a serial NumPy loop, bit for bit, for any sharding."""
    rng = np.random.default_rng(17)
    start, scale = (rng.standard_normal(TABLE.size, np.float32) for _ in range(2))
    rate, mu = np.float32(0.05), np.float32(0.9)
    weights, history = start.copy(), np.zeros_like(start)
    options = {"shards": shards, "rule": rule, "schedule": Fixed(base_rate=0.05), "bound": 0}
    with shards_for(start, **options) as cluster, Client(cluster, worker="w") as client:
        for _ in range(30):
            replica = client.pull()
            for name, view in TABLE.views(replica.weights).items():
                np.testing.assert_array_equal(view, TABLE.views(weights)[name])
            client.push(scale * np.tanh(replica.weights))
            gradient = scale * np.tanh(weights)
            if isinstance(rule, Momentum):
                history = mu * history + rate * gradient
                weights = weights - history
            else:
                weights = weights - rate * gradient
        assert replica.versions == (29,) * shards


def test_prefetched_weights_are_as_fresh_as_the_bound_demands() -> None:
    """Requested before the last push, they hold every push but that one; with no other worker, the
    requested clock decides, and a prefetch that is not taken is forgotten.
    """
    with shards_for(bound=1) as cluster, Client(cluster, worker="w") as client:
        replica = client.pull()
        for step in range(1, 10):
            client.prefetch(step)
            client.push(everywhere(1), read_versions=replica.versions)
            replica = client.pull()
            assert set(replica.weights[:700]) <= {-float(step), 1.0 - step}
        client.prefetch(client.clock)
        assert set(client.pull(client.clock - 1).weights[:700]) == {-9.0}
        assert set(client.pull().weights[:700]) == {-9.0}


def test_another_life_goes_on() -> None:
    """It learns the last applied push of the one before, and pushes nothing twice; that one is
    fenced.
    """
    with shards_for() as cluster, AdminClient(cluster) as console:
        first = Client(cluster, worker="w", incarnation=0)
        first.pull()
        for _ in range(3):
            first.push(everywhere(1), steps=2)
        first.flush()
        first.abort()
        with Client(cluster, worker="w", incarnation=1) as second:
            assert (second.seq, second.step, second.clock) == (3, 6, 6)
            second.pull()
            second.push(everywhere(1))
        assert set(console.read()[:700]) == {-4.0}
        assert [one.takeovers for status in console.status() for one in status.workers] == [1, 1]


def test_weights_that_nobody_took_leave_nothing() -> None:
    """Their answers still measure the link, and no memory of them is kept."""
    with shards_for(bound=None) as cluster, Client(cluster, worker="w") as client:
        for clock in range(0, 10, 2):
            client.prefetch(clock)
            client.pull(clock + 1)
        client.pull(11)
        assert client._pacing.pulls._flying == {}
        client.pull(12)
        assert client._pacing.pulls._durations, "it was alone in flight"


def test_numbers_may_be_numpys() -> None:
    """Wherever a number is expected; anything else is refused before anything is sent."""
    with shards_for(bound=None) as cluster, AdminClient(cluster) as console:
        with ps.connect(cluster).worker("w", prefetch=np.int64(1)) as me:  # type: ignore[arg-type]
            with me.step(samples=np.int64(3)) as step:  # type: ignore[arg-type]
                step.push(step.pull(timeout_s=np.float32(60)))  # type: ignore[arg-type]
                step.loss = np.float32(0.5)  # type: ignore[assignment]
            with pytest.raises(BadInput, match=r"samples: expected a whole number, got 2\.5"):
                me.step(samples=2.5)  # type: ignore[arg-type]
            me.flush()
            assert (me.seq, type(me.clock)) == (1, int)
        assert [(one.pushes, one.samples) for one in console.status()] == [(1, 3), (1, 3)]


def test_more_in_flight_than_shared_memory_has_slots() -> None:
    """The other gradients are in ordinary memory."""
    with shards_for() as cluster, Client(cluster, worker="w", in_flight=300) as client:
        client.pull()
        gradients = [client.new_gradient() for _ in range(270)]
        for gradient in gradients:
            gradient[:] = 1
            client.push(gradient)
        assert client.pull().versions == (270, 270)


def test_the_time_of_a_flush_is_not_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it waits the client is listening, and the caller's time counts from its return."""
    with shards_for() as cluster, Client(cluster, worker="w") as client:
        client.pull()
        client.push(everywhere(1))
        heard, left_at = [], client._pacing._left_at
        monkeypatch.setattr(client, "_await_room", lambda _: heard.append(client._pacing.listens))
        client.flush()
        assert (heard, client._pacing.listens) == ([True], False)
        assert client._pacing._left_at > left_at
        monkeypatch.undo()


def leave_when_waited_for(cluster: Cluster, client: Client) -> None:
    with AdminClient(cluster) as console:
        eventually(
            lambda: all(any(one.waiting for one in status.workers) for status in console.status()),
            because="a worker waits at every shard's gate",
        )
    client.close()


def test_a_worker_that_leaves_frees_the_others() -> None:
    """A worker that waits at the bound is answered as soon as the slowest leaves."""
    with shards_for(bound=0) as cluster, Client(cluster, worker="fast") as fast:
        slow = Client(cluster, worker="slow")
        fast.pull()
        fast.push(everywhere(1))
        leaving = threading.Thread(target=leave_when_waited_for, args=(cluster, slow))
        leaving.start()
        replica = fast.pull()
        leaving.join()
        assert replica.versions == (1, 1)
        assert fast.times.waited_s > 0


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_worker_that_dies_frees_the_others(forgotten: bool) -> None:
    """When its lease runs out, and only then; also for a client that is dropped without `close`."""
    with shards_for(bound=0, lease_s=4.0) as cluster, Client(cluster, worker="fast") as fast:
        slow = Client(cluster, worker="slow")
        fast.pull()
        fast.push(everywhere(1))
        if forgotten:
            cycle = [slow]
            cycle.append(cycle)  # type: ignore[arg-type]  # as a traceback would
            del slow, cycle
            gc.collect()
        else:
            slow.abort()
        assert fast.pull().versions == (1, 1)
        with AdminClient(cluster) as console:
            standing = {one.worker: one.standing for one in console.status()[0].workers}
        assert standing == {"fast": Standing.ACTIVE, "slow": Standing.EXPIRED}
