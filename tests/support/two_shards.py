"""Two shards in this process under plain SGD at rate 1: weights are minus the sum of the pushes."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

import ps
from ps import Cluster
from ps.job_spec import shard_specs
from ps.launch.threads import local_shards
from shards.schedules import Fixed
from tests.support.session_replies import Array

TABLE = ps.DenseTable("net", (ps.TensorSpec("a", (700,)), ps.TensorSpec("b", (3, 100))))
UNIT = Fixed(base_rate=1.0)


@contextmanager
def shards_for(weights: Array | None = None, **options: object) -> Iterator[Cluster]:
    """Two shards of TABLE under plain SGD at rate 1, unless `options` change that."""
    told: dict[str, object] = {"shards": 2, "schedule": UNIT}
    with local_shards(shard_specs(TABLE, **(told | options)), weights) as cluster:  # type: ignore[arg-type]
        yield cluster


def everywhere(value: float) -> Array:
    """A gradient with `value` in every float, including the padding."""
    return np.full(TABLE.size, value, np.float32)
