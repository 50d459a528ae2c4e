"""Compiles the loops of a net and of its update rule before the workers need them.

Only the first training on a machine needs it, because later ones read numba's cache. Without it
every worker would compile the same loops at the same time, on cores that they share.
"""

from collections.abc import Callable
from threading import Thread

import numpy as np
from threadpoolctl import threadpool_limits

from cupy_kernels.ops.updates import compiles_first, stores_loops
from ps.logs import logger
from worker.data.columns import ColumnKind
from worker.job.training_job import Job

_ROWS = 2  # a loop is compiled for types and dimensions, not for sizes
_TYPES = {
    ColumnKind.IMAGE: np.uint8,
    ColumnKind.LABEL: np.int64,
    ColumnKind.NUMBERS: np.float32,
}


def compile_ahead(job: Job, *, workers_here: bool = True) -> Callable[[], None]:
    """Begin to compile in a thread, if this is the first training; returns what waits for it.

    Nothing is compiled if the workers could not use it: they are on other machines, or numba has no
    folder for its cache.
    """
    in_vain = not workers_here or not stores_loops()
    if in_vain or job.driver_model is None or job.device.gpu or not compiles_first(net=True):
        return lambda: None
    thread = Thread(target=_take_step, args=[job], name="compile", daemon=True)
    thread.start()
    return thread.join


def _take_step(job: Job) -> None:
    """Compute a gradient of the driver's model on rows of zeros, and compile the update rule."""
    model = job.driver_model
    assert model is not None
    batch = {
        column.name: np.zeros((_ROWS, *(column.shape or ())), _TYPES[column.kind])
        for column in job.columns
    }
    try:
        weights = model.initial(job.plan.seed)
        # OpenBLAS ends its threads where another thread forks, as the start of a JVM does, and a
        # product that has begun on several would wait for them for ever.
        with threadpool_limits(1):
            model.gradient(weights, batch, np.empty_like(weights), step=0, seed=job.plan.seed)
        for spec in job.tables_of(model.table):
            spec.rule.prepare()
    except Exception:  # noqa: BLE001  # the model may be anybody's; its workers say what is wrong
        logger(__name__).info("the loops are not compiled ahead", exc_info=True)
