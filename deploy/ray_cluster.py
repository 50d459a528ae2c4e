"""The Ray that shards run on: one started here, or a running one by its address.

An embedded Ray is a head node of this process's own. It stays on a loopback address, so that a
laptop may change networks under it, asks for a token that only this process's children know, and
keeps its files in a folder that goes away with it. Of a running cluster nothing is ever stopped.

Ray takes minutes to give up on an address that does not answer, and prints while it does. So the
connection is tried in a child process first, which can be killed when its time is up.
"""

import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from platform import python_version
from typing import Any
from urllib.parse import urlsplit

import ray

from deploy.service_probe import check_ray
from ps.launch.launcher import START_S
from ps.snapshots.secure_files import check_private
from ps.transport.addresses import check_reachable
from shards.errors import BadInput, GiveUp, WrongBuild
from worker.code_archive import PACKAGES

NAMESPACE = "downpour"
_TRIAL_S = 120.0  # a client of ray:// waits for a server of its own to start
# Ray forks that server beside threads of gRPC, and now and then it dies of that at its birth.
_STILLBORN = "Starting Ray client server failed"
# An embedded one gives itself 30 s, which can't be set and are too few on a busy machine.
_STARTS = 3
_TRIAL = "import sys, ray; ray.init(sys.argv[1], log_to_driver=False, logging_level='ERROR')"
# Ray rewrites 127.0.0.1 to an address of the network; the rest of 127/8 it leaves alone.
_LOOPBACK = "127.0.0.2" if sys.platform == "linux" else None
_OBJECT_STORE_BYTES = 80 << 20  # Ray's least: gradients travel over ZeroMQ, never through it.
# A socket's path ends at 107 characters. Ray's sockets lie 64 below its folder, which lies 24 below
# the folder for temporary files.
_LONGEST_FOLDER = 107 - 64 - 24


@contextmanager
def connect(address: str | None, cpus: int) -> Iterator[str]:
    """Connect this process to Ray while the context lasts; gives the address of its head.

    `address` None starts an embedded Ray of `cpus` logical CPUs; otherwise it names a running one,
    whose own CPUs count: `HOST:PORT` of the head, `ray://HOST:PORT`, or `auto` for the one on this
    machine. Call it from the main thread: a Ray started by a thread dies with that thread. SIGTERM
    keeps the handler it has.

    Raises BadInput within seconds where another kind of server or none answers, and after two
    minutes where a Ray does not let this process join; WrongBuild when it is of another
    version, GiveUp when an embedded one does not start, asked three times.
    """
    assert threading.current_thread() is threading.main_thread(), "start Ray from the main thread"
    if ray.is_initialized():
        raise BadInput("Ray: expected no connection in this process, got one that is open")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with _embedded(cpus) if address is None else _running(address) as head:
        yield head


@contextmanager
def _embedded(cpus: int) -> Iterator[str]:
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    with tempfile.TemporaryDirectory(
        prefix="downpour-ray-", dir=_short_folder(), ignore_cleanup_errors=True
    ) as folder:
        options = {
            "num_cpus": cpus,
            "include_dashboard": False,
            "object_store_memory": _OBJECT_STORE_BYTES,
            "_node_ip_address": _LOOPBACK,
            # A shard is an actor with a process of its own: nobody waits for idle ones.
            "_system_config": {
                "enable_worker_prestart": False,
                "prestart_worker_first_driver": False,
                # Ray makes its workers nice, and every worker of ours would wait for its shards.
                "worker_niceness": 0,
                # A worker that is slower is killed and begun again, and is no quicker then.
                "worker_register_timeout_seconds": int(START_S),
            },
        }
        try:
            yield _start(Path(folder), options)
        finally:
            ray.shutdown(wait_for_processes=True)


def _start(folder: Path, options: Mapping[str, Any]) -> str:
    """The address of an embedded Ray, which is started anew if it was too late."""
    for start in range(1, _STARTS + 1):
        try:
            # Ray opens its own folder to everyone. That of a start that failed goes at the end,
            # for what is left of its processes may write there for a moment.
            return _init("local", _temp_dir=str(folder / str(start)), **options)
        except GiveUp:
            if start == _STARTS:
                raise
    raise AssertionError("unreachable")


@contextmanager
def _running(address: str) -> Iterator[str]:
    _try(address)
    # The nodes have the libraries but perhaps not this code, or not this build of it.
    code = [str(files(package)) for package in PACKAGES if package != "deploy"]
    try:
        yield _init(address, runtime_env={"py_modules": code})
    finally:
        ray.shutdown()


def _init(address: str, **options: Any) -> str:
    """ray.init, quiet, leaving the SIGTERM handler as it was; returns the head's address."""
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        context = _ray_init(
            address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR", **options
        )
    except Exception as error:
        # That its start took too long, Ray says by an error of no kind of its own.
        if not isinstance(error, ConnectionError | OSError | RuntimeError | ValueError):
            if type(error) is not Exception:
                raise
            _end_node(error)
        raise GiveUp(f"Ray at {address} did not start: {_first_line(str(error))}") from None
    finally:
        signal.signal(signal.SIGTERM, on_sigterm)
    return str(getattr(context, "address_info", {}).get("gcs_address", address))


def _ray_init(address: str, **options: Any) -> Any:
    """ray.init, and once more where the server that ray:// starts for a client was stillborn."""
    for left in reversed(range(_STARTS)):
        try:
            return ray.init(address, **options)
        except ConnectionAbortedError as error:
            if not left or _STILLBORN not in str(error):
                raise
    raise AssertionError("unreachable")


def _end_node(error: BaseException) -> None:
    """End the processes of the node whose start raised `error`: Ray itself keeps no hold of it.

    They would write into a folder that is about to be removed, until this process ends.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        node = frame.f_locals.get("self")
        if node is not None and hasattr(node, "kill_all_processes"):
            node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)


def check_address(address: str) -> None:
    """Raise BadInput for an address that is none, and within seconds where no Ray answers there."""
    if address == "auto":
        return
    host, port = _host_and_port(address)
    check_reachable(f"Ray at {address}", [(host, port)])
    scheme = "ray" if address.startswith("ray://") else ""
    check_ray(f"Ray at {address}", scheme, (host, port))


def _try(address: str) -> None:
    """Return when a child process can connect to the Ray at `address`; raise why it cannot."""
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
            env=os.environ | {"RAY_NUM_REDIS_GET_RETRIES": "3"},  # seconds of being turned away
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=_TRIAL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise BadInput(
            f"Ray at {address}: expected a Ray head, got no answer in {_TRIAL_S:g} s"
        ) from None


def check_token(environ: Mapping[str, str]) -> None:
    """Raise BadInput unless Ray asks for a token here, and the file that holds it is this user's.

    Whoever can speak to Ray can run code where the shards are, and none of their keys would matter.
    """
    if environ.get("RAY_AUTH_MODE", "").lower() != "token":
        raise BadInput(
            "Ray: expected RAY_AUTH_MODE=token where shards are open to other hosts, got"
            f" {environ.get('RAY_AUTH_MODE') or 'none'}: start the cluster with it, and set it here"
            " (docs/explanation/security.md), or say --plaintext"
        )
    if environ.get("RAY_AUTH_TOKEN"):  # from whoever started this process, as Kubernetes does
        return
    path = Path(environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
    check_private(path, "Ray's token")


def refusal(address: str, printed: str) -> GiveUp:
    """The error for a trial that ended badly, from the traceback that it `printed`."""
    there = re.search(r"cluster was started with:\s+Ray: (\S+)\s+Python: (\S+)", printed)
    if there:
        return WrongBuild(
            f"Ray at {address}: expected Ray {ray.__version__} on Python {python_version()},"
            f" the cluster runs Ray {there[1]} on Python {there[2]}"
        )
    if "InvalidAuthToken" in printed or "AuthenticationError" in printed:
        return BadInput(
            f"Ray at {address}: expected that cluster's token; set RAY_AUTH_MODE=token, and"
            " RAY_AUTH_TOKEN_PATH to its file unless that is ~/.ray/auth_token"
        )
    # The messages of Ray's errors run over several lines; the name of the error starts the first.
    named = re.findall(r"^[\w.]*(?:Error|Exception): (.+)$", printed, re.MULTILINE)
    return BadInput(f"Ray at {address}: {named[-1] if named else 'the connection was refused'}")


def _host_and_port(address: str) -> tuple[str, int]:
    parts = urlsplit(address if "://" in address else f"//{address}")
    try:
        if parts.scheme in {"", "ray"} and parts.hostname and parts.port:
            return parts.hostname, parts.port
    except ValueError:
        pass  # A port that is no number.
    raise BadInput(f"Ray address: expected HOST:PORT, ray://HOST:PORT or auto, got {address!r}")


def _short_folder() -> str | None:
    """Where temporary files go, unless that is too deep for the path of a socket."""
    return None if len(tempfile.gettempdir()) <= _LONGEST_FOLDER else "/tmp"


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "no reason given"
