"""How much of journals is read."""

import pytest

from deploy.runner import journal
from deploy.runner.journal import Entry


def counted_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what is read of journals from now on, one a read."""
    read: list[int] = []
    parse = journal._parse

    def counted(content: bytes) -> tuple[list[Entry], int]:
        read.append(len(content))
        return parse(content)

    monkeypatch.setattr(journal, "_parse", counted)
    return read
