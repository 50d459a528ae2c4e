"""Dropout on the host: Philox draws the mask once, over arrays; the backward pass uses it again."""

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.ops.dropout.rng_keys import WORD, RngKey, limit
from cupy_kernels.types import Array, Kept
from cupy_kernels.workspace import Workspace

_BLOCK = 2048  # counters at a time, so that all temporaries stay in the cache
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(
    counter: tuple[NDArray[np.uint64] | int, ...], key: tuple[int, int]
) -> NDArray[np.uint32]:
    """(..., 4) words for four counter words (numbers or uint64 arrays) and a key of two."""
    c = [np.asarray(word, np.uint64) for word in counter]
    half, low = np.uint64(32), np.uint64(WORD - 1)
    for turn in range(10):
        k = [np.uint64((word + turn * step) % WORD) for word, step in zip(key, _WEYL, strict=True)]
        a, b = (np.uint64(m) * word for m, word in zip(_MULTIPLIERS, c[::2], strict=True))
        c = [(b >> half) ^ c[1] ^ k[0], b & low, (a >> half) ^ c[3] ^ k[1], a & low]
    return np.stack(np.broadcast_arrays(*c), axis=-1).astype(np.uint32)


def words(size: int, draw: RngKey) -> NDArray[np.uint32]:
    """One random word for each element."""
    seed, step, layer = draw.seed, int(draw.step), draw.layer
    key = (seed % WORD, (seed >> 32) % WORD)
    random_words = np.empty((-(-size // 4), 4), np.uint32)
    for start in range(0, len(random_words), _BLOCK):
        part = random_words[start : start + _BLOCK]
        groups = np.arange(start, start + len(part), dtype=np.uint64)
        part[:] = philox((groups, (step >> 32) % WORD, step % WORD, layer % WORD), key)
    return random_words.reshape(-1)[:size]


def forward(x: Array, ratio: float, draw: RngKey, work: Workspace) -> tuple[Array, Kept]:
    """x with each element dropped with probability `ratio`, and the values for `backward`."""
    mask = work.take_as("mask", x.shape, np.bool_)
    np.greater_equal(words(x.size, draw), np.uint32(limit(ratio)), out=mask.reshape(-1))
    factor = np.float32(1.0 / (1.0 - ratio))
    return _apply_mask(x, mask, factor, work.take("y", x.shape)), (mask, factor)


def backward(dy: Array, saved: Kept, work: Workspace) -> Array:
    """dy, dropped and scaled in the same way as x."""
    mask, factor = saved
    return _apply_mask(dy, mask, factor, work.take("dx", dy.shape))


def _apply_mask(x: Array, mask: NDArray[np.bool_], factor: np.float32, out: Array) -> Array:
    np.multiply(x, mask, out=out)
    return np.multiply(out, factor, out=out)
