"""Records of CaffeOnSpark's SequenceFiles: keys that Java serialised, and hostile bytes."""

import numpy as np
import pytest

from shards.errors import BadInput
from worker.data.java_objects import read_key
from worker.data.sequence_file import ImageRecord, image_record

TUPLE_OF_TWO = bytes.fromhex(
    "aced00057372000c7363616c612e5475706c653201fbddcd22e7347a0200024c00025f317400124c6a6176612f6c61"
    "6e672f4f626a6563743b4c00025f3271007e00017870740005696d672d3174000137"
)
"""("img-1", "7"), as scala.Tuple2."""
TUPLE_OF_SIX = bytes.fromhex(
    "aced00057372000c7363616c612e5475706c653689e6cd0b84e7f0300200064c00025f317400124c6a6176612f6c61"
    "6e672f4f626a6563743b4c00025f3271007e00014c00025f3371007e00014c00025f3471007e00014c00025f357100"
    "7e00014c00025f3671007e000178707400013774000137737200116a6176612e6c616e672e496e746567657212e2a0"
    "a4f781873802000149000576616c7565787200106a6176612e6c616e672e4e756d62657286ac951d0b94e08b020000"
    "7870000000017371007e0005000000027371007e000500000003737200116a6176612e6c616e672e426f6f6c65616e"
    "cd207280d59cfaee0200015a000576616c7565787000"
)
"""("7", "7", 1, 2, 3, false), as scala.Tuple6; its strings and class descriptions are shared."""


def test_tuples_that_java_serialised() -> None:
    """Their values in order, boxes as plain numbers."""
    assert read_key(TUPLE_OF_TWO, "key") == ["img-1", "7"]
    assert read_key(TUPLE_OF_SIX, "key") == ["7", "7", 1, 2, 3, False]


def test_records_are_rows_of_images() -> None:
    """Two values go with an image file, six with raw pixels, or with a file, too."""
    expected = ImageRecord("img-1", 7, None, None, None, True, b"jpeg")
    assert image_record(TUPLE_OF_TWO, b"jpeg", "file") == expected
    expected = ImageRecord("7", 7, 1, 2, 3, False, b"abcdef")
    assert image_record(TUPLE_OF_SIX, b"abcdef", "file") == expected


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        (b"", b"", "file: expected a key of CaffeOnSpark, a serialised tuple, got 0 bytes"),
        (TUPLE_OF_TWO[:-1], b"", "expected a key of CaffeOnSpark"),
        (TUPLE_OF_SIX, b"abc", "file: record 7: field data: expected 1x2x3 bytes, got 3"),
        (
            TUPLE_OF_TWO.replace(b"\x00\x017", b"\x00\x01x"),
            b"",
            "record img-1: field label: expected a whole number, got x",
        ),
    ],
)
def test_a_record_that_does_not_fit(key: bytes, value: bytes, error: str) -> None:
    """The error names the file, the record and the field."""
    with pytest.raises(BadInput, match=error):
        image_record(key, value, "file")


def test_any_bytes_are_a_key_or_refused() -> None:
    """Overwritten and cut keys give values or BadInput, and end soon."""
    refused = 0
    for seed in range(2000):
        dice, data = np.random.default_rng(seed), bytearray(TUPLE_OF_SIX)
        for _ in range(2):
            data[int(dice.integers(4, len(data)))] = int(dice.integers(256))
        if seed % 5 == 0:
            del data[int(dice.integers(len(data))) :]
        try:
            read_key(bytes(data), "key")
        except BadInput:
            refused += 1
    assert refused > 500
