"""What the emulator finds: planted defects, each in a child process, and what it must let pass."""

import os
from collections.abc import Callable

import pytest

from cupy_kernels import sources
from cupy_kernels.emulator import Emulator, KernelFault, Schedule, build
from tests.support.kernel_check import Case, check
from tests.support.kernel_defects import DEFECTS, SOURCE, kernel_name

TEXT = sources.expand(SOURCE, "planted.cu")
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


def finding(name: str, schedule: Schedule) -> str:
    """The one line that a run of a planted kernel ends with; empty if nothing is wrong."""
    defect, kernel = DEFECTS[name], kernel_name(name)
    engine = Emulator(schedule, source=TEXT)
    arguments = defect.arguments()
    if "scale" in defect.signature:
        arguments["scale"] = 1.0
    try:
        check(Case(kernel, arguments, row=defect.row(kernel)), engine)
    except KernelFault as fault:
        return str(fault)
    except AssertionError:
        return "a wrong result"
    return ""


@pytest.mark.parametrize("schedule", Schedule, ids=lambda schedule: schedule.name.lower())
@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_found(name: str, schedule: Schedule) -> None:
    """Whatever the schedule, the emulator says what is wrong and lives on."""
    build.load(TEXT, "planted.cu")  # once, and not in every child
    said = in_child(lambda: finding(name, schedule))
    wanted = DEFECTS[name].finding
    if wanted is None:
        assert said == "a wrong result"
    elif not wanted:
        assert not said
    else:
        assert any(part in said for part in wanted.split(" | ")), said
        assert said.startswith(kernel_name(name))
        assert "\n" not in said
