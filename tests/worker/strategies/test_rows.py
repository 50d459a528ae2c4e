"""Strategies and rows: those that cannot work with a sparse table refuse before anything starts."""

import numpy as np
import pytest

import ps
import worker
from shards.errors import BadInput
from worker.strategies import STRATEGIES, Downpour

WITH_ROWS = {"asp", "bsp", "downpour", "ssp", "stale_rate"}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_takes_rows_or_refuses_them(name: str) -> None:
    """The strategies that push gradients to the shards' rule at each step take rows, no others."""
    half = STRATEGIES[name]().for_shards(2, prefetch=False)
    if name in WITH_ROWS:
        half.check_rows("user")
    else:
        with pytest.raises(BadInput, match="table user: expected a strategy that works with rows"):
            half.check_rows("user")


def test_windows_take_no_rows() -> None:
    """Downpour with steps on weights of its own refuses them as well."""
    half = Downpour(n_push=5, n_fetch=5).for_shards(2, prefetch=False)
    with pytest.raises(BadInput, match="steps on weights of a worker's own"):
        half.check_rows("user")


def test_a_job_refuses_before_it_starts(caplog: pytest.LogCaptureFixture) -> None:
    """The error is raised where the job would start; a loop of one table names what it expects."""
    tables = ps.Tables(net=ps.Dense.zeros({"w": 3}), user=ps.Sparse(2))
    for strategy in ("easgd", "dc_asgd"):
        with pytest.raises(BadInput, match="table user: expected a strategy that works with rows"):
            worker.start(tables, strategy=strategy, workers=2, on="threads")
    assert not caplog.records  # no notice of what such a strategy would change
    with (
        worker.start(tables, strategy="ssp", workers=1, on="threads") as job,
        job.worker("w0") as me,
        me.step(gather={"user": [1]}) as step,
    ):
        step.scatter("user", np.ones((1, 2), np.float32))
    with (
        ps.local(ps.Sparse(2)) as job,
        pytest.raises(BadInput, match="a job with one dense table"),
    ):
        worker.loop(job, "w0", lambda *_: (0.0, {}), [], steps=1)
