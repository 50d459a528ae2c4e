"""A run's Spark starts with what `downpour prepare` has written, where it starts a JVM."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from deploy.clusters import class_archive
from deploy.clusters.class_archive import EXECUTOR_OPTIONS, OPTIONS, write_archive
from deploy.clusters.java import spark_environment
from deploy.run import ray_and_spark
from deploy.run.progress import Progress
from deploy.run.settings import TrainSettings
from ps.launch.launcher import Placement
from worker import spark

Started = dict[str, Any]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """What the last session was started with; no Spark starts."""
    options: Started = {}

    @contextmanager
    def start_session(url: str, slots: int, **given: Any) -> Iterator[None]:
        options.clear()
        options.update(given)
        yield

    monkeypatch.setattr(spark, "start_session", start_session)
    return options


def start(url: str, **more: Any) -> None:
    more |= {"spark": url, "shards_in": Placement.PROCESSES}
    settings = TrainSettings(solver=Path("/s"), data=Path("/d"), out=Path("/o"), **more)
    progress = cast(Progress, SimpleNamespace(starting=lambda _: None))
    with ExitStack() as stack:
        ray_and_spark.start(settings, progress, stack, lambda _: None)


def test_archive_of_classes_is_named_to_the_jvms_of_a_cluster(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the driver's and the executors', and the user's own settings stay."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(OPTIONS, raising=False)
    start("spark://h:1", driver_port=7001)
    assert OPTIONS not in started["env"]
    unprepared = started["conf"]
    assert unprepared["spark.driver.port"] == "7001"
    assert EXECUTOR_OPTIONS not in unprepared

    home = spark_environment()["JAVA_HOME"]

    def rehearse(_: str, archive: Path, __: object) -> None:
        archive.write_bytes(b"classes")

    monkeypatch.setattr(class_archive, "_rehearse", rehearse)
    archive = write_archive(home, {"XDG_CACHE_HOME": str(tmp_path)})
    start("spark://h:1", driver_port=7001)
    assert str(archive) in started["env"][OPTIONS]
    named = started["conf"].pop(EXECUTOR_OPTIONS)
    assert f'"-XX:SharedArchiveFile={archive.resolve()}"' in named
    assert started["conf"] == unprepared


@pytest.mark.parametrize("url", ["sc://h:1", "submitted"])
def test_session_whose_jvm_is_up_needs_no_java(
    url: str, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a client of Spark Connect without one."""
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    monkeypatch.setenv("PATH", "")
    start(url)
    assert started["env"] == {}
    assert EXECUTOR_OPTIONS not in started["conf"]
