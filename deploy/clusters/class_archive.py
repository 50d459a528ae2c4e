"""The classes of Spark in a file that Java maps into memory, so that Spark is up sooner.

Much of the CPU time of a start of Spark is Java's, which reads thousands of classes from jars and
verifies them. `write_archive` has a JVM write them as it has them in memory, once for a Java and a
Spark; `archive_options` names the file for later JVMs of drivers, `executor_settings` for those of
executors. Java checks that the file is of this Java and of these jars, and does without it if not,
or if there is none. It does not check that the file is whole, and ends by SIGBUS if it is not: so
drivers read a link to it that has its size in the name. Executors run on other machines, where the
size may be another, and read the file itself.
"""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from deploy.clusters.user_cache import cache_folder, make_digest, report_unwritable
from ps.whole_files import Flush, whole_file
from shards.errors import BadInput, GiveUp

OPTIONS = "SPARK_SUBMIT_OPTS"
"""The variable with options that Spark's launcher gives a driver's JVM before all others."""
EXECUTOR_OPTIONS = "spark.executorEnv.JDK_JAVA_OPTIONS"
"""The setting with options that Java itself reads, besides those that Spark gives an executor."""
_QUIET = "-Xlog:cds*=off"
_LIMIT_S = 600.0


def archive_options(java_home: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The variable that names the archive to a driver's JVM; empty without an archive.

    It keeps the options that `environ` has there.
    """
    archive = find_archive(java_home, environ)
    options = environ.get(OPTIONS, "")
    if archive is None or f"SharedArchiveFile={archive}" in options:
        return {}
    return {OPTIONS: f"{_name_archive(archive)} {options}".rstrip()}


def executor_settings(java_home: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The setting that names the archive of each executor's machine; empty without one here.

    There it is expected in the same folder, as written for a Java and a Spark at the same places.
    """
    if find_archive(java_home, environ) is None:
        return {}
    return {EXECUTOR_OPTIONS: _name_archive(_archive_path(java_home, environ))}


def find_archive(java_home: str, environ: Mapping[str, str]) -> Path | None:
    """The archive of this Java and the Spark of this Python; None if there is none."""
    with suppress(BadInput, OSError):  # no home, or a writer has just removed it
        complete = _archive_path(java_home, environ)
        for path in complete.parent.glob(f"{complete.stem}-*.jsa"):
            if path.stem.endswith(f"-{path.stat().st_size}"):
                return path
    return None


def write_archive(java_home: str, environ: Mapping[str, str]) -> Path:
    """Write the archive of this Java and the Spark of this Python; it takes less than a minute.

    It replaces an earlier one. `environ` are the variables of the process that runs Spark. Raises
    BadInput if its folder cannot be written, GiveUp if Java writes no archive, or takes too long.
    """
    complete = _archive_path(java_home, environ)
    folder = complete.parent
    hint = "set XDG_CACHE_HOME to a folder of yours with 200 MB free"
    with report_unwritable(f"the archive of Spark's classes in {folder}", hint):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        earlier = list(folder.glob(f"{complete.stem}-*.jsa"))
        with whole_file(complete, flush=Flush.CONTENT, contended=True) as partial:
            _rehearse(java_home, partial, environ)
        sized = complete.with_stem(f"{complete.stem}-{complete.stat().st_size}")
        with suppress(FileExistsError):  # another writer, or an earlier release, has made it
            sized.symlink_to(complete.name)
        for path in earlier:
            if path != sized:
                path.unlink(missing_ok=True)  # a JVM that has mapped it keeps its content
    return sized


def _name_archive(path: Path) -> str:
    return f'{_QUIET} "-XX:SharedArchiveFile={path}"'  # a folder's name may have a space in it


def _rehearse(java_home: str, archive: Path, environ: Mapping[str, str]) -> None:
    """Run Spark's jobs of a training in a JVM that writes its classes to `archive`."""
    added = {"JAVA_HOME": java_home, OPTIONS: f'{_QUIET} "-XX:ArchiveClassesAtExit={archive}"'}
    rehearsal = subprocess.Popen(
        [sys.executable, "-m", "worker.spark.rehearsal"],
        env={**environ, **added},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        process_group=0,
    )
    try:
        said, _ = rehearsal.communicate(timeout=_LIMIT_S)
    except BaseException as error:
        # Else the JVM, which ends with its driver, would write the file after its removal here.
        os.killpg(rehearsal.pid, signal.SIGKILL)
        rehearsal.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            raise GiveUp(
                f"the Java in {java_home} wrote no archive of Spark's classes in {_LIMIT_S:g} s"
            ) from None
        raise
    if rehearsal.returncode != 0 or not archive.exists():
        lines = said.strip().splitlines()
        last = f"; it said last: {lines[-1]}" if lines else ""
        raise GiveUp(f"the Java in {java_home} wrote no archive of Spark's classes{last}")


def _archive_path(java_home: str, environ: Mapping[str, str]) -> Path:
    """The file for this Java and the Spark of this Python."""
    spark = find_spec("pyspark")
    assert spark is not None
    assert spark.origin is not None
    places = os.path.realpath(java_home), os.path.realpath(spark.origin)
    return cache_folder(environ) / f"spark-classes-{make_digest(shlex.join(places))}.jsa"
