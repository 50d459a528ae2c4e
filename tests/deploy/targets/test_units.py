"""The units for systemd: it finds nothing to say about them, and their commands exist."""

import re
import shlex
import subprocess
import zipfile
from pathlib import Path

import pyspark
import pytest
from ray.scripts.scripts import start as ray_start

from tests.support.command_parser import parse
from tests.support.target_tools import TARGETS, tool

UNITS = sorted((TARGETS / "units").glob("*.service"))
_PROGRAMS = "/opt/downpour/bin"


def settings(unit: Path) -> list[tuple[str, str]]:
    """The assignments of a unit, in order."""
    lines = unit.read_text().splitlines()
    pairs = [line.partition("=") for line in lines if "=" in line and not line.startswith("#")]
    return [(name, value) for name, _, value in pairs]


def command(unit: Path) -> list[str]:
    """The words of a unit's command, with a number in the place of each variable."""
    return shlex.split(re.sub(r"\$\{\w+\}", "4", dict(settings(unit))["ExecStart"]))


def verify(unit: Path, folder: Path) -> str:
    """The output of `systemd-analyze verify` for a unit, with its programs below `folder`.

    It exits with 0 for a key that it does not know, so its output counts.
    """
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name in ("downpour", "ray", "spark-class"):
        (programs / name).touch(mode=0o755)
    copy = folder / unit.name
    copy.write_text(unit.read_text().replace(_PROGRAMS, str(programs)))
    done = subprocess.run(
        [tool("systemd-analyze"), "verify", "--man=no", str(copy)],
        capture_output=True, text=True, check=False,
        env={"SYSTEMD_LOG_LEVEL": "warning", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_has_nothing_to_say(unit: Path, tmp_path: Path) -> None:
    """`systemd-analyze verify` prints nothing."""
    assert verify(unit, tmp_path) == ""


def test_an_unknown_key_is_seen(tmp_path: Path) -> None:
    """A misspelt key, which systemd ignores at a start, is output of the check."""
    unit = tmp_path / "wrong.service"
    unit.write_text(UNITS[0].read_text().replace("PrivateTmp=", "PrivateTemp="))
    (tmp_path / "checked").mkdir()
    assert "PrivateTemp" in verify(unit, tmp_path / "checked")


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_units_are_hardened_and_limited(unit: Path) -> None:
    """No unit runs as root, gains rights, or has a limit on files that many workers exceed."""
    values = dict(settings(unit))
    assert values["User"] == "downpour"
    assert values["NoNewPrivileges"] == "yes"
    assert values["CapabilityBoundingSet"] == ""
    assert values["ProtectSystem"] == "strict"
    assert int(values["LimitNOFILE"]) >= 65536
    assert values["TasksMax"]
    assert (values["PrivateTmp"] == "yes") != (values.get("ReadWritePaths") == "/tmp")
    assert values["WantedBy"] == "multi-user.target", "`systemctl enable` makes it start at boot"


def test_a_stopped_service_ends_no_job() -> None:
    """systemd ends only the service's own process, and leaves jobs their processes and /tmp."""
    values = dict(settings(TARGETS / "units" / "downpour.service"))
    assert values["KillMode"] == "process"
    assert values["PrivateTmp"] == "no"
    assert values["TasksMax"] == "infinity"  # the tasks of all jobs are counted as its own


def test_spark_takes_no_programs_of_strangers() -> None:
    """The master neither runs programs that are submitted over HTTP, nor ends jobs by its page."""
    unit = (TARGETS / "units" / "downpour-spark-master.service").read_text()
    compose = (TARGETS / "compose" / "setup.sh").read_text()
    for name in ("spark.master.rest.enabled", "spark.ui.killEnabled"):
        assert f"-D{name}=false" in unit
        assert f"\n{name} false\n" in compose


def test_variables_are_in_the_example_files() -> None:
    """Each variable of a command is set in the example of the unit's file of variables."""
    for unit in UNITS:
        example = Path(dict(settings(unit))["EnvironmentFile"]).name + ".example"
        text = (TARGETS / "units" / example).read_text()
        for name in re.findall(r"\$\{(\w+)\}", unit.read_text()):
            assert f"\n{name}=" in text, (unit.name, name)


def test_commands_exist() -> None:
    """The options of `downpour` and of `ray start` parse; those of Spark are in its classes."""
    jars = Path(pyspark.__file__).parent / "jars"
    with zipfile.ZipFile(next(jars.glob("spark-core_*.jar"))) as core:
        for unit in UNITS:
            program, *rest = command(unit)
            assert program.startswith(_PROGRAMS)
            match Path(program).name:
                case "downpour":
                    parse(["downpour", *rest])
                case "ray":
                    assert rest[0] == "start"
                    ray_start.make_context("ray", rest[1:])
                case "spark-class":
                    package, _, kind = rest[0].rpartition(".")
                    arguments = f"{package.replace('.', '/')}/{kind}Arguments.class"
                    known = core.read(arguments)
                    for option in rest[1:]:
                        assert not option.startswith("--") or option.encode() in known, option
                case _:
                    pytest.fail(f"unknown program {program}")
