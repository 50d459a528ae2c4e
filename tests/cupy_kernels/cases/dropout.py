"""Cases of `dropout.cu`."""

from collections.abc import Iterator

import numpy as np

from cupy_kernels.ops.dropout.rng_keys import limit
from tests.support.kernel_check import Case

SIZES = (0, 1, 6, 257, 1030)
MOMENTS = ((0, 0, 0), (7, 2**40 + 3, 2**32 - 1), (2**64 - 1, 2**63, 11))


def cases() -> Iterator[Case]:
    generator = np.random.default_rng(61)
    for n in SIZES:
        x = generator.standard_normal(n, np.float32)
        for seed, step, layer in MOMENTS:
            moment = {"step": np.array([step], np.uint64), "seed": seed, "layer": layer, "n": n}
            grid = (1, 1, 1)
            yield Case("philox_words", {"words": np.empty(n, np.uint32), **moment}, grid=grid)
            for ratio in (0.5, 0.1):
                kept = {"limit": limit(ratio), "scale": 1 / (1 - ratio)}
                yield Case("dropout_apply", {"x": x, "y": x, **moment, **kept})
