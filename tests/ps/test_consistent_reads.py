"""Consistent reads: all shards with the same pushes of every worker, while these push."""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import numpy as np
import pytest

import ps
from ps.reader import Reader
from ps.start_job import OwnJob

WORKERS, FLOATS = 3, 512


@pytest.fixture
def job() -> Iterator[ps.Job]:
    """Two tables on three shards at rate 1, so that each shard holds a part of both or of one."""
    tables = ps.Tables(
        a=ps.Dense.like({"w": np.zeros(FLOATS)}, rate=1.0),
        b=ps.Dense.like({"w": np.zeros(FLOATS)}, rate=1.0),
    )
    with ps.local(tables, shards=3) as started:
        yield started


READS = 5


def blocking(job: ps.Job) -> list[Any]:
    with ps.reader(job) as reader:
        return [reader.pull(consistent=True) for _ in range(READS)]


def concurrent(job: ps.Job) -> list[Any]:
    """The coroutines of one reader take turns, or one would end another's quiesce."""

    async def read() -> list[Any]:
        async with ps.aio.reader(job) as reader:
            return await asyncio.gather(*(reader.pull(consistent=True) for _ in range(READS)))

    return asyncio.run(read())


@pytest.mark.parametrize("read", [blocking, concurrent])
def test_a_consistent_read_holds_whole_pushes(
    job: ps.Job, read: Callable[[ps.Job], list[Any]]
) -> None:
    """Every worker's count is the same in all keys of both tables, which three shards hold; a read
    without `consistent` meanwhile makes no such promise, and pushes continue afterwards."""
    ended = Event()

    def push(number: int) -> int:
        taken = 0
        with job.worker(f"w{number}") as me:
            while not ended.is_set():
                with me.step() as step:
                    for name in ("a", "b"):
                        step.gradients(name)["w"][number::WORKERS] = -1.0
                taken += 1
        return taken

    with ThreadPoolExecutor(WORKERS) as pool:
        workers = [pool.submit(push, number) for number in range(WORKERS)]
        try:
            seen = read(job)
        finally:
            ended.set()
        taken = [one.result() for one in workers]
    for number in range(WORKERS):
        counts = list[float]()
        for weights in seen:
            found = {float(c) for name in ("a", "b") for c in weights[name]["w"][number::WORKERS]}
            assert len(found) == 1, f"w{number}: {found}"
            counts += found
        assert counts == sorted(counts)
        assert counts[-1] <= taken[number]
    last = job.read(consistent=True)
    assert [last["b"]["w"][number] for number in range(WORKERS)] == taken


def test_a_read_that_takes_too_long_is_refused(
    job: ps.Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shards have resumed by then, so nothing is known of the parts; it may be repeated."""
    monkeypatch.setattr(sys.modules[Reader.__module__], "_QUIESCE_S", 0.01)
    with ps.reader(job) as reader:
        plain = reader._read

        def slow(links: Any, ids: Any) -> Any:
            time.sleep(0.02)
            return plain(links, ids)

        monkeypatch.setattr(reader, "_read", slow)
        with pytest.raises(ps.errors.Retry, match="consistent read took"):
            reader.pull(consistent=True)


def test_a_read_that_a_reshard_precedes_is_of_the_new_shards(
    job: ps.Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader finds the shards, and before it has quiesced them they hand the job over."""
    assert isinstance(job, OwnJob)
    with job.worker("w0") as me, me.step() as step:
        step.push("a", {"w": np.ones(FLOATS)})
    with ps.reader(job) as reader:
        present = reader._present

        def then_moved(connection: Any, ids: Any) -> Any:
            found = present(connection, ids)
            if len(job.cluster.endpoints) == 3:
                job.reshard(2)
            return found

        monkeypatch.setattr(reader, "_present", then_moved)
        assert (reader.pull("a", consistent=True)["w"] == -1).all()
        assert reader.versions == (1, 1)


def test_a_read_waits_for_another_operator(job: ps.Job) -> None:
    """It neither moves nor ends the other's quiesce, and is answered once that has ended."""
    with (
        ps.AdminClient(job.cluster, patience_s=600) as other,
        ps.reader(job, patience_s=600) as reader,
        job.worker("w0") as me,
        ThreadPoolExecutor(1) as pool,
    ):
        other.quiesce(600)
        with me.step() as step:
            step.push("a", {"w": np.ones(FLOATS)})
        reading = pool.submit(reader.pull, "a", consistent=True)
        with pytest.raises(ps.errors.Retry, match="push 1 is not acknowledged after 1 s"):
            step.ack.result(timeout_s=1.0)
        assert not any(other.quiesce(600).values()), "the cut is as it was"
        assert not reading.done()
        other.resume()
        assert step.ack.result(timeout_s=600).versions == (1, 1, 1)
        assert len(set(reading.result()["w"])) == 1
