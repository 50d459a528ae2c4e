"""Java's object serialisation, as far as the keys of CaffeOnSpark's SequenceFiles need it.

A key there is a scala.Tuple2 or a Pair of an id and a label, or a scala.Tuple6 of id, label,
channels, height, width and encoded. (The format: "Java Object Serialization Specification", 6.)
"""

from collections.abc import Callable
from struct import Struct
from struct import error as struct_error
from typing import Any

from shards.errors import BadInput

_MAGIC = b"\xac\xed\x00\x05"
_NULL, _REFERENCE, _CLASS, _OBJECT, _STRING = 0x70, 0x71, 0x72, 0x73, 0x74
_BLOCK, _END = 0x77, 0x78
_FIRST_HANDLE = 0x7E0000
_WRITES, _SERIALISABLE = 1, 2
_DEEPEST = 16
_PRIMITIVES = {"B": "b", "C": "H", "D": "d", "F": "f", "I": "i", "J": "q", "S": "h", "Z": "?"}


def read_key(data: bytes, where: str) -> list[Any]:
    """The values of a serialised tuple or pair, in order; BadInput begins with `where`."""
    try:
        if not data.startswith(_MAGIC):
            raise ValueError("no serialised object")
        fields = _ObjectStream(data).value()
        if not isinstance(fields, dict):
            raise TypeError("no object with fields")
    except (ValueError, TypeError, IndexError, KeyError, struct_error):
        raise BadInput(
            where, expected="a key of CaffeOnSpark, a serialised tuple", got=f"{len(data)} bytes"
        ) from None
    return [fields[name] for name in sorted(fields)]


class _ObjectStream:
    """Reads one value after another; objects are dicts of their fields, and boxes their values."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._offset = len(_MAGIC)
        self._handles: list[Any] = []
        self._depth = 0

    def value(self) -> Any:
        """The next value of any kind."""
        kind = self._number("B")
        if kind not in _READERS:
            raise ValueError(kind)
        self._depth += 1
        if self._depth > _DEEPEST:
            raise ValueError("nested too deeply")
        value = _READERS[kind](self)
        self._depth -= 1
        return value

    def reference(self) -> Any:
        return self._handles[self._number("i") - _FIRST_HANDLE]

    def string(self) -> str:
        text = self._text()
        self._handles.append(text)
        return text

    def class_description(self) -> list[tuple[int, list[tuple[str, str]]]]:
        """The flags and fields of a class and of its ancestors, the most general first."""
        chain: list[tuple[int, list[tuple[str, str]]]] = []
        self._text()
        self._take(8)  # the version of the class
        self._handles.append(chain)
        flags, fields = self._number("B"), []
        for _ in range(self._number("H")):
            code, name = chr(self._number("B")), self._text()
            if code in "L[":
                self.value()  # the name of its class
            fields.append((code, name))
        self._annotations()
        chain += [*(self.value() or []), (flags, fields)]
        return chain

    def object(self) -> Any:
        chain = self.value()
        handle = len(self._handles)
        self._handles.append(None)
        values: dict[str, Any] = {}
        for flags, fields in chain:
            if not flags & _SERIALISABLE:
                raise ValueError("a class with a format of its own")
            for code, name in fields:
                values[name] = self.value() if code in "L[" else self._number(_PRIMITIVES[code])
            if flags & _WRITES:
                self._annotations()
        box = values["value"] if set(values) == {"value"} else values
        self._handles[handle] = box
        return box

    def _annotations(self) -> None:
        while self._data[self._offset] != _END:
            self.value()
        self._offset += 1

    def block(self) -> None:
        self._take(self._number("B"))

    def _text(self) -> str:
        return self._take(self._number("H")).decode(errors="replace")

    def _number(self, code: str) -> Any:
        form = Struct(">" + code)
        return form.unpack(self._take(form.size))[0]

    def _take(self, size: int) -> bytes:
        self._offset += size
        if self._offset > len(self._data):
            raise IndexError(size)
        return self._data[self._offset - size : self._offset]


_READERS: dict[int, Callable[[_ObjectStream], Any]] = {
    _NULL: lambda _: None,
    _REFERENCE: _ObjectStream.reference,
    _CLASS: _ObjectStream.class_description,
    _OBJECT: _ObjectStream.object,
    _STRING: _ObjectStream.string,
    _BLOCK: _ObjectStream.block,
}
