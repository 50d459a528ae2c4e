"""The SDK's arguments: names, numbers, lists and paths, wherever they are natural to pass."""

from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest

import ps
from ps.client import Client
from ps.job_spec import expect_compression, shard_specs
from ps.launch.threads import local_shards
from shards.aggregation import EACH

TABLE = ps.DenseTable("given", [ps.TensorSpec("w", 1000)])  # type: ignore[arg-type]


def test_natural_values_become_the_exact_ones() -> None:
    """A name is a rule, a number a rate or a decay, inf no bound, a text a compression."""
    (given,) = shard_specs(
        TABLE,
        rule="Adam",
        schedule=0.1,
        decay=0.5,
        bound=float("inf"),
        merge="each",
    )
    (exact,) = shard_specs(
        TABLE,
        rule=ps.Adam(),
        schedule=ps.Fixed(base_rate=0.1),
        decay=ps.Decay(0.5),
        bound=None,
        merge=EACH,
    )
    (given,) = expect_compression([given], "int8")
    (exact,) = expect_compression([exact], ps.Compression.parse("int8"))
    for field in given.__struct_fields__:
        if field != "job":
            assert getattr(given, field) == getattr(exact, field), field
    assert ps.DenseTable("given", (ps.TensorSpec("w", (1000,)),)) == TABLE


@pytest.mark.parametrize("of", [str, Path])
def test_a_path_is_a_cluster(of: Callable[[Path], str | Path], tmp_path: Path) -> None:
    """A client and an admin client find the job by a file's path, as text or as a Path."""
    path = of(tmp_path / "cluster.json")
    with local_shards(shard_specs(TABLE)) as cluster:
        cluster.save(path)
        assert ps.Cluster.load(path) == cluster
        with Client(path, worker="w") as client, ps.AdminClient(path) as console:
            np.testing.assert_array_equal(client.pull().weights, console.read())


def test_lists_are_arrays() -> None:
    """Weights and gradients may be lists of numbers."""
    ones = [1.0] * TABLE.size
    specs = shard_specs(TABLE, schedule=1.0)
    with (
        local_shards(specs, ones) as cluster,  # type: ignore[arg-type]
        Client(cluster, worker="w", compression="fp16", link="rtt=1ms") as client,
    ):
        client.pull()
        client.push(ones)
        client.flush()
        assert not client.pull().weights[:1000].any()


@pytest.mark.parametrize("transport", ["tcp", "auto"])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_pull_that_is_the_callers_own(shards: int, transport: str) -> None:
    """`pull` returns a read-only array, `pull(copy=True)` a writable one, and writing it changes no
    other weights.
    """
    with (
        local_shards(shard_specs(TABLE, shards=shards)) as cluster,
        Client(cluster, worker="w", transport=transport) as client,
    ):
        assert not client.pull().weights.flags.writeable
        own = client.pull(copy=True)
        assert own.weights.flags.writeable
        assert own.weights.flags.c_contiguous
        own.weights[:] = 5
        client.push(client.new_gradient())  # from the version that was copied
        client.flush()
        assert not client.pull().weights.any()


@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_an_empty_gradient_is_zero(transport: str) -> None:
    """Also where its memory has held another one; without `zeroed` the content is arbitrary."""
    with (
        local_shards(shard_specs(TABLE)) as cluster,
        Client(cluster, worker="w", transport=transport) as client,
    ):
        client.pull()
        for _ in range(20):
            gradient = client.new_gradient()
            assert not gradient.any()
            gradient[:] = 7
            client.push(gradient)
            del gradient
        assert client.new_gradient(zeroed=False).shape == (TABLE.size,)


def test_a_client_in_another_thread() -> None:
    """A second thread that calls while the first waits is refused at once, in one line; the first
    continues, and the second may call once the first has returned.
    """
    specs = shard_specs(TABLE, bound=0, workers=2)
    with (
        local_shards(specs) as cluster,
        Client(cluster, worker="w0") as client,
        Client(cluster, worker="w1") as other,
    ):
        client.pull()
        client.push(client.new_gradient())
        inside, pulled = Event(), Event()

        def wait_at_the_bound() -> None:
            inside.set()
            client.pull()  # until w1 has pushed as well
            pulled.set()

        thread = Thread(target=wait_at_the_bound)
        thread.start()
        inside.wait()
        text = "worker w0: it is in use by another thread; make one for each thread"
        calls: tuple[Callable[[], object], ...] = (
            client.pull,
            client.flush,
            client.close,
            lambda: client.prefetch(3),
            lambda: client.push([0.0] * TABLE.size),
        )
        while client._user.acquire(blocking=False):  # until the thread is in the call
            client._user.release()
        for call in calls:
            with pytest.raises(ps.BadInput, match=f"^{text}$"):
                call()
        other.pull()
        other.push(other.new_gradient())
        other.flush()
        thread.join()
        assert pulled.is_set()
        client.push(client.new_gradient())
        client.flush()
        assert client.seq == 2


def test_everything_is_exported() -> None:
    """Rules, schedules, errors and all else that an ordinary program needs are in `ps` itself."""
    from shards import errors, rules, schedules

    wanted = [
        *rules.RULES.values(),
        *schedules.SCHEDULES.values(),
        ps.Guard,
        ps.Each,
        ps.Round,
        ps.Buffer,
    ]
    wanted += [one for one in vars(errors).values() if isinstance(one, type)]
    for one in wanted:
        assert getattr(ps, one.__name__) is one
        assert one.__name__ in ps.__all__
    assert sorted(set(ps.__all__)) == sorted(ps.__all__)
    assert all(hasattr(ps, name) for name in ps.__all__)
