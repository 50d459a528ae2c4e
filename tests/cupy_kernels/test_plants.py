"""The tool that plants a defect in each kernel; `make check C=plants` runs it on all sources."""

import pytest

from cupy_kernels import sources
from tests.support.kernel_plants import RULES, idle, missed, operator, planted

TWO = """
extern "C" __global__ void first(const float* x, float* y, i64 n) {
  for (GRID_STRIDE(i, n)) { y[i] += x[i] * x[i]; }
}
extern "C" __global__ void __launch_bounds__(64) second(float* y, i64 n) { shared_body(y, n); }
"""


def test_each_kernel_gets_its_own_defect() -> None:
    """In its body alone; a kernel without an operator has none to change."""
    text, changed = planted(TWO, operator)
    assert text == TWO.replace("+=", "-=")
    assert changed == {"first"}
    text, changed = planted(TWO, idle)
    assert text.count("== 0) return;") == 2
    assert changed == {"first", "second"}


@pytest.mark.usefixtures("emulated")
def test_cases_find_an_idle_thread() -> None:
    """Every kernel of the smallest source with a planted defect is found, and none without."""
    names = set(sources.kernel_names(sources.text("image_layout.cu")))
    assert missed("image_layout.cu", "idle thread") == (names, set())


@pytest.mark.usefixtures("emulated")
def test_a_harmless_change_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that "found" means what it says."""
    monkeypatch.setitem(RULES, "nothing", lambda body: f"; {body}")
    changed, unseen = missed("image_layout.cu", "nothing")
    assert changed == unseen
