"""Spark's Python workers are forked from a process that has what they need, and is safe to fork."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import deploy
from worker.spark import settings as spark_settings
from worker.spark.daemon import NEEDED, PRELOADED

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
        numbers = [np.random.random()]
        if torch := sys.modules.get("torch"):
            numbers += [torch.rand(()).item()]
        os.write(writer, json.dumps(numbers).encode())
        os._exit(0)
    return json.loads(os.read(reader, 100))

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


_OF_THE_USER = """
import os, sys, threading
from worker.spark import daemon

os.execv = lambda *command: (print(*command[1][1:], "with", os.environ.get(daemon.PRELOADED)),
                             sys.exit())
sys.argv[1:] = ["pyspark.worker"]
safe = daemon.load()
print(safe, *(name in sys.modules for name in ("fractions", "not_there", "calm", "busy")))
daemon.main()
"""


def run(program: str, **variables: str) -> str:
    """The output of a Python program, with the environment of an embedded session."""
    environ = os.environ | spark_settings.ONE_THREAD | variables
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
    (first,), (second,) = found["drawn"]
    assert first != second


def test_pytorch_is_safe_to_fork() -> None:
    """It starts no thread when it is imported, and two workers draw different numbers by it."""
    pytest.importorskip("torch")
    found: dict[str, Any] = json.loads(run(_LOADED, **{PRELOADED: "torch"}))
    assert found["safe"]
    assert found["others"] == [False, True, False, False]
    first, second = found["drawn"]
    assert all(one != other for one, other in zip(first, second, strict=True))


def test_unsafe_to_fork() -> None:
    """With a thread, of a library for instance, it becomes Spark's own daemon."""
    assert run(_UNSAFE) == "-m pyspark.daemon pyspark.worker\n"


def test_modules_of_the_user(tmp_path: Path) -> None:
    """They are loaded where that leaves one thread; else it starts again without them. One that
    cannot be imported, or that raises, is left to the worker."""
    (tmp_path / "calm.py").write_text("print('of a module')\nraise RuntimeError")
    (tmp_path / "busy.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    calm = run(
        _OF_THE_USER.replace("daemon.main()", ""),
        PYTHONPATH=path,
        **{PRELOADED: "fractions not_there calm"},
    )
    assert calm == "True True False False False\n"
    busy = run(_OF_THE_USER, PYTHONPATH=path, **{PRELOADED: "fractions busy"})
    assert busy.splitlines() == [
        "False True False False True",
        "-m worker.spark.daemon pyspark.worker with None",
    ]


def test_workers_of_a_session_are_forked_with_modules() -> None:
    """The settings reach the process that Spark forks workers from, on a session of the user's."""
    program = """
import os, sys
import deploy
from pyspark.sql import SparkSession

os.environ |= deploy.spark_environment()
settings = deploy.spark_settings("colorsys") | {"spark.ui.enabled": "false"}
spark = SparkSession.builder.master("local[1]").config(map=settings).getOrCreate()

def look(_):
    import sys
    yield [name in sys.modules for name in ("colorsys", "worker.spark.worker_task", "wave")]

print(spark.sparkContext.parallelize([0], 1).mapPartitions(look).collect())
"""
    assert run(program) == "[[True, True, False]]\n"


@pytest.mark.parametrize(("python", "loads"), [(sys.executable, True), ("/other/python", False)])
def test_only_for_this_python(python: str, loads: bool) -> None:
    """Another Python may have none of this project's code."""
    settings = deploy.spark_settings("torch", "x", environ={"PYSPARK_PYTHON": python})
    assert settings == (
        {
            "spark.python.daemon.module": "worker.spark.daemon",
            "spark.executorEnv.DOWNPOUR_PRELOADED": "torch x",
        }
        if loads
        else {}
    )
