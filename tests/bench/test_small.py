"""What a small update costs in calls, which, unlike its time, is the same on every machine."""

import pytest

from tests.bench.bench_small import calls
from tests.bench.peers.contract import Setting


@pytest.mark.parametrize("floats", [10_000, 100_000])
def test_a_small_update_takes_few_calls(floats: int) -> None:
    """Its time is that of its calls of Python functions (docs/measurements/data-path.md): they are
    on a budget.

    Whoever needs more looks first what can go (`python tests/bench/bench_small.py`).
    """
    pytest.importorskip("numba")  # whose loops are one call
    spent = calls(Setting(floats, 1, 1, 0.0, "ipc"))
    assert 0 < spent.worker <= 140
    assert 0 < spent.shard <= 140
