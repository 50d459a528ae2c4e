"""Reading prototxt: the text form of nets and solvers, which users write and servers receive.

Text from outside is bounded before it is parsed (bytes, nesting) and after (layers), its numbers
must be finite, and every error is one short line that names the file, the line and the fault.
"""

import re
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from typing import TypeVar

from google.protobuf import text_format
from google.protobuf.message import Message

from shards.errors import BadInput, quoted
from worker.caffe.caffe_pb2 import DESCRIPTOR, NetParameter, SolverParameter

MAX_BYTES = 8 * 2**20
MAX_DEPTH = 32
MAX_LAYERS = 4096
_MAX_QUOTED = 300

# A quoted string or a comment, in which brackets do not count, or a bracket.
_TOKENS = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|#[^\n]*|[{}<>\n]')

_NO_FIELD = re.compile(
    r'Message type "caffe\.(?P<message>[\w.]+)" has no field named "(?P<field>\w+)"'
)
_LAYERS = {"LayerParameter", "V1LayerParameter"}
_LAYER = re.compile(r"\blayers?\s*:?\s*\{")
_NAME = re.compile(r"""\bname\s*:\s*["']([^"'\n]*)["']""")

_Message = TypeVar("_Message", NetParameter, SolverParameter)


def read_text(path: Path) -> str:
    """The file's text, at most `MAX_BYTES` of UTF-8; raises BadInput."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise BadInput(f"{path}: expected at most {MAX_BYTES} bytes of prototxt, got more")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise BadInput(
            f"{path}: expected UTF-8 text, got byte {error.object[error.start]:#04x}"
            f" at offset {error.start}"
        ) from None


def parse_net(text: str, file: str = "net") -> NetParameter:
    """A net from prototxt; `file` names it in errors."""
    net = _parse(text, NetParameter(), file)
    layers = len(net.layer) + len(net.layers)
    if layers > MAX_LAYERS:
        raise BadInput(f"{file}: expected at most {MAX_LAYERS} layers, got {layers}")
    return net


def parse_solver(text: str, file: str = "solver") -> SolverParameter:
    """A solver from prototxt; `file` names it in errors."""
    return _parse(text, SolverParameter(), file)


def _parse(text: str, message: _Message, file: str) -> _Message:
    if len(text) > MAX_BYTES:
        raise BadInput(f"{file}: expected at most {MAX_BYTES} bytes of prototxt, got {len(text)}")
    _check_depth(text, file)
    try:
        text_format.Parse(text, message)
    except text_format.ParseError as error:
        # The parser's messages begin with "line:column : ", and some span several lines.
        what = re.sub(r"^\d+:\d+ ?: ?", "", str(error))
        line = error.GetLine()
        what = _unknown(what, text, error) or quoted(" ".join(what.split()), _MAX_QUOTED)
        raise BadInput(f"{file}:{line}: {what}" if line else f"{file}: {what}") from None
    except RecursionError:
        raise BadInput(f"{file}: nested too deeply") from None
    missing: list[str] = []
    if not message.IsInitialized(missing):  # type: ignore[call-arg]  # absent from the stubs
        raise BadInput(f"{file}: expected a value for {missing[0]}, got none")
    _check_finite(message, file)
    return message


def _unknown(what: str, text: str, error: text_format.ParseError) -> str:
    """The parser's error about a field that does not exist, with its layer and the closest fields.

    Empty for another error.
    """
    found, line = _NO_FIELD.search(what), error.GetLine()
    kinds = DESCRIPTOR.message_types_by_name
    if found is None or line is None or found["message"].partition(".")[0] not in kinds:
        return ""
    outer, *inner = found["message"].split(".")
    kind, field = kinds[outer], found["field"]
    for name in inner:
        kind = kind.nested_types_by_name[name]
    lines = text.splitlines(keepends=True)
    place = len("".join(lines[: line - 1])) + (error.GetColumn() or 1) - 1
    if outer in _LAYERS and field in {"layer", "layers"}:
        where = _layer_at(text, place - 1)
        return f"{where}expected its closing brace before the next layer"
    where = "" if outer in {"NetParameter", "SolverParameter"} else _layer_at(text, place)
    closest = ", ".join(get_close_matches(field, kind.fields_by_name, cutoff=0.0))
    return (
        f"{where}{outer} has no field {quoted(field)}; expected one of {len(kind.fields_by_name)}"
        f" fields, of which {closest} are closest"
    )


def _layer_at(text: str, place: int) -> str:
    """The beginning of an error about the layer around an offset; empty if it has no name."""
    starts = [match.start() for match in _LAYER.finditer(text)]
    begin = max((start for start in starts if start <= place), default=len(text))
    end = min((start for start in starts if start > place), default=len(text))
    name = _NAME.search(text, begin, end)
    return "" if name is None else f"layer {quoted(name[1])}: "


def _check_finite(message: Message, where: str) -> None:
    """Raise BadInput naming the first field, in the file's order of types, that is NaN or infinite.

    Such a number has no meaning in a net or a solver, and a NaN would spread to every weight.
    """
    for field, value in message.ListFields():
        for one in value if field.is_repeated else [value]:
            if isinstance(one, Message):
                name = getattr(one, "name", "")
                called = f" {quoted(name)}" if isinstance(name, str) and name else ""
                _check_finite(one, f"{where}: {field.name}{called}")
            elif isinstance(one, float) and not isfinite(one):
                raise BadInput(f"{where}: {field.name}: expected a finite number, got {one:g}")


def _check_depth(text: str, file: str) -> None:
    depth, line = 0, 1
    for token in _TOKENS.finditer(text):
        match token.group():
            case "\n":
                line += 1
            case "{" | "<":
                depth += 1
            case "}" | ">":
                depth -= 1
        if depth > MAX_DEPTH:
            raise BadInput(f"{file}:{line}: expected at most {MAX_DEPTH} nested messages, got more")
