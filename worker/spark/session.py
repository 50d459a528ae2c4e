"""A Spark session: embedded, on a cluster's master, or over Spark Connect; all are used alike.

On exit everything that was started here is removed, the JVM and its files included.
"""

import logging
import os
import re
import signal
import sys
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Event, Timer, current_thread, main_thread
from types import MappingProxyType
from typing import Any
from warnings import catch_warnings

import pyspark
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from ps.shared_memory.shm_files import temporary_folder
from ps.transport.addresses import REACH_S, check_reachable
from ps.transport.advertised_address import own_address
from shards.errors import BadInput, GiveUp
from worker.spark import settings as spark_settings
from worker.spark.code_archive import pack_code
from worker.spark.failures import SPARK_ERRORS, reason

_EXIT_S = 15.0


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
    is a Spark Connect server; this project's code is shipped to their executors. `app` is the name
    that Spark's pages show. `env` is added to the environment of the JVM and of embedded Python
    workers; deploy.spark_environment finds the Java. A named master gets the settings `conf`, and
    `start_s` seconds to start. The SIGINT handler stays the same.

    Raises BadInput when the URL is not valid, when no server listens there, and when this process
    already has a session; GiveUp when Spark does not start.
    """
    if SparkContext._active_spark_context is not None or SparkSession.getActiveSession():
        raise BadInput("Spark", expected="no session in this process", got="one that is running")
    with ExitStack() as stack:
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
        settings = spark_settings.prepare_embedded_settings(master, app, slots, folder)
        home = Path(pyspark.__file__).parent
        env = spark_settings.build_embedded_environment(folder, home, os.environ) | dict(env)
        return _classic(settings, env, folder, without=spark_settings.FOREIGN)
    assert url is not None
    servers = spark_settings.addresses(url, os.environ)
    local_ip = (
        check_reachable(f"Spark at {spark_settings.hide_url_options(url)}", servers)
        if servers
        else None
    )
    if url.startswith("sc://"):
        return _connect(url, app, folder)
    local_ip = local_ip or own_address()
    settings = spark_settings.cluster(url, app, local_ip, conf, os.environ)
    env = spark_settings.cluster_environment(folder, os.environ, local_ip) | dict(env)
    return _ship_code(_classic(settings, env, folder, start_s=start_s), folder)


@contextmanager
def _classic(
    settings: Mapping[str, str],
    env: Mapping[str, str],
    folder: Path,
    without: Collection[str] = (),
    start_s: float = spark_settings.START_S,
) -> Iterator[SparkSession]:
    """A session on its own JVM, which ends with the session."""
    master, log = settings["spark.master"], folder / "spark.log"
    # An earlier session in this process leaves its JVM behind, with settings that are not ours.
    earlier = SparkContext._gateway, SparkContext._jvm
    try:
        with _change_environment(env, without):
            gateway = _launch(settings, log)
            SparkContext._gateway, SparkContext._jvm = gateway, gateway.jvm
            with _limit_start(gateway, master, start_s):
                context = _context(gateway)
                # It would print a traceback when the JVM is killed, which `run_tasks` reports.
                context._accumulatorServer.handle_error = lambda *_: None  # type: ignore[method-assign]
                session = SparkSession(context)
        yield session
    finally:
        if SparkContext._gateway not in earlier:
            _stop(SparkContext._gateway)
        SparkContext._gateway, SparkContext._jvm = earlier


@contextmanager
def _connect(url: str, app: str, folder: Path) -> Iterator[SparkSession]:
    """A session on a Spark Connect server, released on exit; the server keeps running."""
    _await_connect(url)
    with _change_environment({}):
        try:
            session = SparkSession.builder.remote(url).appName(app).create()
            session.addArtifacts(str(pack_code(folder)), pyfile=True)
        except SPARK_ERRORS as error:
            why = spark_settings.without_options(reason(error), url)
            shown = spark_settings.hide_url_options(url)
            raise GiveUp(f"Spark at {shown} gave no session: {why}") from None
        try:
            yield session
        finally:
            session.stop()


@contextmanager
def _ship_code(
    sessions: AbstractContextManager[SparkSession], folder: Path
) -> Iterator[SparkSession]:
    """The session, with our packages shipped to its executors."""
    with sessions as session:
        with _change_environment({}):  # The driver continues to import from its own path.
            session.sparkContext.addPyFile(str(pack_code(folder)))
        yield session


def _launch(settings: Mapping[str, str], log: Path) -> Any:
    """A JVM with `settings`, as Py4J's gateway; its output goes to `log`."""
    with log.open("wb") as output:
        conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
        try:
            return launch_gateway(conf, {"stdout": output, "stderr": output})
        except SPARK_ERRORS as error:
            printed = log.read_text(errors="replace").splitlines()
            why = next((line for line in printed if re.search("Error|Exception", line)), None)
            raise GiveUp(f"Spark's JVM did not start: {why or reason(error)}") from None


@contextmanager
def _limit_start(gateway: Any, master: str, start_s: float) -> Iterator[None]:
    """Turn a start-up error into one line, and stop waiting for an address that is not a master.

    Spark itself asks the master for a minute, then reports an unrelated error. There is no such
    limit for YARN and Kubernetes, which may have good reasons to be slow.
    """
    late = Event()

    def give_up() -> None:
        late.set()
        gateway.proc.kill()

    timer = Timer(start_s, give_up)
    if master.startswith("spark:"):
        timer.start()
    try:
        yield
    except SPARK_ERRORS as error:
        silence = f"no Spark {pyspark.__version__} master answered in {start_s:g} s"
        why = silence if late.is_set() else reason(error)
        raise GiveUp(f"Spark at {master} did not start: {why}") from None
    finally:
        timer.cancel()


def _context(gateway: Any) -> SparkContext:
    """The JVM's context, created in another thread.

    In the main thread Spark would install a SIGINT handler that calls the JVM in the middle of
    another call, and prints two tracebacks when it fails.
    """
    pool = ThreadPoolExecutor(1, "spark-start")
    try:
        return pool.submit(SparkContext, gateway=gateway).result()
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


def _stop(gateway: Any) -> None:
    """End the session, then its JVM, which exits when its standard input closes."""
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
            gateway.proc.wait(_EXIT_S)
        finally:
            gateway.proc.kill()
            gateway.proc.wait()


def _await_connect(url: str) -> None:
    """Wait for a gRPC server to answer at `url`; Spark itself would retry for many minutes.

    Raises BadInput after `REACH_S` seconds without an answer.
    """
    shown = spark_settings.hide_url_options(url)
    try:
        import grpc
        from pyspark.sql.connect.client import DefaultChannelBuilder

        with DefaultChannelBuilder(url).toChannel() as channel:
            grpc.channel_ready_future(channel).result(REACH_S)
    except ImportError as error:
        raise BadInput(
            f"Spark at {shown}", expected=f"the extra `connect` installed, {error}"
        ) from None
    except PySparkException as error:
        why = spark_settings.without_options(reason(error), url)
        raise BadInput(f"Spark URL {shown}: {why}") from None
    except grpc.FutureTimeoutError:
        raise BadInput(
            f"Spark at {shown}",
            expected="a Spark Connect server",
            got=f"no gRPC answer in {REACH_S:g} s",
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
