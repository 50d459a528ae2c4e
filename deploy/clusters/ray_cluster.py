"""The Ray that shards run on: one started here, or a running one by its address.

An embedded Ray is a head node of this process's own. It uses a loopback address, so that a laptop
may change networks. It requires a token that only this process's children know. It keeps its files
in a folder that is removed with it. A running cluster is never stopped.

Ray takes minutes to give up on an address that does not answer, and prints in the meantime. So a
child process tries the connection first, because it can be killed after a timeout.
"""

import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib.resources import files
from pathlib import Path
from platform import python_version
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import ray
from ray._private import state as ray_state
from ray._private import worker as ray_worker
from ray._private.ray_constants import PROCESS_TYPE_GCS_SERVER, PROCESS_TYPE_LOG_MONITOR
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deploy.clusters.probe import check_ray
from ps.launch.launch_plan import START_S
from ps.shared_memory.shm_files import ray_folder
from ps.snapshots.private_files import check_private
from ps.transport.addresses import check_reachable
from shards.errors import BadInput, GiveUp, NoServer, WrongBuild
from worker.job.network import DriverNetwork
from worker.spark.code_archive import PACKAGES

_TRIAL_S = 120.0  # a client of ray:// waits until a server of its own has started
# Ray forks that server while gRPC threads are running, and sometimes it crashes at once.
_STILLBORN = "Starting Ray client server failed"
# An embedded Ray gives itself 30 s, which cannot be configured and is too short on a busy machine.
_STARTS = 3
_TRIAL = "import sys, ray; ray.init(sys.argv[1], log_to_driver=False, logging_level='ERROR')"
# Ray rewrites 127.0.0.1 to an address of the network, but leaves the rest of 127/8 unchanged.
_LOOPBACK = "127.0.0.2" if sys.platform == "linux" else None
_LEFT = {1, 3, 4}  # reasons in Ray's gcs.proto: ended as planned, or drained
_HEAD = "node:__internal_head__"  # a resource of the head alone
_LOOK_S = 0.5
_OBJECT_STORE_BYTES = 80 << 20  # Ray's least: gradients travel over ZeroMQ, never through it.


class RayNode(NamedTuple):
    """A node of Ray: its id, its host and address, and the port of its raylet.

    `death` says why it is counted as dead; it is empty for a node that lives.
    """

    id: str
    host: str
    address: str
    port: int
    death: str = ""


class NodeOutput(NamedTuple):
    """The result of a program on a node of Ray, or why there is none."""

    node: RayNode
    result: Any
    error: str


@contextmanager
def connect(
    address: str | None, cpus: int, namespace: str = DriverNetwork.namespace
) -> Iterator[str]:
    """Connect this process to Ray for the duration of the context; yields the head's address.

    `address` None starts an embedded Ray with `cpus` logical CPUs. Otherwise it names a running
    Ray, which has its own CPUs: `HOST:PORT` of the head, `ray://HOST:PORT`, or `auto` for the one
    on this machine. Call it from the main thread, because a Ray that is started in a thread dies
    with that thread. The handler of SIGTERM is preserved.

    Raises BadInput within seconds if no server or another kind of server answers, and after two
    minutes if Ray does not let this process join; WrongBuild if Ray has another version; GiveUp if
    an embedded Ray fails to start three times.
    """
    assert threading.current_thread() is threading.main_thread(), "start Ray from the main thread"
    if ray.is_initialized():
        raise BadInput("Ray", expected="no connection in this process", got="one that is open")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with _start_embedded(cpus) if address is None else _running(address, namespace) as head:
        yield head


@contextmanager
def _start_embedded(cpus: int) -> Iterator[str]:
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    with ray_folder() as folder:
        options = {
            "namespace": DriverNetwork.namespace,
            "num_cpus": cpus,
            "include_dashboard": False,
            "object_store_memory": _OBJECT_STORE_BYTES,
            "_node_ip_address": _LOOPBACK,
            # A process for each CPU starts now, and loads Ray while the caller starts Spark; more
            # of them would be idle, as a shard is an actor with its own process.
            "_system_config": {
                "enable_worker_prestart": False,
                "prestart_worker_first_driver": True,
                # Ray lowers the priority of its processes; all our workers would wait for shards.
                "worker_niceness": 0,
                # Ray kills and restarts a process that is slower, which does not make it faster.
                "worker_register_timeout_seconds": int(START_S),
            },
        }
        try:
            head = _start(folder, options)
            _end_log_monitor()
            yield head
        finally:
            ray.shutdown(wait_for_processes=True)


def _end_log_monitor() -> None:
    """End Ray's log monitor, which looks at all log files ten times a second for a driver that asks
    for their lines; this one does not. `ray.init` always starts it."""
    node = ray_worker._global_node
    monitors = node.all_processes.get(PROCESS_TYPE_LOG_MONITOR, []) if node is not None else []
    processes = [monitor.process for monitor in monitors]
    if node is not None:
        node.kill_log_monitor(check_alive=False)
    for process in processes:
        process.wait()


def check_head() -> None:
    """Raise GiveUp if the head of an embedded Ray has died; no effect for a running cluster.

    Shards and workers still train for a minute, until Ray ends this process: in that time a
    snapshot can be taken.
    """
    node = ray_worker._global_node
    heads = node.all_processes.get(PROCESS_TYPE_GCS_SERVER, []) if node is not None else []
    if any(head.process.poll() is not None for head in heads):
        raise GiveUp("Ray's head has died, killed or crashed (its process is gcs_server)")


def _start(folder: Path, options: Mapping[str, Any]) -> str:
    """Start an embedded Ray, with retries after a timeout; returns its address."""
    for start in range(1, _STARTS + 1):
        try:
            # Ray makes its folder accessible to everyone, so it goes inside our private one. Each
            # attempt has its own, because processes of a failed start may still write there.
            return _init("local", _temp_dir=str(folder / str(start)), **options)
        except GiveUp:
            if start == _STARTS:
                raise
    raise AssertionError("unreachable")


def _running(address: str, namespace: str) -> AbstractContextManager[str]:
    # The nodes have the libraries, but perhaps not this build of our code.
    code = [str(files(package)) for package in PACKAGES if package != "deploy"]
    return _join(address, namespace=namespace, runtime_env={"py_modules": code})


@contextmanager
def _join(address: str, **options: Any) -> Iterator[str]:
    """Connect to a running Ray, with these options of ray.init, while the context lasts.

    Raises GiveUp, in one line, where Ray's client has lost its connection.
    """
    _try(address)
    try:
        yield _init(address, **options)
    except ConnectionError as error:
        if type(error) is not ConnectionError:  # a subclass, as Py4J and sockets raise
            raise
        raise GiveUp(
            f"the connection to Ray at {address} is lost: its head has ended, or cannot be reached"
        ) from error
    finally:
        ray.shutdown()


def run_on_nodes(
    address: str, source: str, function: str, request: Mapping[str, Any], wait_s: float
) -> list[NodeOutput]:
    """Call a function of one argument, in Python source, on each node of the Ray at `address`.

    Nodes need nothing but Ray: the source is compiled there. A node that is dead, fails, or has not
    answered after `wait_s` seconds has an error. Raises what `connect` does.
    """

    def call(source: str, function: str, request: Mapping[str, Any]) -> Any:
        module: dict[str, Any] = {"__name__": "program"}
        exec(compile(source, "program", "exec", dont_inherit=True), module)  # our source
        return module[function](request)

    with _join(address):
        task, calls = ray.remote(call), {}
        nodes = list_nodes(ray.nodes())
        for node in nodes:
            if not node.death:
                pinned = NodeAffinitySchedulingStrategy(node.id, soft=False)
                options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": pinned}
                calls[node.id] = task.options(**options).remote(source, function, request)
        if calls:
            ray.wait(list(calls.values()), num_returns=len(calls), timeout=wait_s)
        return [_collect(node, calls.get(node.id), wait_s) for node in nodes]


def _collect(node: RayNode, call: Any, wait_s: float) -> NodeOutput:
    if call is None:
        return NodeOutput(node, None, f"dead: {node.death}")
    try:
        return NodeOutput(node, ray.get(call, timeout=0), "")
    except ray.exceptions.GetTimeoutError:
        return NodeOutput(node, None, f"no answer in {wait_s:g} s")
    except ray.exceptions.RayError as error:
        return NodeOutput(node, None, _first_line(str(error)))


def list_nodes(table: Iterable[Mapping[str, Any]]) -> list[RayNode]:
    """The nodes in Ray's table, by host: those that live, and the last one to die at an address.

    Ray remembers nodes that have left as planned, and former lives of a node: they are left out.
    """
    living, dead = [], {}
    for entry in table:
        address, port = entry["NodeManagerAddress"], int(entry["NodeManagerPort"])
        node = RayNode(entry["NodeID"], entry["NodeManagerHostname"], address, port)
        if entry["Alive"]:
            living.append(node)
        elif entry.get("DeathReason") not in _LEFT:
            death = str(entry.get("DeathReasonMessage") or "for a reason that Ray does not say")
            dead[address] = node._replace(death=death)
    for node in living:
        dead.pop(node.address, None)
    return sorted([*living, *dead.values()], key=lambda node: (node.host, node.address))


def drain_node(address: str, name: str, wait_s: float, report: Callable[[str], None]) -> None:
    """Have Ray start nothing more on a node, and wait until its last actor has ended.

    Ray then stops on that node by itself. `name` is the node's address, host or id. Actors stay
    where they are: a job leaves the node when it is stopped and resumed. `report` is called with a
    line whenever other actors are left.

    Raises what `connect` does, BadInput for a node that Ray lacks or its head, and GiveUp if actors
    are left after `wait_s` seconds; the node takes nothing more then, too.
    """
    if address.startswith("ray://"):
        raise BadInput("--ray", expected="HOST:PORT of the head, or auto", got=address)
    with _join(address) as head:
        node = choose_node(ray.nodes(), name)
        reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "maintenance"]
        command = [sys.executable, "-P", "-m", "ray.scripts.scripts", "drain-node"]
        command += ["--address", head, "--node-id", node.id, *reason]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise GiveUp(f"node {node.address} of Ray: {done.stderr.strip().splitlines()[-1]}")
        report(f"node {node.address} of Ray takes nothing more")
        shown, until = list[str](), time.monotonic() + wait_s
        while node.id in (living.id for living in list_nodes(ray.nodes()) if not living.death):
            left = list_actors(ray_state.actors().values(), node.id)
            if left != shown:
                report(f"left on it: {', '.join(left) or 'nothing'}")
                shown = left
            if time.monotonic() > until:
                raise GiveUp(
                    f"node {node.address} of Ray: after {wait_s:g} s {', '.join(left) or 'Ray'} is"
                    " left; stop or pause the jobs there, resume them, and run this again"
                )
            time.sleep(_LOOK_S)


def choose_node(table: Iterable[Mapping[str, Any]], name: str) -> RayNode:
    """The living node with this address, host or id.

    Raises BadInput for none, for several, and for the head, without which there is no Ray.
    """
    table = list(table)
    living = [node for node in list_nodes(table) if not node.death]
    fitting = [node for node in living if name in {node.address, node.host, node.id}]
    if len(fitting) != 1:
        raise BadInput(
            f"node {name}",
            expected=f"one of {', '.join(f'{node.address} ({node.host})' for node in living)}",
            got="none" if not fitting else f"{len(fitting)} nodes of this host: name an address",
        )
    (resources,) = (entry["Resources"] for entry in table if entry["NodeID"] == fitting[0].id)
    if _HEAD in resources:
        raise BadInput(f"node {name}", expected="another node than Ray's head", got="the head")
    return fitting[0]


def list_actors(table: Iterable[Mapping[str, Any]], node: str) -> list[str]:
    """The living actors on the node with this id, each by its class and process."""
    return sorted(
        f"{actor['ActorClassName']} (process {actor['Pid']})"
        for actor in table
        if actor["State"] == "ALIVE" and actor["Address"]["NodeID"] == node
    )


def _init(address: str, **options: Any) -> str:
    """Call ray.init quietly and preserve the SIGTERM handler; returns the head's address."""
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        context = _ray_init(address, log_to_driver=False, logging_level="ERROR", **options)
    except Exception as error:
        # For a timeout at its start, Ray raises a plain Exception.
        if not isinstance(error, ConnectionError | OSError | RuntimeError | ValueError):
            if type(error) is not Exception:
                raise
            _end_node(error)
        raise GiveUp(f"Ray at {address} did not start: {_first_line(str(error))}") from None
    finally:
        signal.signal(signal.SIGTERM, on_sigterm)
    return str(getattr(context, "address_info", {}).get("gcs_address", address))


def _ray_init(address: str, **options: Any) -> Any:
    """Call ray.init, and retry if the server that ray:// starts for a client crashed at once."""
    for remaining in reversed(range(_STARTS)):
        try:
            return ray.init(address, **options)
        except ConnectionAbortedError as error:
            if not remaining or _STILLBORN not in str(error):
                raise
    raise AssertionError("unreachable")


def _end_node(error: BaseException) -> None:
    """End the processes of a node that failed to start with `error`; Ray leaves them running.

    They would write into a folder that is about to be removed, until this process ends.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        node = frame.f_locals.get("self")
        if node is not None and hasattr(node, "kill_all_processes"):
            node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)


def check_address(address: str) -> None:
    """Raise BadInput for an invalid address, and within seconds if no Ray answers there."""
    if address == "auto":
        return
    host, port = _host_and_port(address)
    check_reachable(f"Ray at {address}", [(host, port)])
    scheme = "ray" if address.startswith("ray://") else ""
    check_ray(f"Ray at {address}", scheme, (host, port))


def _try(address: str) -> None:
    """Connect to the Ray at `address` from a child process; raises the reason if that fails."""
    check_address(address)
    for _ in range(_STARTS):
        done = _trial(address)
        if _STILLBORN not in done.stderr:
            break
    if done.returncode:
        raise refusal(address, done.stderr)


def _trial(address: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [sys.executable, "-c", _TRIAL, address],
            env=os.environ | {"RAY_NUM_REDIS_GET_RETRIES": "3"},  # one retry a second if refused
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=_TRIAL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NoServer(
            f"Ray at {address}", expected="a Ray head", got=f"no answer in {_TRIAL_S:g} s"
        ) from None


def check_token(environ: Mapping[str, str]) -> None:
    """Raise BadInput unless Ray requires a token, in a file that only this user can read.

    Anyone with access to Ray can run code on the shards' nodes, which would make their keys
    worthless.
    """
    if environ.get("RAY_AUTH_MODE", "").lower() != "token":
        raise BadInput(
            "Ray",
            expected="RAY_AUTH_MODE=token where shards are open to other hosts",
            got=(
                f"{environ.get('RAY_AUTH_MODE') or 'none'}: start the cluster "
                "with it, and set it here (docs/explanation/security.md), or "
                "give --plaintext"
            ),
        )
    if environ.get("RAY_AUTH_TOKEN"):  # set by a launcher such as Kubernetes
        return
    path = Path(environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
    check_private(path, "Ray's token")


def refusal(address: str, printed: str) -> GiveUp:
    """The error for a failed trial, from the traceback that it `printed`."""
    versions = re.search(r"cluster was started with:\s+Ray: (\S+)\s+Python: (\S+)", printed)
    if versions:
        return WrongBuild(
            f"Ray at {address}: expected Ray {ray.__version__} on Python {python_version()},"
            f" the cluster runs Ray {versions[1]} on Python {versions[2]}"
        )
    if "InvalidAuthToken" in printed or "AuthenticationError" in printed:
        return BadInput(
            f"Ray at {address}",
            expected="that cluster's token",
            hint=(
                "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to its file "
                "unless that is ~/.ray/auth_token"
            ),
        )
    # Messages of Ray's errors have several lines; the first starts with the name of the error. If
    # that announces what a server said, the last line has the reason.
    named = re.findall(r"^[\w.]*(?:Error|Exception): (.+)$", printed, re.MULTILINE)
    why = named[-1] if named else "the connection was refused"
    if why.endswith(":"):
        why = f"{why} {printed.strip().splitlines()[-1]}"
    return NoServer(f"Ray at {address}: {why}")


def _host_and_port(address: str) -> tuple[str, int]:
    parts = urlsplit(address if "://" in address else f"//{address}")
    try:
        if parts.scheme in {"", "ray"} and parts.hostname and parts.port:
            return parts.hostname, parts.port
    except ValueError:
        pass  # The port is not a number.
    raise BadInput("Ray address", expected="HOST:PORT, ray://HOST:PORT or auto", got=f"{address!r}")


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "no reason given"
