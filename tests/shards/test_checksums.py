"""The errors that the checksum finds, and the library's own test vectors."""

import numpy as np
import pytest

from shards.checksums import HEX_DIGITS, checksum, hex_checksum

PAGE = 4096


def noise(size: int, seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def test_it_is_xxh3() -> None:
    """Files are read by another build, so the algorithm is fixed: values of the specification."""
    assert checksum([]) == 0x2D06800538D394C2
    assert hex_checksum([]) == "2d06800538d394c2"
    assert hex_checksum([b"abc"]) == "78af5f94892f3950"
    assert len(hex_checksum([noise(100, 1)])) == HEX_DIGITS


@pytest.mark.parametrize("size", [1, 63, 2 * PAGE])
def test_each_flipped_bit_shows(size: int) -> None:
    """Each flipped bit of a frame is found, one by one."""
    written = bytearray(noise(size, 7))
    right = checksum([memoryview(written)])
    for bit in range(8 * size):
        written[bit // 8] ^= 1 << bit % 8
        assert checksum([memoryview(written)]) != right, bit
        written[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("size", [1, PAGE + 1, (1 << 20) + 12345])
def test_what_is_cut_off_shows(size: int) -> None:
    """A frame that ends, from any byte on, with the former contents is found. (Seed 5.)"""
    written, former = noise(size, 3), noise(size, 4)
    right = checksum([written])
    places = np.random.default_rng(5).integers(size, size=20).tolist()
    for place in {0, size - 1, *places}:
        found = written[:place] + former[place:]
        assert found == written or checksum([found]) != right, place


def test_order_and_seed_count() -> None:
    """Exchanged frames, and another seed, give another checksum; where frames are cut does not."""
    a, b = noise(PAGE + 100, 8), noise(PAGE, 9)
    assert checksum([b, a]) != checksum([a, b]) == checksum([a + b])
    assert len({checksum([a], seed) for seed in range(1000)}) == 1000
