"""XXH64 of many short values at once, each with a seed of its own: the hash of Spark's `xxhash64`.

A value is 4 or 8 bytes, or a piece of a buffer. Values are hashed next to each other, by loops of
numba over the buffer where it is installed and by NumPy otherwise, with the same bits: a loop of
Python over values would take longer than the training step that they are for.

The algorithm is that of https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.compilation import COMPILED, compile_loop
from cupy_kernels.types import freeze

Words = NDArray[np.uint64]
Array = Any  # numba infers the loops' types, not these annotations

_P1 = np.uint64(0x9E3779B185EBCA87)
_P2 = np.uint64(0xC2B2AE3D27D4EB4F)
_P3 = np.uint64(0x165667B19E3779F9)
_P4 = np.uint64(0x85EBCA77C2B2AE63)
_P5 = np.uint64(0x27D4EB2F165667C5)
_STRIPE = 32
_WORD = 8

_R1, _R7, _R11, _R12, _R18 = (np.uint64(bits) for bits in (1, 7, 11, 12, 18))
_R23, _R27, _R31, _R29, _R32, _R33 = (np.uint64(bits) for bits in (23, 27, 31, 29, 32, 33))
_L1, _L7, _L11, _L12, _L18 = (np.uint64(64 - bits) for bits in (1, 7, 11, 12, 18))
_L23, _L27, _L31 = (np.uint64(64 - bits) for bits in (23, 27, 31))


def hash_words(words: Words, seeds: Words) -> Words:
    """The hash of each word's 8 bytes; `seeds` has one a word, or one for all."""
    hashes = seeds + (_P5 + np.uint64(8))
    hashes = hashes ^ _round(np.uint64(0), words)
    return _avalanche(_rotate(hashes, _R27, _L27) * _P1 + _P4)


def hash_half_words(words: NDArray[np.uint32], seeds: Words) -> Words:
    """The hash of each word's 4 bytes; `seeds` has one a word, or one for all."""
    hashes = seeds + (_P5 + np.uint64(4))
    hashes = hashes ^ (words.astype(np.uint64) * _P1)
    return _avalanche(_rotate(hashes, _R23, _L23) * _P2 + _P3)


def hash_pieces(
    data: NDArray[np.uint8], starts: NDArray[np.int64], lengths: NDArray[np.int64], seeds: Words
) -> Words:
    """The hash of `lengths` bytes of `data` from `starts` on, for each piece.

    `seeds` has one for each.
    """
    if COMPILED:
        hashes = np.empty(len(starts), np.uint64)
        data, starts, lengths, seeds = (
            freeze(np.ascontiguousarray(array)) for array in (data, starts, lengths, seeds)
        )
        _hash_loop(data, starts, lengths, seeds, hashes)
        return hashes
    return hash_with_numpy(data, starts, lengths, seeds)


def hash_with_numpy(
    data: NDArray[np.uint8], starts: NDArray[np.int64], lengths: NDArray[np.int64], seeds: Words
) -> Words:
    """Hash pieces as `hash_pieces` does, without numba: step by step, all pieces at once."""
    padded = np.concatenate([data, np.zeros(_WORD, np.uint8)])
    # Overlapping words at every byte: a piece begins anywhere.
    words: Words = np.ndarray((len(padded) - _WORD + 1,), np.dtype("<u8"), padded, 0, (1,))
    positions, ends = starts.copy(), starts + lengths
    hashes = seeds + _P5
    (rest,) = np.nonzero(lengths >= _STRIPE)
    if rest.size:
        hashes[rest] = _hash_stripes(words, positions, ends, rest, seeds[rest])
    hashes += lengths.astype(np.uint64)
    while (rest := np.flatnonzero(positions + _WORD <= ends)).size:
        mixed = hashes[rest] ^ _round(np.uint64(0), words[positions[rest]])
        hashes[rest] = _rotate(mixed, _R27, _L27) * _P1 + _P4
        positions[rest] += _WORD
    if (rest := np.flatnonzero(positions + _WORD // 2 <= ends)).size:
        half = words[positions[rest]] & np.uint64(0xFFFFFFFF)
        hashes[rest] = _rotate(hashes[rest] ^ (half * _P1), _R23, _L23) * _P2 + _P3
        positions[rest] += _WORD // 2
    while (rest := np.flatnonzero(positions < ends)).size:
        byte = padded[positions[rest]].astype(np.uint64)
        hashes[rest] = _rotate(hashes[rest] ^ (byte * _P5), _R11, _L11) * _P1
        positions[rest] += 1
    return _avalanche(hashes)


def _hash_stripes(
    words: Words,
    positions: NDArray[np.int64],
    ends: NDArray[np.int64],
    rows: NDArray[np.intp],
    seeds: Words,
) -> Words:
    """The sum of four lanes over the stripes of 32 bytes of these rows; advances `positions`."""
    lanes = np.stack([seeds + _P1 + _P2, seeds + _P2, seeds, seeds - _P1])
    active = np.arange(len(rows))
    while active.size:
        at = positions[rows[active]]
        for lane in range(4):
            lanes[lane, active] = _round(lanes[lane, active], words[at + lane * _WORD])
        positions[rows[active]] = at + _STRIPE
        active = active[at + 2 * _STRIPE <= ends[rows[active]]]
    first, second, third, fourth = lanes
    total: Words = _rotate(first, _R1, _L1) + _rotate(second, _R7, _L7)
    total += _rotate(third, _R12, _L12) + _rotate(fourth, _R18, _L18)
    for lane in lanes:
        total ^= _round(np.uint64(0), lane)
        total = total * _P1 + _P4
    return total


def _rotate(words: Any, left: np.uint64, right: np.uint64) -> Any:
    return (words << left) | (words >> right)


def _round(lane: Any, words: Words) -> Any:
    mixed = lane + words * _P2
    return _rotate(mixed, _R31, _R33) * _P1


def _avalanche(hashes: Words) -> Words:
    hashes = (hashes ^ (hashes >> _R33)) * _P2
    hashes = (hashes ^ (hashes >> _R29)) * _P3
    hashes ^= hashes >> _R32
    return hashes


@compile_loop
def _read_word(data: Array, position: int, count: int) -> Any:
    """The `count` bytes of `data` from `position` on as a number, the lowest first."""
    word = np.uint64(0)
    for byte in range(count):
        word |= np.uint64(data[position + byte]) << np.uint64(8 * byte)
    return word


@compile_loop
def _turn(lane: Any, word: Any) -> Any:
    mixed = lane + word * _P2
    return ((mixed << _R31) | (mixed >> _R33)) * _P1


@compile_loop
def _hash_loop(data: Array, starts: Array, lengths: Array, seeds: Array, hashes: Array) -> None:
    for piece in range(len(starts)):
        position, seed = starts[piece], seeds[piece]
        end = position + lengths[piece]
        if lengths[piece] >= _STRIPE:
            a, b, c, d = seed + _P1 + _P2, seed + _P2, seed, seed - _P1
            while position + _STRIPE <= end:
                a = _turn(a, _read_word(data, position, 8))
                b = _turn(b, _read_word(data, position + 8, 8))
                c = _turn(c, _read_word(data, position + 16, 8))
                d = _turn(d, _read_word(data, position + 24, 8))
                position += _STRIPE
            mixed = ((a << _R1) | (a >> _L1)) + ((b << _R7) | (b >> _L7))
            mixed += ((c << _R12) | (c >> _L12)) + ((d << _R18) | (d >> _L18))
            for lane in (a, b, c, d):
                mixed = (mixed ^ _turn(np.uint64(0), lane)) * _P1 + _P4
        else:
            mixed = seed + _P5
        mixed += np.uint64(lengths[piece])
        while position + 8 <= end:
            mixed ^= _turn(np.uint64(0), _read_word(data, position, 8))
            mixed = ((mixed << _R27) | (mixed >> _L27)) * _P1 + _P4
            position += 8
        if position + 4 <= end:
            mixed ^= _read_word(data, position, 4) * _P1
            mixed = ((mixed << _R23) | (mixed >> _L23)) * _P2 + _P3
            position += 4
        while position < end:
            mixed ^= np.uint64(data[position]) * _P5
            mixed = ((mixed << _R11) | (mixed >> _L11)) * _P1
            position += 1
        mixed = (mixed ^ (mixed >> _R33)) * _P2
        mixed = (mixed ^ (mixed >> _R29)) * _P3
        hashes[piece] = mixed ^ (mixed >> _R32)
