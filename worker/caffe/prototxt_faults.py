"""Finds every fault of a prototxt that protobuf's parser refuses, each with its line and layer.

The parser stops at the first fault, and a file of a fork of Caffe has many. So a refused text is
read once more, token by token, with the descriptors of its messages. A layer of an unsupported type
is one fault, by its type: its settings say nothing more.
"""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from shards.errors import quote
from worker.caffe.caffe_pb2 import NetParameter, SolverParameter, V1LayerParameter
from worker.caffe.registry import LAYERS, UNSUPPORTED

_Descriptor = Any  # of Python's protobuf or of its C library

_TOKENS = re.compile(
    r"""(?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|(?P<comment>\#[^\n]*)|(?P<end>\n)"""
    r"""|(?P<mark>[{}<>\[\]:,;])|(?P<word>[^\s"'\#{}<>\[\]:,;]+)|(?P<stray>["'][^\n]*)"""
)
_LAYER_MESSAGES = {"LayerParameter", "V1LayerParameter"}
# Names that other versions and forks of Caffe have, and what is written here.
_WRITTEN_HERE = {
    ("ConvolutionParameter", "hole"): "dilation",
    ("ConvolutionParameter", "hole_h"): "dilation, twice: for the height and the width",
    ("ConvolutionParameter", "hole_w"): "dilation, twice: for the height and the width",
    ("LayerParameter", "blobs_lr"): "param { lr_mult: ... }",
    ("LayerParameter", "weight_decay"): "param { decay_mult: ... }",
}
_MOST_DIGITS = 20  # of a whole number
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?[fF]?|[+-]?(?:inf|infinity|nan)f?")
_WHOLE = re.compile(r"[+-]?(?:0[xX][0-9a-fA-F]+|\d+)")
_BOOLEANS = {"true", "false", "True", "False", "t", "f", "0", "1"}
_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_FLOATS = {FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE}
_MOST_LISTED = 20


def faults_of(text: str, message: NetParameter | SolverParameter, file: str) -> str:
    """One line with every fault of a text that is to be such a message; empty if none is seen."""
    reader = _FaultReader(message.DESCRIPTOR)
    reader.read(text)
    page = "solver" if isinstance(message, SolverParameter) else "layers"
    return reader.wrong_kind(file) or _one_line(reader.all_faults(), file, page)


def list_unsupported(layers: Iterable[tuple[str, str]], file: str) -> str:
    """One line with every unsupported type among the (name, type) of layers; empty if none."""
    unsupported = [_Layer(0, name, kind) for name, kind in layers if kind not in LAYERS]
    return _one_line([(layer, _TYPE, 0) for layer in unsupported], file, "layers")


class _Layer:
    """A layer of the text: where it begins, and what it says of itself so far."""

    def __init__(self, line: int, name: str = "", kind: str = "", *, old: bool = False) -> None:
        self.line, self.name, self.kind, self.old = line, name, kind, old

    @property
    def is_unsupported(self) -> bool:
        known = V1LayerParameter.LayerType.keys() if self.old else LAYERS
        return bool(self.kind) and self.kind not in known and not self.kind.isdigit()

    def __str__(self) -> str:
        kind = f" ({quote(self.kind)})" if self.kind else ""
        return f"layer {quote(self.name) if self.name else '(unnamed)'}{kind}"


_Fault = tuple[_Layer | None, str, int]
"""The layer around a fault, what it is, and its line; 0 for a net that is no text."""

_TYPE = "type not supported"


class _Message:
    """An open message: its descriptor (None: unknown), and the fields that it has so far."""

    def __init__(
        self, descriptor: _Descriptor, line: int, layer: _Layer | None = None, *, listed: bool
    ) -> None:
        self.descriptor, self.line, self.layer, self.listed = descriptor, line, layer, listed
        self.seen: set[str] = set()


class _FaultReader:
    """Reads tokens and collects faults."""

    def __init__(self, root: _Descriptor) -> None:
        self._root = root
        self._blocks = [_Message(root, 1, listed=False)]
        self._layers: list[_Layer] = []
        self._faults: list[_Fault] = []
        self._strangers: dict[str, int] = {}  # unknown fields at the top, by their lines
        self._line = 1
        self._field: _Descriptor = None  # None: unknown, so its value is not looked at
        self._expects = "name"  # of a field; then a "colon" or a block; then a "value"
        self._listed = self._unclosed = False

    def read(self, text: str) -> None:
        """Read all tokens, or those before a layer that is not closed."""
        before = ""
        for token in _TOKENS.finditer(text):
            kind, written = token.lastgroup, token.group()
            if kind == "end":
                self._line += 1
            elif kind == "mark":
                self._mark(written)
            elif kind == "stray":
                self._add(f"expected a text that ends on its line, got {quote(written)}")
                self._expects = "name"
            elif kind != "comment" and not (kind == before == "string"):  # strings may be in parts
                self._word(written, kind or "")
            if kind not in {"end", "comment"}:
                before = kind or ""
            if self._unclosed:
                return
        if len(self._blocks) > 1:
            block = self._blocks[1]
            self._add(
                "expected its closing brace, got the end of the file", block.layer, block.line
            )

    def all_faults(self) -> list[_Fault]:
        """Those of unsupported types, and those outside of such layers, by line."""
        faults: list[_Fault] = [(x, _TYPE, x.line) for x in self._layers if x.is_unsupported]
        faults += (fault for fault in self._faults if not (fault[0] and fault[0].is_unsupported))
        return sorted(faults, key=lambda fault: fault[2])

    def wrong_kind(self, file: str) -> str:
        """An error about a solver in place of a net, or the reverse; empty if it is neither."""
        solver = self._root is SolverParameter.DESCRIPTOR
        other = NetParameter.DESCRIPTOR if solver else SolverParameter.DESCRIPTOR
        for name, line in self._strangers.items():
            if name in other.fields_by_name:
                kinds = ("a solver", "a net") if solver else ("a net", "a solver")
                return f"{file}:{line}: expected {kinds[0]}, got {kinds[1]}: it has {name}"
        return ""

    def _mark(self, mark: str) -> None:
        if mark in "{<":
            self._open()
        elif mark in "}>":
            self._close(mark)
        elif mark == ":":
            self._expects = "value"
        elif mark in "[]":
            self._listed = mark == "["
            self._expects = "value" if self._listed else "name"

    def _open(self) -> None:
        block, field = self._blocks[-1], self._field
        if self._expects == "name" and block.descriptor is not None and not self._listed:
            self._add("expected the name of a field, got an opening brace")
        descriptor, layer = None, block.layer
        if self._expects != "name" and field is not None:
            descriptor = field.message_type
            if descriptor is None:
                self._add(f"{field.name}: expected {_describe_values(field)}, got an opening brace")
            elif descriptor.name in _LAYER_MESSAGES:
                layer = _Layer(self._line, old=descriptor.name == "V1LayerParameter")
                self._layers.append(layer)
        self._blocks.append(_Message(descriptor, self._line, layer, listed=self._listed))
        self._expects, self._listed = "name", False

    def _close(self, mark: str) -> None:
        if len(self._blocks) == 1:
            self._add(f"expected the name of a field, got {mark}")
            return
        self._listed = self._blocks.pop().listed
        self._expects = "name"

    def _word(self, word: str, kind: str) -> None:
        descriptor = self._blocks[-1].descriptor
        if self._listed and self._expects == "name":
            self._expects = "value"
        if self._expects == "name":
            if descriptor is not None and kind != "word":
                self._add(f"expected the name of a field, got {quote(word)}")
            else:
                self._begin(word)
            return
        if self._field is not None:
            if self._expects == "colon":
                self._add(f"{self._field.name}: expected a colon, got {quote(word)}")
            else:
                self._check(word, kind)
        if word not in {"-", "+"}:
            self._expects = "value" if self._listed else "name"

    def _begin(self, name: str) -> None:
        """Begin a field of the open message."""
        block = self._blocks[-1]
        self._field, self._expects = None, "colon"
        if block.descriptor is None:
            return
        field = block.descriptor.fields_by_name.get(name)
        inner = block.descriptor.name
        if inner in _LAYER_MESSAGES and name in {"layer", "layers"} and field is None:
            self._add("expected its closing brace before the next layer")
            self._unclosed = True
        elif field is None:
            if len(self._blocks) == 1:
                self._strangers.setdefault(name, self._line)
            here = _WRITTEN_HERE.get((inner, name))
            instead = f": write {here}" if here else _closest(name, block.descriptor)
            self._add(f"{inner} has no field {quote(name)}{instead}")
        elif name in block.seen and not field.is_repeated:
            self._add(f"{name}: expected one value, got a second one")
        block.seen.add(name)
        self._field = field

    def _check(self, word: str, kind: str) -> None:
        """Check a value, and keep a layer's name and type."""
        field, block = self._field, self._blocks[-1]
        if block.descriptor is not None and block.descriptor.name in _LAYER_MESSAGES:
            assert block.layer is not None, "made when the block was opened"
            plain = word[1:-1] if kind == "string" else word
            if field.name == "name":
                block.layer.name = plain
            elif field.name == "type":
                block.layer.kind = plain
                if block.layer.is_unsupported:
                    return
        if word not in {"-", "+"} and not _fits(field, word, kind):
            self._add(f"{field.name}: expected {_describe_values(field, word)}, got {quote(word)}")

    def _add(self, text: str, layer: _Layer | None = None, line: int = 0) -> None:
        self._faults.append((layer or self._blocks[-1].layer, text, line or self._line))


def _fits(field: _Descriptor, word: str, kind: str) -> bool:
    """Return whether a field may have this value, as protobuf's parser reads it."""
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return kind == "string"
    if kind != "word":
        return False
    if field.cpp_type in _INTEGERS:
        least, most = _INTEGERS[field.cpp_type]
        if _WHOLE.fullmatch(word) is None or len(word) > _MOST_DIGITS:
            return False
        number = int(word, 16) if "x" in word.lower() else int(word)
        return least <= number <= most
    if field.cpp_type in _FLOATS:
        return _NUMBER.fullmatch(word.lower()) is not None or _WHOLE.fullmatch(word) is not None
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return word in _BOOLEANS
    if field.enum_type is not None:
        names, numbers = field.enum_type.values_by_name, field.enum_type.values_by_number
        return word in names or word in map(str, numbers)
    return False


def _describe_values(field: _Descriptor, word: str = "") -> str:
    if field.message_type is not None:
        return "a block in braces"
    if field.enum_type is not None:
        return f"one of {', '.join(field.enum_type.values_by_name)}"
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return "true or false"
    if field.cpp_type in _INTEGERS:
        least, most = _INTEGERS[field.cpp_type]
        return "a whole number" + (f" in [{least}, {most}]" if _WHOLE.fullmatch(word) else "")
    return "a number" if field.cpp_type in _FLOATS else "a text in quotes"


def _closest(name: str, descriptor: _Descriptor) -> str:
    fields = descriptor.fields_by_name
    closest = ", ".join(get_close_matches(name, fields, cutoff=0.0))
    return f"; expected one of {len(fields)} fields, of which {closest} are closest"


def _one_line(faults: list[_Fault], file: str, page: str) -> str:
    """All faults in one line; the layers of an unsupported type are one, and hints are for one."""
    groups: dict[object, list[_Fault]] = {}
    for fault in faults:
        layer, message, _ = fault
        key = layer.kind if layer is not None and message == _TYPE else fault
        groups.setdefault(key, []).append(fault)
    if not groups:
        return ""
    listed = list(groups.values())
    if len(listed) == 1:
        (layer, message, line), *more = listed[0]
        message = _instead(layer.kind) if layer is not None and message == _TYPE else message
        return f"{file}:{line}: {_name_layer(layer, more)}{message}".replace(":0: ", ": ", 1)
    parts = []
    for (layer, message, line), *more in listed[:_MOST_LISTED]:
        at = f"line {line}: " if line else ""
        parts.append(f"{at}{_name_layer(layer, more)}{message.partition(';')[0]}")
    if len(listed) > _MOST_LISTED:
        parts.append(f"and {len(listed) - _MOST_LISTED} more")
    text = "; ".join(parts)
    return f"{file}: {len(listed)} faults: {text}; docs/reference/{page}.md lists what exists"


def _name_layer(layer: _Layer | None, more: list[_Fault]) -> str:
    if layer is None or not (layer.name or layer.kind):
        return ""
    return f"{layer}: " if not more else f"{layer} and {len(more)} more: "


def _instead(kind: str) -> str:
    """The fault of a type that is not supported, with what to use in its place."""
    if kind in UNSUPPORTED:
        return f"{_TYPE}: {UNSUPPORTED[kind].replace('`', '')}"
    if not kind:
        return "expected a type, got none"
    plain = {name.lower(): name for name in LAYERS}
    written = kind.lower().replace("_", "")  # older versions wrote INNER_PRODUCT
    near_names = [written] if written in plain else get_close_matches(written, plain, cutoff=0.7)
    closest = [plain[name] for name in near_names]
    near = f", of which {', '.join(closest)} is closest" if len(closest) == 1 else ""
    near = f", of which {', '.join(closest)} are closest" if len(closest) > 1 else near
    return f"{_TYPE}; expected one of the {len(LAYERS)} types in docs/reference/layers.md{near}"
