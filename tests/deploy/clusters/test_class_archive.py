"""The archive of Spark's classes: named to a JVM while it is whole, and replaced by its writer."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from deploy.clusters import class_archive
from deploy.clusters.class_archive import (
    EXECUTOR_OPTIONS,
    OPTIONS,
    archive_options,
    executor_settings,
    find_archive,
    write_archive,
)
from deploy.clusters.java import spark_environment
from deploy.clusters.user_cache import cache_folder
from shards.errors import BadInput, GiveUp
from tests.support.eventually import eventually

JAVA = "/opt/java"
Rehearse = Callable[[str, Path, Mapping[str, str]], None]


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """The variables of a user with an empty cache, in a folder with a space in its name."""
    return {"XDG_CACHE_HOME": str(tmp_path / "a cache")}


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> bytearray:
    """The bytes that the next archive has, without a Java that writes it."""
    content = bytearray(b"classes")

    def rehearse(_: str, archive: Path, __: Mapping[str, str]) -> None:
        archive.write_bytes(content)

    monkeypatch.setattr(class_archive, "_rehearse", rehearse)
    return content


def test_jvm_gets_the_archive_before_the_options_that_are_set(
    environ: dict[str, str], written: bytearray
) -> None:
    """Nothing is added without an archive, and nothing is added twice."""
    assert archive_options(JAVA, environ) == {}
    archive = write_archive(JAVA, environ)
    assert archive.read_bytes() == written
    mine = f'-Xlog:cds*=off "-XX:SharedArchiveFile={archive}"'
    assert archive_options(JAVA, environ) == {OPTIONS: mine}
    added = archive_options(JAVA, environ | {OPTIONS: "-Dmine=1"})
    assert added == {OPTIONS: f"{mine} -Dmine=1"}
    assert archive_options(JAVA, environ | added) == {}


def test_executors_get_a_file_whose_name_is_the_same_on_each_machine(
    environ: dict[str, str], written: bytearray
) -> None:
    """Its size may differ there; nothing is named without a whole archive here."""
    assert executor_settings(JAVA, environ) == {}
    archive = write_archive(JAVA, environ)
    named = executor_settings(JAVA, environ)
    (path,) = re.findall(r'-Xlog:cds\*=off "-XX:SharedArchiveFile=(.+)"', named[EXECUTOR_OPTIONS])
    assert Path(path).read_bytes() == written
    assert Path(path).name == archive.name.replace(f"-{len(written)}.jsa", ".jsa")
    written += b" of another machine"
    write_archive(JAVA, environ)
    assert executor_settings(JAVA, environ) == named
    Path(path).write_bytes(b"torn")
    assert executor_settings(JAVA, environ) == {}


def test_another_java_has_another_archive(environ: dict[str, str], written: bytearray) -> None:
    archive = write_archive(JAVA, environ)
    assert find_archive("/opt/other", environ) is None
    written += b" of another"
    assert write_archive("/opt/other", environ) != archive
    assert find_archive(JAVA, environ) == archive


def test_a_torn_archive_is_not_named(environ: dict[str, str], written: bytearray) -> None:
    """Java would map it, and end where a page is missing."""
    archive = write_archive(JAVA, environ)
    archive.chmod(0o600)
    archive.write_bytes(written[:-1])
    assert find_archive(JAVA, environ) is None


def test_a_later_archive_takes_the_place_of_the_earlier(
    environ: dict[str, str], written: bytearray
) -> None:
    earlier = write_archive(JAVA, environ)
    assert write_archive(JAVA, environ) == earlier
    written += b" and more"
    later = write_archive(JAVA, environ)
    assert set(later.parent.iterdir()) == {later, later.resolve()}
    assert later.read_bytes() == written


def test_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match=r"archive of Spark's classes in .*got Not a directory"):
        write_archive(JAVA, {"XDG_CACHE_HOME": str(tmp_path / "file")})


def test_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under any number: Spark starts, and nothing can be prepared."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert archive_options(JAVA, {}) == {}
    with pytest.raises(BadInput, match=r"cache folder: expected XDG_CACHE_HOME or HOME to be set"):
        write_archive(JAVA, {})


def test_java_that_writes_no_archive(tmp_path: Path, environ: dict[str, str]) -> None:
    """Its last words are quoted, and nothing is left behind."""
    java = tmp_path / "java" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text("#!/bin/sh\necho 'no classes today' >&2; exit 1\n")
    java.chmod(0o755)
    with pytest.raises(GiveUp, match=f"the Java in {java.parents[1]} wrote no archive"):
        write_archive(str(java.parents[1]), os.environ | environ)
    assert list(cache_folder(environ).iterdir()) == []


def test_java_that_does_not_end(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is ended with all that it has started, so that it writes nothing later."""
    java, started = tmp_path / "java" / "bin" / "java", tmp_path / "started"
    java.parent.mkdir(parents=True)
    java.write_text(f'#!/bin/sh\necho $$ > "{started}"; exec sleep 600\n')
    java.chmod(0o755)
    monkeypatch.setattr(class_archive, "_LIMIT_S", 10.0)
    with pytest.raises(GiveUp, match="wrote no archive of Spark's classes in 10 s"):
        write_archive(str(java.parents[1]), os.environ | environ)
    assert list(cache_folder(environ).iterdir()) == []
    pid = int(started.read_text())
    eventually(lambda: not Path(f"/proc/{pid}").exists(), because="its group is killed")


_SESSION = """
import os
import sys

from pyspark.sql import SparkSession

import deploy

os.environ |= deploy.spark_environment()
logged = {"spark.ui.enabled": "false", "spark.executor.extraJavaOptions": sys.argv[1]}
builder = SparkSession.builder.master("local-cluster[1,1,1024]")
with builder.config(map=deploy.spark_settings() | logged).getOrCreate() as session:
    print(session.range(3).count())
"""


@pytest.mark.timeout(600)  # Java writes thousands of classes, on one core
def test_spark_reads_its_classes_from_the_archive(tmp_path: Path, environ: dict[str, str]) -> None:
    """Most of what a driver and an executor load comes from a real archive.

    The session has a process of its own, for this one may have another test's.
    """
    real = spark_environment(os.environ | environ)
    write_archive(real["JAVA_HOME"], os.environ | real | environ)
    logs = {role: tmp_path / role for role in ("driver", "executor")}
    driver, executor = (f"-Xlog:class+load:file={log}" for log in logs.values())
    command = [sys.executable, "-c", _SESSION, executor]
    variables = os.environ | environ | {OPTIONS: driver}
    assert subprocess.check_output(command, env=variables, text=True) == "3\n"
    for role, log in logs.items():
        sources = re.findall(r"\] \S+ source: (.+)", log.read_text())
        archived = sum("(top)" in source for source in sources)
        assert archived > 0.6 * len(sources), f"{role}: {archived} of {len(sources)}"
