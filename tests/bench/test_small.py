"""What a small update costs in calls, which, unlike its time, is the same on every machine."""

import pytest

from tests.bench.bench_small import calls
from tests.bench.peers.contract import Setting


@pytest.mark.parametrize(
    ("floats", "worker", "shard"),
    [
        (10_000, 82, 63),
        (100_000, 93, 74),  # ZeroMQ shares the arrays and has to be asked when they have left
    ],
)
def test_a_small_update_takes_few_calls(floats: int, worker: int, shard: int) -> None:
    """Its time is that of its calls of Python functions (docs/measurements/data-path.md): they are
    on a budget.

    The budget is what an update takes today and three calls more. Before you raise it, look for
    calls that can go (`python tests/bench/bench_small.py`).
    """
    pytest.importorskip("numba")  # whose loops are one call
    spent = calls(Setting(floats, 1, 1, 0.0, "ipc"))
    assert 0 < spent.worker <= worker
    assert 0 < spent.shard <= shard
