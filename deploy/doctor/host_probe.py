"""Reads the facts of a host that decide whether a driver, a shard or a worker can run there.

`downpour deploy check` imports this module for its own host, and sends its source to the executors
of a Spark. Their Python may be another version and have no package at all. So this file needs only
the standard library, of Python 3.8 or newer, and the facts are plain JSON. It judges nothing: that
is the task of findings.py.

As a program it reads a request in a line of JSON from standard input, and prints the facts.
"""

from __future__ import annotations

import json
import os
import pwd
import resource
import shutil
import socket
import sys
import tempfile
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

_SECRET_SETTINGS = ("secret", "password", "token")
PYTHON = "{}.{}".format(*sys.version_info[:2])
CONNECT_S = 3.0
"""The usual limit on one connection, in seconds."""


def read_facts(request: dict[str, Any]) -> dict[str, Any]:
    """The facts of this host, as a value of JSON.

    Keys of `request`, each optional: `packages` are the distributions whose versions to return,
    `folders` more folders to try to write into, `addresses` servers to connect to as
    [NAME, HOST, PORT], `connect_s` the limit on each connection in seconds, and `secrets` more
    files whose mode to return.
    """
    time_s = time.time()
    folders = [os.environ.get("HOME", "/"), _temporary_folder(), *request.get("folders", [])]
    secrets = [*find_secrets(os.environ), *request.get("secrets", [])]
    timeout_s = float(request.get("connect_s", CONNECT_S))
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {
        "host": socket.gethostname(),
        "time_s": time_s,
        "python": PYTHON,
        "executable": sys.executable,
        "packages": {name: find_version(name) for name in request.get("packages", [])},
        "name_error": _try_to_resolve(socket.gethostname()),
        "local_ip": os.environ.get("SPARK_LOCAL_IP", ""),
        "user": os.getuid(),
        "user_name": _user_name(),
        "shm_bytes": _size_of_disk("/dev/shm"),
        "open_files": None if files == resource.RLIM_INFINITY else files,
        "gpus": len(list(Path("/dev").glob("nvidia[0-9]*"))),
        "home": folders[0],
        "temporary": folders[1],
        "folders": {folder: _try_folder(folder) for folder in folders},
        "secrets": {path: _mode(path) for path in secrets},
        "refused": {
            name: error
            for name, host, port in request.get("addresses", [])
            for error in [try_connection(host, port, timeout_s)]
            if error
        },
    }


def find_version(name: str) -> str | None:
    """The version of an installed distribution; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def find_secrets(environ: Any) -> list[str]:
    """The files with secrets of Ray and Spark that this host would use, by its variables."""
    token = environ.get("RAY_AUTH_TOKEN_PATH")
    usual = Path(environ.get("HOME", "/"), ".ray", "auth_token")
    files = [token] if token else [str(usual)] if usual.exists() else []
    folder = environ.get("SPARK_CONF_DIR") or Path(environ.get("SPARK_HOME", ""), "conf")
    settings = Path(folder, "spark-defaults.conf")
    with suppress(OSError):
        lines = settings.read_text(errors="replace").splitlines()
        names = [line.split()[0].lower() for line in lines if line.strip()]
        if any(word in name for name in names if name[0] != "#" for word in _SECRET_SETTINGS):
            files.append(str(settings))
    return files


def try_connection(host: str, port: int, timeout_s: float = CONNECT_S) -> str:
    """Why a server accepts no TCP connection from here; empty if it does."""
    try:
        socket.create_connection((host, port), timeout_s).close()
    except socket.timeout:  # noqa: UP041  # another class before Python 3.10
        return f"no answer in {timeout_s:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _try_to_resolve(name: str) -> str:
    """Why a host name has no address here; empty if it has."""
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _user_name() -> str | None:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return None


def _temporary_folder() -> str:
    try:
        return tempfile.gettempdir()
    except OSError:  # none can be written
        return os.environ.get("TMPDIR", "/tmp")


def _size_of_disk(folder: str) -> int | None:
    try:
        return shutil.disk_usage(folder).total
    except OSError:
        return None


def _try_folder(folder: str) -> dict[str, Any]:
    """The free bytes of a folder's disk, and why no file can be written and renamed there."""
    facts: dict[str, Any] = {"free_bytes": None, "error": ""}
    try:
        handle, name = tempfile.mkstemp(prefix=".downpour-check-", dir=folder)
        path = Path(name)
        try:
            os.write(handle, b"downpour")
            os.fsync(handle)
            path = path.rename(name + ".renamed")
        finally:
            os.close(handle)
            path.unlink()
        facts["free_bytes"] = shutil.disk_usage(folder).free
    except OSError as error:
        facts["error"] = error.strerror or str(error)
    return facts


def _mode(path: str) -> int | None:
    """The permissions of a file; None if there is none, or none that this user may see."""
    try:
        return Path(path).stat().st_mode & 0o777
    except OSError:
        return None


if __name__ == "__main__":
    sys.stdout.write(json.dumps(read_facts(json.loads(sys.stdin.readline()))) + "\n")
