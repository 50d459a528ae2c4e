"""Text that users write, from editors of any system: with a byte order mark, or in UTF-16."""

import codecs
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path, PureWindowsPath

from shards.errors import BadInput

_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_BEGINNING = 1 << 16  # bytes in which a list shows what it is


def decode_text(data: bytes, file: str) -> str:
    """The text without its byte order mark; raises BadInput unless it is UTF-8, or marked UTF-16.

    `file` names it in errors.
    """
    utf_16 = data.startswith(_UTF_16)
    try:
        return data.decode("utf-16" if utf_16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        kind = "UTF-16" if utf_16 else "UTF-8"
        raise BadInput(
            file,
            expected=f"{kind} text",
            got=f"byte {error.object[error.start]:#04x} at offset {error.start}",
        ) from None


def read_lines(path: Path, max_bytes: int) -> list[str]:
    """The lines of a list without their ends, empty ones too; raises BadInput."""
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > max_bytes:
        raise BadInput(path, expected=f"a list of at most {max_bytes} bytes", got="more")
    return _lines(decode_text(data, str(path)))


def first_lines(path: Path, count: int) -> list[str]:
    """The first lines of a file that are neither empty nor a comment; fewer if there are no more.

    A file of other content gives some text or none: this shows the kind of a file.
    """
    with path.open("rb") as file:
        data = file.read(_BEGINNING)
    try:
        text = decode_text(data, str(path))
    except BadInput:  # it may be cut within a character
        text = data.decode("utf-8-sig", errors="replace")
    lines = (line.strip() for line in _lines(text))
    return list(islice((line for line in lines if line and not line.startswith("#")), count))


def locate(name: str, folder: Path, fits: Callable[[Path], bool] = Path.is_file) -> Path | None:
    """The file that a file in `folder` calls `name`: in that folder, or in the working one.

    A name may have the backslashes of Windows. None if no such path `fits`.
    """
    for written in dict.fromkeys((name, PureWindowsPath(name).as_posix())):
        for path in (folder / written, Path(written)):
            with suppress(OSError, ValueError):  # it may be too long for a file name, or be none
                if fits(path):
                    return path
    return None


def _lines(text: str) -> list[str]:
    """Ends are those of files only: a name may have one of the others that Python knows."""
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
