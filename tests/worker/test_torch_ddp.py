"""Learners that are themselves DDP over several processes; skipped without PyTorch."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import worker
import worker.torch
from tests.support.eventually import eventually
from tests.support.ports import free_port

torch: Any = pytest.importorskip("torch", reason="needs the extra `torch`")

RANKS, STEPS, PERIOD = 2, 60, 10
ENDLESS = 1_000_000


def start_rank(
    job: Path, name: str, rank: int, port: int, *arguments: int
) -> subprocess.Popen[str]:
    """One process of a learner, as torchrun starts it."""
    environment = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "deploy.examples.learner_ddp_torch", str(job), name]
    return subprocess.Popen(
        [*command, *map(str, arguments)], env=environment, stderr=subprocess.PIPE, text=True
    )


def start_learner(job: Path, name: str, *arguments: int) -> list[subprocess.Popen[str]]:
    port = free_port()
    return [start_rank(job, name, rank, port, *arguments) for rank in range(RANKS)]


def test_two_learners_of_two_ranks(tmp_path: Path) -> None:
    """Rank 0 exchanges, the other gets the fragments, and every step counts the rows of both. The
    death of a rank ends its learner with an error, while the other learner trains on; started
    again, the learner continues after its last push."""
    from deploy.examples.learner_ddp_torch import HOW, ROWS, net, tables

    file = tmp_path / "job"
    with worker.start(tables(), on="threads", shards=2, **HOW) as job:
        job.save(file)
        other = start_learner(file, "w1", STEPS)
        killed = start_learner(file, "w0", ENDLESS)

        def step_of(name: str) -> int:
            workers = {one.worker: one.step for one in job.status()[0].workers}
            return workers.get(name, 0)

        try:
            eventually(
                lambda: step_of("w0") >= 5,
                because="the learner trains",
                within_s=300,
                check=lambda: killed[0].poll() is None or pytest.fail("rank 0 ended"),
            )
            killed[1].kill()
            _, trace = killed[0].communicate(timeout=180)
            assert killed[0].returncode == 1
            assert "RuntimeError" in trace.strip().splitlines()[-1], trace
            steps = step_of("w0") + 100  # pushes may still be on their way
            again = start_learner(file, "w0", steps, 1)
            for process in (*again, *other):
                _, trace = process.communicate(timeout=300)
                assert process.returncode == 0, trace
        finally:
            for process in (*killed, *other):
                process.kill()
                process.communicate()
        status = job.status()
        assert {one.steps for one in status} == {STEPS + steps}
        for one in status:  # a shard does not count the samples of a late report that it drops
            missing = ROWS * RANKS * (STEPS + steps) - one.samples
            assert 0 <= missing <= one.dropped * ROWS * RANKS * PERIOD
        model = worker.torch.load(net(), job.read())
    x = torch.ones(1, 3) / 3
    assert abs(model(x).item() - 1) < abs(net()(x).item() - 1)
