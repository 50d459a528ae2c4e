"""A Spark session: embedded, on a cluster's master, or over Spark Connect; all are used alike.

On exit everything that was started here is removed, the JVM and its files included.
"""

import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from subprocess import TimeoutExpired
from threading import current_thread, main_thread
from types import MappingProxyType
from typing import Any
from warnings import catch_warnings

import pyspark
from pyspark import SparkConf, SparkContext, SparkFiles
from pyspark.errors import PySparkException
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from ps.shared_memory.shm_files import sweep, temporary_folder
from ps.transport.addresses import REACH_S, check_reachable
from ps.transport.advertised_address import own_address
from shards.errors import BadInput, GiveUp, NoServer
from worker.spark import settings as spark_settings
from worker.spark.background import Result, begin
from worker.spark.code_archive import pack_code
from worker.spark.failures import SPARK_ERRORS, reason, root_cause
from worker.spark.start_limit import StartLimit

_EXIT_S = 15.0
_GRPC_FORKS = "GRPC_ENABLE_FORK_SUPPORT"
_QUOTED = 240  # of a line of Spark's log


@contextmanager
def start_session(
    url: str | None,
    slots: int,
    *,
    app: str,
    env: Mapping[str, str],
    conf: Mapping[str, str] = MappingProxyType({}),
    start_s: float = spark_settings.START_S,
) -> Iterator[SparkSession]:
    """A Spark session for as long as the context lasts.

    `url` None (or `local[N]`) starts Spark in this process's own JVM, which runs `slots` (or N)
    tasks at a time. `spark://HOST:PORT`, `yarn` and `k8s://HOST:PORT` are masters, `sc://HOST:PORT`
    is a Spark Connect server; `submitted` is the Spark of the spark-submit that runs this program,
    with its settings; this project's code is shipped to their executors. `app` is the name
    that Spark's pages show. `env` is added to the environment of the JVM and of embedded Python
    workers; deploy.spark_environment finds the Java. A named master gets the settings `conf`,
    `start_s` seconds to register the application, and as many to run a first task. The SIGINT
    handler stays the same.

    Raises BadInput when the URL is not valid, when no server listens there, and when this process
    already has a session; GiveUp when Spark does not start.
    """
    if SparkContext._active_spark_context is not None or SparkSession.getActiveSession():
        raise BadInput("Spark", expected="no session in this process", got="one that is running")
    with ExitStack() as stack:
        stack.callback(sweep)  # Spark kills the Python of a task that it cancels
        path = stack.enter_context(temporary_folder("spark"))
        stack.enter_context(_without_stacks())
        yield stack.enter_context(_session(url, slots, app, env, path, conf, start_s))


def _session(
    url: str | None,
    slots: int,
    app: str,
    env: Mapping[str, str],
    folder: Path,
    conf: Mapping[str, str],
    start_s: float,
) -> AbstractContextManager[SparkSession]:
    master = spark_settings.parse_local_master(url, slots)
    if master:
        return start_embedded(master, slots, app=app, env=env, folder=folder)
    assert url is not None
    servers = spark_settings.addresses(url, os.environ)
    local_ip = (
        check_reachable(spark_settings.name_servers(url, servers), servers) if servers else None
    )
    if url == spark_settings.SUBMITTED:
        return _ship_code(_join_submission(app, conf))
    if url.startswith("sc://"):
        return _connect(url, app, start_s)
    local_ip = local_ip or own_address()
    settings = spark_settings.cluster(url, app, local_ip, conf, os.environ)
    env = spark_settings.cluster_environment(folder, os.environ, local_ip) | dict(env)
    return _ship_code(_classic(settings, env, folder, start_s=start_s))


def start_embedded(
    master: str,
    slots: int,
    *,
    app: str,
    env: Mapping[str, str],
    folder: Path,
    conf: Mapping[str, str] = MappingProxyType({}),
    exit_s: float | None = None,
) -> AbstractContextManager[SparkSession]:
    """A session on a JVM of this machine, with all its files in `folder`.

    `master` is local[N]. Its JVM has `exit_s` seconds to end by itself (None: as every session's).
    """
    settings = spark_settings.prepare_embedded_settings(master, app, slots, folder)
    home = Path(pyspark.__file__).parent
    env = spark_settings.build_embedded_environment(folder, home, os.environ) | dict(env)
    settings |= spark_settings.preload(env) | dict(conf)
    return _classic(settings, env, folder, without=spark_settings.FOREIGN, exit_s=exit_s)


@contextmanager
def _classic(
    settings: Mapping[str, str],
    env: Mapping[str, str],
    folder: Path,
    without: Collection[str] = (),
    start_s: float = spark_settings.START_S,
    exit_s: float | None = None,
) -> Iterator[SparkSession]:
    """A session on its own JVM, which ends with the session."""
    master, log = settings["spark.master"], folder / "spark.log"
    # An earlier session in this process leaves its JVM behind, with settings that are not ours.
    earlier = SparkContext._gateway, SparkContext._jvm
    try:
        with _change_environment(env, without):
            gateway = _launch(settings, log)
            SparkContext._gateway, SparkContext._jvm = gateway, gateway.jvm
            with _limit_start(gateway, master, start_s, log) as progress:
                context = _context(gateway)
                progress.register()
                if not spark_settings.parse_local_master(master, 1):
                    _await_executor(context)
                # It would print a traceback when the JVM is killed, which `run_tasks` reports.
                context._accumulatorServer.handle_error = lambda *_: None  # type: ignore[method-assign]
                _end_without_memory(gateway)
                session = SparkSession(context)
        yield session
    finally:
        if SparkContext._gateway not in earlier:
            _stop(SparkContext._gateway, exit_s)
        SparkContext._gateway, SparkContext._jvm = earlier


@contextmanager
def _join_submission(app: str, conf: Mapping[str, str]) -> Iterator[SparkSession]:
    """A session on the JVM of the spark-submit that runs this program; that JVM ends with it.

    On YARN in cluster mode the application fails unless the context is made in this very JVM.
    """
    try:
        with _change_environment({}):
            gateway = launch_gateway()
            SparkContext._gateway, SparkContext._jvm = gateway, gateway.jvm
            submitted = SparkConf(_jvm=gateway.jvm)
            added = spark_settings.submission(app, submitted.get("spark.app.name"), conf)
            session = SparkSession(_context(gateway, submitted.setAll(list(added.items()))))
            _end_without_memory(gateway)
    except SPARK_ERRORS as error:
        raise GiveUp(f"the Spark of spark-submit did not start: {reason(error)}") from None
    try:
        yield session
    finally:
        with suppress(*SPARK_ERRORS), catch_warnings(action="ignore"):
            session.stop()


@contextmanager
def _connect(url: str, app: str, start_s: float) -> Iterator[SparkSession]:
    """A session on a Spark Connect server, released on exit; the server keeps running."""
    until = time.monotonic() + start_s
    shown = spark_settings.hide_url_options(url)
    _await_connect(url, min(REACH_S, start_s))

    def create() -> SparkSession:
        session = SparkSession.builder.remote(url).appName(app).create()
        ship_code(session)
        return session

    with _change_environment({}):
        try:
            session = _within(until, create)
            if session is None:
                raise GiveUp(f"Spark at {shown}: its port answers, but no session in {start_s:g} s")
            # Spark keeps the active session for each thread; its readers of models ask for it.
            type(session)._set_default_and_active_session(session)  # type: ignore[attr-defined]
            until = time.monotonic() + start_s
            if _within(until, session.range(1).count) is None:
                raise GiveUp(
                    f"Spark at {shown}: the session is open, but no executor ran a task in"
                    f" {start_s:g} s"
                )
        except SPARK_ERRORS as error:
            why = spark_settings.without_options(reason(error), url)
            raise GiveUp(f"Spark at {shown} gave no session: {why}") from None
        try:
            yield session
        finally:
            session.stop()


def _within(until: float, action: Callable[[], Result]) -> Result | None:
    """The result of `action`, run in another thread; None if there is none at the time `until`.

    Such a thread stays behind, and does not keep the process.
    """
    done = begin(action, "spark-start")
    try:
        return done.result(max(0.0, until - time.monotonic()))
    except TimeoutError:
        return None


def ship_code(spark: SparkSession) -> None:
    """Give this project's packages to the Python workers of a session, classic or of Connect.

    On a cluster where the project is not installed, call it once, before the first task. This
    process, and processes that it starts, go on to import the packages from where they are here:
    `SparkContext.addPyFile` would put the shipped copy, which has no demo data, before them.
    """
    if not hasattr(spark, "_jsparkSession"):  # of Connect: its server keeps a copy
        with temporary_folder("spark") as folder:
            spark.addArtifacts(str(pack_code(folder)), pyfile=True)
        return
    # Executors fetch the file from here when they start; it goes when the session's own files go.
    code_folder = Path(SparkFiles.getRootDirectory()).with_name("downpour-code")
    shipped = code_folder / "shipped"
    if not shipped.exists():  # not the folder: a call may fail when it has made that
        code_folder.mkdir(exist_ok=True)
        with _change_environment({}):
            spark.sparkContext.addPyFile(str(pack_code(code_folder)))
        shipped.touch()


@contextmanager
def _ship_code(sessions: AbstractContextManager[SparkSession]) -> Iterator[SparkSession]:
    """The session, with our packages shipped to its executors."""
    with sessions as session:
        ship_code(session)
        yield session


def _launch(settings: Mapping[str, str], log: Path) -> Any:
    """A JVM with `settings`, as Py4J's gateway; its output goes to `log`."""
    with log.open("wb") as output:
        conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
        try:
            return launch_gateway(conf, {"stdout": output, "stderr": output})
        except SPARK_ERRORS as error:
            printed = log.read_text(errors="replace")
            why = root_cause(printed) or f"{reason(error)} {_quote_last_line(printed)}"
            raise GiveUp(f"Spark's JVM did not start: {why}") from None


def _quote_last_line(printed: str) -> str:
    """The end of what a JVM has printed, for an error without a cause of Java's."""
    lines = printed.splitlines()
    said = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"It said last: {said[:_QUOTED]}" if said else "It said nothing."


@contextmanager
def _limit_start(gateway: Any, master: str, start_s: float, log: Path) -> Iterator[StartLimit]:
    """Turn a start-up error into one line, and a stage that takes longer than `start_s` seconds.

    Spark itself asks a standalone master for a minute, YARN's ResourceManager for several, and
    waits for an executor for ever. An embedded Spark has no limit.
    """
    embedded = spark_settings.parse_local_master(master, 1) is not None
    limit = StartLimit(
        None if embedded else start_s, gateway.proc.kill, lambda: _describe_end(log) is not None
    )
    try:
        yield limit
    except SPARK_ERRORS as error:
        why = root_cause(str(error)) or reason(error)
        if end := _describe_end(log):
            why = end
        elif limit.late.is_set():
            why = _describe_silence(master, start_s, limit.registered, log)
        raise GiveUp(f"Spark at {master} did not start: {why}") from None
    finally:
        limit.end()


def _describe_silence(master: str, start_s: float, registered: bool, log: Path) -> str:
    """The stage that a start did not reach in time, and the last that Spark said about it."""
    if master.startswith("k8s:"):
        missed = f"its port answers, but Kubernetes ran no executor in {start_s:g} s"
    elif registered:
        missed = f"the application is registered, but no executor ran a task in {start_s:g} s"
    elif master == "yarn":
        missed = f"YARN did not run the application in {start_s:g} s"
    else:
        missed = (
            f"its port answers, but no Spark {pyspark.__version__} master registered the"
            f" application in {start_s:g} s"
        )
    warnings = re.findall(r"(?:WARN|ERROR) (.+)", log.read_text(errors="replace"))
    return f"{missed}; Spark's log says: {warnings[-1][:_QUOTED]}" if warnings else missed


def _describe_end(log: Path) -> str | None:
    """Why Spark's cluster has ended the application by itself, if it has."""
    ends = re.findall(
        r"Application has been killed\. Reason: (.+)", log.read_text(errors="replace")
    )
    if not ends:
        return None
    why = ends[-1][:_QUOTED]
    return (
        f"its application was ended, {why!r}: where executors fail, a Spark worker's log says why"
    )


def _end_without_memory(gateway: Any) -> None:
    """Have a driver's JVM end when one of its threads runs out of memory, as executors do.

    Spark's scheduler loses the tasks that it was starting then, and waits for them for ever.
    """
    jvm = gateway.jvm
    only_fatal = jvm.org.apache.spark.util.SparkUncaughtExceptionHandler(False)
    jvm.java.lang.Thread.setDefaultUncaughtExceptionHandler(only_fatal)


def _await_executor(context: SparkContext) -> None:
    """Run a task on some executor, without Python: with dynamic allocation only a job starts one.

    Returns when it is done; the caller limits the time.
    """
    jvm = context._jvm
    assert jvm is not None
    rows = jvm.java.util.ArrayList()
    rows.add(1)
    context._jsc.parallelize(rows, 1).count()


def _context(gateway: Any, conf: SparkConf | None = None) -> SparkContext:
    """The JVM's context, created in another thread.

    In the main thread Spark would install a SIGINT handler that calls the JVM in the middle of
    another call, and prints two tracebacks when it fails.
    """
    pool = ThreadPoolExecutor(1, "spark-start")
    try:
        return pool.submit(SparkContext, gateway=gateway, conf=conf).result()
    finally:
        pool.shutdown(wait=False)  # A second Ctrl-C ends the JVM, and this call with it.


@contextmanager
def _without_stacks() -> Iterator[None]:
    """Suppress Py4J's records in the root log: it also raises each error, Ctrl-C included."""
    root = logging.getLogger()

    def of_others(record: logging.LogRecord) -> bool:
        return "py4j" not in Path(record.pathname).parts

    root.addFilter(of_others)
    try:
        yield
    finally:
        root.removeFilter(of_others)


def _stop(gateway: Any, exit_s: float | None = None) -> None:
    """End the session, then its JVM, which exits when its standard input closes.

    It is killed after `exit_s` seconds (None: `_EXIT_S`).
    """
    try:
        if session := SparkSession._instantiatedSession:
            with suppress(*SPARK_ERRORS), catch_warnings(action="ignore"):
                session.stop()
    finally:
        SparkSession._instantiatedSession = SparkContext._active_spark_context = None
        with suppress(*SPARK_ERRORS):
            gateway.shutdown()
        gateway.proc.stdin.close()
        try:
            with suppress(TimeoutExpired):
                gateway.proc.wait(_EXIT_S if exit_s is None else exit_s)
        finally:
            gateway.proc.kill()
            gateway.proc.wait()


@contextmanager
def _keep_grpc_out_of_forks() -> Iterator[None]:
    """Have gRPC leave the forks of this process alone, if it is imported meanwhile.

    Else it starts its threads again in a child, such as one that is to become a JVM, and some of
    these die at once by an `epoll_wait error: Bad file descriptor`.
    """
    if _GRPC_FORKS in os.environ:
        yield
        return
    os.environ[_GRPC_FORKS] = "false"
    try:
        yield
    finally:
        os.environ.pop(_GRPC_FORKS, None)


def _await_connect(url: str, reach_s: float) -> None:
    """Wait for a gRPC server to answer at `url`; Spark itself would retry for many minutes.

    Raises NoServer after `reach_s` seconds without an answer, BadInput for a URL that is not valid.
    """
    shown = spark_settings.hide_url_options(url)
    try:
        with _keep_grpc_out_of_forks():
            import grpc
        from pyspark.sql.connect.client import DefaultChannelBuilder

        with DefaultChannelBuilder(url).toChannel() as channel:
            grpc.channel_ready_future(channel).result(reach_s)
    except ImportError as error:
        raise BadInput(
            f"Spark at {shown}", expected=f"the extra `connect` installed, {error}"
        ) from None
    except PySparkException as error:
        why = spark_settings.without_options(reason(error), url)
        raise BadInput(f"Spark URL {shown}: {why}") from None
    except grpc.FutureTimeoutError:
        raise NoServer(
            f"Spark at {shown}",
            expected="a Spark Connect server",
            got=f"no gRPC answer in {reach_s:g} s",
        ) from None


@contextmanager
def _change_environment(env: Mapping[str, str], without: Collection[str] = ()) -> Iterator[None]:
    """Run with `env` added and `without` removed; on exit restore what Spark changes.

    It changes the environment, the import path, and, in the main thread, the SIGINT handler.
    """
    variables, path, on_sigint = dict(os.environ), list(sys.path), signal.getsignal(signal.SIGINT)
    for name in without:
        os.environ.pop(name, None)
    os.environ.update(env)
    try:
        yield
    finally:
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        os.environ.update(variables)
        sys.path[:] = path
        if current_thread() is main_thread():
            signal.signal(signal.SIGINT, on_sigint)
