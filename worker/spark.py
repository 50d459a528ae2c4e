"""The door to Spark: the one file of this package that imports PySpark.

A session is embedded, on a cluster's master, or over Spark Connect; what is done with it is the
same. Whatever was started here is gone on leaving, the JVM and its files included.
"""

import os
import re
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Event, Timer, current_thread, main_thread
from typing import Any
from warnings import catch_warnings

import pyspark
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import SparkConf, SparkContext, TaskContext
from pyspark.errors import PySparkException
from pyspark.java_gateway import launch_gateway
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from ps.sharing.claims import temporary_folder
from ps.wire.reach import REACH_S, reach
from shards.errors import BadInput, GiveUp
from worker import spark_settings
from worker.shipping import pack

__all__ = [
    "DataFrame",
    "SparkSession",
    "check_guarded",
    "interrupt",
    "partition_count",
    "partitions",
    "run_tasks",
    "runs_here",
    "start_session",
]

_START_S = 60.0
_EXIT_S = 15.0
_SPARK_ERRORS = (PySparkException, Py4JError, OSError)


@contextmanager
def start_session(
    url: str | None, slots: int, *, app: str, env: Mapping[str, str]
) -> Iterator[SparkSession]:
    """A Spark session for as long as the context lasts.

    `url` None (or `local[N]`) starts Spark in a JVM of this process's own, with `slots` tasks at a
    time. `spark://HOST:PORT`, `yarn` and `k8s://HOST:PORT` are masters, `sc://HOST:PORT` a Spark
    Connect server; this project's code is shipped to their executors. `app` is the name that
    Spark's pages show. `env` joins the environment of the JVM and of embedded Python workers: see
    deploy.java for the Java. SIGINT keeps the handler it has.

    Raises BadInput when the URL is none, when nobody listens there, and when this process has a
    session already; GiveUp when Spark does not start.
    """
    if SparkContext._active_spark_context is not None or SparkSession.getActiveSession():
        raise BadInput("Spark: expected no session in this process, got one that is running")
    with ExitStack() as stack:
        path = stack.enter_context(temporary_folder("spark"))
        yield stack.enter_context(_session(url, slots, app, env, path))


def run_tasks(
    df: DataFrame, task: Callable[..., Iterator[Any]], schema: Any, tag: str
) -> list[Any]:
    """Run `task(batches, partition, attempt, gpus)` over each partition of `df`; returns its rows.

    `batches` and what `task` yields are Arrow record batches, the latter of `schema`. `attempt` is
    higher for each later attempt at a partition, be it that its task or that its stage is tried
    again. `gpus` are the addresses of those that Spark assigned to the task, none where it
    schedules none. Tasks are ordinary ones: there may be more than slots, and one that fails is
    tried again by itself. `tag` names them for `interrupt`. Raises GiveUp with the task's own words
    when one fails for good.
    """

    def host(batches: Iterator[Any]) -> Iterator[Any]:
        context = TaskContext.get()
        assert context is not None, "mapInArrow runs inside a task"
        gpu = (context.resources() or {}).get("gpu")
        gpus = list(gpu.addresses) if gpu is not None else []
        # Spark's attempt number would begin anew where a lost shuffle has the stage tried again.
        yield from task(batches, context.partitionId(), context.taskAttemptId(), gpus)

    add, remove, _ = _tagging(df)
    add(tag)
    try:
        return df.mapInArrow(host, from_arrow_schema(schema)).collect()
    except _SPARK_ERRORS as error:
        raise GiveUp(f"a Spark task failed for good: {task_reason(str(error))}") from None
    finally:
        remove(tag)


def _tagging(df: DataFrame) -> tuple[Callable[[str], Any], ...]:
    """How to tag this thread's jobs, to end that, and to cancel what runs under a tag.

    A classic session's own tags do not reach the job behind `collect`; its context's do.
    """
    session = df.sparkSession
    if not hasattr(df, "_jdf"):
        return session.addTag, session.removeTag, session.interruptTag
    context = session.sparkContext
    return context.addJobTag, context.removeJobTag, context.cancelJobsWithTag


def interrupt(df: DataFrame, tag: str) -> None:
    """Cancel what runs under `tag`; its tasks end within moments."""
    with suppress(*_SPARK_ERRORS):
        _, _, cancel = _tagging(df)
        cancel(tag)


def runs_here(df: DataFrame) -> bool:
    """Whether the tasks over `df` are known to run on this machine."""
    return hasattr(df, "_jdf") and str(df.sparkSession.sparkContext.master).startswith("local")


def check_guarded(df: DataFrame) -> None:
    """Raise BadInput where a secret in a closure over `df` could be overheard."""
    session = df.sparkSession
    if hasattr(df, "_jdf"):
        conf = session.sparkContext.getConf()
        settings = {name: conf.get(name) for name in spark_settings.GUARDS}
        spark_settings.check_guarded(str(session.sparkContext.master), settings)
        return
    try:
        settings = {name: session.conf.get(name, None) for name in spark_settings.GUARDS}
        master = str(session.conf.get("spark.master", ""))
    except _SPARK_ERRORS as error:
        raise GiveUp(f"Spark Connect does not tell its settings: {reason(error)}") from None
    spark_settings.check_guarded(master, settings)


def partition_count(df: DataFrame) -> int:
    """How many partitions `df` has; raises BadInput over Spark Connect, which does not say."""
    if not hasattr(df, "_jdf"):
        raise BadInput("train over Spark Connect: expected the number of workers, got none")
    return int(df.rdd.getNumPartitions())


def partitions(df: DataFrame, workers: int) -> DataFrame:
    """`df` in `workers` partitions: as it is where it already has so many, else dealt out anew."""
    if hasattr(df, "_jdf") and partition_count(df) == workers:
        return df
    return df.repartition(workers)


def task_reason(text: str) -> str:
    """What a Python task raised, out of the tale of stages and tracebacks that Spark tells."""
    lines = [line.strip() for line in text.splitlines()]
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception|[A-Z]\w+): ", line)]
    ours = [line for line in raised if line.startswith("shards.errors.")]
    for line in ours or raised[-1:]:
        return line.removeprefix("shards.errors.")
    return next((line for line in lines if line), "no reason given")


def reason(error: BaseException) -> str:
    """What happened, in one line: Java's own words when the error came from Java."""
    text = str(error)
    if isinstance(error, Py4JJavaError):
        text = str(error.java_exception.toString())
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _session(
    url: str | None, slots: int, app: str, env: Mapping[str, str], folder: Path
) -> AbstractContextManager[SparkSession]:
    master = spark_settings.embedded_master(url, slots)
    if master:
        settings = spark_settings.embedded(master, app, slots, folder)
        home = Path(pyspark.__file__).parent
        env = spark_settings.embedded_environment(folder, home) | dict(env)
        return _classic(settings, env, folder, without=spark_settings.FOREIGN)
    assert url is not None
    servers = spark_settings.addresses(url, os.environ)
    local_ip = reach(f"Spark at {spark_settings.shown(url)}", servers) if servers else None
    if url.startswith("sc://"):
        return _connect(url, app, folder)
    driver_host = None if "SPARK_LOCAL_IP" in os.environ else local_ip
    settings = spark_settings.cluster(url, app, driver_host)
    env = spark_settings.cluster_environment(folder, os.environ) | dict(env)
    return _shipped(_classic(settings, env, folder), folder)


@contextmanager
def _classic(
    settings: Mapping[str, str], env: Mapping[str, str], folder: Path, without: Collection[str] = ()
) -> Iterator[SparkSession]:
    """A session on a JVM of its own, which ends with it."""
    master, log = settings["spark.master"], folder / "spark.log"
    # A session that has ended leaves its JVM behind, with settings that are not ours.
    earlier = SparkContext._gateway, SparkContext._jvm
    try:
        with _kept(env, without):
            gateway = _launch(settings, log)
            SparkContext._gateway, SparkContext._jvm = gateway, gateway.jvm
            with _hurried(gateway, master):
                session = SparkSession(SparkContext(gateway=gateway))
        yield session
    finally:
        if SparkContext._gateway not in earlier:
            _stop(SparkContext._gateway)
        SparkContext._gateway, SparkContext._jvm = earlier


@contextmanager
def _connect(url: str, app: str, folder: Path) -> Iterator[SparkSession]:
    """A session on a Spark Connect server, released on leaving; the server goes on."""
    _await_connect(url)
    with _kept({}):
        try:
            session = SparkSession.builder.remote(url).appName(app).create()
            session.addArtifacts(str(pack(folder)), pyfile=True)
        except _SPARK_ERRORS as error:
            why = spark_settings.without_options(reason(error), url)
            shown = spark_settings.shown(url)
            raise GiveUp(f"Spark at {shown} gave no session: {why}") from None
        try:
            yield session
        finally:
            session.stop()


@contextmanager
def _shipped(
    sessions: AbstractContextManager[SparkSession], folder: Path
) -> Iterator[SparkSession]:
    """The session, its executors given our packages."""
    with sessions as session:
        with _kept({}):  # The driver goes on importing from where it did.
            session.sparkContext.addPyFile(str(pack(folder)))
        yield session


def _launch(settings: Mapping[str, str], log: Path) -> Any:
    """A JVM with `settings`, as Py4J's gateway; what it prints goes to `log`."""
    with log.open("wb") as output:
        conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
        try:
            return launch_gateway(conf, {"stdout": output, "stderr": output})
        except _SPARK_ERRORS as error:
            printed = log.read_text(errors="replace").splitlines()
            why = next((line for line in printed if re.search("Error|Exception", line)), None)
            raise GiveUp(f"Spark's JVM did not start: {why or reason(error)}") from None


@contextmanager
def _hurried(gateway: Any, master: str) -> Iterator[None]:
    """Turn what goes wrong at the start into one line, and end a wait for what is no master.

    Spark itself asks a master for a minute, then speaks of something else. YARN and Kubernetes may
    have good reasons to be slow.
    """
    late = Event()

    def give_up() -> None:
        late.set()
        gateway.proc.kill()

    timer = Timer(_START_S, give_up)
    if master.startswith("spark:"):
        timer.start()
    try:
        yield
    except _SPARK_ERRORS as error:
        silence = f"no Spark {pyspark.__version__} master answered in {_START_S:g} s"
        why = silence if late.is_set() else reason(error)
        raise GiveUp(f"Spark at {master} did not start: {why}") from None
    finally:
        timer.cancel()


def _stop(gateway: Any) -> None:
    """End the session, then its JVM, which leaves when its standard input closes."""
    try:
        if session := SparkSession._instantiatedSession:
            with suppress(*_SPARK_ERRORS), catch_warnings(action="ignore"):
                session.stop()
    finally:
        SparkSession._instantiatedSession = SparkContext._active_spark_context = None
        with suppress(*_SPARK_ERRORS):
            gateway.shutdown()
        gateway.proc.stdin.close()
        try:
            gateway.proc.wait(_EXIT_S)
        finally:
            gateway.proc.kill()
            gateway.proc.wait()


def _await_connect(url: str) -> None:
    """Return when a gRPC server answers at `url`; Spark itself would ask for many minutes."""
    shown = spark_settings.shown(url)
    try:
        import grpc
        from pyspark.sql.connect.client import DefaultChannelBuilder

        with DefaultChannelBuilder(url).toChannel() as channel:
            grpc.channel_ready_future(channel).result(REACH_S)
    except ImportError as error:
        raise BadInput(
            f"Spark at {shown}: expected the extra `connect` installed, {error}"
        ) from None
    except PySparkException as error:
        why = spark_settings.without_options(reason(error), url)
        raise BadInput(f"Spark URL {shown}: {why}") from None
    except grpc.FutureTimeoutError:
        raise BadInput(
            f"Spark at {shown}: expected a Spark Connect server, got no gRPC answer in"
            f" {REACH_S:g} s"
        ) from None


@contextmanager
def _kept(env: Mapping[str, str], without: Collection[str] = ()) -> Iterator[None]:
    """Run with `env` added and `without` removed; then give the process back what Spark changed.

    Those are the environment, the import path, and, in the main thread, the SIGINT handler.
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
