"""Rows of sparse tables through the SDK: gather, scatter, readers, reshards, what is refused."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ps
from shards.first_values import Uniform
from shards.rules import RowAdagrad
from shards.tables import SparseTable
from tests.support.row_oracle import RowOracle

DIM, RATE, SEED = 3, 0.5, 7
IDS = np.array([5, -1, 5, 2**62, 9, -1, 77], np.int64)


def tables(**options: Any) -> ps.Tables:
    user = ps.Sparse(
        DIM, rule=ps.RowAdagrad(), rate=RATE, init=ps.Uniform(0.1), seed=SEED, **options
    )
    return ps.Tables(net=ps.Dense.zeros({"w": (4,)}, rate=RATE), user=user)


def oracle() -> RowOracle:
    return RowOracle(SparseTable("user", DIM, Uniform(0.1), SEED), RowAdagrad())


def push_to(rows: RowOracle, ids: np.ndarray[Any, Any], gradient: np.ndarray[Any, Any]) -> None:
    """Push the sums of the rows of each id to the oracle."""
    distinct = np.unique(ids.view(np.uint64))
    sums = [gradient[ids.view(np.uint64) == number].sum(0, np.float64) for number in distinct]
    rows.push(distinct, np.array(sums, np.float32), RATE)


def gradient_of(seed: int, count: int = len(IDS)) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal((count, DIM)).astype(np.float32)


@pytest.fixture(scope="module", params=[(1, "tcp"), (3, "tcp"), (2, "ipc"), (2, "auto")], ids=str)
def job(request: pytest.FixtureRequest) -> Iterator[ps.Job]:
    shards, transport = request.param
    with ps.local(tables(), shards=shards, transport=transport) as job:
        yield job


def test_rows_and_weights_of_one_step(job: ps.Job) -> None:
    """Each step reads and changes rows in the order of its ids, with a dense table, as one push."""
    rows = oracle()
    with job.worker("w0") as me:
        for seed in range(3):
            gradient = gradient_of(seed)
            with me.step(samples=7, gather={"user": IDS}) as step:
                weights = step.pull("net")["w"]
                assert np.array_equal(step.rows("user"), rows.gather(IDS.view(np.uint64)))
                assert weights.tolist() == [-RATE * seed] * 4
                step.push("net", {"w": np.ones(4, np.float32)})
                step.scatter("user", gradient)
            push_to(rows, IDS, gradient)
            ack = step.ack.result()
            assert (ack.seq, ack.duplicate) == (seed + 1, False)
    with ps.reader(job) as reader:
        assert np.array_equal(reader.gather("user", IDS), rows.gather(IDS.view(np.uint64)))
        assert reader.pull()["w"].tolist() == [-RATE * 3] * 4
        unknown = np.array([5, 10**12], np.uint64)
        zero = reader.gather("user", unknown, missing="zero")
        assert zero[1].tolist() == [0] * DIM
        assert np.array_equal(zero[0], rows.rows[5].weights)
        init = reader.gather("user", unknown, missing="init", consistent=True)
        assert np.array_equal(init, rows.gather(unknown))
        with pytest.raises(ps.BadInput, match="1 of 2 ids without one, such as 1000000000000"):
            reader.gather("user", unknown, missing="error")
        assert reader.gather("user", []).shape == (0, DIM)


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        (np.arange(3, dtype=np.int32), "expected int64 or uint64 of shape (n,), got int32"),
        (np.zeros(3), "got float64 of shape (3,)"),
        (np.zeros((3, 2), np.int64), "got int64 of shape (3, 2)"),
        ([[1, 2], [3]], "gather: user: expected int64 or uint64 of shape (n,)"),
        ("abc", "gather: user: expected int64 or uint64 of shape (n,)"),
        (np.ma.array([1, 2], mask=[False, True]), "gather: user: expected ids without a mask"),
        ([2**64], "expected ids from -9223372036854775808 to 18446744073709551615, got 1844674"),
        ([1, 2.5], "got float64 of shape (2,)"),
    ],
)
def test_ids_that_are_none(job: ps.Job, ids: object, text: str) -> None:
    """Ids of another dtype or shape are refused in one line, before anything is sent."""
    with job.worker("w1") as me, pytest.raises(ps.BadInput) as raised:
        me.step(gather={"user": ids})
    assert text in str(raised.value)


@pytest.mark.parametrize(
    ("gradient", "text"),
    [
        (gradient_of(0, 3), "expected shape (7, 3), a row for each id, got shape (3, 3)"),
        (np.full((7, 3), np.nan, np.float32), "got NaN or infinity in the row of id 5"),
        (np.full((7, 3), -np.inf, np.float32), "got NaN or infinity in the row of id 5"),
        (np.full((7, 3), 3e38, np.float32), "got NaN or infinity in the row of id 5"),
        (np.full((7, 3), 1e300), "got NaN or infinity in the row of id 5"),
        (np.ones((7, 3), np.int64), "rows of table user: expected an array of floats, got int64"),
        (np.ma.array(gradient_of(0), mask=True), "rows of table user: expected an array without a"),
        ([[1.0, 2.0, 3.0], [4.0]], "rows of table user: expected an array of floats, got a list"),
    ],
)
def test_gradients_that_are_none(job: ps.Job, gradient: Any, text: str) -> None:
    """Rows of another number, of no floats, or not finite are refused; the step can end."""
    with job.worker("w2") as me:
        with me.step(gather={"user": IDS}) as step, pytest.raises(ps.BadInput) as raised:
            step.scatter("user", gradient)
        assert text in str(raised.value)
        step.ack.result()


def test_steps_of_no_ids_and_of_no_gradients(job: ps.Job) -> None:
    """Empty ids have no rows, gathered ids need no gradient, and each step is one push."""
    ids = np.array([2**63, 12], np.uint64)
    with job.worker("w4") as me, job.reader() as reader:
        for number, empty in enumerate(([], np.zeros(0, np.int64), np.zeros(0, np.uint64)), 1):
            with me.step(samples=0, gather={"user": empty}) as step:
                assert step.rows("user").shape == (0, DIM)
                step.scatter("user", [] if number == 1 else np.zeros((0, DIM), np.float32))
            assert step.ack.result().seq == number
        with me.step(gather={"user": ids}) as step:
            step.rows("user")
        assert step.ack.result().seq == 4
        with pytest.raises(ps.BadInput, match="2 of 2 ids without one, such as 12"):
            reader.gather("user", ids, missing="error")
        with me.step(gather={"user": ids}) as step:
            step.scatter("user", np.ones((2, DIM), np.float32))
            with pytest.raises(ps.BadInput, match="expected one scatter in a step, got a second"):
                step.scatter("user", np.ones((2, DIM), np.float32))
        assert step.ack.result().seq == 5
        pushed = oracle()
        push_to(pushed, ids, np.ones((2, DIM), np.float32))
        assert np.array_equal(reader.gather("user", ids), pushed.gather(ids))


def test_rows_are_not_weights(job: ps.Job) -> None:
    """A sparse table is gathered, not pulled; a dense one pulled, not gathered; each says so."""
    with job.worker("w3") as me:
        with me.step() as step:
            with pytest.raises(ps.BadInput, match="user is sparse: gather and scatter its rows"):
                step.pull("user")
            with pytest.raises(ps.BadInput, match="a step with its ids"):
                step.rows("user")
        with pytest.raises(ps.BadInput, match="gather: expected one of the sparse tables user, go"):
            me.step(gather={"net": IDS})


def test_rows_where_there_are_no_weights_and_weights_where_no_rows() -> None:
    """A call that suits no table of the job says which tables there are."""
    alone = "table: expected a job with a dense table, got one with rows alone (weights); gather a"
    with (
        ps.local(ps.Sparse(DIM)) as job,
        job.worker("w0") as me,
        job.reader() as reader,
        me.step() as step,
    ):
        for call in (
            step.pull,
            step.gradients,
            lambda: step.push(np.ones(3, np.float32)),
            lambda: step.push("nope", np.ones(3, np.float32)),
            me.pull,
            reader.pull,
            job.read,
        ):
            with pytest.raises(ps.BadInput) as raised:
                call()
            assert str(raised.value).startswith(alone)
        with pytest.raises(ps.BadInput, match="weights is sparse: gather and scatter its rows"):
            step.pull("weights")
    with (
        ps.local({"w": np.ones(2)}) as job,
        job.worker("w0") as me,
        pytest.raises(ps.BadInput, match="gather: expected a job with a sparse table, got 'weigh"),
    ):
        me.step(gather={"weights": [1]})


def test_ids_on_both_sides_of_the_sign() -> None:
    """A list of ids for which NumPy has no common dtype is taken exactly, as 64 bits each."""
    with ps.local(tables(), shards=2) as job, job.worker("w0") as me, job.reader() as reader:
        with me.step(gather={"user": [1, 2**63 + 1, -1]}) as step:
            step.scatter("user", gradient_of(0, 3).astype(np.float64))
        step.ack.result()
        rows = oracle()
        ids = np.array([1, 2**63 + 1, 2**64 - 1], np.uint64)
        push_to(rows, ids, gradient_of(0, 3))
        stored = reader.gather("user", [2**64 - 1, 2**63 + 1, 1], missing="error")
        assert np.array_equal(stored, rows.gather(ids[::-1]))


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_gradients_of_another_precision(job: ps.Job, dtype: str) -> None:
    """Gradients of rows are taken in any precision, as those of weights are."""
    ids, gradient = [10**6 + len(dtype), 10**6], np.full((2, DIM), 0.5, dtype)
    with job.worker(f"w-{dtype}") as me:
        with me.step(gather={"user": ids}) as step:
            before = step.rows("user")
            step.scatter("user", gradient)
            step.push("net", {"w": np.zeros(4, dtype)})
        with me.step(gather={"user": ids}) as step:
            assert (step.rows("user") < before).all()


def test_what_a_reader_and_a_status_say_of_rows() -> None:
    """A reader has the versions that its rows were of, and a status the rows of each shard."""
    with ps.local(tables(), shards=3) as job, job.worker("w0") as me, job.reader() as reader:
        assert [status.rows for status in job.status()] == [{"user": 0}] * 3
        with me.step(gather={"user": np.arange(30)}) as step:
            step.scatter("user", np.ones((30, DIM), np.float32))
        step.ack.result()
        reader.gather("user", np.arange(30))
        assert list(reader.versions) == [1, 1, 1]
        reader.gather("user", [3])
        assert sorted(reader.versions, key=str) == [1, None, None]
        assert "-" in repr(reader).rpartition("last read version ")[2]
        reader.gather("user", [])
        assert reader.versions.count(None) == 3
        assert sum(status.rows["user"] for status in job.status()) == 30


def test_tables_are_printed_as_they_are_written() -> None:
    """A sparse table shows its settings, and tables show each of theirs."""
    sparse = ps.Sparse(3, rule="adagrad", init="zeros", seed=7, rows=10)
    assert repr(sparse).startswith("Sparse(3, rule=Adagrad(")
    assert repr(sparse).endswith("init=Zeros(), seed=7, rows=10)")
    dense = ps.Dense.zeros({"w": (2, 3), "b": 1})
    shown = "<Dense of 2 tensors, 7 floats, rule=SGD(), rate=Fixed(base_rate=0.01)>"
    assert (
        repr(ps.Tables(net=dense, user=sparse)) == f"Tables({{'net': {shown}, 'user': {sparse}}})"
    )


def test_a_job_of_rows_alone() -> None:
    """A job may have no dense table; its rows are resharded with their optimiser state."""
    rows = oracle()
    alone = ps.Tables(user=tables()["user"])
    with ps.local(alone, shards=2) as job, job.worker("w0") as me:
        for seed, shards in enumerate((1, 3, None)):
            gradient = gradient_of(seed)
            with me.step(gather={"user": IDS}) as step:
                assert np.array_equal(step.rows("user"), rows.gather(IDS.view(np.uint64)))
                step.scatter("user", gradient)
            push_to(rows, IDS, gradient)
            me.flush()
            if shards is not None:
                job.reshard(shards)
        with job.reader() as reader:
            assert np.array_equal(reader.gather("user", IDS), rows.gather(IDS.view(np.uint64)))


def test_pushes_under_way_are_repeated_at_the_new_shards() -> None:
    """Pushes of rows that the former shards never acknowledged count once at the new ones."""
    rows = oracle()
    with ps.local(tables(), shards=2) as job, job.worker("w0", in_flight=8) as me:
        for seed in range(6):
            gradient = gradient_of(seed)
            with me.step(gather={"user": IDS}) as step:
                step.scatter("user", gradient)
            push_to(rows, IDS, gradient)
            if seed == 2:
                job.reshard(3)
        me.flush()
        with job.reader() as reader:
            assert np.array_equal(reader.gather("user", IDS), rows.gather(IDS.view(np.uint64)))


def test_a_full_table() -> None:
    """New rows beyond the table's limit raise Full, and the worker can push rows that there are."""
    with ps.local(tables(rows=3)) as job, job.worker("w0") as me:
        for ids in ([1, 2, 3], [1, 4], [1, 2]):
            with me.step(gather={"user": ids}) as step:
                step.scatter("user", np.ones((len(ids), DIM), np.float32))
            if 4 in ids:
                with pytest.raises(ps.errors.Full, match="3 rows at a shard, its share of rows=3"):
                    me.flush()
        me.flush()
        with job.reader() as reader, pytest.raises(ps.BadInput, match="such as 4"):
            reader.gather("user", [1, 2, 3, 4], missing="error")


def test_a_full_table_moves_to_fewer_shards() -> None:
    """Two full shards store more rows than `rows`; one shard takes them all, and has no room."""
    ids = np.arange(220)
    with ps.local(tables(rows=200), shards=2) as job, job.worker("w0") as me:
        for numbers in (ids, None, ids):
            if numbers is None:
                me.flush()
                job.reshard(1)
                continue
            with me.step(gather={"user": numbers}) as step:
                step.scatter("user", np.ones((len(numbers), DIM), np.float32))
        me.flush()
        with job.reader() as reader:
            assert reader.gather("user", ids, missing="error").shape == (len(ids), DIM)
        with me.step(gather={"user": [10**12]}) as step:
            step.scatter("user", np.ones((1, DIM), np.float32))
        with pytest.raises(ps.errors.Full, match="got 1 new ones beyond 220"):
            me.flush()


def test_a_resumed_job_keeps_its_first_values(tmp_path: Path) -> None:
    """Rows that nobody has pushed are in no snapshot: another seed or `init` would change them."""
    with ps.local(tables()) as job, ps.AdminClient(job.cluster) as admin:
        ps.save_snapshot(
            tmp_path,
            admin.export(),
            layout=job.cluster.layout,
            shard_map=job.cluster.map,
            rules=("sgd", "row_adagrad"),
            workers=1,
        )
    with ps.local(tables(), shards=3, resume=tmp_path) as job, job.reader() as reader:
        assert np.array_equal(reader.gather("user", IDS), oracle().gather(IDS.view(np.uint64)))
    for other, text in (
        (
            {"seed": SEED + 1},
            "user.rows of 3, Uniform.*, seed 8.*, got net.*; user.rows of 3, Uniform.*, seed 7",
        ),
        ({"init": ps.Zeros()}, r"user.rows of 3, Zeros\(\), seed 7.*, got .*Uniform"),
    ):
        settings: dict[str, Any] = {"seed": SEED, "init": ps.Uniform(0.1), **other}
        sparse = ps.Sparse(DIM, rule=ps.RowAdagrad(), **settings)
        changed = ps.Tables(net=tables()["net"], user=sparse)
        with pytest.raises(ps.BadInput, match=text), ps.local(changed, resume=tmp_path):
            pass


def test_compressions_that_rows_lack() -> None:
    """A choice for all concerns dense tables; one that rows lack is refused, never ignored."""
    with ps.local(ps.Sparse(DIM)) as job:
        for choice, text in (
            ("int8", "compression: expected a dict by table, of weights, got one for all"),
            ({"user": "int8"}, "compression: expected tables among weights, got 'user'"),
            ({"weights": "topk:0.1"}, "weights: expected none, bf16 or int8 for pushes of rows"),
            ({"weights": "fp16"}, "compression: weights: expected none, bf16 or int8 for pushes"),
            ({"weights": "int8,zstd"}, "pushes of rows, without zstd, got int8,zstd"),
            (
                {"weights": ps.Compression.parse("none", "int8")},
                "weights: expected none or bf16 for pulls of rows, got int8",
            ),
        ):
            with pytest.raises(ps.BadInput) as raised:
                job.worker("w0", compression=choice).__enter__()
            assert text in str(raised.value)


def test_settings_that_are_refused() -> None:
    """Wrong settings of a sparse table, and strategies without rows, raise one line each."""
    for settings, text in (
        ({"dim": 0}, "Sparse: dim: expected 1 to 4096, got 0"),
        ({"dim": 4097}, "dim: expected 1 to 4096, got 4097"),
        ({"dim": 4, "rule": ps.RMSProp()}, "rule: expected a rule of sparse tables"),
        ({"dim": 4, "init": 0.1}, 'expected first values such as Uniform(0.01) or "zeros", got 0'),
        ({"dim": 4, "init": "normal"}, "Sparse: init: expected first values such as Uniform(0.01)"),
        ({"dim": 4, "buffers": ()}, "Sparse: settings: expected rule, rate, decay, guard, "),
        ({"dim": 4, "compression": "topk:0.1"}, "Sparse: compression: expected none, bf16 or int8"),
        ({"dim": 4, "rates": 1}, "Sparse: settings: expected rate, or another known name, got 'ra"),
        ({"dim": 4, "seed": -1}, "seed: expected 0 to"),
        ({"dim": 4, "rows": 0}, "rows: expected 1 to"),
    ):
        with pytest.raises(ps.BadInput) as raised:
            ps.Sparse(**settings)
        assert text in str(raised.value)
    with pytest.raises(ps.BadInput, match="rule: expected a rule of dense tables"):
        ps.Dense.zeros({"w": 3}, rule=ps.RowAdagrad())
    with pytest.raises(ps.BadInput, match="start: table user: expected none"):
        ps.local(tables(), start={"user": 1}).__enter__()


def test_a_job_is_found_with_its_rows(job: ps.Job) -> None:
    """Another process's job has the sparse table with its settings."""
    other = ps.connect(job.cluster)
    user, known = other.tables["user"], tables()["user"]
    assert user.table("user") == known.table("user")
    assert (user.rule, user.rate) == (known.rule, known.rate)


def test_rows_in_a_snapshot(tmp_path: Path) -> None:
    """A job resumes from a snapshot with other shards, with its rows and their optimiser state."""
    rows, place = oracle(), tmp_path / "snapshot"
    with ps.local(tables(), shards=2) as job, job.worker("w0") as me:
        with me.step(gather={"user": IDS}) as step:
            step.scatter("user", gradient_of(0))
        push_to(rows, IDS, gradient_of(0))
        me.flush()
        with ps.AdminClient(job.cluster) as admin:
            ps.save_snapshot(
                place,
                admin.export(),
                layout=job.cluster.layout,
                shard_map=job.cluster.map,
                rules=("sgd", "row_adagrad"),
                workers=1,
            )
    other = ps.Tables(net=tables()["net"], user=ps.Sparse(DIM, rule=ps.RowAdagrad(), seed=8))
    with (
        pytest.raises(ps.BadInput, match=r"resume .*: expected tables .* seed 8\), got"),
        ps.local(other, resume=place),
    ):
        pass
    with ps.local(tables(), shards=3, resume=place) as job, job.worker("w1") as me:
        with me.step(gather={"user": IDS}) as step:
            assert np.array_equal(step.rows("user"), rows.gather(IDS.view(np.uint64)))
            step.scatter("user", gradient_of(1))
        push_to(rows, IDS, gradient_of(1))
        me.flush()
        with job.reader() as reader:
            assert np.array_equal(reader.gather("user", IDS), rows.gather(IDS.view(np.uint64)))


def test_the_rules_of_a_snapshot_are_compared_by_table(tmp_path: Path) -> None:
    """Rows may be described before or after weights; rules that were exchanged are refused."""

    def described(dense: str, sparse: str, *, rows_first: bool) -> ps.Tables:
        net, user = ps.Dense.zeros({"w": 3}, rule=dense), ps.Sparse(DIM, rule=sparse)
        return ps.Tables(user=user, net=net) if rows_first else ps.Tables(net=net, user=user)

    logs, place = tmp_path / "logs", tmp_path / "logs of a killed driver"
    with ps.start(
        described("momentum", "nesterov", rows_first=True), durability="process", logs=logs
    ):
        shutil.copytree(logs, place)
    for rows_first in (True, False):
        with ps.local(described("momentum", "nesterov", rows_first=rows_first), resume=place):
            pass
        exchanged = described("nesterov", "momentum", rows_first=rows_first)
        with (
            pytest.raises(ps.BadInput, match="rules nesterov, momentum, got momentum, nesterov"),
            ps.local(exchanged, resume=place),
        ):
            pass


def test_rows_survive_in_logs(tmp_path: Path) -> None:
    """What processes have logged of rows and weights makes the same job, with other shards."""
    rows = oracle()
    how: dict[str, Any] = {"on": "processes", "durability": "logged", "logs": tmp_path}
    with ps.start(tables(), shards=2, **how) as job, job.worker("w0") as me:
        for seed in range(3):
            with me.step(gather={"user": IDS}) as step:
                step.push("net", {"w": np.ones(4, np.float32)})
                step.scatter("user", gradient_of(seed))
            push_to(rows, IDS, gradient_of(seed))
        me.flush()
    (logs,) = tmp_path.iterdir()
    with ps.local(tables(), shards=3, resume=logs) as job, job.reader() as reader:
        assert np.array_equal(reader.gather("user", IDS), rows.gather(IDS.view(np.uint64)))
        assert reader.pull()["w"].tolist() == [-3 * RATE] * 4


_KILLED = """
import os, signal, sys
import numpy as np
import ps

user = ps.Sparse(3, rule=ps.RowAdagrad(), rate=0.5, init=ps.Uniform(0.1), seed=7)
tables = ps.Tables(net=ps.Dense.zeros({"w": (4,)}, rate=0.5), user=user)
how = {"on": "processes", "durability": "logged", "logs": sys.argv[1]}
with ps.start(tables, shards=2, **how) as job, job.worker("w0") as me:
    for seed in range(3):
        with me.step(gather={"user": np.arange(9)}) as step:
            step.push("net", {"w": np.ones(4, np.float32)})
            step.scatter("user", np.full((9, 3), seed + 1, np.float32))
        step.ack.result()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_logs_of_a_killed_driver(tmp_path: Path) -> None:
    """A job whose driver was killed resumes from its logs with every acknowledged row and weight,
    and its worker continues after its last push.
    """
    command = [sys.executable, "-c", _KILLED, str(tmp_path)]
    killed = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    rows, ids = oracle(), np.arange(9, dtype=np.uint64)
    for seed in range(3):
        rows.push(ids, np.full((9, DIM), seed + 1, np.float32), RATE)
    (logs,) = tmp_path.iterdir()
    with (
        ps.local(tables(), shards=3, resume=logs) as job,
        job.worker("w0", incarnation=1) as me,
        job.reader() as reader,
    ):
        assert (me.seq, me.clock) == (3, 3)
        assert np.array_equal(reader.gather("user", ids, missing="error"), rows.gather(ids))
        assert reader.pull()["w"].tolist() == [-3 * RATE] * 4
