"""Numbers in messages agree with their nouns."""

import pytest

from shards.plurals import format_count


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (0, "step", "0 steps"), (1, "step", "1 step"), (1, "entry", "1 entry"),
        (2, "entry", "2 entries"), (3, "push", "3 pushes"), (6000, "blob", "6,000 blobs"),
    ],
)  # fmt: skip
def test_a_noun_agrees_with_its_number(number: int, noun: str, text: str) -> None:
    """One thing is singular, and long numbers have separators."""
    assert format_count(number, noun) == text
