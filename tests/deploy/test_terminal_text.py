"""What others wrote reaches a terminal as text that acts on nothing."""

import io
import json
import sys

import pytest

from deploy.terminal_text import is_plain, print_text, visible

HOSTILE = (
    "\x1b[31m",
    "\x1b]0;title\x07",
    "\x9b31m",
    "\u202e",
    "\u2066",
    "\x7f",
    "\u2028",
    "\ud800",
)


@pytest.mark.parametrize("text", HOSTILE)
def test_what_acts_on_a_terminal_is_written_as_its_code(text: str) -> None:
    """Nothing is left of it but printable characters, and JSON means what it did."""
    shown = visible(f"a{text}b")
    assert shown.isprintable()
    assert json.loads(f'"{shown}"') == f"a{text}b"
    assert not is_plain(f"a{text}b")


@pytest.mark.parametrize("text", ["plain", "größer × 漢字 🙂", "क्\u200dष", "two\nlines\tand a tab"])
def test_what_people_write_stays(text: str) -> None:
    """Letters of every language, joiners, tabs and line breaks are printed as they are."""
    assert visible(text) == text


def test_a_carriage_return_covers_no_earlier_text() -> None:
    """A line cannot be overwritten by what follows it."""
    assert visible("real\rfake\r\nnext") == "real\nfake\nnext"
    assert not is_plain("a\nb")


@pytest.mark.parametrize("terminal", [True, False])
def test_a_pipe_gets_the_bytes(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a terminal gets codes; a file or a pipe has the text as it was written."""

    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    stream = Stream()
    monkeypatch.setattr(sys, "stdout", stream)
    print_text("a\u202eb")
    assert stream.getvalue() == ("a\\u202eb\n" if terminal else "a\u202eb\n")
