"""A program that forks with a job, a worker, a reader and an admin client open; its output is JSON.

    python -m tests.support.forked_users threads|processes|replicated

Each child does one thing with what it has inherited, and reports what came of it through a pipe.
"""

import asyncio
import gc
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import ps

DOWN = {"w": -np.ones(8, np.float32)}


def step(me: ps.Worker) -> None:
    with me.step() as step:
        step.pull(timeout_s=20)
        step.push(DOWN)


def in_a_fork(use: Callable[[], Any]) -> str:
    """What a forked child says of `use`: its result, or its error, in one line."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            said = f"{use()}"
        except ps.DownpourError as error:
            said = f"{error}".replace(str(os.getpid()), "CHILD")
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return text.replace(str(os.getpid()), "PARENT")


def status_of(leave: Callable[[], Any]) -> int:
    """The exit status of a forked child that leaves all the blocks around it."""
    child = os.fork()
    if not child:
        leave()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(on: str) -> None:
    parent = os.getpid()
    options: dict[str, Any] = {"durability": "replicated"} if on == "replicated" else {}
    place = "threads" if on == "threads" else "processes"
    began = ps.start(ps.Dense.zeros({"w": 8}, rate=1.0), on=place, shards=2, **options)
    said: dict[str, Any] = {}
    try:
        with began as job, job.worker("w0") as me:
            step(me)
            me.flush()
            reader, admin = job.reader(), ps.AdminClient(job.cluster)
            step_there = me.step()
            held = {"job": job, "reader": reader, "admin": admin}

            async def read_asynchronously() -> str:
                async with ps.aio.reader(job) as weights:
                    return in_a_fork(lambda: asyncio.run(weights.pull()))

            def train() -> None:
                with job.worker("forked") as mine:
                    step(mine)

            def collect() -> None:
                held.clear()
                gc.collect()

            def check() -> str:
                job.check()
                return job.degraded_reason

            def close() -> None:
                for opened in (me, reader, admin):
                    opened.close()

            said["worker"] = in_a_fork(me.pull)
            with step_there:
                said["step"] = in_a_fork(step_there.gradients)
            said["reader"] = in_a_fork(reader.pull)
            said["admin"] = in_a_fork(admin.read)
            said["aio"] = asyncio.run(read_asynchronously())
            said["reshard"] = in_a_fork(lambda: job.reshard(3))
            said["check"] = in_a_fork(check)
            said["close"] = in_a_fork(close)
            said["collect"] = in_a_fork(collect)
            said["train"] = in_a_fork(train)
            process = multiprocessing.get_context("fork").Process(target=collect)
            process.start()
            process.join()
            said["multiprocessing"] = process.exitcode
            said["exit"] = status_of(lambda: sys.exit(3))
            said["raise"] = status_of(lambda: 1 / 0)
            step(me)
            me.flush()
            said["weight"] = float(job.read()["w"][0])
            admin.close()
    except ZeroDivisionError:
        assert os.getpid() != parent
        sys.exit(4)
    print(json.dumps(said))


if __name__ == "__main__":
    main(sys.argv[1])
