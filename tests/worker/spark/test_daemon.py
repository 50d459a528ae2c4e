"""Spark's Python workers are forked from a process that has what they need, and is safe to fork."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from worker.spark import settings as spark_settings
from worker.spark.daemon import NEEDED

_LOADED = """
import json, os, sys
from pathlib import Path
from worker.spark import daemon

safe = daemon.load()
links = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.exists()]

def draw():
    reader, writer = os.pipe()
    if os.fork() == 0:
        import numpy as np
        os.write(writer, np.random.random().hex().encode())
        os._exit(0)
    return os.read(reader, 100).decode()

print(json.dumps({
    "safe": safe, "loaded": [name in sys.modules for name in daemon.NEEDED],
    "others": [name in sys.modules for name in ("ray", "torch", "jax", "pandas")],
    "sockets": [link for link in links if link.startswith("socket")],
    "drawn": [draw() for _ in range(2)],
}))
"""
_UNSAFE = """
import os, sys, threading
from worker.spark import daemon

threading.Thread(target=threading.Event().wait, daemon=True).start()
os.execv = lambda *command: (print(*command[1][1:]), sys.exit())
sys.argv[1:] = ["pyspark.worker"]
daemon.main()
"""


def run(program: str) -> str:
    """The output of a Python program, with the environment of an embedded session."""
    environ = os.environ | spark_settings.ONE_THREAD
    command = [sys.executable, "-c", program]
    return subprocess.check_output(command, env=environ, stdin=subprocess.DEVNULL, text=True)


def test_safe_to_fork() -> None:
    """What workers need is loaded, without a thread, a socket or a framework; and two of them draw
    different random numbers."""
    found: dict[str, Any] = json.loads(run(_LOADED))
    assert found["safe"]
    assert found["loaded"] == [True] * len(NEEDED)
    assert found["others"] == [False] * 4
    assert found["sockets"] == []
    assert len(set(found["drawn"])) == 2


def test_unsafe_to_fork() -> None:
    """With a thread, of a library for instance, it becomes Spark's own daemon."""
    assert run(_UNSAFE) == "-m pyspark.daemon pyspark.worker\n"


@pytest.mark.parametrize(("python", "loads"), [(sys.executable, True), ("/other/python", False)])
def test_only_for_this_python(python: str, loads: bool) -> None:
    """Another Python may have none of this project's code."""
    settings = spark_settings.daemon({"PYSPARK_PYTHON": python})
    assert ("spark.python.daemon.module" in settings) == loads
