"""Inverted dropout, with a mask that a repeated step draws again.

Srivastava et al. 2014, "Dropout"; scaled by 1 / (1 - ratio) while training, so that nothing
remains to be done in test. The mask comes from a counter-based generator, Philox4x32-10 (Salmon et
al. 2011), keyed by seed, step and layer: no generator state exists that a restart could lose, and
the CUDA kernel of the same name draws the same mask.

Element i takes word i % 4 of philox(counter = (i / 4, step >> 32, step, layer), key = seed), and is
dropped where the word is below `limit(ratio)`.
"""

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.types import Array
from cupy_kernels.workspace import Workspace

_WORD = 2**32
_BLOCK = 2048  # counters at a time, so that all temporaries stay in the cache
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def limit(ratio: float) -> int:
    """The 32-bit words below which an element is dropped: `ratio` of them all."""
    return min(round(ratio * _WORD), _WORD - 1)


def philox(
    counter: tuple[NDArray[np.uint64] | int, ...], key: tuple[int, int]
) -> NDArray[np.uint32]:
    """(..., 4) words for four counter words (numbers or uint64 arrays) and a key of two."""
    c = [np.asarray(word, np.uint64) for word in counter]
    half, low = np.uint64(32), np.uint64(_WORD - 1)
    for turn in range(10):
        k = [np.uint64((word + turn * step) % _WORD) for word, step in zip(key, _WEYL, strict=True)]
        a, b = (np.uint64(m) * word for m, word in zip(_MULTIPLIERS, c[::2], strict=True))
        c = [(b >> half) ^ c[1] ^ k[0], b & low, (a >> half) ^ c[3] ^ k[1], a & low]
    return np.stack(np.broadcast_arrays(*c), axis=-1).astype(np.uint32)


def words(size: int, *, seed: int, step: int, layer: int) -> NDArray[np.uint32]:
    """One random word an element; numbers are taken modulo 2^64, the layer's modulo 2^32."""
    key = (seed % _WORD, (seed >> 32) % _WORD)
    found = np.empty((-(-size // 4), 4), np.uint32)
    for start in range(0, len(found), _BLOCK):
        part = found[start : start + _BLOCK]
        groups = np.arange(start, start + len(part), dtype=np.uint64)
        part[:] = philox((groups, (step >> 32) % _WORD, step % _WORD, layer % _WORD), key)
    return found.reshape(-1)[:size]


def mask(
    shape: tuple[int, ...], ratio: float, *, seed: int, step: int, layer: int, work: Workspace
) -> Array:
    """0 with probability `ratio`, else 1 / (1 - ratio); `layer` is any number of its own."""
    scaled = work.take("mask", shape)
    flat = scaled.reshape(-1)
    kept = words(flat.size, seed=seed, step=step, layer=layer) >= np.uint32(limit(ratio))
    np.multiply(kept, np.float32(1.0 / (1.0 - ratio)), out=flat)
    return scaled


def apply(x: Array, scaled_mask: Array, work: Workspace, role: str = "y") -> Array:
    """x * mask: the forward pass, and with dy for x the backward pass (under another role)."""
    return np.multiply(x, scaled_mask, out=work.take(role, x.shape))
