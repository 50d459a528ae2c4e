"""`downpour serve`: opens the home, starts the server, and ends streams when it stops."""

import fcntl
import os
import socket
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import uvicorn

from deploy.run_folder import lock_folder
from deploy.service.access import check_loopback
from deploy.service.app import ServeOptions, Service, application
from deploy.service.job_store import JOBS, JobStore
from deploy.service.tables import DATABASE, open_database
from shards.errors import BadInput

HOME_VARIABLE = "DOWNPOUR_HOME"


def home() -> Path:
    """The folder of the service: $DOWNPOUR_HOME, else ~/.downpour."""
    return Path(os.environ.get(HOME_VARIABLE) or Path.home() / ".downpour").absolute()


def serve(
    options: ServeOptions,
    host: str,
    port: int,
    announce: Callable[[str], object] = lambda _: None,
) -> None:
    """Serve until SIGTERM or Ctrl-C; raises BadInput for an address or a home that cannot be used.

    `announce` receives a line once the service can be reached. Jobs are not affected by its end.
    """
    check_loopback(host)
    with _opened(options.home) as path, _listening(host, port) as listener:
        if not path.exists() and _has_jobs(options.home):
            raise BadInput(
                f"{path}: expected the database of the jobs in {options.home}, got none;"
                " rebuild it with: downpour service reindex"
            )
        service = Service(options, open_database(path))
        config = uvicorn.Config(
            application(service),
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=3,
            server_header=False,
        )
        announce(f"serving http://{host}:{port} from {options.home}")
        _Server(config, service).run([listener])


def reindex(folder: Path) -> int:
    """Rebuild the database from the job folders; returns the number of jobs."""
    with _opened(folder) as path:
        for name in (path.name, f"{path.name}-wal", f"{path.name}-shm"):
            path.with_name(name).unlink(missing_ok=True)
        return JobStore(folder, open_database(path)).rebuild()


def backup(folder: Path, target: Path) -> None:
    """Copy the database while a service may use it. The job folders are copied as files."""
    path = folder / DATABASE
    if not path.is_file():
        raise BadInput(f"{path}: expected the database of a service, got none")
    if target.exists():
        raise BadInput(f"{target}: expected a new file, got one that exists")
    target.touch(mode=0o600)
    with sqlite3.connect(path) as source, sqlite3.connect(target) as copy:
        source.backup(copy)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._service.feed.close()  # otherwise the server waits for its open streams
        super().handle_exit(sig, frame)


@contextmanager
def _opened(folder: Path) -> Iterator[Path]:
    """The path of the database in a home that this process has locked."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = lock_folder(folder)
    except BadInput:
        raise BadInput(
            f"{folder}: expected no other service with this home, got one; stop it, or set"
            f" another {HOME_VARIABLE}"
        ) from None
    except OSError as error:
        raise BadInput(f"{HOME_VARIABLE} {folder}: {error.strerror}") from None
    try:
        yield folder / DATABASE
    finally:
        os.close(lock)


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    fcntl.fcntl(listener, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
    try:
        listener.bind((host.strip("[]"), port))
        listener.listen(2048)
        yield listener
    except OSError as error:
        raise BadInput(f"--port {port}: {error.strerror}; choose another --port") from None
    finally:
        listener.close()


def _has_jobs(folder: Path) -> bool:
    with suppress(OSError):
        return any((folder / JOBS).iterdir())
    return False
