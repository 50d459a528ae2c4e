"""Cases of `codecs.cu`: sizes around a block, blocks of zeros, wide ranges, verdicts."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from cupy_kernels.ops.codecs.spec import BLOCK
from tests.cupy_kernels.cases.updates import verdict
from tests.support.kernel_check import Case

SIZES = (0, 1, 64, 257, 777)
BITS = {"int8": 8, "int4": 4, "sign": 1}


def cases() -> Iterator[Case]:
    for n in SIZES:
        for ruling in (None, verdict(scale=0.3), verdict(skip=True)):
            g, error = values(n)
            for kind, bits in BITS.items():
                count = -(-n // BLOCK)
                q, scales = np.empty(count * 32 * bits, np.uint8), np.empty(count, np.float32)
                outputs = {"q": q, "scales": scales, "verdict": ruling, "n": n}
                yield Case(f"quantise_{kind}", {"g": g, "error": error, **outputs})
            for kind in ("bf16", "fp16"):
                for kept in (error, None):
                    codes = {"q": np.empty(n, np.uint16), "verdict": ruling, "n": n}
                    yield Case(f"cast_{kind}", {"g": g, "error": kept, **codes})
        yield from decodings(n)
        yield from sparse(n)
    for blocks in (0, 1, 600, 2050):
        yield starts(blocks)


def values(n: int) -> tuple[Any, Any]:
    """A gradient and an error; the second block is zero, the third spans 12 magnitudes."""
    generator = np.random.default_rng(n)
    g, error = generator.standard_normal((2, n), np.float32)
    g[BLOCK : 2 * BLOCK] = error[BLOCK : 2 * BLOCK] = 0
    wide = slice(2 * BLOCK, 3 * BLOCK)
    g[wide] *= np.exp(generator.uniform(-14, 14, g[wide].shape)).astype(np.float32)
    return g.copy(), error.copy()  # each aligned as a whole array is


def decodings(n: int) -> Iterator[Case]:
    generator = np.random.default_rng(n)
    count = -(-n // BLOCK)
    y, scales = generator.random(n, np.float32), generator.random(count, np.float32)
    for kind, bits in BITS.items():
        q = generator.integers(0, 256, count * 32 * bits).astype(np.uint8)
        for way in ("dequantise", "apply"):
            yield Case(f"{way}_{kind}", {"q": q, "scales": scales, "y": y, "n": n})
    halves = generator.standard_normal(n).astype(np.float16).view(np.uint16)
    for kind in ("bf16", "fp16"):
        for way in ("uncast", "apply"):
            yield Case(f"{way}_{kind}", {"q": halves, "y": y, "n": n})


def sparse(n: int) -> Iterator[Case]:
    generator = np.random.default_rng(n)
    g, u, v = (generator.standard_normal(n, np.float32) for _ in range(3))
    counts = np.empty(-(-n // BLOCK), np.uint32)
    for ruling in (None, verdict(scale=0.5), verdict(skip=True)):
        numbers = {"mu": 0.9, "tau": 2.0, "n": n, "verdict": ruling}
        yield Case("sparse_count", {"g": g, "u": u, "v": v, "counts": counts, **numbers})
    above = np.abs(np.pad(v, (0, -n % BLOCK)).reshape(-1, BLOCK)) > 1.5
    starts = np.concatenate([[0], np.cumsum(above.sum(axis=1))]).astype(np.uint32)
    for capacity in (0, 5, n):
        room = {"indices": np.full(capacity, 7, np.uint32), "values": np.ones(capacity, np.float32)}
        sizes = {"tau": 1.5, "capacity": capacity, "n": n}
        yield Case("sparse_send", {"u": u, "v": v, "starts": starts, **room, **sizes})
    indices = generator.permutation(n + 1).astype(np.uint32)[: n // 3]
    amounts = generator.standard_normal(n // 3, np.float32)
    arrays = {"indices": indices, "values": amounts, "y": v}
    yield Case("sparse_add", {**arrays, "count": n // 3, "n": n})


def starts(blocks: int) -> Case:
    counts = np.random.default_rng(blocks).integers(0, 257, blocks).astype(np.uint32)
    found = np.empty(blocks + 1, np.uint32)
    return Case("sparse_starts", {"counts": counts, "starts": found, "blocks": blocks})
