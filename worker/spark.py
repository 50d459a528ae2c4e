"""The interface to Spark: the only file of this package that imports PySpark.

A session is embedded, on a cluster's master, or over Spark Connect; all three are used in the same
way. On exit everything that was started here is removed, the JVM and its files included.
"""

import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Event, Timer, current_thread, main_thread
from typing import Any, NamedTuple
from warnings import catch_warnings

import pyspark
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import SparkConf, SparkContext, TaskContext, cloudpickle
from pyspark.errors import PySparkException
from pyspark.java_gateway import launch_gateway
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_type
from pyspark.sql.streaming.query import StreamingQuery

from ps import logs
from ps.compatibility import build_id
from ps.shared_memory.shm_files import temporary_folder
from ps.transport.addresses import REACH_S, check_reachable
from shards.errors import BadInput, GiveUp
from worker import spark_settings
from worker.code_archive import pack_code
from worker.data.sequence_file import SCHEMA, image_record
from worker.tfrecord.source import TFRecord

__all__ = [
    "DataFrame",
    "PartitionRows",
    "SparkSession",
    "active_session",
    "await_query",
    "check_guarded",
    "check_python",
    "check_sendable",
    "column_types",
    "deal",
    "dealt_to",
    "final_failure",
    "first_rows",
    "has_partitions",
    "interrupt",
    "map_tasks",
    "numbered",
    "partition_count",
    "query_error",
    "read_table",
    "run_tasks",
    "runs_here",
    "runs_queries",
    "sequence_file",
    "start_query",
    "start_session",
    "stop_query",
    "survey",
]

_START_S = 60.0
_EXIT_S = 15.0
_MOST_ROWS = 2**31 - 1  # the largest int in Java
_SPARK_ERRORS = (PySparkException, Py4JError, OSError)
_BAD_INPUT = "BadInput: "
_MOST_TASKS = 10_000  # to search for the one that failed
_ANY_PYTHON = "python3"  # Spark's choice unless one is configured: the first on PATH
_REMEDY = (
    f"set PYSPARK_PYTHON before the session starts, here to {sys.executable}, on a cluster to a"
    " Python with what workers need (docs/how-to/clusters.md)"
)
_PYTHON_FAULTS = (
    (
        r"different version: (\d+\.\d+) than that in driver: (\d+\.\d+)",
        "is {0}, here it is {1}",
    ),
    (r"No module named ('[\w.]+')", "has no module {0}"),
    (r"(\w+ >= [\w.]+) must be installed", "has no {0}"),
    (r'Cannot run program "([^"]*)"', "cannot be run"),
)


@contextmanager
def start_session(
    url: str | None, slots: int, *, app: str, env: Mapping[str, str]
) -> Iterator[SparkSession]:
    """A Spark session for as long as the context lasts.

    `url` None (or `local[N]`) starts Spark in this process's own JVM, which runs `slots` (or N)
    tasks at a time. `spark://HOST:PORT`, `yarn` and `k8s://HOST:PORT` are masters, `sc://HOST:PORT`
    is a Spark Connect server; this project's code is shipped to their executors. `app` is the name
    that Spark's pages show. `env` is added to the environment of the JVM and of embedded Python
    workers; deploy.java finds the Java. The SIGINT handler stays the same.

    Raises BadInput when the URL is not valid, when no server listens there, and when this process
    already has a session; GiveUp when Spark does not start.
    """
    if SparkContext._active_spark_context is not None or SparkSession.getActiveSession():
        raise BadInput("Spark: expected no session in this process, got one that is running")
    with ExitStack() as stack:
        path = stack.enter_context(temporary_folder("spark"))
        stack.enter_context(_without_stacks())
        yield stack.enter_context(_session(url, slots, app, env, path))


def run_tasks(
    df: DataFrame, task: Callable[..., Iterator[Any]], schema: Any, tag: str, job: str = ""
) -> list[Any]:
    """The rows of `map_tasks`, computed now.

    Tasks are ordinary Spark tasks: there may be more than slots, and a failed one is retried alone.
    `tag` names them for `interrupt`. When one fails for good, its own error is raised if that was a
    BadInput, and otherwise a GiveUp that quotes it; a note holds the traceback.
    """
    add, remove, _ = _tagging(df)
    add(tag)
    try:
        return map_tasks(df, task, schema, job).collect()
    except _SPARK_ERRORS as error:
        raise _task_error(str(error)) from None
    finally:
        remove(tag)


def map_tasks(
    df: DataFrame, task: Callable[..., Iterator[Any]], schema: Any, job: str = ""
) -> DataFrame:
    """What `task(batches, partition, attempt, gpus)` makes of each partition of `df`, when read.

    `batches` are Arrow record batches, and so is what `task` yields, with the schema `schema`.
    `attempt` is higher for each later attempt at a partition, whether its task or its whole stage
    is retried. `gpus` are the addresses of the GPUs that Spark assigned to the task, empty if Spark
    schedules none. `job` names the tasks in what they log.
    """
    settings = logs.current()

    def host(batches: Iterator[Any]) -> Iterator[Any]:
        context = TaskContext.get()
        assert context is not None, "mapInArrow runs inside a task"
        logs.set_up(settings, job=job, worker=f"w{context.partitionId()}")
        gpu = (context.resources() or {}).get("gpu")
        gpus = list(gpu.addresses) if gpu is not None else []
        # Spark's attempt number would restart at 0 if a lost shuffle made Spark retry the stage.
        yield from task(batches, context.partitionId(), context.taskAttemptId(), gpus)

    return _mapped(df, host, from_arrow_schema(schema))


class PartitionRows(NamedTuple):
    """A partition of a DataFrame, and the Python that Spark runs over it.

    `build` is the build id of this project's code there. `lacks` is the reason why no worker can
    run there, or empty.
    """

    rows: int
    python: str
    build: str
    lacks: str


def survey(df: DataFrame) -> list[PartitionRows]:
    """Count the rows of each partition by a small Spark job, and inspect the Python that runs it.

    The job reads no column. Raises BadInput if that Python cannot run at all, GiveUp
    if the DataFrame cannot be computed.
    """

    # Pickled by value, with its own imports: the executor may have none of our packages.
    def look(batches: Iterator[Any]) -> Iterator[Any]:
        import sys

        import pyarrow as pa

        build = lacks = ""
        try:
            import worker.spark_task  # noqa: F401  # all that a worker needs
            from ps.compatibility import build_id

            build = build_id()
        except Exception as error:  # noqa: BLE001  # any error means that no worker can start
            lacks = f"{type(error).__name__}: {error}"
        rows = sum(batch.num_rows for batch in batches)
        facts = {"rows": rows, "python": sys.executable, "build": build, "lacks": lacks}
        yield pa.RecordBatch.from_pylist([facts])

    schema = "rows long, python string, build string, lacks string"
    try:
        return [
            PartitionRows(*row)
            for row in _mapped(df.selectExpr("true AS row"), look, schema).collect()
        ]
    except _SPARK_ERRORS as error:
        text = str(error)
        if why := _python_fault(text):
            raise BadInput(f"Spark's Python ({_python_of(df)}) {why}: {_REMEDY}") from None
        raise GiveUp(f"Spark cannot compute the DataFrame: {task_reason(text)}") from None


def check_python(part: PartitionRows) -> None:
    """Raise BadInput if no worker can run in this Python, or only one of another build."""
    here = build_id()
    if part.lacks:
        raise BadInput(
            f"Spark's Python ({part.python}) cannot run a worker, {part.lacks}: {_REMEDY}"
        )
    if part.build != here:
        raise BadInput(
            f"Spark's Python ({part.python}): expected build {here} of this project, as here, got"
            f" {part.build}: install the same version in both places, or ship this one"
            " (docs/how-to/clusters.md)"
        )


def _mapped(
    df: DataFrame, task: Callable[[Iterator[Any]], Iterator[Any]], schema: Any
) -> DataFrame:
    """`df.mapInArrow`; local tasks run in this process's Python unless another is configured.

    Spark's default is the first `python3` on PATH, which is a different Python where a virtual
    environment is not activated.
    """
    if not runs_here(df) or _python_of(df) != _ANY_PYTHON or "PYSPARK_PYTHON" in os.environ:
        return df.mapInArrow(task, schema)
    context = df.sparkSession.sparkContext
    context.pythonExec = sys.executable
    try:
        return df.mapInArrow(task, schema)
    finally:
        context.pythonExec = _ANY_PYTHON


def _python_of(df: DataFrame) -> str:
    """The Python that Spark runs for tasks over `df`, as far as the driver knows."""
    return str(df.sparkSession.sparkContext.pythonExec) if hasattr(df, "_jdf") else "on the server"


def _python_fault(text: str) -> str:
    """Why a Python worker could not run, if Spark reports such a fault; else empty."""
    for pattern, words in _PYTHON_FAULTS:
        if found := re.search(pattern, text):
            return words.format(*found.groups())
    return ""


def _tagging(df: DataFrame) -> tuple[Callable[[str], Any], ...]:
    """Functions that add a tag to this thread's jobs, remove it, and cancel the jobs with a tag.

    A classic session's tags do not reach the job behind `collect`, so its context's are used.
    """
    session = df.sparkSession
    if not hasattr(df, "_jdf"):
        return session.addTag, session.removeTag, session.interruptTag
    context = session.sparkContext
    return context.addJobTag, context.removeJobTag, context.cancelJobsWithTag


def interrupt(df: DataFrame, tag: str) -> None:
    """Cancel the jobs with `tag`; their tasks end within moments."""
    with suppress(*_SPARK_ERRORS):
        _, _, cancel = _tagging(df)
        cancel(tag)


def final_failure(df: DataFrame, tag: str) -> GiveUp | None:
    """The BadInput that a task with `tag` has raised, if any: it would fail at every attempt.

    Spark itself retries four times before it reports the error. Over Spark Connect the error is not
    known earlier, so this returns None.
    """
    if not hasattr(df, "_jdf"):
        return None
    with suppress(*_SPARK_ERRORS):
        context = df.sparkSession.sparkContext._jsc.sc()
        tracker, store = context.statusTracker(), context.statusStore()
        jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForTag(tag)]
        stages = [stage for job in jobs if job.isDefined() for stage in job.get().stageIds()]
        for stage in stages:
            info = tracker.getStageInfo(stage)
            if not info.isDefined() or not info.get().numFailedTasks():
                continue
            tasks = store.taskList(stage, info.get().currentAttemptId(), _MOST_TASKS)
            for text in (tasks.apply(n).errorMessage() for n in range(tasks.size())):
                if text.isDefined() and task_reason(str(text.get())).startswith(_BAD_INPUT):
                    return _task_error(str(text.get()))
    return None


def runs_here(df: DataFrame) -> bool:
    """Whether the tasks over `df` are known to run on this machine."""
    return hasattr(df, "_jdf") and str(df.sparkSession.sparkContext.master).startswith("local")


def check_guarded(df: DataFrame) -> None:
    """Raise BadInput if a secret in a closure over `df` could be intercepted on the network."""
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
        raise GiveUp(f"Spark Connect does not show its settings: {reason(error)}") from None
    spark_settings.check_guarded(master, settings)


def partition_count(df: DataFrame) -> int:
    """How many partitions `df` has; raises BadInput over Spark Connect, which cannot count them."""
    if not hasattr(df, "_jdf"):
        raise BadInput("train over Spark Connect: expected the number of workers, got none")
    return int(df.rdd.getNumPartitions())


def has_partitions(df: DataFrame, count: int) -> bool:
    """Whether `df` is known to have `count` partitions; always false over Spark Connect.

    Adaptive execution may choose a different number for a different selection of columns.
    """
    return hasattr(df, "_jdf") and partition_count(df) == count


def deal(df: DataFrame, workers: int, sizes: Sequence[int]) -> DataFrame:
    """The rows of `df`, dealt evenly to `workers` partitions.

    `sizes` are the numbers of rows of its present partitions. Spark deals the rows of each
    partition in turn, starting at a random place, so partitions with few rows may leave a worker
    without any. If that could happen, one task deals all rows.
    """
    if sum(size // workers for size in sizes) * workers * 2 < sum(sizes):
        # The detour through Arrow keeps Spark from dropping the first of two repartitions.
        df = _mapped(df.coalesce(1), lambda batches: batches, df.schema)
    return df.repartition(workers)


def sequence_file(session: SparkSession, path: str) -> DataFrame:
    """The images in the SequenceFiles at `path`, any path or URI of Hadoop's, as a DataFrame.

    They are as CaffeOnSpark wrote them (worker/data/sequence_file.py has the columns), and are read
    when the DataFrame is. A record that does not fit fails the task that reads it, with an error
    that names the record. Raises BadInput over Spark Connect, which cannot read them.
    """
    if not hasattr(session, "_jsparkSession"):
        raise BadInput(f"SequenceFile {path}: expected a Spark session that is not Spark Connect's")
    kind = "org.apache.hadoop.io.BytesWritable"
    try:
        records: Any = session.sparkContext.sequenceFile(path, kind, kind)

        def row(record: tuple[bytearray, bytearray]) -> Any:
            return image_record(bytes(record[0]), bytes(record[1]), f"SequenceFile {path}")

        return session.createDataFrame(records.map(row), SCHEMA)
    except _SPARK_ERRORS as error:
        raise BadInput(f"SequenceFile {path}: cannot be read: {reason(error)}") from None


def numbered(session: SparkSession, partitions: int) -> DataFrame:
    """A DataFrame of one row a partition, its number: for tasks that read their rows themselves."""
    return session.range(0, partitions, 1, partitions)


def active_session(what: str) -> SparkSession:
    """This thread's Spark session, or the default one; raises BadInput, naming `what`, for none."""
    session = SparkSession.getActiveSession()
    if session is None:
        raise BadInput(f"{what}: expected a Spark session in this process to read a path, got none")
    return session


def read_table(session: SparkSession, kind: str, place: str) -> DataFrame:
    """The files at a path or URI as a DataFrame; `kind` is parquet or tfrecord. Raises BadInput."""
    if kind == "tfrecord":
        session.dataSource.register(TFRecord)
    where = place if "://" in place else str(Path(place).absolute())
    try:
        return session.read.format(kind).load(where)
    except _SPARK_ERRORS as error:
        raise BadInput(f"{place}: cannot be read: {reason(error)}") from None


def runs_queries(df: DataFrame) -> bool:
    """Whether a stream's micro-batches come to this process; over Spark Connect they do not."""
    return hasattr(df, "_jdf")


def dealt_to(df: DataFrame, workers: int) -> DataFrame:
    """The rows of `df` in this number of partitions."""
    return df if has_partitions(df, workers) else df.repartition(workers)


def start_query(
    df: DataFrame,
    each: Callable[[DataFrame, int], None],
    checkpoint: str,
    trigger: Mapping[str, Any],
) -> StreamingQuery:
    """Start a stream whose micro-batches are given to `each`, with their numbers.

    Raises BadInput for a trigger or a checkpoint that Spark refuses.
    """
    try:
        writer = df.writeStream.foreachBatch(each).option("checkpointLocation", checkpoint)
        return (writer.trigger(**trigger) if trigger else writer).start()
    except (*_SPARK_ERRORS, TypeError, ValueError) as error:
        raise BadInput(f"stream: cannot be started: {reason(error)}") from None


def await_query(query: StreamingQuery, timeout_s: float) -> bool:
    """Whether a stream has ended, or ends within this time; does not raise its error."""
    try:
        return bool(query.awaitTermination(timeout_s))  # type: ignore[arg-type]  # seconds, any
    except _SPARK_ERRORS:
        return True


def query_error(query: StreamingQuery) -> GiveUp | None:
    """The error that has ended a stream."""
    error = query.exception()
    return None if error is None else GiveUp(f"the stream failed: {reason(error)}")


def stop_query(query: StreamingQuery) -> None:
    """End a stream; one that has ended is left alone."""
    with suppress(*_SPARK_ERRORS):
        query.stop()


def check_sendable(function: object, args: object) -> None:
    """Raise BadInput unless a function and its arguments can be sent to tasks."""
    for what, value in (("args", args), ("train", function)):
        try:
            cloudpickle.dumps(value)
        except Exception as error:  # noqa: BLE001  # any object may fail in its own way
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise BadInput(
                f"run: {what}: expected what can be sent to Spark's tasks, got {why}: create such"
                " objects within the function, or pass a path"
            ) from None


def first_rows(df: DataFrame, most: int) -> list[Any]:
    """The first `most` rows as Arrow record batches in this process; raises GiveUp."""
    try:
        batches: list[Any] = df.limit(min(most, _MOST_ROWS)).toArrow().to_batches()
    except _SPARK_ERRORS as error:
        raise GiveUp(f"reading the first {most} rows failed: {reason(error)}") from None
    return batches


def column_types(df: DataFrame, names: Collection[str]) -> dict[str, Any]:
    """The Arrow types of these columns of `df`; raises BadInput for one that Arrow has no type for.

    A vector of Spark ML has an error of its own, because the tasks could not read it.
    """
    found = {}
    for field in df.schema.fields:
        if field.name not in names:
            continue
        kind = field.dataType.simpleString()
        if kind == "vector":
            raise BadInput(
                f"the DataFrame, column {field.name}: expected binary pixels or a list of numbers,"
                " got a vector of Spark ML: convert it by pyspark.ml.functions.vector_to_array"
            )
        try:
            found[field.name] = to_arrow_type(field.dataType)
        except PySparkException:
            raise BadInput(f"the DataFrame, column {field.name}: {kind} is not supported") from None
    return found


def task_reason(text: str) -> str:
    """The error that a Python task raised, found in Spark's report of stages and tracebacks."""
    lines = [line.strip() for line in text.splitlines()]
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception|[A-Z]\w+): ", line)]
    ours = [line for line in raised if line.startswith("shards.errors.")]
    for line in ours or raised[-1:]:
        return line.removeprefix("shards.errors.")
    return next((line for line in lines if line), "no reason given")


def _task_error(text: str) -> GiveUp:
    """The error to raise for a task that failed for good, parsed from Spark's report."""
    why = task_reason(text)
    error = (
        BadInput(why.removeprefix(_BAD_INPUT))
        if why.startswith(_BAD_INPUT)
        else GiveUp(f"a Spark task failed for good: {why.removeprefix('GiveUp: ')}")
    )
    if "Traceback (most recent call last)" in text:
        python = (line for line in text.splitlines() if not re.match(r"\s+at |\t", line))
        error.add_note("\n".join(["Spark reports:", *python]).rstrip())
    return error


def reason(error: BaseException) -> str:
    """An error in one line; Java's own message if it came from Java."""
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
    local_ip = (
        check_reachable(f"Spark at {spark_settings.shown(url)}", servers) if servers else None
    )
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
    """A session on its own JVM, which ends with the session."""
    master, log = settings["spark.master"], folder / "spark.log"
    # An earlier session in this process leaves its JVM behind, with settings that are not ours.
    earlier = SparkContext._gateway, SparkContext._jvm
    try:
        with _kept(env, without):
            gateway = _launch(settings, log)
            SparkContext._gateway, SparkContext._jvm = gateway, gateway.jvm
            with _hurried(gateway, master):
                session = SparkSession(_context(gateway))
        yield session
    finally:
        if SparkContext._gateway not in earlier:
            _stop(SparkContext._gateway)
        SparkContext._gateway, SparkContext._jvm = earlier


@contextmanager
def _connect(url: str, app: str, folder: Path) -> Iterator[SparkSession]:
    """A session on a Spark Connect server, released on exit; the server keeps running."""
    _await_connect(url)
    with _kept({}):
        try:
            session = SparkSession.builder.remote(url).appName(app).create()
            session.addArtifacts(str(pack_code(folder)), pyfile=True)
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
    """The session, with our packages shipped to its executors."""
    with sessions as session:
        with _kept({}):  # The driver continues to import from its own path.
            session.sparkContext.addPyFile(str(pack_code(folder)))
        yield session


def _launch(settings: Mapping[str, str], log: Path) -> Any:
    """A JVM with `settings`, as Py4J's gateway; its output goes to `log`."""
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
    """Turn a start-up error into one line, and stop waiting for an address that is not a master.

    Spark itself asks the master for a minute, then reports an unrelated error. There is no such
    limit for YARN and Kubernetes, which may have good reasons to be slow.
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
    """Wait for a gRPC server to answer at `url`; Spark itself would retry for many minutes.

    Raises BadInput after `REACH_S` seconds without an answer.
    """
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
