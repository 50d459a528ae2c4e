"""The sums that a log's checksum is made of: compiled, and as NumPy takes them."""

import numpy as np
import pytest

from cupy_kernels import checksum_sums


@pytest.mark.parametrize("shape", [(4, 1), (128, 1024), (8, 37)])
@pytest.mark.parametrize("aligned", [True, False])
def test_both_ways_give_the_same_bits(shape: tuple[int, int], aligned: bool) -> None:
    """Compiled or not, for words at any address, the sums are those of whole numbers, modulo
    2**64. (Seed 5.)"""
    content = np.random.default_rng(5).bytes(8 * shape[0] * shape[1] + 1)
    words = np.frombuffer(content, "<u8", shape[0] * shape[1], 0 if aligned else 1).reshape(shape)
    assert words.flags.aligned is aligned
    table = [[int(word) for word in row] for row in words]
    by_columns, by_rows = checksum_sums.table_sums(words)
    assert by_columns.tolist() == [sum(column) % 2**64 for column in zip(*table, strict=True)]
    assert by_rows.tolist() == [sum(row) % 2**64 for row in table]


def test_numpy_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where numba is not installed a log has the same checksums. (Seed 6.)"""
    words = np.frombuffer(np.random.default_rng(6).bytes(1 << 20), "<u8").reshape(128, 1024)
    compiled = [sums.tobytes() for sums in checksum_sums.table_sums(words)]
    monkeypatch.setattr(checksum_sums, "_loop", lambda: None)
    assert [sums.tobytes() for sums in checksum_sums.table_sums(words)] == compiled
