"""Ray comes up embedded or is found by its address, and only what was started here is stopped."""

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from deploy.clusters import ray_cluster
from deploy.clusters.ray_cluster import check_token, connect, refusal
from shards.errors import BadInput, GiveUp, NoServer, WrongBuild
from tests.support.quick_start import import_path

if TYPE_CHECKING:
    from tests.support.clusters import RunningRay

ROOT = Path(__file__).parents[3]


def run(*addresses: str, **environ: str) -> list[dict[str, Any]]:
    """The report of tests.support.ray_probe, run outside the project's folder, as by a user."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.ray_probe", *addresses],
        cwd="/",
        env=os.environ | import_path(ROOT) | environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_embedded(tmp_path: Path) -> None:
    """Two embedded Rays in turn start with a token, in a folder that only we may enter, and
    leave no process, file or handler behind, though the first exceeds Ray's time limit and is
    started again; a deep folder for temporary files does no harm."""
    deep = tmp_path / "a-folder-too-deep-for-the-path-of-a-socket"
    deep.mkdir()
    home = tmp_path / "home"
    home.mkdir()
    for session in run("late", "-", TMPDIR=str(deep), HOME=str(home)):
        assert session["head"].startswith("127.0.0.2:")
        assert session["actor"]["mode"] == "token"
        assert session["cpus"] == 3.0
        assert session["children"] > 0
        assert session["log_monitors"] == 0, "nobody reads what it looks for"
        assert session["folders"] == ["0o700"]
        assert session["kept"]
        assert session["left"] == []
        assert session["left_folders"] == 0
    assert list(deep.iterdir()) == []
    assert list(home.iterdir()) == [], "no token of Ray's own making is left in the user's home"


def test_the_death_of_the_head_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that has ended is an error; one that lives, and a Ray of others, are none."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        node = SimpleNamespace(all_processes={"gcs_server": [SimpleNamespace(process=process)]})
        monkeypatch.setattr("ray._private.worker._global_node", node)
        ray_cluster.check_head()
        process.kill()
        process.wait()
        with pytest.raises(GiveUp, match=r"^Ray's head has died, killed or crashed"):
            ray_cluster.check_head()
    for other in (None, SimpleNamespace(all_processes={})):
        monkeypatch.setattr("ray._private.worker._global_node", other)
        ray_cluster.check_head()


def test_an_embedded_ray_that_never_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """After three starts, the failure is reported in one line."""
    starts = []

    def late(_: str, **options: Any) -> object:
        starts.append(options["_temp_dir"])
        raise RuntimeError("The current node timed out during startup. This could")

    monkeypatch.setattr("ray.init", late)
    line = r"^Ray at local did not start: The current node timed out during startup\."
    with pytest.raises(GiveUp, match=line), ray_cluster._start_embedded(1):
        pass
    assert len(set(starts)) == 3


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_running_cluster(running_ray: "RunningRay") -> None:
    """A running Ray is used with this project's code and continues after we leave, by either kind
    of address."""
    address, client_address, auth = running_ray
    session, client = run(address, client_address, **auth)
    assert session["head"] == address
    assert session["cpus"] == 2.0
    for found in (session, client):
        assert "/py_modules_files/" in found["actor"]["ps"]
        assert found["left"] == []


@pytest.mark.slow
def test_who_may_not_join(
    running_ray: "RunningRay", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a running Ray's token, or with another version, the error is one line that says
    so."""
    for name, value in (running_ray.token | {"RAY_AUTH_MODE": "disabled"}).items():
        monkeypatch.setenv(name, value)
    line = rf"^Ray at {running_ray.address}: expected that cluster's token"
    with pytest.raises(BadInput, match=line):
        ray_cluster._try(running_ray.address)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setattr("ray.__version__", "2.1.0")
    (tmp_path / "sitecustomize.py").write_text("import ray; ray.__version__ = '2.1.0'")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    line = rf"^Ray at {running_ray.address}: expected Ray 2\.1\.0 on Python"
    with pytest.raises(WrongBuild, match=line):
        ray_cluster._try(running_ray.address)


def test_nodes_that_count() -> None:
    """Living nodes of Ray's table count, and dead ones at an address where no node lives."""

    def entry(host: str, address: str, reason: int | None = None, text: str = "") -> dict[str, Any]:
        facts = {"NodeID": f"{host} {reason}", "NodeManagerHostname": host, "NodeManagerPort": 7}
        facts |= {"NodeManagerAddress": address, "Alive": reason is None}
        return {**facts, "DeathReason": reason or 0, "DeathReasonMessage": text}

    table = [
        entry("lost", "10.0.0.4", 2, "health check failed"),
        entry("two", "10.0.0.2"),
        entry("one", "10.0.0.1", 2, "health check failed"),
        entry("one", "10.0.0.1"),
        entry("left", "10.0.0.3", 1, "drained"),
        entry("gone", "10.0.0.5", 0),
    ]
    assert [(node.host, node.death) for node in ray_cluster.list_nodes(table)] == [
        ("gone", "for a reason that Ray does not say"),
        ("lost", "health check failed"),
        ("one", ""),
        ("two", ""),
    ]


def test_no_ray_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a port belongs to another server than Ray, the run gives up within the time set, in one
    line."""
    monkeypatch.setattr(ray_cluster, "_TRIAL_S", 0.5)
    monkeypatch.setattr(ray_cluster, "check_ray", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        line = rf"^Ray at {address}: expected a Ray head, got no answer in 0\.5 s$"
        with pytest.raises(BadInput, match=line):
            ray_cluster._try(address)


_STILLBORN = "Initialization failure from server: Starting Ray client server failed. See a.err"


@pytest.mark.parametrize(("deaths", "asked"), [(2, 3), (3, 3)])
def test_a_server_that_dies_at_its_birth(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, deaths: int, asked: int
) -> None:
    """If the server that Ray starts for a client of ray:// crashes, the start is retried, three
    times in all, by the trial and by the connection itself."""
    count = tmp_path / "count"
    program = (
        f"import sys; f = open({str(count)!r}, 'a+'); f.write('x'); f.seek(0)\n"
        f"if len(f.read()) <= {deaths}: sys.exit('ConnectionAbortedError: ' + {_STILLBORN!r})"
    )
    monkeypatch.setattr(ray_cluster, "_TRIAL", program)
    with nullcontext() if deaths < asked else pytest.raises(BadInput, match="client server failed"):
        ray_cluster._try("auto")
    assert len(count.read_text()) == asked

    calls = 0

    def init(*_: object, **__: object) -> object:
        nonlocal calls
        calls += 1
        if calls <= deaths:
            raise ConnectionAbortedError(_STILLBORN)
        return SimpleNamespace(address_info={"gcs_address": "head:1"})

    monkeypatch.setattr("ray.init", init)
    if deaths < asked:
        assert ray_cluster._init("ray://h:1") == "head:1"
    else:
        with pytest.raises(GiveUp, match="Starting Ray client server failed"):
            ray_cluster._init("ray://h:1")
    assert calls == asked


@pytest.mark.parametrize(
    ("raised", "line"),
    [
        (ConnectionError("can't be sent\nstatus\n"), r"^the connection to Ray at h:1 is lost"),
        (ConnectionResetError("Py4J's"), "^Py4J's$"),
    ],
)
def test_a_lost_connection_is_named(
    monkeypatch: pytest.MonkeyPatch, raised: ConnectionError, line: str
) -> None:
    """What Ray's client says in many lines becomes one; errors of others stay as they are."""
    monkeypatch.setattr(ray_cluster, "_try", lambda _: None)
    monkeypatch.setattr(ray_cluster, "_init", lambda *_, **__: "h:1")
    with pytest.raises((GiveUp, ConnectionError), match=line), ray_cluster._join("h:1"):
        raise raised


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_closed_port(scheme: str) -> None:
    """A closed port is reported at once."""
    with pytest.raises(
        BadInput, match=r"^Ray at .*: expected a server .*, got: Connection refused$"
    ):
        ray_cluster._try(f"{scheme}127.0.0.1:1")


@pytest.mark.parametrize("address", ["", "localhost", "h:port", "http://h:1", ":6379", "h:99999"])
def test_no_ray_address(address: str) -> None:
    """An invalid address is refused with the valid forms."""
    line = rf"^Ray address: expected HOST:PORT, ray://HOST:PORT or auto, got {address!r}$"
    with pytest.raises(BadInput, match=line):
        ray_cluster._try(address)


def test_refusal_names_both_versions() -> None:
    """Ray's six-line complaint about versions becomes one line of both."""
    printed = (
        "RuntimeError: Version mismatch: The cluster was started with:\n"
        "    Ray: 9.9.9\n    Python: 3.14.0\n"
        "This process on node 127.0.0.3 was started with:\n    Ray: 2.1.0\n    Python: 3.11.7\n"
    )
    error = refusal("h:1", printed)
    assert isinstance(error, WrongBuild)
    assert str(error).endswith("the cluster runs Ray 9.9.9 on Python 3.14.0")


@pytest.mark.parametrize(
    ("printed", "line"),
    [
        ("x\nConnectionError: Could not find any running Ray instance.\n", "Could not find any"),
        ("a.b.SomeError: first\nmore\n\nValueError: last\nmore\n", "Ray at auto: last$"),
        ("", "the connection was refused"),
        (
            "a.Error: Initialization failure from server:\nTraceback\n  b\ngrpc.TimeoutError\n",
            "Initialization failure from server: grpc.TimeoutError$",
        ),
    ],
)
def test_refusal_is_the_last_error(printed: str, line: str) -> None:
    """Of a long traceback, the first line of the last error is reported, as one that may pass."""
    error = refusal("auto", printed)
    assert isinstance(error, NoServer)
    assert error.retryable
    assert "\n" not in str(error)
    with pytest.raises(BadInput, match=line):
        raise error


def test_second_connection(ray_local: str) -> None:
    """A process that is connected already gets an error, and stays connected."""
    import ray

    with pytest.raises(BadInput, match="expected no connection in this process"), connect(None, 1):
        pass
    assert ray.is_initialized()
    assert ray.get_runtime_context().gcs_address == ray_local


def test_a_token_is_wanted_where_shards_are_open(tmp_path: Path) -> None:
    """The token is in a file that only its owner can read, or in the environment of a launcher."""
    file = tmp_path / "token"
    file.write_text("0" * 64)
    file.chmod(0o600)
    environ = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(file)}
    check_token(environ)
    check_token({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64})
    with pytest.raises(BadInput, match=r"expected RAY_AUTH_MODE=token .*, got disabled"):
        check_token(environ | {"RAY_AUTH_MODE": "disabled"})
    file.chmod(0o644)
    with pytest.raises(BadInput, match=f"Ray's token: {file}: expected .* mode 600, got .* 644"):
        check_token(environ)
    file.unlink()
    with pytest.raises(BadInput, match=f"Ray's token: {file}: No such file"):
        check_token(environ)


def test_the_node_to_drain_is_found_by_its_names() -> None:
    """By address, host or id; the head, a dead node and an ambiguous name are refused."""
    table = [
        entry("a1", "one", "10.0.0.1", head=True),
        entry("b2", "two", "10.0.0.2"),
        entry("c3", "two", "10.0.0.3"),
        entry("d4", "four", "10.0.0.4", alive=False),
    ]
    for name in ("10.0.0.2", "b2"):
        assert ray_cluster.choose_node(table, name).id == "b2"
    living = r"10\.0\.0\.1 \(one\), 10\.0\.0\.2 \(two\), 10\.0\.0\.3 \(two\)"
    with pytest.raises(
        BadInput, match=r"^--ray: expected HOST:PORT of the head, or auto, got ray:"
    ):
        ray_cluster.drain_node("ray://10.0.0.1:10001", "two", 1.0, print)
    for name, line in (
        ("four", rf"^node four: expected one of {living}, got none$"),
        ("two", r"got 2 nodes of this host: name an address$"),
        ("10.0.0.1", r"^node 10\.0\.0\.1: expected another node than Ray's head, got the head$"),
    ):
        with pytest.raises(BadInput, match=line):
            ray_cluster.choose_node(table, name)


def entry(
    node: str, host: str, address: str, *, head: bool = False, alive: bool = True
) -> dict[str, Any]:
    """A node in Ray's table."""
    resources = {"node:__internal_head__": 1.0} if head else {}
    return {
        "NodeID": node, "NodeManagerHostname": host, "NodeManagerAddress": address,
        "NodeManagerPort": 1, "Alive": alive, "Resources": resources,
    }  # fmt: skip


SHARDS = """
import sys
import numpy as np, ps, ray
from ps.launch.ray_actors import nodes
from ray._private import state

ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")
with ps.start({"w": np.zeros(48, np.float32)}, on="ray", shards=3) as job:
    address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    mine = ray.get_runtime_context().get_job_id()
    actors = [actor for actor in state.actors().values() if actor["JobID"] == mine]
    print(*(address[actor["Address"]["NodeID"]] for actor in actors), len(nodes()), flush=True)
    sys.stdin.readline()
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_node_is_drained(running_ray: "RunningRay", tmp_path: Path) -> None:
    """A node that drains keeps its shard and takes no other; when the job ends, it leaves Ray."""
    from tests.support.clusters import ray_node

    head, environ, there = running_ray.address, os.environ | running_ray.token, "127.0.0.4"
    main = "from deploy.cli.app import main; main()"
    drain = [sys.executable, "-c", main, "deploy", "drain", there, "--ray", head]

    def start(*words: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            words, env=environ, text=True, stdin=pipe, stdout=pipe, stderr=pipe
        )
        stack.callback(process.kill)
        return process

    def read_nodes(job: subprocess.Popen[str]) -> tuple[list[str], int]:
        """The nodes of a job's shards, and the number of those that take more."""
        assert job.stdout is not None
        *addresses, count = job.stdout.readline().split()
        return sorted(addresses), int(count)

    with ExitStack() as stack:
        stack.enter_context(ray_node(tmp_path / "node.log", head, there, running_ray.token))
        while True:
            first = start(sys.executable, "-c", SHARDS, head)
            used, count = read_nodes(first)
            assert count == 2
            if there in used:
                break
            first.communicate("\n")  # Ray spreads shards as far as it likes
        early = subprocess.run(
            [*drain, "--wait-s", "0.1"], env=environ, capture_output=True, text=True, check=False
        )
        assert early.returncode != 0
        assert "after 0.1 s ShardActor (process " in early.stderr
        draining = start(*drain)
        assert draining.stdout is not None
        assert draining.stdout.readline() == f"node {there} of Ray takes nothing more\n"
        assert draining.stdout.readline().startswith("left on it: ShardActor (process ")
        second = start(sys.executable, "-c", SHARDS, head)
        assert read_nodes(second) == (["127.0.0.3"] * 3, 1)
        assert draining.poll() is None
        for job in (first, second):
            error = job.communicate("\n")[1]
            assert job.returncode == 0, error
        out, error = draining.communicate()
        assert (draining.returncode, error) == (0, "")
        assert out.endswith(f"node {there} is empty, and has left Ray\n")
