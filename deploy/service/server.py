"""`downpour serve`: opens the home, starts the server, and ends streams when it stops."""

import fcntl
import os
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType

import msgspec
import sqlalchemy as sa
import uvicorn

from deploy.run.folder import lock_folder
from deploy.service import database, postgres
from deploy.service.access_store import AccessStore
from deploy.service.app import ServeOptions, Service, application
from deploy.service.database_tables import DatabasePlace, is_database
from deploy.service.job_store import JOBS, JobStore
from deploy.service.long_answers import STALLED_S
from shards.errors import BadInput

HOME_VARIABLE = "DOWNPOUR_HOME"
_TICKS = 100  # of a tenth of a second, between two looks at the files of TLS


def home() -> Path:
    """The folder of the service: $DOWNPOUR_HOME, else ~/.downpour."""
    return Path(os.environ.get(HOME_VARIABLE) or Path.home() / ".downpour").absolute()


class Listen(msgspec.Struct, frozen=True, kw_only=True):
    """Where a service listens. `certificate` and `key` are PEM files, both or neither."""

    host: str
    port: int
    certificate: Path | None = None
    key: Path | None = None

    def check(self) -> None:
        """Raise BadInput for files that TLS cannot use, or a key that everybody can read."""
        if self.certificate is None and self.key is None:
            return
        if self.certificate is None or self.key is None:
            raise BadInput(
                "--tls-cert", expected="both --tls-cert and --tls-key", got="one of them"
            )
        try:
            if self.key.stat().st_mode & 0o007:
                raise BadInput(
                    f"--tls-key {self.key}",
                    expected="a file that other users cannot read",
                    hint=f"chmod 600 {self.key}",
                )
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.certificate, self.key, password="")
        except OSError as error:  # ssl.SSLError is one
            why = error.strerror or str(error)
            raise BadInput(f"--tls-cert {self.certificate}, --tls-key {self.key}: {why}") from None


def serve(
    options: ServeOptions, listen: Listen, announce: Callable[[str], object] = lambda _: None
) -> None:
    """Serve until SIGTERM or Ctrl-C; raises BadInput for an address or a home that cannot be used.

    `announce` receives a line once the service can be reached. Jobs are not affected by its end.
    """
    listen.check()
    for root in options.roots:
        if not root.is_dir():
            raise BadInput("--root", expected="a folder that exists", got=root)
        if root.resolve().is_relative_to(options.home.resolve()):
            raise BadInput(
                "--root",
                expected=f"a folder outside the home of the service, {options.home}",
                got=root,
                hint="jobs may name no file of the home but their own, and uploads",
            )
    host, port = listen.host, listen.port
    with ExitStack() as resources:
        resources.enter_context(_lock_home(options.home))
        listener = resources.enter_context(_listening(host, port))
        location = database.database_of(options.home, options.database)
        engine = database.open_for_home(options.home, location, filled=_has_jobs(options.home))
        resources.callback(engine.dispose)
        resources.enter_context(_alone(engine, location))
        if options.exposure.tokens and not AccessStore(engine).any_token():
            raise BadInput(
                database.describe(location),
                expected="a token, as this address asks for them",
                got="none",
                hint=(
                    "create one with: downpour service token create --name YOU --role administrator"
                ),
            )
        database.remember(options.home, location)
        service = Service(options, engine)
        config = uvicorn.Config(
            application(service),
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=3,
            server_header=False,
            proxy_headers=options.exposure.origin is not None,
            ssl_certfile=listen.certificate,
            ssl_keyfile=listen.key,
        )
        scheme = "https" if listen.certificate is not None else "http"
        announce(f"serving {scheme}://{host}:{port} from {options.home}")
        _Server(config, service, listen).run([listener])


def reindex(folder: Path) -> int:
    """Rebuild the index of jobs from their folders; returns the number of jobs.

    Tokens, limits and the audit stay. They are lost with a file that is no database.
    """
    with _lock_home(folder):
        location = database.database_of(folder)
        if isinstance(location, Path) and not is_database(location):
            for name in (location.name, f"{location.name}-wal", f"{location.name}-shm"):
                location.with_name(name).unlink(missing_ok=True)
        with _closing(database.take_over(folder, location)) as engine, _alone(engine, location):
            return JobStore(folder, engine).rebuild()


@contextmanager
def access_of(folder: Path) -> Iterator[AccessStore]:
    """The tokens, limits and audit of a home, also while a service runs."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    with _closing(database.open_for_home(folder, database.database_of(folder))) as engine:
        yield AccessStore(engine)


def backup(folder: Path, target: Path) -> None:
    """Copy the database while a service may use it. The job folders are copied as files."""
    database.copy_to(database.database_of(folder), target)


def restore(folder: Path, source: Path) -> None:
    """Fill an empty database with a copy that `backup` made, perhaps of another kind."""
    with _lock_home(folder):
        location = database.database_of(folder)
        database.restore_from(source, location)
        database.take_over(folder, location).dispose()
        database.remember(folder, location)


class CertificateReload:
    """Reads the files of TLS again after they have changed, as when a certificate is renewed.

    Open connections keep the certificate that they have begun with.
    """

    def __init__(self, listen: Listen) -> None:
        self._listen = listen
        self._read = self._times()

    def reload(self, context: ssl.SSLContext) -> None:
        """Give `context` the files if they have changed and belong together; else keep the old."""
        times = self._times()
        if times is None or times == self._read:
            return
        try:
            self._listen.check()  # a pair that does not match would spoil the context
            context.load_cert_chain(str(self._listen.certificate), self._listen.key, password="")
        except (BadInput, OSError):
            return  # half of the pair is still the old one: the next call tries again
        self._read = times

    def _times(self) -> tuple[int, int] | None:
        certificate, key = self._listen.certificate, self._listen.key
        if certificate is None or key is None:
            return None
        try:
            return certificate.stat().st_mtime_ns, key.stat().st_mtime_ns
        except OSError:
            return None


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, service: Service, listen: Listen) -> None:
        super().__init__(config)
        self._service, self._certificate = service, CertificateReload(listen)

    async def on_tick(self, counter: int) -> bool:
        if counter % _TICKS == 0 and self.config.ssl is not None:
            self._certificate.reload(self.config.ssl)
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._service.feed.close()  # otherwise the server waits for its open streams
        super().handle_exit(sig, frame)


@contextmanager
def _lock_home(folder: Path) -> Iterator[None]:
    """Keep other services from a home until the end of the context."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (folder / ".lock").open("ab"):
            pass  # a folder that cannot be written is no folder in use
    except OSError as error:
        raise BadInput(f"{HOME_VARIABLE} {folder}: {error.strerror}") from None
    try:
        lock = lock_folder(folder)
    except BadInput:
        raise BadInput(
            folder,
            expected="no other service with this home",
            got="one",
            hint=f"stop it, or set another {HOME_VARIABLE}",
        ) from None
    try:
        yield
    finally:
        os.close(lock)


@contextmanager
def _closing(engine: sa.Engine) -> Iterator[sa.Engine]:
    try:
        yield engine
    finally:
        engine.dispose()


@contextmanager
def _alone(engine: sa.Engine, location: DatabasePlace) -> Iterator[None]:
    """Keep other services from a database; the lock of the home does that for one in it."""
    with nullcontext() if isinstance(location, Path) else postgres.hold_database(engine, location):
        yield


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    fcntl.fcntl(listener, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # connections inherit it
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * STALLED_S))
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
