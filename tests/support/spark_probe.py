"""Spark sessions in a process of their own: `python -m tests.support.spark_probe WHAT [URL]`.

Prints one line of JSON that says what was seen from inside; the test that runs it judges.
"""

import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa

from deploy.clusters.java import spark_environment
from ps import build_id
from shards.errors import DownpourError
from tests.support.process_tree import list_commands
from worker.spark import run_tasks, start_session
from worker.spark import session as spark

_YARN_SITE = """<configuration><property><name>yarn.resourcemanager.hostname</name>
<value>127.0.0.1</value></property><property><name>yarn.resourcemanager.address</name>
<value>${{yarn.resourcemanager.hostname}}:{}</value></property></configuration>"""
_BUSY_S = 250.0  # `refused` alone tries a short limit; a busy machine needs more


def seen(url: str | None, *, kill: bool = False, gpus: bool = False) -> dict[str, Any]:
    """One session with one small Arrow job, with `gpus` one more; with `kill` its JVM is killed
    before leaving.
    """
    before = _process_state()
    with start_session(
        url, 2, app="one session", env=spark_environment(), start_s=_BUSY_S
    ) as session:
        frame = session.range(4, numPartitions=2)
        rows = frame.mapInArrow(_look, "seen string").collect()
        found: dict[str, Any] = {
            "rows": [json.loads(row.seen) for row in rows],
            "build": build_id(),
            "temporary": [entry.name for entry in Path(tempfile.gettempdir()).iterdir()],
            "children": _children(),
            "listening": _listening(),
        }
        if not (url or "").startswith("sc:"):
            assert session._jvm is not None
            found["java_home"] = session._jvm.System.getProperty("java.home")
            found["java_files"] = session._jvm.System.getProperty("java.io.tmpdir")
        if gpus:
            found["gpus"] = _gpus(session)
        if kill:
            for child in psutil.Process().children():
                child.kill()
    return found | {"left": _children(), "kept": _process_state() == before}


def _gpus(session: Any) -> list[list[str]]:
    """The addresses that Spark assigns to each of two tasks that run at one time."""
    schema = pa.schema([("gpus", pa.string())])

    def task(batches: Any, partition: int, attempt: int, assigned: list[str]) -> Iterator[Any]:
        for _ in batches:
            pass
        # Each waits for the other, or one slot might be given both, one after the other.
        (Path(folder) / str(partition)).touch()
        until = time.monotonic() + 200
        while len(list(Path(folder).iterdir())) < 2:
            assert time.monotonic() < until, "the other task has not begun"
            time.sleep(0.05)
        yield pa.record_batch([pa.array([json.dumps(assigned)])], schema=schema)

    with tempfile.TemporaryDirectory() as folder:
        frame = session.range(8, numPartitions=2)
        return [json.loads(row.gpus) for row in run_tasks(frame, task, schema, "gpus")]


def out_of_memory() -> dict[str, str]:
    """The error of a job when a thread of the JVM has run out of memory."""
    with start_session(None, 1, app="memory", env=spark_environment()) as session:
        jvm: Any = session._jvm
        frame = session.range(1)
        handler = jvm.java.lang.Thread.getDefaultUncaughtExceptionHandler()
        fault = jvm.java.lang.OutOfMemoryError("Java heap space")
        with suppress(Exception):  # the JVM ends in the middle of this call
            handler.uncaughtException(jvm.java.lang.Thread.currentThread(), fault)
        try:
            run_tasks(frame, lambda *_: iter(()), pa.schema([]), "memory")
        except DownpourError as error:
            return {"error": f"{type(error).__name__}: {error}"}
    return {}


def refused() -> dict[str, Any]:
    """What a dead port and a silent one answer to each kind of URL, and what a broken Java does."""
    spark.REACH_S = 1.0  # type: ignore[attr-defined]  # the door's own copy of the limit
    with socket.socket() as dead, socket.create_server(("127.0.0.1", 0)) as silent:
        dead.bind(("127.0.0.1", 0))
        refusals = {}
        for name, port in (("dead", dead.getsockname()[1]), ("silent", silent.getsockname()[1])):
            for scheme in ("spark", "sc"):
                answer = _refusal(f"{scheme}://127.0.0.1:{port}", spark_environment())
                refusals[f"{scheme} {name}"] = _without_log(answer.replace(str(port), "PORT"))
            threads = sum(map(_count_threads_of_child, range(40)))
            refusals["threads of children"] = f"{threads} more"
            with tempfile.TemporaryDirectory() as conf:
                (Path(conf) / "yarn-site.xml").write_text(_YARN_SITE.format(port))
                os.environ["HADOOP_CONF_DIR"] = conf
                answer = _refusal("yarn", spark_environment())
                refusals[f"yarn {name}"] = _without_log(answer.replace(str(port), "PORT"))
                del os.environ["HADOOP_CONF_DIR"]
        answer = _refusal(f"k8s://http://127.0.0.1:{port}", spark_environment())
        refusals["k8s silent"] = _without_log(answer.replace(str(port), "PORT"))
    with tempfile.TemporaryDirectory() as home:
        java = Path(home) / "bin" / "java"
        java.parent.mkdir()
        java.write_text("#!/bin/sh\necho WARNING: x\necho Error: no room >&2\necho bye\nexit 1\n")
        java.chmod(0o755)
        refusals["java"] = _refusal(None, {"JAVA_HOME": home})
        java.write_text("#!/bin/sh\necho a word\nkill -9 $$\n")
        refusals["killed"] = _refusal(None, {"JAVA_HOME": home})
    return refusals | {"left": _children()}


def _refusal(url: str | None, env: Mapping[str, str]) -> str:
    try:
        conf = {"spark.kubernetes.container.image": "none"}
        with start_session(url, 2, app="refused", env=env, conf=conf, start_s=3.0):
            return "a session"
    except DownpourError as error:
        return f"{type(error).__name__}: {error}"


def _count_threads_of_child(_: int) -> int:
    """The threads that a child of this process has when it is forked, without its first."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        threads = [*Path("/proc/self/task").iterdir()]
        os.write(writing, bytes([len(threads)]))
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        return file.read()[0] - 1


def _without_log(line: str) -> str:
    return line.partition("; Spark's log says: ")[0]


def _look(batches: Iterator[Any]) -> Iterator[Any]:
    """In a Python worker: what it sees of itself, a row for each number that came in."""
    import ps

    facts = {
        "ps": ps.__file__,
        "python": sys.executable,
        "threads": os.environ.get("OPENBLAS_NUM_THREADS"),
    }
    for batch in batches:
        rows = [json.dumps(facts | {"id": value}) for value in batch.column(0).to_pylist()]
        yield pa.RecordBatch.from_pydict({"seen": rows})


def _children() -> list[str]:
    return [" ".join(words)[:80] for _, words in list_commands()]


def _listening() -> list[str]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found += [
                connection.laddr.ip
                for connection in process.net_connections("tcp")
                if connection.status == psutil.CONN_LISTEN
            ]
    return found


def _process_state() -> Any:
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return environ, list(sys.path), signal.getsignal(signal.SIGINT)


if __name__ == "__main__":
    what, url = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
    match what:
        case "twice":
            print(json.dumps([seen(url), seen(url, kill=True)]))
        case "gpus":
            print(json.dumps(seen(url, gpus=True)))
        case "memory":
            print(json.dumps(out_of_memory()))
        case "refused":
            print(json.dumps(refused()))
