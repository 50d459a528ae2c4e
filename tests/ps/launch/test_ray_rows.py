"""Rows of sparse tables at shards that are Ray actors."""

import numpy as np

import ps
from shards.first_values import Uniform
from shards.rules import RowAdagrad
from shards.tables import SparseTable
from tests.support.row_oracle import RowOracle

IDS = np.arange(20, dtype=np.uint64) * np.uint64(2**59)


def test_rows_at_actors_that_move(ray_local: str) -> None:
    """Rows and weights are those of an oracle, before and after a move to two actors."""
    rows = RowOracle(SparseTable("user", 3, Uniform(0.1), 7), RowAdagrad())
    user = ps.Sparse(3, rule=ps.RowAdagrad(), rate=0.5, init=ps.Uniform(0.1), seed=7)
    tables = ps.Tables(net=ps.Dense.zeros({"w": 2}, rate=1.0), user=user)
    with ps.start(tables, on="ray") as job, job.worker("w0") as me:
        for number in range(4):
            gradient = np.full((len(IDS), 3), number - 1.5, np.float32)
            with me.step(gather={"user": IDS}) as step:
                assert np.array_equal(step.rows("user"), rows.gather(IDS))
                step.scatter("user", gradient)
                step.push("net", {"w": -np.ones(2, np.float32)})
            rows.push(IDS, gradient, 0.5)
            step.ack.result()
            if number == 1:
                job.reshard(2)
        with job.reader() as reader:
            assert np.array_equal(reader.gather("user", IDS, missing="error"), rows.gather(IDS))
            assert reader.pull()["w"].tolist() == [4.0] * 2
