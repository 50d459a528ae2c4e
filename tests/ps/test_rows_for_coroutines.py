"""Rows of sparse tables through `ps.aio`: what the blocking worker and reader do, in coroutines."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

import ps
from ps.reader import Connection
from ps.start_job import OwnJob
from shards.first_values import Uniform
from shards.rules import SGD
from shards.tables import SparseTable
from tests.support.row_oracle import RowOracle

DIM, RATE, SEED = 3, 0.5, 7
TABLE = SparseTable("user", DIM, Uniform(0.1), SEED)
IDS = np.arange(40, dtype=np.uint64)
ONES = np.ones((len(IDS), DIM), np.float32)


def run(coroutine: Callable[[OwnJob], Coroutine[Any, Any, None]], **options: Any) -> None:
    """Run a coroutine with a job of two shards."""
    user = ps.Sparse(DIM, rate=RATE, init=ps.Uniform(0.1), seed=SEED)
    tables = ps.Tables(net=ps.Dense.zeros({"w": (4,)}, rate=1.0), user=user)
    with ps.local(tables, shards=2, **options) as job:
        asyncio.run(coroutine(job))


def test_steps_with_rows() -> None:
    """Steps gather and scatter rows next to a dense table, also with rows requested ahead."""

    async def take_steps(job: OwnJob) -> None:
        rows = RowOracle(TABLE, SGD())
        async with ps.aio.worker(job, "w0") as me:
            for number in range(4):
                async with me.step(samples=2, gather={"user": IDS}) as step:
                    assert np.array_equal(await step.rows("user"), rows.gather(IDS))
                    assert (await step.pull("net"))["w"].tolist() == [number] * 4
                    step.scatter("user", ONES)
                    step.push("net", {"w": -np.ones(4, np.float32)})
                    me.prefetch(gather={"user": IDS})
                rows.push(IDS, ONES, RATE)
                assert (await step.ack).seq == number + 1
            with pytest.raises(ps.BadInput, match="gather: expected one of the sparse tables user"):
                async with me.step(gather={"net": IDS}):
                    pass
        async with ps.aio.reader(job) as reader:
            assert np.array_equal(await reader.gather("user", IDS), rows.gather(IDS))

    run(take_steps, staleness=0)


def test_many_coroutines_gather_at_the_same_time() -> None:
    """Reads of rows share a reader's connections, and each gets those of its own ids."""

    async def gather(job: OwnJob) -> None:
        rows = RowOracle(TABLE, SGD())
        async with ps.aio.worker(job, "w0") as me, me.step(gather={"user": IDS}) as step:
            step.scatter("user", ONES)
        rows.push(IDS, ONES, RATE)
        async with ps.aio.reader(job) as reader:
            asked = [np.array([number, number + 35, number], np.uint64) for number in range(30)]
            cancelled = asyncio.ensure_future(reader.gather("user", IDS))
            await asyncio.sleep(0)
            cancelled.cancel()
            answers, weights = await asyncio.gather(
                asyncio.gather(*(reader.gather("user", ids) for ids in asked)), reader.pull()
            )
            for ids, answer in zip(asked, answers, strict=True):
                assert np.array_equal(answer, rows.gather(ids))
            assert weights["w"].tolist() == [0] * 4
            assert (await reader.gather("user", [])).shape == (0, DIM)
            unknown = await reader.gather("user", [10**12, 3], missing="zero")
            assert unknown[0].tolist() == [0] * DIM
            both = await reader.gather("user", IDS, consistent=True)
            assert np.array_equal(both, rows.gather(IDS))
            with pytest.raises(ps.BadInput, match="1 of 2 ids without one, such as 1000000000000"):
                await reader.gather("user", [10**12, 3], missing="error")
            with pytest.raises(ps.BadInput, match="table: expected one of the sparse tables user"):
                await reader.gather("net", [1])
            job.reshard(3)
            moved = await asyncio.gather(*(reader.gather("user", ids) for ids in asked[:5]))
            for ids, answer in zip(asked, moved, strict=False):
                assert np.array_equal(answer, rows.gather(ids))
        with pytest.raises(ps.BadInput, match="reader: it is closed"):
            await reader.gather("user", [1])

    run(gather)


def test_a_silent_shard_ends_a_read_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read of rows that no shard answers raises the error that says which, and none waits on."""

    async def gather(job: OwnJob) -> None:
        async with ps.aio.reader(job, patience_s=0.01) as reader:
            monkeypatch.setattr(Connection, "send", lambda *_: None)
            with pytest.raises(ps.errors.Unreachable, match="has not answered a read for"):
                await reader.gather("user", IDS)
            assert reader._waiting() == []

    run(gather)
