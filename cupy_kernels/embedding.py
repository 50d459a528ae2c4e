"""Embedding: rows of a table by id, and their gradient as sums over segments of equal ids.

It uses neither atomics nor scatter: a batch's positions are sorted by id once, equal ids in batch
order, and each distinct id's gradient is one sum in that order, with the same bits in every run.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.backends import pick
from cupy_kernels.cpu import embedding as on_host
from cupy_kernels.gpu import embedding as in_kernels
from cupy_kernels.types import Array
from cupy_kernels.workspace import Workspace

Ids = NDArray[np.int64]


class Segments(NamedTuple):
    """A batch sorted by id: positions order[starts[s]:starts[s + 1]] all hold ids[s]."""

    ids: Ids
    order: Ids
    starts: Ids


def segments(ids: Ids) -> Segments:
    """Sort a batch's ids (count,), on the host, into non-empty segments of equal ids."""
    order = np.argsort(ids, kind="stable")
    distinct, first = np.unique(ids[order], return_index=True)
    return Segments(distinct, order, np.append(first, len(ids)))


def gather(table: Array, ids: Ids, work: Workspace) -> Array:
    """y (count, width) with y[i] = table[ids[i]]; zeros if an id is not a row of the table."""
    return pick(table, on_host.gather, in_kernels.gather)(table, ids, work)


def segment_sums(dy: Array, order: Ids, starts: Ids, work: Workspace) -> Array:
    """(segments, width): for each distinct id the sum of its rows of dy (count, width)."""
    return pick(dy, on_host.segment_sums, in_kernels.segment_sums)(dy, order, starts, work)
