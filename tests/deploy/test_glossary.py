"""The glossary, the table of updates and the summary agree with each other."""

import re
from pathlib import Path

from deploy.summary import Summary
from deploy.updates import SCHEMA
from shards.update_records import RECORD

GLOSSARY = Path(__file__).parents[2] / "docs" / "reference" / "glossary.md"


def rows(heading: str) -> list[str]:
    """The names in the first column of the table under a heading."""
    section = GLOSSARY.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)


def test_every_column_of_the_updates_is_explained() -> None:
    """The table names exactly the columns, in the order of the file, and all those of a record."""
    assert rows("The columns of `updates.parquet`") == SCHEMA.names
    assert set(RECORD.names or ()) <= set(SCHEMA.names)


def test_every_key_of_the_summary_is_explained() -> None:
    """The table names exactly the keys, in the order of the file."""
    assert rows("The keys of `summary.json`") == list(Summary.__struct_fields__)


def test_no_word_is_defined_twice() -> None:
    """Each word has one entry, and the entry is not empty."""
    text = GLOSSARY.read_text()
    entries = re.findall(r"^(\*\*.+)\n(.*)$", text, re.MULTILINE)
    words = [word for entry, _ in entries for word in re.findall(r"\*\*(.+?)\*\*", entry)]
    assert len(words) == len(set(words)) > 20
    assert all(meaning.startswith(": ") for _, meaning in entries)
