"""Spark's Python workers are forked from a process that has what they need, and is safe to fork."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

import deploy
from deploy.clusters.java import start_ahead
from tests.support.eventually import eventually
from worker.spark import head_start
from worker.spark import settings as spark_settings
from worker.spark.daemon import NEEDED, PRELOADED

_LOADED = """
import gc, json, os, sys
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
    "others": [name in sys.modules for name in ("ray", "torch", "jax")],
    "frozen": gc.get_freeze_count(),
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


BUSY = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a test's sockets; the path of a socket is short."""
    with TemporaryDirectory(prefix="ahead-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def run(program: str, *arguments: str, **variables: str) -> str:
    """The output of a Python program, with the environment of an embedded session."""
    environ = os.environ | spark_settings.ONE_THREAD | variables
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.check_output(command, env=environ, stdin=subprocess.DEVNULL, text=True)


def test_safe_to_fork() -> None:
    """What workers need is loaded, without a thread, a socket or a framework; and two of them draw
    different random numbers."""
    found: dict[str, Any] = json.loads(run(_LOADED))
    assert found["safe"]
    assert found["loaded"] == [True] * len(NEEDED)
    assert found["others"] == [False] * 3
    assert found["frozen"] > 50_000
    assert found["sockets"] == []
    (first,), (second,) = found["drawn"]
    assert first != second


def test_pytorch_is_safe_to_fork() -> None:
    """It starts no thread when it is imported, and two workers draw different numbers by it."""
    pytest.importorskip("torch")
    found: dict[str, Any] = json.loads(run(_LOADED, **{PRELOADED: "torch"}))
    assert found["safe"]
    assert found["others"] == [False, True, False]
    first, second = found["drawn"]
    assert all(one != other for one, other in zip(first, second, strict=True))


def test_unsafe_to_fork() -> None:
    """With a thread, of a library for instance, it becomes Spark's own daemon."""
    assert run(_UNSAFE) == "-m pyspark.daemon pyspark.worker\n"


def test_modules_of_the_user(tmp_path: Path) -> None:
    """They are loaded where that leaves one thread; else it starts again without them. One that
    cannot be imported, or that raises, is left to the worker."""
    (tmp_path / "calm.py").write_text("print('of a module')\nraise RuntimeError")
    (tmp_path / "busy.py").write_text(BUSY)
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


_SESSION = """
import os, sys, tempfile
import numpy as np
import deploy, worker
from pyspark.sql import SparkSession
from worker.spark import head_start

os.environ |= deploy.spark_environment()
settings = deploy.spark_settings("colorsys", *sys.argv[1:]) | {"spark.ui.enabled": "false"}
settings |= {"spark.executorEnv.MINE": "1"}
spark = SparkSession.builder.master("local[1]").config(map=settings).getOrCreate()

def look(_):
    import os, sys
    loaded = [name in sys.modules for name in ("colorsys", "worker.spark.worker_task", "wave")]
    seed = os.environ["PYTHONHASHSEED"], sys.flags.hash_randomization
    yield loaded, os.environ["MINE"], seed, head_start.AHEAD in os.environ, os.getppid()

def train(path, ctx):
    import sys
    with ctx.worker.step() as step, open(path, "w") as file:
        file.write(str([name for name in sys.modules if name.startswith("worker.job")]))

(*seen, parent), = spark.sparkContext.parallelize([0], 1).mapPartitions(look).collect()
with tempfile.NamedTemporaryFile("r") as file:
    worker.run(spark.range(1), train, file.name, params={"w": np.zeros(1, np.float32)},
               shards_in="processes")
    print(file.read(), end=" ")
print(*seen, parent == head_start._STARTED[0].pid, parent)
"""


def is_over(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_workers_of_a_session_are_forked_with_modules(temporary: Path) -> None:
    """From the process that was started ahead, with what Spark gives its workers; it ends with the
    session, and leaves no file. A task of `worker.run` imports nothing of the driver's."""
    output, _, pid = run(_SESSION).strip().rpartition(" ")
    assert output == "[] [True, True, False] 1 ('0', 0) False True"
    eventually(lambda: is_over(int(pid)), because="its daemon ends with a session")
    assert not list(temporary.glob("downpour-ahead-*"))


def test_a_session_does_without_a_head_start(tmp_path: Path, temporary: Path) -> None:
    """One that has a thread is not forked: Spark's daemon serves, and loads no module ahead."""
    (tmp_path / "busy.py").write_text(BUSY)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    output = run(_SESSION, "busy", PYTHONPATH=path)
    assert output.startswith("[] [False, True, False] 1 ('0', 0) False False")
    assert not list(temporary.glob("downpour-ahead-*"))


def test_a_head_start_that_nobody_claims_ends_with_its_driver(temporary: Path) -> None:
    program = """
import deploy
from worker.spark import head_start

deploy.spark_settings()
print(head_start._STARTED[0].pid)
"""
    pid = int(run(program))
    eventually(lambda: is_over(pid), because="it ends with the driver")
    assert not list(temporary.glob("downpour-ahead-*"))


def test_nobody_there() -> None:
    assert not head_start.hand_over("/nowhere/socket")


def test_a_daemon_at_another_place_is_refused(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers would have the network and the limits of the driver."""
    address = head_start.start(os.environ)
    eventually(Path(address).exists, because="it listens before it loads")
    monkeypatch.setattr(head_start, "describe_place", lambda: ["net:[1]"])
    assert not head_start.hand_over(address)
    assert head_start._STARTED[-1].wait(60) == 0
    assert not list(temporary.iterdir())


@pytest.mark.parametrize(("python", "loads"), [(sys.executable, True), ("/other/python", False)])
def test_only_for_this_python(python: str, loads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another Python may have none of this project's code."""
    begun: list[str] = []

    def start(environ: dict[str, str]) -> str:
        begun.append(environ[PRELOADED])
        return "/s"

    monkeypatch.setattr(head_start, "start", start)
    settings = deploy.spark_settings("torch", "x", environ={"PYSPARK_PYTHON": python})
    assert begun == ["torch x"] * loads
    assert settings == (
        {
            "spark.python.daemon.module": "worker.spark.daemon",
            "spark.executorEnv.DOWNPOUR_PRELOADED": "torch x",
            "spark.executorEnv.DOWNPOUR_AHEAD": "/s",
        }
        if loads
        else {}
    )


@pytest.mark.parametrize(("python", "begins"), [("", True), ("/other/python", False)])
def test_an_embedded_session_loads_ahead(
    python: str, begins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the threads of its workers, which a library reads once; not for another Python."""
    begun: list[str] = []

    def start(environ: dict[str, str]) -> str:
        begun.append(environ["OMP_NUM_THREADS"])
        return "/s"

    monkeypatch.setattr(head_start, "start", start)
    variables = start_ahead({"PYSPARK_PYTHON": python, "OMP_NUM_THREADS": "8"})
    assert begun == ["1"] * begins
    assert variables == ({"DOWNPOUR_AHEAD": "/s"} if begins else {})
