"""Every kernel of the registry, executed on the CPU and held against its reference."""

from collections import Counter

import pytest

from cupy_kernels import sources
from cupy_kernels.emulator import Emulator, Schedule, build, signature
from cupy_kernels.kernel_spec import Kernel
from cupy_kernels.registry import KERNELS
from tests.cupy_kernels.cases import every_case
from tests.support.kernel_check import Case, check

CASES: dict[str, list[Case]] = {name: [] for name in KERNELS}
for case in every_case():
    CASES.setdefault(case.kernel, []).append(case)


def test_every_kernel_has_a_row_and_every_row_a_kernel_and_a_case() -> None:
    """The names in the sources, in the registry and in the cases are the same."""
    in_sources = [(n, source) for source in sources.names() for n in found(source)]
    assert Counter(in_sources) == Counter((k.name, k.source) for k in KERNELS.values())
    assert sorted(CASES) == sorted(KERNELS)
    assert all(CASES.values())


def found(source: str) -> tuple[str, ...]:
    text = sources.text(source)
    names = sources.kernel_names(text)
    assert len(names) == text.count("__global__"), f"{source}: a kernel of another form"
    return names


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=lambda kernel: kernel.name)
def test_a_row_has_the_types_of_its_source(kernel: Kernel) -> None:
    """The C++ compiler's view of the parameters is the row's, pointers to const included."""
    assert signature(kernel.name, build.library(kernel.source)) == kernel.signature


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("schedule", Schedule, ids=lambda schedule: schedule.name.lower())
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_equals_its_reference(name: str, schedule: Schedule) -> None:
    """Over odd sizes, whatever the order of threads and blocks, within the row's tolerance."""
    for number, case in enumerate(CASES[name]):
        check(case, Emulator(schedule, seed=number + 1))
