"""Where a process may open too few files, an error names the remedy; ZeroMQ would end it."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import numpy as np
import ps
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]),) * 2)
try:
    with ps.start({"w": np.zeros(64)}, on=sys.argv[2]) as job, job.worker("w0") as me:
        with me.step() as step:
            step.push({"w": np.ones(64)})
        me.flush()
        print(job.read()["w"][0])
except ps.errors.GiveUp as error:
    print(error)
"""
REMEDY = "raise the limit before it starts, as with `ulimit -n 4096`"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("most", "on"), [(20, "processes"), (34, "processes"), (24, "threads"), (40, "threads")]
)
def test_too_few_descriptors_are_named_with_the_remedy(most: int, on: str) -> None:
    """In the driver, in a shard's process and in a worker: one line, and no process is aborted."""
    line = [sys.executable, "-c", PROGRAM, str(most), on]
    ended = subprocess.run(line, capture_output=True, text=True, check=False, timeout=280)
    assert (ended.returncode, ended.stdout.count("\n")) == (0, 1), ended.stderr
    assert f"too many open files: this process may open {most}, and sockets need" in ended.stdout
    assert REMEDY in ended.stdout
