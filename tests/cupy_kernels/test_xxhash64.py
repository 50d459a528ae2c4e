"""XXH64 of many pieces: published hashes, and another implementation at every length."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import xxhash

from cupy_kernels.xxhash64 import (
    hash_half_words,
    hash_pieces,
    hash_with_numpy,
    hash_words,
)

PUBLISHED = {
    b"": 0xEF46DB3751D8E999,
    b"a": 0xD24EC4F1A98C6E5B,
    b"as": 0x1C330FB2D66BE179,
    b"asd": 0x631C37CE72A97393,
    b"asdf": 0x415872F599CEA71E,
    b"abc": 0x44BC2CF5AD770999,
    b"Nobody inspects the spammish repetition": 0xFBCEA83C8A378BF1,
    b"Call me Ishmael. Some years ago--never mind how long precisely-": 0x02A2E85470D6FD96,
}
"""Hashes with the seed 0, from the tests of implementations in C, Go and Python."""

ENGINES = pytest.mark.parametrize("engine", [hash_pieces, hash_with_numpy])


def hash_all(engine: Callable[..., Any], pieces: Sequence[bytes], seeds: Any) -> Any:
    """The hashes of some pieces, which are next to each other in one buffer."""
    lengths = np.array([len(piece) for piece in pieces], np.int64)
    data = np.frombuffer(b"".join(pieces), np.uint8)
    return engine(data, np.cumsum(lengths) - lengths, lengths, np.asarray(seeds, np.uint64))


@ENGINES
def test_published_hashes(engine: Callable[..., Any]) -> None:
    """The seed 0 gives the hashes that others have published."""
    hashes = hash_all(engine, list(PUBLISHED), [0] * len(PUBLISHED))
    assert hashes.tolist() == list(PUBLISHED.values())


@ENGINES
def test_each_length_and_seed(engine: Callable[..., Any]) -> None:
    """Pieces of 0 to 140 bytes, each with a seed of its own, are hashed as by the C library."""
    dice = np.random.default_rng(7)
    pieces = [dice.bytes(length) for length in range(141) for _ in range(3)]
    seeds = dice.integers(0, 2**64, len(pieces), np.uint64)
    expected = [
        xxhash.xxh64_intdigest(piece, int(seed)) for piece, seed in zip(pieces, seeds, strict=True)
    ]
    order = dice.permutation(len(pieces))
    assert hash_all(engine, pieces, seeds).tolist() == expected
    shuffled = hash_all(engine, [pieces[piece] for piece in order], seeds[order])
    assert shuffled.tolist() == [expected[piece] for piece in order]
    assert hash_all(engine, [], []).tolist() == []


@pytest.mark.parametrize(("hash_numbers", "bits"), [(hash_words, 64), (hash_half_words, 32)])
def test_numbers_are_hashed_as_their_bytes(hash_numbers: Callable[..., Any], bits: int) -> None:
    """Words of 8 and of 4 bytes have the hash of these bytes, the lowest first."""
    dice = np.random.default_rng(8)
    words = dice.integers(0, 2**bits, 200, f"u{bits // 8}")
    seeds = dice.integers(0, 2**64, 200, np.uint64)
    expected = [
        xxhash.xxh64_intdigest(word.tobytes(), int(seed))
        for word, seed in zip(words, seeds, strict=True)
    ]
    assert hash_numbers(words, seeds).tolist() == expected
