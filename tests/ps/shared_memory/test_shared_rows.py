"""Rows through shared memory: the same bits as over TCP, whatever fits, dies or is repeated."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ps
from ps.client import Client
from ps.job_spec import shard_specs
from ps.launch import restart
from ps.launch.processes import process_shards
from ps.session.row_requests import Gather
from ps.shared_memory import shm_files
from ps.shared_memory.segment import ROW_SLOTS, ShmSegment
from ps.shared_memory.shard_side import LOANS
from shards.errors import BadInput
from shards.first_values import Uniform
from shards.row_frames import RowGradient
from shards.rules import Adagrad
from shards.schedules import Fixed
from shards.shard_state import ShardState, of_table
from shards.spec import TableSpec
from shards.tables import SparseTable
from tests.support.eventually import eventually
from tests.support.row_oracle import RowOracle

DIM, RATE, SEED = 16, 0.5, 7
TABLE = SparseTable("user", DIM, Uniform(0.1), SEED, rows=20_000)
PATIENT: dict[str, Any] = {"retry_s": 60.0, "patience_s": 200.0}  # nothing is sent twice
COUNT = 2000  # ids of a step: 144 KB of rows and ids


def tables() -> ps.Tables:
    user = ps.Sparse(DIM, rule="adagrad", rate=RATE, init=ps.Uniform(0.1), seed=SEED, rows=20_000)
    item = ps.Sparse(4, rule="row_adagrad", rate=RATE, seed=SEED, rows=20_000)
    return ps.Tables(net=ps.Dense.zeros({"w": (5000,)}, rate=RATE), user=user, item=item)


def ids_of(step: int, count: int = COUNT) -> Any:
    return np.random.default_rng(step).integers(0, 10_000, count).astype(np.uint64)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all rows that get memory in a segment of this process."""
    sizes: list[int] = []
    real = ShmSegment.take_rows

    def take_rows(self: ShmSegment, size: int) -> Any:
        memory = real(self, size)
        if memory is not None:
            sizes.append(size)
        return memory

    monkeypatch.setattr(ShmSegment, "take_rows", take_rows)
    return sizes


def train(transport: str, shards: int) -> tuple[list[ShardState], list[Any], str]:
    """The states after some steps of one worker, what it has read, and its description."""
    seen: list[Any] = []
    with ps.local(tables(), shards=shards, transport=transport) as job:
        with job.worker("w0", **PATIENT) as me:
            assert set(me.transports) == {transport}
            for number in range(8):
                ids = {"user": ids_of(number), "item": ids_of(number + 100, 3 * COUNT)}
                me.prefetch(gather=ids)
                with me.step(gather=ids) as step:
                    for name, dim in (("user", DIM), ("item", 4)):
                        seen.append(step.rows(name))
                        step.scatter(name, np.sin(np.arange(seen[-1].size)).reshape(-1, dim))
                    seen.append(step.pull("net")["w"].copy())
                    step.push("net", {"w": np.cos(np.arange(5000), dtype=np.float32)})
            me.flush()
            shown = repr(me)
        with ps.AdminClient(job.cluster) as admin:
            return admin.export(), seen, shown


def assert_equal(states: tuple[Any, ...], others: tuple[Any, ...]) -> None:
    for state, other in zip(states[0], others[0], strict=True):
        assert state.arrays.keys() == other.arrays.keys()
        for name, array in state.arrays.items():
            assert np.array_equal(array, other.arrays[name]), name
    assert all(map(np.array_equal, states[1], others[1]))


@pytest.mark.parametrize("shards", [1, 3])
def test_rows_are_the_same_by_every_transport(shards: int, taken: list[int]) -> None:
    """Rows, slots and weights are equal bit for bit, and with shared memory all rows are in it."""
    by_tcp = train("tcp", shards)
    assert not taken
    by_memory = train("shm", shards)
    assert_equal(by_tcp, by_memory)
    assert by_memory[2].endswith("over " + "/".join(["shm"] * shards) + ">")
    # Eight pushes to each shard in one piece, and eight answers with the rows of two tables.
    assert len(taken) == 8 * shards * 3


def test_rows_that_do_not_fit_use_the_socket(
    monkeypatch: pytest.MonkeyPatch, taken: list[int]
) -> None:
    """Messages larger than a slot go through the socket, dense parts excepted, and are counted."""
    by_tcp = train("tcp", 1)
    monkeypatch.setattr("ps.shared_memory.segment.ROW_SLOT_BYTES", 128 << 10)
    by_memory = train("shm", 1)
    assert_equal(by_tcp, by_memory)
    # The answers' rows of each table fit, a push of both does not.
    assert len(taken) == 16
    assert by_memory[2].endswith("over shm, 8 messages through a socket>")


def test_no_room_in_shared_memory(monkeypatch: pytest.MonkeyPatch, taken: list[int]) -> None:
    """Without room for rows they use the socket; without any segment the transport says so."""
    by_tcp = train("tcp", 1)
    real = os.posix_fallocate

    def full(fd: int, offset: int, length: int) -> None:
        if length > 40_000:  # of rows: the dense table takes 20 KB
            raise OSError(28, "No space left on device")
        real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", full)
    by_memory = train("shm", 1)
    assert_equal(by_tcp, by_memory)
    assert not taken
    assert by_memory[2].endswith("over shm, 16 messages through a socket>")

    def none(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", none)
    with ps.local(ps.Sparse(DIM)) as job:
        with job.worker("w0", **PATIENT) as me:
            assert me.transports == ("ipc",)
        with pytest.raises(BadInput, match="transport shm: no shared memory: No space left"):
            job.worker("w1", transport="shm").__enter__()


def test_rows_alone_share_memory(taken: list[int]) -> None:
    """A job without a dense table has segments of rows alone; many steps use few slots."""
    oracle = RowOracle(TABLE, Adagrad())
    user = tables()["user"]
    with ps.local(ps.Tables(user=user), transport="shm") as job, job.worker("w0", **PATIENT) as me:
        for number in range(ROW_SLOTS + 8):
            ids = np.arange(150 * (1 + number % 3), dtype=np.uint64)
            gradient = np.full((len(ids), DIM), number + 1, np.float32)
            with me.step(gather={"user": ids}) as step:
                assert np.array_equal(step.rows("user"), oracle.gather(ids))
                step.scatter("user", gradient)
            oracle.push(ids, gradient, RATE)
        assert repr(me).endswith("over shm>")
        assert len(taken) == 2 * (ROW_SLOTS + 8)


def test_small_rows_use_the_socket(taken: list[int]) -> None:
    """Rows of a few kilobytes go with the header, which costs less, beside a dense reference."""
    with ps.local(tables(), transport="shm") as job, job.worker("w0", **PATIENT) as me:
        for _ in range(3):
            with me.step(gather={"user": [1, 2, 3]}) as step:
                step.scatter("user", np.ones((3, DIM), np.float32))
                step.push("net", {"w": np.ones(5000, np.float32)})
        with me.step(gather={"user": [1, 2, 3]}) as step:
            assert step.pull("net")["w"].tolist() == [-3 * RATE] * 5000
        assert not taken
        assert repr(me).endswith("over shm>")


def test_answers_that_are_kept_stay_as_they_were() -> None:
    """Rows of a worker that holds many answers never change; what exceeds its loans is copied."""
    ids, held = np.arange(COUNT, dtype=np.uint64), []
    with (
        ps.local(ps.Tables(user=tables()["user"])) as job,
        Client(job.cluster, worker="w0", transport="shm", **PATIENT) as client,
    ):
        for number in range(12):
            pulled = client.pull(gather=Gather({"user": ids}))
            held.append((pulled, pulled.rows["user"].rows.copy()))
            gradient = np.full((COUNT, DIM), number + 1, np.float32)
            client.push({"user": RowGradient(ids, gradient)})
        for pulled, copy in held:
            assert np.array_equal(pulled.rows["user"].rows, copy)
        assert len({rows.tobytes() for _, rows in held}) == len(held)
        assert client.links.by_socket == len(held) - LOANS


@pytest.mark.timeout(300)
def test_a_killed_shard_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pushes of rows amid which their shard is killed count once; its next process shares again."""
    monkeypatch.setattr(restart, "QUICK_S", 0.0)
    specs = shard_specs([TableSpec(TABLE, Adagrad(), Fixed(base_rate=RATE))], shards=2)
    oracle = RowOracle(TABLE, Adagrad())
    with process_shards(specs, durability=ps.Durability.PROCESS, logs=tmp_path) as hosts:
        with ps.AdminClient(hosts.cluster) as admin:
            admin.install(np.zeros(0, np.float32))
        with Client(hosts.cluster, worker="w0", transport="shm", in_flight=4) as client:
            for number in range(24):
                ids = np.unique(ids_of(number, 400))
                rows = client.pull(gather=Gather({"user": ids})).rows["user"].rows
                assert np.array_equal(rows, oracle.gather(ids))
                gradient = np.full((len(ids), DIM), number + 1, np.float32)
                client.push({"user": RowGradient(ids, gradient)})
                oracle.push(ids, gradient, RATE)
                if number in (7, 15):
                    os.kill(hosts.pids[number % 2], signal.SIGKILL)
            client.flush()
            assert client.transports == ("shm", "shm")
            assert client.links.by_socket == 0
        assert hosts.deaths == 2
        with ps.AdminClient(hosts.cluster) as admin:
            states = admin.export()
        joined = [of_table(state.arrays, "user") for state in states]
        assert sum(len(arrays["ids"]) for arrays in joined) == len(oracle.rows)
    assert not list(shm_files.ROOT.glob(f"{shm_files.job_prefix(hosts.cluster.job)}*"))


_HOLDER = """
import sys
import numpy as np
import ps
from ps.client import Client
from ps.session.row_requests import Gather
from shards.row_frames import RowGradient
ids = np.arange(2000, dtype=np.uint64)
client = Client(ps.Cluster.load(sys.argv[1]), worker="holder", transport="shm")
client.push({"user": RowGradient(ids, np.ones((2000, 16), np.float32))}, read_versions=(0,))
held = [client.pull(gather=Gather({"user": ids})) for _ in range(3)]
assert client.links.by_socket == 0
print("holds", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[tuple[ps.Job, "subprocess.Popen[str]"]]:
    """A job, and a process that has pushed rows and holds three answers."""
    with ps.local(ps.Tables(user=tables()["user"])) as job:
        job.cluster.save(tmp_path / "cluster.json")
        with subprocess.Popen(
            [sys.executable, "-c", _HOLDER, str(tmp_path / "cluster.json")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "holds\n"
                yield job, process
            finally:
                process.kill()


def test_a_killed_worker_leaves_nothing(holder: tuple[ps.Job, "subprocess.Popen[str]"]) -> None:
    """Its segment is removed and its loans are taken back; the rows that it pushed stay."""
    job, process = holder
    prefix = shm_files.job_prefix(job.cluster.job)
    assert len(list(shm_files.ROOT.glob(f"{prefix}memory-*"))) == 2
    process.kill()
    process.wait()
    eventually(
        lambda: len(list(shm_files.ROOT.glob(f"{prefix}memory-*"))) == 1,
        because="the shard removes the segment of the dead worker",
    )
    with job.reader() as reader:
        rows = reader.gather("user", np.arange(2000), missing="error")
    oracle = RowOracle(TABLE, Adagrad())
    ids = np.arange(2000, dtype=np.uint64)
    oracle.push(ids, np.ones((2000, DIM), np.float32), RATE)
    assert np.array_equal(rows, oracle.gather(ids))
