"""Cases of `embedding.cu`: repeated ids, one id, ids outside the table, odd widths."""

from collections.abc import Iterator

import numpy as np

from tests.support.kernel_check import Case

SIZES = ((0, 4, 3), (1, 1, 1), (17, 5, 3), (40, 1, 31), (33, 200, 17))


def cases() -> Iterator[Case]:
    """For a count of ids, rows of the table, and a width."""
    for count, rows, width in SIZES:
        generator = np.random.default_rng(count)
        ids = generator.integers(0, rows, count)
        table = generator.standard_normal((rows, width), np.float32)
        dy = generator.standard_normal((count, width), np.float32)
        order = np.argsort(ids, kind="stable")
        found = np.unique(ids)
        starts = np.searchsorted(ids[order], found)
        yield Case(
            "segment_sums",
            {
                "dy": dy,
                "order": order,
                "starts": np.append(starts, count).astype(np.int64),
                "sums": np.empty((len(found), width), np.float32),
                "count": count,
                "segments": len(found),
                "width": width,
            },
        )
        strange = np.append(ids, [-1, rows, 2**62])
        arrays = {"table": table, "ids": strange, "y": np.empty((count + 3, width), np.float32)}
        yield Case("embedding_gather", {**arrays, "rows": rows, "count": count + 3, "width": width})
