"""Cases of `embedding.cu`: repeated ids, one id, ids outside the table, odd widths."""

from collections.abc import Iterator

import numpy as np

from tests.support.kernel_check import Case

SIZES = ((0, 4, 3), (1, 1, 1), (17, 5, 3), (40, 1, 31), (33, 200, 17), (3, 0, 2))


def cases() -> Iterator[Case]:
    """For a count of ids, rows of the table, and a width."""
    for count, rows, width in SIZES:
        generator = np.random.default_rng(count)
        ids = np.append(generator.integers(0, rows + 1, count), [-1, rows, 2**62])
        count += 3
        table = generator.standard_normal((rows, width), np.float32)
        dy = generator.standard_normal((count, width), np.float32)
        order = np.argsort(ids, kind="stable")
        starts = np.searchsorted(ids[order], np.arange(rows + 1))
        known = {"ids": ids, "count": count}
        yield Case(
            "embedding_gather", {"table": table, "y": dy, **known, "rows": rows, "width": width}
        )
        yield Case("stable_order", {"order": order, **known}, grid=(1, 1, 1))
        yield Case("segment_starts", {"order": order, "starts": starts, "rows": rows, **known})
        arrays = {"dy": dy, "order": order, "starts": starts, "sums": table}
        yield Case("segment_sums", {**arrays, "count": count, "rows": rows, "width": width})
