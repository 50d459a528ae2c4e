"""The SDK's arguments: names, numbers, lists and paths, wherever they are natural to pass."""

from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest

import ps
from ps.client import Client
from ps.job_spec import expect_compression, shard_specs
from ps.launch.threads import local_shards
from shards.aggregation import EACH
from shards.argument_checks import check_names

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
    """The weights that a job begins with may be lists of numbers."""
    ones = [1.0] * TABLE.size
    specs = shard_specs(TABLE, schedule=1.0)
    with (
        local_shards(specs, ones) as cluster,  # type: ignore[arg-type]
        Client(cluster, worker="w", compression="fp16", link="rtt=1ms") as client,
    ):
        client.pull()
        client.push(np.ones(TABLE.size, np.float32))
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
        inside, pulled, gradient = Event(), Event(), client.new_gradient()

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
            lambda: client.push(gradient),
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


def _itself() -> dict[str, object]:
    params: dict[str, object] = {"w": np.zeros(3)}
    params["me"] = params
    return params


class SparseTensor:
    """A PyTorch tensor as `Embedding(sparse=True)` makes it, as far as the SDK looks at it."""

    layout = "torch.sparse_coo"

    def detach(self) -> "SparseTensor":
        return self

    def cpu(self) -> "SparseTensor":
        return self


MASKED = np.ma.masked_array([1.0, 2.0, 3.0], [False, True, False])
OF_A_TABLE = "(a table has it: ps.Dense.like(params, rate=...))"
ANY_ADDRESS = "expected an address of this machine, or 0.0.0.0 for all, got"


@pytest.mark.parametrize(
    ("use", "line"),
    [
        (
            lambda: ps.Adam(lr=0.1),  # type: ignore[call-arg]
            f"Adam: expected beta1, beta2, delta, got 'lr' {OF_A_TABLE}",
        ),
        (
            lambda: ps.AdamW(bata1=0.1),  # type: ignore[call-arg]
            "AdamW: expected beta1, or another known name, got 'bata1'",
        ),
        (
            lambda: check_names("start", ["q"], [f"{kind}_{n}" for kind in "ab" for n in range(9)]),
            (
                "start: expected a_0, a_1, a_2, a_3, a_4, a_5, a_6, a_7 or one of 10 more, which"
                " help() lists, got 'q'"
            ),
        ),
        (
            lambda: ps.Step(base_rate=0.1, gamma=0.5),  # type: ignore[call-arg]
            "Step: expected base_rate, gamma, step_size; Missing required argument 'step_size'",
        ),
        (
            lambda: ps.Guard(norm=1.0),  # type: ignore[call-arg]
            "Guard: expected max_norm, or another known name, got 'norm'",
        ),
        (
            lambda: ps.Dense.zeros({"w": 10**12}),
            (
                "shapes: expected a table that fits into memory, got 1,000,000,000,000 floats,"
                " 4,000 GB"
            ),
        ),
        (
            lambda: ps.Dense.like(_itself()),
            (
                "params: expected nested dicts, lists and tuples, none of which holds itself, got a"
                " dict of 2"
            ),
        ),
        (
            lambda: ps.Dense.like({"w": MASKED}),
            (
                "params: w: expected an array without a mask, got a masked one (give it other"
                " values there, as value.filled(0) does)"
            ),
        ),
        (
            lambda: ps.Dense.like({"w": SparseTensor()}),
            (
                "params: w: expected a dense tensor, got a sparse one (make the layer with"
                " sparse=False, or push gradient.to_dense())"
            ),
        ),
        (
            lambda: ps.connect("127.0.0.1:5555"),
            (
                "connect: expected the address of a shard or the path of a cluster file, got"
                " '127.0.0.1:5555' (perhaps tcp://127.0.0.1:5555?)"
            ),
        ),
        (
            lambda: ps.connect("127.0.0.1:5555", token="job-0"),
            (
                "token: expected none with a cluster file, which has its own, got one; the address"
                " of a shard begins with tcp:// (perhaps tcp://127.0.0.1:5555?)"
            ),
        ),
        (
            ps.start({"w": [0.0]}, host="no.host.example").__enter__,
            f"host: {ANY_ADDRESS} 'no.host.example', which does not resolve",
        ),
        (
            ps.start({"w": [0.0]}, host="192.0.2.1").__enter__,
            "host: expected an IPv4 address of this machine, or 0.0.0.0 for all, got '192.0.2.1'",
        ),
    ],
)
def test_what_users_try_is_refused_in_one_line(use: Callable[[], object], line: str) -> None:
    """A wrong argument names itself, what is known or expected, and the remedy; nothing starts."""
    with pytest.raises(ps.BadInput) as caught:
        use()
    assert str(caught.value) == line


def test_a_name_of_this_machine_is_a_host() -> None:
    """`localhost` is an address to listen on, which ZeroMQ alone would take for a device."""
    with ps.start({"w": [1.0]}, host="localhost") as job:
        assert job.address.startswith("tcp://127.0.0.1:")


def test_an_array_with_an_empty_mask_is_an_array() -> None:
    """A mask that hides nothing is no reason to refuse a gradient."""
    with ps.local(ps.Dense.zeros({"w": 3}, rate=1.0)) as job, job.worker("w0") as me:
        with me.step() as step:
            step.push({"w": np.ma.masked_array([1.0, 2.0, 3.0], [False] * 3)})
        np.testing.assert_array_equal(me.pull()["w"], [-1, -2, -3])


@pytest.mark.parametrize("shards", [1, 2])
def test_a_gradient_that_is_not_finite_names_its_array(shards: int) -> None:
    """The step that is given NaN, or more than a float32 holds, pushes nothing; the next may."""
    params = {"net": {"w": np.zeros(500), "b": np.zeros(3)}, "head": [np.zeros(500)]}
    with ps.local(ps.Dense.like(params), shards=shards) as job, job.worker("w0") as me:
        for value, got in ((np.nan, "nan"), (1e39, "inf")):
            gradient: Any = {"net": {"w": np.ones(500), "b": np.ones(3)}, "head": [np.ones(500)]}
            gradient["net"]["b"][2] = value
            with pytest.raises(ps.BadInput) as caught, me.step() as step:
                step.push(gradient)
            assert str(caught.value) == (
                f"table weights: net.b: expected finite values, got {got} at 2"
            )
            assert (caught.value.table, caught.value.worker) == ("weights", "w0")
        diverged = pytest.raises(ps.BadInput, match=r"got nan at 2; is the rate too high\?$")
        with diverged, me.step() as step:
            step.gradients()["net"]["b"][2] = np.nan
            step.loss = float("inf")
        with me.step():
            pass
        assert me.seq == 1
