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

        def slow(links: Any) -> Any:
            time.sleep(0.02)
            return plain(links)

        monkeypatch.setattr(reader, "_read", slow)
        with pytest.raises(ps.errors.Retry, match="consistent read took"):
            reader.pull(consistent=True)
