"""The glossary gives each term one meaning."""

import re

from tests.support.doc_pages import read


def test_no_word_is_defined_twice() -> None:
    """Each word has one entry, and the entry is not empty."""
    entries = re.findall(r"^(\*\*.+)\n(.*)$", read("docs/reference/glossary.md"), re.MULTILINE)
    words = [word for entry, _ in entries for word in re.findall(r"\*\*(.+?)\*\*", entry)]
    assert len(words) == len(set(words)) > 20
    assert all(meaning.startswith(": ") for _, meaning in entries)
