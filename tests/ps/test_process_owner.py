"""A job belongs to the process that started it: forks, exits, and sending it elsewhere."""

import asyncio
import copy
import gc
import json
import pickle
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ps
from tests.support.eventually import eventually

PARAMS = {"w": np.zeros(4)}
FORK = "was opened in process PARENT, and this is its fork CHILD"
SECONDS = 300  # for a program that would wait for ever


def _run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *argv], capture_output=True, text=True, timeout=SECONDS, check=True
    )


@pytest.mark.parametrize("on", ["threads", "processes", "replicated"])
def test_a_fork_neither_ends_nor_uses_what_its_parent_has_opened(on: str) -> None:
    """Whatever a forked process does with a job and its users, the parent's go on.

    It is told at once which of them it cannot use, and what to do. A worker of its own serves it.
    """
    said = json.loads(_run("-m", "tests.support.forked_users", on).stdout)
    assert said == {
        "worker": f"worker w0 {FORK}: open another with job.worker(...)",
        "step": f"worker w0 {FORK}: open another with job.worker(...)",
        "reader": f"the reader {FORK}: make another with ps.reader(job)",
        "admin": f"the admin client {FORK}: make another with ps.AdminClient(job.cluster)",
        "aio": f"the reader {FORK}: make another with ps.aio.reader(job)",
        "reshard": f"reshard: job job {FORK}: move it from there",
        "check": "",
        "close": "None",
        "collect": "None",
        "train": "None",
        "multiprocessing": 0,
        "exit": 3,
        "raise": 4,
        "weight": 3.0,
    }


@pytest.mark.parametrize("options", ["on='threads'", "shards=2", "durability='replicated'"])
def test_a_program_that_leaves_its_job_open_ends(tmp_path: Path, options: str) -> None:
    """The shards end with the interpreter, as they would with the block; the job's file says so."""
    script = f"""
import contextlib, numpy as np, ps
opened = contextlib.ExitStack()
job = opened.enter_context(ps.start({{"w": np.zeros(4096)}}, {options}))
job.save({str(tmp_path / "job.json")!r})
me = opened.enter_context(job.worker("w0"))
me.pull()
pids = getattr(job._hosts[0], "pids", ()) if job._hosts else ()
print(*(pids.values() if isinstance(pids, dict) else pids))
"""
    left = [Path("/proc", pid) for pid in _run("-c", script).stdout.split()]
    eventually(
        lambda: not any(process.exists() for process in left),
        because="no process of the job is left",
    )
    with pytest.raises(ps.errors.JobEnded):
        ps.connect(tmp_path / "job.json")


def test_the_shards_of_a_killed_program_end_although_its_fork_lives() -> None:
    """A fork holds none of the pipes by which shards notice that their parent has ended."""
    script = """
import os, signal, numpy as np, ps
with ps.start({"w": np.zeros(8)}) as job:
    child = os.fork()
    if not child:
        os.close(1), os.close(2)
        signal.pause()
    print(child, *job._hosts[0].pids, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=SECONDS, check=False)
    fork, shard = map(int, ended.stdout.split())
    try:
        eventually(lambda: not Path(f"/proc/{shard}").exists(), because="the shard has ended")
        assert Path(f"/proc/{fork}").exists()
    finally:
        subprocess.run(["kill", "-s", str(signal.SIGKILL), str(fork)], check=True)


def test_what_has_connections_cannot_be_sent_to_another_process() -> None:
    """pickle and copy, which multiprocessing, joblib, Ray and Spark use, say what to send."""
    send = "cannot be sent to another process: send job.address and job.token, and"
    with ps.local(PARAMS) as job, job.worker("w0") as me, job.reader() as reader:
        with me.step() as step:
            pass
        ways: list[Callable[[object], object]] = [pickle.dumps, copy.copy, copy.deepcopy]
        connected = ps.connect(job.address, token=job.token)
        with ps.AdminClient(job.cluster) as admin:
            for thing, text in (
                (job, f"a job {send} call ps.connect there"),
                (connected, f"a job {send} call ps.connect there"),
                (me, f"a worker {send} make a worker of ps.connect there"),
                (me.pull, f"a worker {send} make a worker of ps.connect there"),
                (me.client, f"a client {send} make a worker of ps.connect there"),
                (step, f"a step {send} make a worker of ps.connect there"),
                (step.ack, f"an acknowledgement {send} make a worker of ps.connect there"),
                (reader, f"a reader {send} make one of ps.connect there"),
                (admin, f"an admin client {send} make one of the file of job.save there"),
                (ps.aio.reader(job), f"a reader {send} make one of ps.connect there"),
                (ps.aio.worker(job, "w1"), f"a worker {send} make a worker of ps.connect there"),
            ):
                for way in ways[: 1 if thing == me.pull else None]:
                    with pytest.raises(ps.BadInput) as caught:
                        way(thing)
                    assert str(caught.value) == text
        assert copy.deepcopy(job.cluster) == job.cluster  # it travels in Spark's closures


def test_a_connected_job_is_a_context_manager() -> None:
    """Leaving the block closes what the job has made; with an error, as a crash would."""
    with ps.local(PARAMS) as job:
        with ps.connect(job.address, token=job.token) as other:
            me, reader = other.worker("w0"), other.reader()
            with me.step():
                pass
        for use in (me.pull, reader.pull, other.read, other.status, other.__enter__):
            with pytest.raises(ps.BadInput, match="it is closed"):
                use()
        assert [one.standing for one in job.status()[0].workers] == ["left"]
        with suppress(ZeroDivisionError), ps.connect(job.cluster) as other:
            other.worker("w1").pull()
            raise ZeroDivisionError
        standing = {one.worker: one.standing for one in job.status()[0].workers}
        assert standing == {"w0": "left", "w1": "active"}  # until its lease expires


def test_connecting_leaves_other_coroutines_running() -> None:
    """`ps.aio.connect` is `ps.connect` for coroutines: an asynchronous context manager."""

    async def read(address: str, token: str) -> Any:
        async with (
            ps.aio.connect(address, token=token) as job,
            ps.aio.reader(job) as reader,
            ps.aio.worker(job, "w0") as me,
        ):
            async with me.step() as step:
                step.push({"w": -np.ones(4)})
            await me.flush()
            return (await reader.pull())["w"][0]

    with ps.local(ps.Dense.zeros({"w": 4}, rate=1.0)) as job:
        assert asyncio.run(read(job.address, job.token)) == 1.0


def test_a_job_that_has_ended_is_not_kept_for_the_exit() -> None:
    """Nothing refers to it any more but its user."""
    with ps.local(PARAMS) as job:
        ended = weakref.ref(job)
    del job
    gc.collect()
    assert ended() is None
