"""The environment of a training run: the addresses that it uses, and its Ray and Spark.

Ray and Spark are started one after the other from the main thread, because a Ray that is started in
a thread dies with that thread. With shards in processes Ray is not even imported.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from deploy.clusters.class_archive import executor_settings
from deploy.clusters.java import spark_environment, start_ahead
from deploy.clusters.probe import check_spark_url
from deploy.run.disk_space import check_room
from deploy.run.folder import CAFFEMODEL, WEIGHTS
from deploy.run.prepare import Inputs
from deploy.run.progress import Progress
from deploy.run.settings import TrainSettings
from ps.launch.launcher import Placement
from ps.transport.addresses import check_listen
from shards.errors import BadInput
from worker import spark
from worker.spark import settings as spark_settings
from worker.spark.signals import defer_interrupt

_FLOAT_BYTES = 4


def check(inputs: Inputs, snapshots: str) -> None:
    """Raise BadInput if an address, a server or a disk is not as the run needs it.

    `snapshots` is the place of the snapshots.
    """
    _check_guarded(inputs.settings)
    _check_addresses(inputs.settings)
    _check_room(inputs, snapshots)


def _check_guarded(settings: TrainSettings) -> None:
    """Raise BadInput if the shards are guarded, but Ray or Spark would admit strangers."""
    if not settings.uses_curve:
        return
    if settings.ray is not None:
        from deploy.clusters.ray_cluster import check_token

        check_token(os.environ)
    if settings.spark is not None:
        spark_settings.check_connect(settings.spark)


def _check_addresses(settings: TrainSettings) -> None:
    """Raise BadInput if shards cannot use the host or a port, or Ray or Spark does not answer."""
    if (
        settings.shards_in is Placement.PROCESSES or settings.ray is None
    ):  # they listen on this machine
        ports = range(settings.port, settings.port + settings.shards) if settings.port else ()
        _of_option("--bind", lambda: check_listen(settings.bind, ()))
        _of_option("--port", lambda: check_listen(settings.bind, ports))
    if settings.ray is not None:
        from deploy.clusters.ray_cluster import check_address

        check_address(settings.ray)
    if settings.spark is not None:
        check_spark_url(settings.spark)


def _of_option(name: str, check: Callable[[], None]) -> None:
    """Run a check, and put the option in front of the text of its BadInput."""
    try:
        check()
    except BadInput as error:
        raise error.within(name) from None


def _check_room(inputs: Inputs, snapshots: str) -> None:
    """Raise BadInput if a disk lacks room for the weights, in two formats, and a snapshot."""
    out = inputs.settings.out
    weights = inputs.model.table.size * _FLOAT_BYTES
    present = [out / name for name in (WEIGHTS, CAFFEMODEL)]
    needs = {out: 2 * weights - sum(path.stat().st_size for path in present if path.is_file())}
    if "://" not in snapshots:
        needs[Path(snapshots)] = weights * (1 + len(inputs.job.rule.slot_names))
    check_room(needs)


def check_head(settings: TrainSettings) -> None:
    """Raise GiveUp if the shards run in an embedded Ray whose head has died."""
    if settings.shards_in is Placement.RAY and settings.ray is None:
        from deploy.clusters import ray_cluster

        ray_cluster.check_head()


def start(
    settings: TrainSettings, progress: Progress, stack: ExitStack, note: Callable[[str], None]
) -> spark.SparkSession:
    """Connect to Ray if shards run there, then to Spark; `stack` stops what is started.

    `note` is called with the name of each once it is ready.
    """
    env: dict[str, str] = {}
    conf = settings.spark_conf()
    if settings.spark is None:
        with defer_interrupt():
            env = spark_environment() | start_ahead(os.environ)
    elif spark_settings.starts_java(settings.spark):
        env = spark_environment()
        conf = executor_settings(env["JAVA_HOME"], os.environ) | conf
    if settings.shards_in is Placement.RAY:
        from deploy.clusters import ray_cluster

        progress.starting("Ray" if settings.ray is None else f"Ray at {settings.ray}")
        with defer_interrupt():
            stack.enter_context(
                ray_cluster.connect(settings.ray, settings.shards, settings.namespace)
            )
        note("ray")
    where = (
        "" if settings.spark is None else f" at {spark_settings.hide_url_options(settings.spark)}"
    )
    progress.starting(f"Spark{where}")
    with defer_interrupt():
        session = stack.enter_context(
            spark.start_session(
                settings.spark,
                settings.workers,
                app=settings.app_name,
                env=env,
                conf=conf,
                start_s=settings.start_s,
            )
        )
    note("spark")
    return session
