"""The errors that the checksum finds, at the sizes where a block or a page ends."""

import numpy as np
import pytest

from cupy_kernels.checksum_sums import table_sums
from shards.checksums import checksum

BLOCK, PAGE = 1 << 20, 4096
SIZES = (1, 63, PAGE - 1, PAGE, PAGE + 1, BLOCK - 8, BLOCK, BLOCK + 12345)


def noise(size: int, seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(size)


@pytest.mark.parametrize("size", SIZES)
def test_a_page_that_is_not_what_was_written_shows(size: int) -> None:
    """Pages that are zeroed, that hold data of a former use, or that are exchanged, are found."""
    written, former = noise(size, 1), noise(size, 2)
    right = checksum([memoryview(written)])
    for start in range(0, size, PAGE * (1 + size // (32 * PAGE))):
        page = slice(start, min(start + PAGE, size))
        for lost in (bytes(page.stop - start), former[page]):
            found = bytearray(written)
            found[page] = lost
            assert checksum([memoryview(found)]) != right, start
    for start in range(0, size - 2 * PAGE, 64 * PAGE):
        a, b = written[start : start + PAGE], written[start + PAGE : start + 2 * PAGE]
        found = bytearray(written)
        found[start : start + 2 * PAGE] = b + a
        assert checksum([memoryview(found)]) != right, start


@pytest.mark.parametrize("size", SIZES)
def test_what_is_cut_off_shows(size: int) -> None:
    """A frame that ends, from any byte on, with the former contents is found. (Seed 5.)"""
    written, former = noise(size, 3), noise(size, 4)
    right = checksum([memoryview(written)])
    places = np.random.default_rng(5).integers(size, size=20).tolist()
    for place in {0, size - 1, *places}:
        found = written[:place] + former[place:]
        assert found == written or checksum([memoryview(found)]) != right, place


@pytest.mark.parametrize("size", SIZES)
def test_each_flipped_bit_shows(size: int) -> None:
    """A flipped bit is found, in a sample of every kind of place. (Seed 6.)"""
    written = bytearray(noise(size, 6))
    right = checksum([memoryview(written)])
    rng = np.random.default_rng(6)
    for place in {0, size // 2, size - 1, *(int(one) for one in rng.integers(size, size=30))}:
        bit = 1 << int(rng.integers(8))
        written[place] ^= bit
        assert checksum([memoryview(written)]) != right, place
        written[place] ^= bit


def test_every_bit_of_a_frame_of_two_pages() -> None:
    """Each flipped bit shows, one by one."""
    written = bytearray(noise(2 * PAGE, 7))
    right = checksum([memoryview(written)])
    for bit in range(8 * len(written)):
        written[bit // 8] ^= 1 << bit % 8
        assert checksum([memoryview(written)]) != right, bit
        written[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("size", SIZES)
def test_compiled_sums_give_the_same_check(size: int) -> None:
    """A process can verify what another has written, whichever sums each uses."""
    frames = [memoryview(noise(size, 10)), memoryview(noise(size, 11))]
    assert checksum(frames, table_sums) == checksum(frames)


def test_the_order_of_frames_counts() -> None:
    """Exchanged frames have another checksum."""
    a, b = memoryview(noise(PAGE + 100, 8)), memoryview(noise(PAGE, 9))
    assert checksum([b, a]) != checksum([a, b])
    assert checksum([]) == 0
