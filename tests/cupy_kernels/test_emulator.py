"""What the emulator finds: planted defects, each in a child process, and what it must let pass."""

import os
from collections.abc import Callable

import pytest

from cupy_kernels import sources
from cupy_kernels.emulator import Emulator, KernelFault, Schedule
from tests.cupy_kernels.defects import DEFECTS, Defect
from tests.cupy_kernels.kernel_check import Case, check

pytestmark = pytest.mark.usefixtures("emulated")


def in_child(work: Callable[[], str]) -> str:
    """What `work` returns in a forked child; the child's end, where it dies."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, work().encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    return said if status == 0 else f"died with status {status}"


def finding(defect: Defect, schedule: Schedule) -> str:
    """The one line that a run of the planted kernel ends with; empty if nothing is wrong."""
    engine = Emulator(schedule, source=sources.expand(defect.source, "planted.cu"))
    arguments = defect.arguments()
    if "scale" in defect.signature:
        arguments["scale"] = 1.0
    try:
        check(Case("planted", arguments, row=defect.row), engine)
    except KernelFault as fault:
        return str(fault)
    except AssertionError:
        return "a wrong result"
    return ""


@pytest.mark.parametrize("schedule", Schedule, ids=lambda schedule: schedule.name.lower())
@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_found(name: str, schedule: Schedule) -> None:
    """Whatever the schedule, the emulator says what is wrong and lives on."""
    defect = DEFECTS[name]
    said = in_child(lambda: finding(defect, schedule))
    if defect.finding is None:
        assert said == "a wrong result"
    else:
        assert any(part in said for part in defect.finding.split(" | ")), said
        assert "\n" not in said
