"""Rows that travel in fewer bits: what is applied and read, wherever and however it travels."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import ps
from ps.session.compression import Compression
from shards.first_values import Uniform
from shards.messages import Kind
from shards.row_codecs import round_rows
from shards.row_frames import RowGradient
from shards.rules import Adagrad
from shards.shard_state import of_table
from shards.tables import SparseTable
from tests.support.row_oracle import RowOracle

DIM, RATE, SEED = 5, 0.5, 7
IDS = np.arange(700, dtype=np.uint64) * np.uint64(2**55 + 3)
CHOICES = {
    "bf16": Compression.parse("bf16"),
    "int8": Compression.parse("int8"),
    "bf16 pulls": Compression.parse("none", "bf16"),
    "both": Compression.parse("int8", "bf16"),
}


def tables(compression: Compression | str | None) -> ps.Tables:
    user = ps.Sparse(
        DIM,
        rule="adagrad",
        rate=RATE,
        init=ps.Uniform(0.1),
        seed=SEED,
        compression=compression,
    )
    return ps.Tables(net=ps.Dense.zeros({"w": (4,)}, rate=RATE), user=user)


def oracle() -> RowOracle:
    return RowOracle(SparseTable("user", DIM, Uniform(0.1), SEED), Adagrad())


def gradient_of(seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((len(IDS), DIM)).astype(np.float32)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(("shards", "transport"), [(1, "tcp"), (3, "tcp"), (1, "shm"), (2, "shm")])
def test_what_is_rounded(choice: str, shards: int, transport: str) -> None:
    """The sum of a row's gradients is rounded once, and a pulled row from what the shard has.

    The shards' rows and slots have all their bits, and readers get them.
    """
    compression, rows = CHOICES[choice], oracle()
    with ps.local(tables(compression), shards=shards, transport=transport) as job:
        with job.worker("w0") as me:
            for seed in range(3):
                with me.step(gather={"user": np.concatenate([IDS, IDS])}) as step:
                    read = step.rows("user")
                    assert np.array_equal(
                        read[: len(IDS)], round_rows(compression.pull, rows.gather(IDS))
                    )
                    gradient = gradient_of(seed)
                    step.scatter("user", np.concatenate([gradient, gradient]))
                    step.push("net", {"w": np.full(4, 1.001, np.float32)})
                rows.push(IDS, round_rows(compression.push_kind, 2 * gradient), RATE)
            step.ack.result()
            assert np.allclose(me.pull()["w"], -3.003 * RATE, rtol=1e-6), "not rounded"
        with job.reader() as reader:
            assert np.array_equal(reader.gather("user", IDS), rows.gather(IDS))
        if shards == 1:
            with ps.AdminClient(job.cluster) as admin:
                rows.check_state(of_table(admin.export()[0].arrays, "user"))


def test_pushes_under_way_are_not_rounded_twice() -> None:
    """Pushes that the former shards never acknowledged arrive at the new ones as they were."""
    rows = oracle()
    with ps.local(tables("int8"), shards=2) as job, job.worker("w0", in_flight=8) as me:
        for seed in range(6):
            with me.step(gather={"user": IDS}) as step:
                step.scatter("user", gradient_of(seed))
            rows.push(IDS, round_rows(Kind.INT8, gradient_of(seed)), RATE)
            if seed == 2:
                job.reshard(3)
        me.flush()
        with job.reader() as reader:
            assert np.array_equal(reader.gather("user", IDS), rows.gather(IDS))


def test_logs_of_rounded_rows(tmp_path: Path) -> None:
    """A log has the bytes that were pushed, and replaying them makes the same rows."""
    rows = oracle()
    how: dict[str, Any] = {"on": "processes", "durability": "logged", "logs": tmp_path}
    with ps.start(tables("int8"), **how) as job, job.worker("w0") as me:
        for seed in range(3):
            with me.step(gather={"user": IDS}) as step:
                step.scatter("user", gradient_of(seed))
            rows.push(IDS, round_rows(Kind.INT8, gradient_of(seed)), RATE)
        me.flush()
    (logs,) = tmp_path.iterdir()
    with ps.local(tables("int8"), shards=2, resume=logs) as job, job.reader() as reader:
        assert np.array_equal(reader.gather("user", IDS), rows.gather(IDS))


def test_a_worker_chooses_for_itself() -> None:
    """A worker's choice by name replaces the table's; a choice for all leaves rows as they are.

    Other processes find the table's choice with the job.
    """
    with ps.local(tables("int8")) as job:
        found = ps.connect(job.cluster).tables["user"]
        assert isinstance(found, ps.Sparse)
        assert found.compression == CHOICES["int8"]
        rows = oracle()
        choices: tuple[tuple[dict[str, Any], Kind], ...] = (
            ({}, Kind.INT8),
            ({"compression": {"user": "bf16"}}, Kind.BF16),
            ({"compression": "int8"}, Kind.F4),
        )
        for number, (choice, kind) in enumerate(choices):
            with job.worker(f"w{number}", **choice) as me:
                with me.step(gather={"user": IDS}) as step:
                    step.scatter("user", gradient_of(number))
                step.ack.result()
            rows.push(IDS, round_rows(kind, gradient_of(number)), RATE)
        with job.reader() as reader:
            assert np.array_equal(reader.gather("user", IDS), rows.gather(IDS))


@pytest.mark.parametrize("choice", ["bf16", "int8"])
@pytest.mark.parametrize("shards", [1, 2])
def test_what_is_not_finite_is_not_rounded(choice: str, shards: int) -> None:
    """NaN and infinity are refused before they become numbers, and nothing is sent."""
    with ps.local(tables(choice), shards=shards) as job, job.worker("w0") as me:
        me.pull()
        for wrong in (np.nan, np.inf):
            gradient = gradient_of(0)
            gradient[3, 2] = wrong
            with pytest.raises(ps.BadInput, match="table user"):
                me.client.push({"user": RowGradient(IDS, gradient)})
        assert me.seq == 0
        with job.reader() as reader, pytest.raises(ps.BadInput, match="700 of 700 ids without"):
            reader.gather("user", IDS, missing="error")


@pytest.mark.parametrize(("choice", "value"), [("bf16", 1 + 0.51 / 128), ("int8", 0.51 / 127)])
def test_a_limit_holds_for_what_is_sent(choice: str, value: float) -> None:
    """Rows that only rounding lengthens beyond a limit go to no shard, and the next push counts."""
    ids, rows = np.sort(IDS), np.zeros((len(IDS), DIM), np.float32)
    rows[0] = [1.0, *[value] * (DIM - 1)]
    net = ps.Dense.zeros({"w": (4,)})
    guard = ps.Guard(max_norm=1.00001 * float(np.linalg.norm(rows[0])))
    user = ps.Sparse(DIM, rate=1.0, init="zeros", compression=choice, guard=guard)
    with ps.local(ps.Tables(net=net, user=user), shards=2) as job, job.worker("w0") as me:
        me.pull()
        with pytest.raises(ps.BadInput, match=r"^push 1: table user has norm .* expected at most"):
            me.client.push({"user": RowGradient(ids, rows)})
        half = rows * np.float32(0.5)
        me.client.push({"user": RowGradient(ids, half)})
        me.flush()
        assert me.seq == 1
        with job.reader() as reader:
            sent = round_rows(Kind(choice), half)
            assert np.array_equal(reader.gather("user", ids), -sent)
