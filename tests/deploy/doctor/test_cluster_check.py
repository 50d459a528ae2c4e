"""`downpour deploy check`: it names what a host lacks, and says what to do."""

import inspect
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from packaging.requirements import Requirement

from deploy.doctor import host_probe
from deploy.doctor.cluster_check import CheckPlan, check_executors, listen_for_shards
from deploy.doctor.findings import (
    FolderFacts,
    HostFacts,
    decode_facts,
    judge_clock,
    judge_executor,
    judge_host,
    judge_ray_node,
    judge_silent_node,
    judge_spark_start,
    judge_start,
)
from shards.errors import GiveUp
from tests.chaos.namespaces import missing
from tests.support.cli_in_process import Run, command
from tests.support.hosts import Host, hosts
from tests.support.ports import free_port
from worker import spark as spark_door
from worker.job.network import ClusterNetwork

if TYPE_CHECKING:
    from tests.support.clusters import RunningRay

NOW_S = 1_800_000_000.0
MEGABYTE = 1_000_000
NEEDED = [Requirement("numpy>=2"), Requirement("pyarrow>=18")]
READY = HostFacts(
    host="node",
    time_s=NOW_S,
    python="3.11",
    executable="/opt/python",
    packages={"numpy": "2.4.6", "pyarrow": "26.0.1"},
    name_error="",
    local_ip="",
    user=1000,
    user_name="ada",
    shm_bytes=1 << 30,
    open_files=65536,
    gpus=0,
    home="/home/ada",
    temporary="/tmp",
    folders={
        "/home/ada": FolderFacts(free_bytes=10**10, error=""),
        "/tmp": FolderFacts(free_bytes=10**10, error=""),
    },
    secrets={"/home/ada/token": 0o600},
    refused={},
)
SOURCE = inspect.getsource(host_probe)
_FULL = FolderFacts(free_bytes=5 * MEGABYTE, error="")
_READ_ONLY = FolderFacts(free_bytes=None, error="Read-only file system")
_ON_HOSTS = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def judge(facts: HostFacts, gpus: int = 0) -> list[str]:
    """All findings about an executor's host, from facts read at NOW_S."""
    findings = [
        *judge_executor(facts, "3.11", NEEDED),
        *judge_clock(facts, NOW_S - 0.5, NOW_S + 0.5),
        *judge_host(facts, gpus),
    ]
    return [str(finding) for finding in findings]


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return command(capsys, monkeypatch, "deploy", "check")


def test_a_host_that_is_ready() -> None:
    """Nothing is missing; with SPARK_LOCAL_IP no name is needed, and few files may be unlimited."""
    assert judge(READY) == []
    other = msgspec.structs.replace(
        READY, name_error="unknown", local_ip="10.0.0.1", open_files=None, gpus=2
    )
    assert judge(other, gpus=2) == []


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (
            {"python": "3.12"},
            (
                "Python of executors (/opt/python): expected version 3.11, as the driver's, got"
                " 3.12; set PYSPARK_PYTHON to a Python 3.11 there, or ship one (downpour pack)"
            ),
        ),
        (
            {"packages": {"numpy": "2.4.6", "pyarrow": None}},
            (
                "Python of executors (/opt/python): expected pyarrow>=18, got not installed;"
                " install the extra `executor` there, or ship a Python with it (downpour pack)"
            ),
        ),
        (
            {"packages": {"numpy": "1.26.4", "pyarrow": "26.0.1"}},
            "Python of executors (/opt/python): expected numpy>=2, got installed is 1.26.4; ",
        ),
        (
            {"time_s": NOW_S + 600},
            "clock: expected the driver's, within 1 s, got 600 s ahead; run a time service",
        ),
        ({"time_s": NOW_S - 600}, "clock: expected the driver's, within 1 s, got 600 s behind; "),
        (
            {"name_error": "Name or service not known"},
            (
                "own name: expected 'node' to resolve, got Name or service not known; add it to"
                " /etc/hosts with this host's address, or set SPARK_LOCAL_IP to that"
            ),
        ),
        (
            {"shm_bytes": 64 << 20},
            "/dev/shm: expected at least 268.4 MB, got 67.1 MB; give a container more: --shm-size,",
        ),
        ({"shm_bytes": None}, "/dev/shm: expected at least 268.4 MB, got none; "),
        (
            {"folders": READY.folders | {"/home/ada": _READ_ONLY}},
            (
                "/home/ada: expected a folder to write files and rename them in, got Read-only file"
                " system; set HOME to a folder that this user may write"
            ),
        ),
        (
            {"folders": READY.folders | {"/mnt/snapshots": _READ_ONLY}},
            (
                "/mnt/snapshots: expected a folder to write files and rename them in, got Read-only"
                " file system; mount it there, and let user 1000 write"
            ),
        ),
        (
            {"folders": READY.folders | {"/tmp": _FULL}},
            "/tmp: expected 1,000.0 MB free, for the rows of later epochs, got 5.0 MB; set TMPDIR",
        ),
        (
            {"user": 54321, "user_name": None},
            "user: expected a name for user id 54321, which Spark's login asks for, got none; ",
        ),
        (
            {"open_files": 256},
            "open files: expected a limit of at least 1024, got 256; raise it: ulimit -n 65536",
        ),
        (
            {"secrets": {"/home/ada/a b": 0o644}},
            (
                "/home/ada/a b: expected mode 600, as it holds a secret, got 644;"
                " chmod 600 '/home/ada/a b'"
            ),
        ),
        ({"secrets": {"/token": None}}, "/token: expected a file with a secret, got none; write"),
        (
            {"refused": {"shards, 10.0.0.5:7400": "no answer in 3 s"}},
            "port of shards, 10.0.0.5:7400: expected a connection, got no answer in 3 s; open it",
        ),
    ],
)
def test_what_is_missing(change: dict[str, Any], finding: str) -> None:
    """Each fault is the only finding, in one line with its remedy."""
    (line,) = judge(msgspec.structs.replace(READY, **change))
    assert line.startswith(f"node: {finding}")
    assert "\n" not in line


def test_fewer_gpus() -> None:
    """A host with fewer GPUs than each executor's needs is named."""
    (line,) = judge(msgspec.structs.replace(READY, gpus=1), gpus=2)
    assert line.startswith("node: GPU: expected 2 devices, got 1 of /dev/nvidia*; install NVIDIA's")


def test_a_python_that_does_not_start_well() -> None:
    """Text before Spark's own output and a failed start are named, with what was printed."""
    (noise,) = judge_start("node", ["hello"], 0, "")
    assert "nothing on standard output at its start, where Spark reads a port, got hello; " in str(
        noise
    )
    (failed,) = judge_start("node", [], 127, "sh: 3: ./environment/bin/python: not found")
    assert "expected it to run, got sh: 3: ./environment/bin/python: not found; set PYSP" in str(
        failed
    )


def test_nodes_of_ray() -> None:
    """A node needs the driver's Python and Ray, and the base install; a silent one is named."""
    node = msgspec.structs.replace(READY, packages={"numpy": "2.4.6", "ray": "2.50.0"})
    lines = [str(line) for line in judge_ray_node(node, "3.12", "2.60.0", NEEDED[:1])]
    remedy = "start the node from an environment like the driver's (downpour pack --extra server)"
    assert lines == [
        f"node: Python of Ray's node (/opt/python): expected {fault}; {remedy}"
        for fault in (
            "version 3.12, as the driver's, got 3.11",
            "ray==2.60.0, got installed is 2.50.0",
        )
    ]
    assert list(judge_ray_node(node, "3.11", "2.50.0", NEEDED[:1])) == []
    assert str(judge_silent_node("node", "10.0.0.7", "no answer in 60 s")) == (
        "node: node 10.0.0.7 of Ray: expected it to run a task, got no answer in 60 s;"
        " see /tmp/ray/session_latest/logs on 10.0.0.7, and start the node again"
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_running_ray(running_ray: "RunningRay", tmp_path: Path) -> None:
    """A task on each node reads the facts there, of a Ray that requires a token."""
    main = "from deploy.cli.app import main; main()"
    options = ["--ray", running_ray.address, "--advertise", "127.0.0.1", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", main, "deploy", "check", *options, "--start-s", "300"],
        env=os.environ | running_ray.token | {"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    report = json.loads(done.stdout)
    here = socket.gethostname()
    assert list(report["hosts"]) == [f"{here} (driver)", f"{here} (Ray)"], done.stderr
    facts = report["hosts"][f"{here} (Ray)"]
    assert facts["packages"]["ray"] == metadata.version("ray")
    subjects = [finding["subject"] for finding in report["findings"]]
    assert not [subject for subject in subjects if "Ray" in subject], report["findings"]


def test_executors_that_cannot_reach_the_driver() -> None:
    """Where no executor comes, the ports that they need are named; other errors stay."""
    silent = GiveUp("Spark at m did not start: registered, but no executor ran a task in 60 s")
    finding = judge_spark_start("driver", silent, ClusterNetwork())
    assert finding.subject == "ports of Spark's driver"
    assert "executors to reach 7600-7616 and 7700-7716 of this host" in finding.expected
    assert finding.got == str(silent)
    other = judge_spark_start("driver", GiveUp("no Java"), ClusterNetwork())
    assert str(other) == "driver: Spark: no Java"


def run_probe(host: Host, request: dict[str, Any], *before: str, **environ: str) -> HostFacts:
    """The facts that the system's Python, which has no packages, reads on a host."""
    words = [*before, "/usr/bin/python3", "-I", "-c", SOURCE]
    done = host.run(*words, environ=environ, line=json.dumps(request))
    assert done.returncode == 0, done.stderr
    facts, others = decode_facts(done.stdout.splitlines())
    assert facts is not None
    assert others == []
    return facts


@_ON_HOSTS
def test_faulty_hosts() -> None:
    """The probe finds real faults with the standard library alone: another host's clock apart.

    The firewall loses the answers of one port in one direction; the other port stays open.
    """
    request = {"packages": ["pyarrow"], "connect_s": 0.3}
    with hosts("driver", "node", shm="64m") as lab:
        driver, node = lab["driver"], lab["node"]
        serve = (
            "import socket, sys; both = [socket.create_server(('', port)) for port in (7400, 7401)]"
            "; sys.stdout.write('.'); sys.stdout.flush(); sys.stdin.read()"
        )
        server = driver.start(
            sys.executable, "-c", serve, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            assert server.stdout is not None
            assert server.stdout.read(1) == b"."
            lost = ("blackhole", "pref", "10", "ipproto", "tcp", "sport", "7401")
            driver.ip("rule", "add", *lost)
            servers = [[name, driver.address, port] for name, port in (("a", 7400), ("b", 7401))]
            facts = run_probe(
                node,
                {**request, "addresses": servers},
                *("prlimit", "--nofile=256", "setpriv", "--reuid", "54321", "--clear-groups"),
                HOME="/proc",
            )
        finally:
            server.communicate()
    subjects = [finding.subject for finding in judge_host(facts)]
    assert subjects == ["own name", "user", "/proc", "/dev/shm", "open files", "port of b"]
    assert facts.refused == {"b": "no answer in 0.3 s"}
    (finding,) = judge_executor(facts, facts.python, NEEDED[1:])
    assert finding.got == "not installed"


@_ON_HOSTS
def test_no_default_route(tmp_path: Path) -> None:
    """Without a default route a driver has no address to give, and the remedy is in the line."""
    with hosts("driver") as lab:
        lab["driver"].name_host("driver", "10.88.0.1")
        main = "from deploy.cli.app import main; main()"
        words = [sys.executable, "-c", main, "deploy", "check"]
        done = lab["driver"].run(*words, environ={"HOME": str(tmp_path)})
        first, _ = done.stdout.splitlines()
        assert first == (
            "driver: listening on every address of driver: expected one that other hosts can reach,"
            " got 127.0.0.1 only, as there is no default route; give --bind ADDRESS, or"
            " --advertise, or set DOWNPOUR_ADVERTISE on that host"
        )
        assert done.returncode == 1


def test_executors_answer(spark: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The job reads facts without a Python worker; a Python that prints or fails is named."""
    plan = CheckPlan(network=ClusterNetwork(start_s=1), spark="local[2]", store=str(tmp_path))
    monkeypatch.setattr(spark.sparkContext, "pythonExec", sys.executable)
    findings, answered = check_executors(spark, plan, [("gone", "127.0.0.1", 1)])
    ((name, facts),) = answered.items()
    subjects = {finding.subject for finding in findings}
    assert subjects - facts.secrets.keys() == {"port of gone"}, "besides a user's open secrets"
    assert name == facts.host == socket.gethostname()
    assert facts.folders[str(tmp_path)].error == ""
    assert list(tmp_path.iterdir()) == []

    source = "import sys; print(1, flush=True); sys.exit('bad\\nworse')"
    (output,) = spark_door.run_on_executors(spark, source, {})
    assert (output.lines, output.status, output.error) == (["1"], 1, "worse")
    monkeypatch.setattr(spark.sparkContext, "pythonExec", "/no/python")
    findings, answered = check_executors(spark, plan, [])
    assert answered == {}
    (finding,) = findings
    assert finding.got.endswith("/no/python: not found")


def test_a_host_without_an_answer_is_named(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Spark ran all tasks of the check on one host, the other does not count as checked."""
    managers = {"driver": ("127.0.0.1", 1), "0": ("127.0.0.1", 1), "1": ("127.0.0.2", 1)}
    monkeypatch.setattr(spark_door, "await_executors", lambda *_: managers)
    plan = CheckPlan(network=ClusterNetwork(start_s=1), spark="local[2]", executors=2)
    findings, answered = check_executors(spark, plan, [])
    assert len(answered) == 1
    (finding,) = (finding for finding in findings if finding.subject == "answers")
    assert str(finding).endswith(
        "answers: expected 2 hosts', got those of 1; try again when each executor has a free core"
    )


def test_ports_in_use() -> None:
    """Executors may connect to the ports of shards and copies; one that is taken is named."""
    network = ClusterNetwork(
        bind="127.0.0.1", advertise="127.0.0.1", port=free_port(), shard_ports=1
    )
    with listen_for_shards(network, None) as (endpoints, _):
        (shard,) = (end for end in endpoints if end[0].startswith("shards"))
        assert host_probe.try_connection(*shard[1:]) == ""
        with listen_for_shards(network, None) as (_, findings):
            (taken,) = (finding for finding in findings if str(network.port) in str(finding))
    assert "expected a free port, got one that is already in use" in str(taken)
    assert host_probe.try_connection(*shard[1:]) == "Connection refused"


def test_the_command(check: Run, tmp_path: Path) -> None:
    """The status is 0 or 1; JSON has the findings and the facts."""
    secret, store = tmp_path / "secret", tmp_path / "store"
    secret.write_text("x")
    secret.chmod(0o640)
    options: Callable[..., list[str]] = lambda *more: [  # noqa: E731  # three calls share it
        *("--advertise", "10.0.0.5", "--store", str(store), "--secret", str(secret), *more)
    ]
    status, out, err = check(*options())
    assert (status, err) == (1, "")
    here = socket.gethostname()
    assert f"{here}: {secret}: expected mode 600, as it holds a secret, got 640; chmod 600" in out
    status, out, _ = check(*options("--json"))
    report = json.loads(out)
    assert not report["ready"]
    assert str(secret) in [finding["subject"] for finding in report["findings"]]
    assert report["hosts"][f"{here} (driver)"]["secrets"][str(secret)] == 0o640
    secret.chmod(0o600)
    _, out, _ = check(*options("--json"))
    subjects = [finding["subject"] for finding in json.loads(out)["findings"]]
    assert str(secret) not in subjects
    assert not store.exists()


def test_a_master_that_is_not_there(check: Run) -> None:
    """It is a finding among the others, not an error of the command."""
    status, out, err = check("--spark", "spark://127.0.0.1:1")
    assert (status, err) == (1, "")
    assert ": Spark: Spark at spark://127.0.0.1:1: expected a server that accepts conn" in out


def test_secrets_of_a_host(tmp_path: Path) -> None:
    """Ray's token and Spark's settings are found by the variables that lead to them."""
    settings = tmp_path / "spark-defaults.conf"
    token = tmp_path / ".ray" / "auth_token"
    environ = {"HOME": str(tmp_path), "SPARK_CONF_DIR": str(tmp_path)}
    assert host_probe.find_secrets(environ) == []
    token.parent.mkdir()
    token.write_text("x")
    settings.write_text("# spark.authenticate.secret\nspark.authenticate true\n")
    assert host_probe.find_secrets(environ) == [str(token)]
    settings.write_text("spark.authenticate true\n\nspark.authenticate.secret x\n")
    assert host_probe.find_secrets(environ) == [str(token), str(settings)]
    elsewhere = environ | {"RAY_AUTH_TOKEN_PATH": "/run/token"}
    assert host_probe.find_secrets(elsewhere) == ["/run/token", str(settings)]
