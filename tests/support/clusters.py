"""Real clusters of one machine, as an operator would start them: each ends with its context."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple
from urllib.request import urlopen

import psutil
import pyspark

from deploy.clusters.java import spark_environment
from tests.support.eventually import eventually
from tests.support.ports import free_port
from tests.support.quick_start import QUICK_JAVA

_READY_S = 240.0
_RAY_TRIES = 3  # a raylet aborts where an agent of its is 15 s late, as on a busy machine
_SPARK_HOME = Path(pyspark.__file__).parent
_LOG4J = """\
rootLogger.level = error
rootLogger.appenderRef.out.ref = out
appender.out.type = Console
appender.out.name = out
appender.out.layout.type = PatternLayout
"""

MESSAGE_BYTES = 4 << 20
"""The largest message that a Spark Connect server takes here."""


class RunningRay(NamedTuple):
    """A Ray that others have started: HOST:PORT, ray://HOST:PORT, and the environment of those who
    may speak to it."""

    address: str
    client: str
    token: dict[str, str]


@contextmanager
def standalone_spark(folder: Path, cores: int = 2, gpus: int = 0) -> Iterator[str]:
    """A standalone master and one worker of `cores`; gives the master's spark:// URL.

    The worker believes in so many GPUs, for its discovery script says so.
    """
    port, page = free_port(), free_port()
    master = f"spark://127.0.0.1:{port}"
    with ExitStack() as stack:
        process = _spark_class(
            stack,
            folder / "master",
            "org.apache.spark.deploy.master.Master",
            *("--host", "127.0.0.1", "--port", str(port), "--webui-port", str(page)),
        )
        _wait(process, folder / "master/log", lambda: bool(_master(page)))
        process = _spark_class(
            stack,
            folder / "worker",
            "org.apache.spark.deploy.worker.Worker",
            *("--host", "127.0.0.1", "--cores", str(cores), "--memory", "1g"),
            *("--webui-port", "0", "--work-dir", str(folder / "work"), master),
            defaults=_gpu_defaults(folder, gpus) if gpus else "",
        )
        _wait(process, folder / "worker/log", lambda: _master(page).get("aliveworkers") == 1)
        yield master


@contextmanager
def start_master_again(master: str) -> Iterator[None]:
    """Kill the master of a `standalone_spark` of this process, and start it again, as it was."""
    _, _, port = master.rpartition(":")
    found = next(
        child
        for child in psutil.Process().children(recursive=True)
        if port in child.cmdline() and "org.apache.spark.deploy.master.Master" in child.cmdline()
    )
    command, environ = found.cmdline(), found.environ()
    log = Path(environ["SPARK_CONF_DIR"]).with_name("log-again")
    found.kill()
    with ExitStack() as stack:
        _process(stack, log, command, environ)
        yield


@contextmanager
def connect_server(folder: Path) -> Iterator[str]:
    """A Spark Connect server over `local[2,4]`, with messages of 4 MiB; gives its sc:// URL."""
    port = free_port()
    options = {
        "spark.master": "local[2,4]",
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.connect.grpc.maxInboundMessageSize": str(MESSAGE_BYTES),
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.local.dir": str(folder),
    }
    with ExitStack() as stack:
        process = _spark_class(
            stack,
            folder / "connect",
            "org.apache.spark.deploy.SparkSubmit",
            *(word for name, value in options.items() for word in ("--conf", f"{name}={value}")),
            *("--class", "org.apache.spark.sql.connect.service.SparkConnectServer"),
            "spark-internal",
        )
        _wait(process, folder / "connect/log", lambda: _listening(port))
        yield f"sc://127.0.0.1:{port}"


@contextmanager
def ray_head(
    folder: Path, environ: Mapping[str, str], client_port: int | None = None
) -> Iterator[str]:
    """A Ray head with two CPUs, under `environ`; gives HOST:PORT.

    `folder` holds Ray's sockets, so its path must be short. At `client_port`, if any, it speaks
    ray://.
    """
    port = free_port()
    options = [
        *("--head", "--node-ip-address", "127.0.0.3", "--port", str(port), "--num-cpus", "2"),
        *("--include-dashboard", "false", "--disable-usage-stats", "--temp-dir", str(folder)),
        # They look ten times a second for lines to print and for nodes to add.
        *("--include-log-monitor", "false", "--no-monitor"),
        *("--ray-client-server-port", str(client_port or free_port())),
    ]
    environ = {
        # A server of its own for each client starts within 30 s, unless the machine is busy.
        "RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": "100",
        # With them it is forked beside threads of gRPC, and on a busy machine may die at once.
        "GRPC_ENABLE_FORK_SUPPORT": "0",
        # A worker is given a minute to start, and then killed; importing Ray alone may take that.
        "RAY_worker_register_timeout_seconds": "240",
        # A shard's process is its own: those that wait for work in advance cost seconds of a core.
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
        **environ,
    }
    with _ray_start(folder.with_suffix(".log"), options, environ):
        yield f"127.0.0.3:{port}"


@contextmanager
def ray_node(
    log: Path, head: str, address: str, environ: Mapping[str, str]
) -> Iterator[psutil.Process]:
    """One more node, with two CPUs, of the Ray whose head is there; gives its first process.

    `address` is another one of loopback; all the node's other processes descend from that one.
    """
    options = ["--address", head, "--node-ip-address", address, "--num-cpus", "2"]
    options += ["--include-log-monitor", "false"]
    with _ray_start(log, [*options, "--disable-usage-stats"], environ) as process:
        yield psutil.Process(process.pid)


@contextmanager
def _ray_start(
    log: Path, options: list[str], environ: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    # Not as a module, and without its folder on the path: that has packages named as ours.
    ray = [sys.executable, "-P", str(Path(__file__).with_name("slow_ray_start.py"))]
    command = [*ray, "start", "--block", *options]
    with ExitStack() as stack:
        for tries_left in reversed(range(_RAY_TRIES)):
            process = _process(stack, log, command, os.environ | environ)
            try:
                _wait(process, log, lambda: "Ray runtime started" in log.read_text())
                break
            except AssertionError:
                if process.poll() is None or not tries_left:
                    raise
        yield process


def _gpu_defaults(folder: Path, count: int) -> str:
    """A worker's settings, as docs/how-to/clusters.md has them, with a script that finds `count`
    GPUs.
    """
    script = folder / "gpus.sh"
    found = json.dumps({"name": "gpu", "addresses": [str(index) for index in range(count)]})
    script.write_text(f"#!/bin/sh\necho '{found}'\n")
    script.chmod(0o755)
    return (
        f"spark.worker.resource.gpu.amount {count}\n"
        f"spark.worker.resource.gpu.discoveryScript {script}\n"
    )


def _spark_class(
    stack: ExitStack, folder: Path, *command: str, defaults: str = ""
) -> subprocess.Popen[bytes]:
    conf = folder / "conf"
    conf.mkdir(parents=True)
    (conf / "spark-defaults.conf").write_text(defaults)
    (conf / "log4j2.properties").write_text(_LOG4J)
    java = os.environ.get("JAVA_TOOL_OPTIONS", QUICK_JAVA)
    environ = (
        os.environ
        | spark_environment()
        | {
            # The executors have it from their worker. Spark Connect keeps what it is sent there.
            "JAVA_TOOL_OPTIONS": f"{java} -Djava.io.tmpdir={folder}",
            "SPARK_HOME": str(_SPARK_HOME),
            "SPARK_CONF_DIR": str(conf),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_DIRS": str(folder),
            "SPARK_DAEMON_MEMORY": "512m",
            "SPARK_NO_DAEMONIZE": "1",
            "PYSPARK_PYTHON": sys.executable,
        }
    )
    spark_class = str(_SPARK_HOME / "bin" / "spark-class")
    return _process(stack, folder / "log", [spark_class, *command], environ)


def _process(
    stack: ExitStack, log: Path, command: list[str], environ: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    output = stack.enter_context(log.open("wb"))
    process = subprocess.Popen(
        command, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
    )
    stack.callback(_end, process)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that was started here, and what it started."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(family, timeout=10)
    for child in alive:
        child.kill()
    psutil.wait_procs(alive)


def _wait(process: subprocess.Popen[bytes], log: Path, ready: Callable[[], bool]) -> None:
    def said() -> str:
        return f"it starts: {log.read_text(errors='replace')[-2000:]}"

    def check() -> None:
        assert process.poll() is None, said()

    eventually(ready, because=said, within_s=_READY_S, check=check)


def _master(page: int) -> dict[str, object]:
    """What a master's page says of its cluster; nothing while there is no page."""
    try:
        with urlopen(f"http://127.0.0.1:{page}/json/", timeout=5) as answer:
            return dict(json.load(answer))
    except (OSError, HTTPException, ValueError):
        return {}


def _listening(port: int, host: str = "127.0.0.1") -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0
