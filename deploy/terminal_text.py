"""Text that others wrote, as a terminal may show it: characters that would act are made visible.

A terminal obeys the control characters of what is printed: it changes colours and titles, moves the
cursor over earlier lines, and some terminals answer as if the user typed. Formatting characters
reorder what the eye reads. `print_text` writes them as \\u001b, where a JSON reader finds the same
character again. What goes into a file or a pipe stays as it is: nothing acts on it there.
"""

import sys
import unicodedata
from typing import TextIO

_JOINERS = "\u200c\u200d"  # words of some languages need them
_KEPT = "\n\t" + _JOINERS


def is_plain(text: str) -> bool:
    """True if a name shows as what it is: no control or formatting character, no line break."""
    return not any(_acts(character) for character in text if character not in _JOINERS)


def visible(text: str) -> str:
    """The text with each character that a terminal would obey as its code; lines stay lines."""
    if text.isascii() and text.isprintable():
        return text
    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    return "".join(
        _code(character) if character not in _KEPT and _acts(character) else character
        for character in lines
    )


def print_text(text: str | bytes, *, nl: bool = True, err: bool = False) -> None:
    """Print text or JSON that others may have written; raw where the output is no terminal."""
    from typer import echo  # the service has no use for it

    stream: TextIO = sys.stderr if err else sys.stdout
    if stream.isatty():
        text = visible(text.decode(errors="replace") if isinstance(text, bytes) else text)
    echo(text, nl=nl, err=err)


def _code(character: str) -> str:
    """A character as JSON writes it, in one or two units of UTF-16."""
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[n : n + 2].hex()}" for n in range(0, len(units), 2))


def _acts(character: str) -> bool:
    """True if a character controls (Cc), formats (Cf), breaks lines (Zl, Zp), or is none (Cs)."""
    return unicodedata.category(character) in {"Cc", "Cf", "Cs", "Zl", "Zp"}
