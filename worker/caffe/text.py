"""Reading prototxt: the text form of nets and solvers, which users write and servers receive.

Text from outside is bounded before it is parsed (bytes, nesting) and after (layers), its numbers
must be finite, and every error is one short line that names the file, the line and the fault.
"""

import codecs
import re
from contextlib import suppress
from functools import lru_cache
from math import isfinite
from pathlib import Path
from typing import TypeVar

from google.protobuf import text_format
from google.protobuf.message import DecodeError, Message

from ps.path_checks import refuse_pipe
from shards.errors import BadInput, quote
from worker.caffe.caffe_pb2 import NetParameter, SolverParameter
from worker.caffe.prototxt_faults import faults_of
from worker.data.text_files import decode_text

MAX_BYTES = 8 * 2**20
MAX_DEPTH = 32
MAX_LAYERS = 4096
_MAX_QUOTED = 300

# A quoted string or a comment, in which brackets do not count, or a bracket.
_TOKENS = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|#[^\n]*|[{}<>\n]')

# As in Caffe, there may be a space behind a minus; Python's parser wants none.
_MINUS = re.compile(r'("(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|#[^\n]*)|-[ \t]+(?=[\d.])')

_COMMENTS = re.compile(rb'("(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\')|#[^\n]*')
_BINARY = re.compile(rb"[\x00-\x08\x0e-\x1f]")
_LOOKED_AT = 4096  # bytes of a file that show whether it is text
_HDF5 = b"\x89HDF"
# The beginnings of other languages, none of which begins a prototxt.
_LANGUAGES = {"JSON": r"[{\[]", "HTML or XML": r"<", "YAML": r"(?:---|- |[\w-]+:\s*\n\s*- )"}

_Message = TypeVar("_Message", NetParameter, SolverParameter)


def read_text(path: Path) -> str:
    """The file's text, at most `MAX_BYTES`; raises BadInput.

    As in Caffe, comments may be in any encoding: where they prevent decoding they are left out.
    """
    refuse_pipe(path)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise BadInput(path, expected=f"at most {MAX_BYTES} bytes of prototxt", got="more")
    if not data.strip():
        raise BadInput(path, expected="a prototxt", got="an empty file")
    if (binary := _binary(data)) is not None:
        raise BadInput(path, expected="a prototxt", got=binary)
    try:
        return decode_text(data, str(path))
    except BadInput:
        return decode_text(_COMMENTS.sub(_without_comment, data), str(path))


def parse_net(text: str, file: str = "net") -> NetParameter:
    """A net from prototxt; `file` names it in errors."""
    net = NetParameter()
    net.CopyFrom(_parse_net_once(text, file))  # the caller may change it
    return net


# A solver's training and test net are one text, which the job asks for several times: for its data
# layers, for the files it names, and for each model that is built of it.
@lru_cache(maxsize=4)
def _parse_net_once(text: str, file: str) -> NetParameter:
    net = _parse(text, NetParameter(), file)
    layers = len(net.layer) + len(net.layers)
    if layers > MAX_LAYERS:
        raise BadInput(file, expected=f"at most {MAX_LAYERS} layers", got=layers)
    return net


def parse_solver(text: str, file: str = "solver") -> SolverParameter:
    """A solver from prototxt; `file` names it in errors."""
    return _parse(text, SolverParameter(), file)


def _parse(text: str, message: _Message, file: str) -> _Message:
    if len(text) > MAX_BYTES:
        raise BadInput(file, expected=f"at most {MAX_BYTES} bytes of prototxt", got=len(text))
    _check_depth(text, file)
    try:
        text_format.Parse(_MINUS.sub(_without_space, text), message)
    except text_format.ParseError as error:
        # The parser's messages begin with "line:column : ", and some span several lines.
        faults = _other_language(text, file) or faults_of(text, message, file)
        if faults:
            raise BadInput(faults) from None
        fault = re.sub(r"^\d+:\d+ ?: ?", "", str(error))
        line = error.GetLine()
        fault = quote(" ".join(fault.split()), _MAX_QUOTED)
        raise BadInput(f"{file}:{line}: {fault}" if line else f"{file}: {fault}") from None
    except RecursionError:
        raise BadInput(f"{file}: nested too deeply") from None
    missing: list[str] = []
    if not message.IsInitialized(missing):  # type: ignore[call-arg]  # absent from the stubs
        raise BadInput(file, expected=f"a value for {missing[0]}", got="none")
    _check_finite(message, file)
    return message


def _without_comment(match: "re.Match[bytes]") -> bytes:
    return match[1] or b""


def _without_space(match: "re.Match[str]") -> str:
    return match[1] or "-"


def _binary(data: bytes) -> str | None:
    """The kind of a file that is no text; None for text."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return None
    if data.startswith(_HDF5):
        return "an HDF5 file; give weights as --weights or weights="
    if _BINARY.search(data, 0, _LOOKED_AT) is None:
        return None
    with suppress(DecodeError):
        net = NetParameter.FromString(data)
        if net.layer or net.layers:
            return "a binary net, such as a .caffemodel; give it as --weights or weights="
    return "a binary file"


def _other_language(text: str, file: str) -> str:
    """An error about text in a language other than that of a prototxt; empty if it may be one."""
    for language, beginning in _LANGUAGES.items():
        if re.match(beginning, text.lstrip()):
            return f"{file}: expected a prototxt, got {language}"
    return ""


def _check_finite(message: Message, where: str) -> None:
    """Raise BadInput naming the first field, in the file's order of types, that is NaN or infinite.

    Such a number has no meaning in a net or a solver, and a NaN would spread to every weight.
    """
    for field, value in message.ListFields():
        for element in value if field.is_repeated else [value]:
            if isinstance(element, Message):
                name = getattr(element, "name", "")
                called = f" {quote(name)}" if isinstance(name, str) and name else ""
                _check_finite(element, f"{where}: {field.name}{called}")
            elif isinstance(element, float) and not isfinite(element):
                raise BadInput(
                    f"{where}: {field.name}", expected="a finite number", got=f"{element:g}"
                )


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
            raise BadInput(
                f"{file}:{line}", expected=f"at most {MAX_DEPTH} nested messages", got="more"
            )
