"""Checks within seconds that the server at an address is a Ray head or a Spark master.

The clients of Ray and Spark retry for a minute or two before they give up on another kind of
server. Here each server gets one small request in its own protocol, which it answers at once:

    Ray     gRPC over HTTP/2 (RFC 9113, with header fields as of RFC 7541): a call. A server that
            does not have the method answers with status 12, and a server of another kind with no
            HTTP/2 frame.
    Spark   its RPC's frames, a length of eight bytes, a type, the body: a request for a stream that
            does not exist, which is answered by a failure.

A Spark master with TLS closes the connection without an answer, so a missing answer passes. If
Ray's environment variable for TLS is set, there is no request at all.
"""

import os
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress

from ps.transport.addresses import REACH_S, check_reachable
from shards.errors import BadInput, NoServer
from worker.spark import settings as spark_settings

Address = tuple[str, int]

_SETTINGS, _HEADERS, _DATA = 4, 1, 0
_END_STREAM, _END_HEADERS = 1, 4
_METHODS = {
    "": "/ray.rpc.NodeInfoGcsService/GetClusterId",
    "ray": "/ray.rpc.RayletDriver/ClusterInfo",
}
_UNIMPLEMENTED = b"grpc-status\x0212"  # the field and its value, with the value's length
_STREAM_REQUEST, _STREAM_FAILURE = 6, 8
_TLS_ALERT = 0x15
_LARGEST_ANSWER = 1 << 16


def check_ray(name: str, scheme: str, address: Address, timeout_s: float = REACH_S) -> None:
    """Raise BadInput unless the server at `address` answers like a Ray head.

    `name` is the server's name in the error; `scheme` is "ray" for the server of Ray clients.
    """
    if os.environ.get("RAY_USE_TLS", "0") not in {"", "0"}:
        return
    answer = _ask(name, address, _call(_METHODS[scheme], address), timeout_s)
    if not answer or not _is_http2(answer) or _UNIMPLEMENTED in answer:
        other = "HOST:PORT for its head" if scheme else "ray://HOST:PORT for its client server"
        raise BadInput(
            name,
            expected="a Ray head",
            got=f"another kind of server{_opening(answer)}",
            hint=f"Ray's own addresses are of the form {other}",
        )


def check_spark(name: str, addresses: Sequence[Address], timeout_s: float = REACH_S) -> None:
    """Raise BadInput unless one of the servers at `addresses` answers like a Spark master."""
    error = None
    for address in addresses:
        try:
            answer = _ask(name, address, _stream_request("/none/none"), timeout_s)
        except BadInput as refused:
            error = refused
            continue
        if not answer or answer[0] == _TLS_ALERT or answer[8:9] == bytes([_STREAM_FAILURE]):
            return
        error = BadInput(
            name, expected="a Spark master", got=f"another kind of server{_opening(answer)}"
        )
    if error is not None:
        raise error


def check_spark_url(url: str) -> list[Address]:
    """The servers of the Spark at `url`, none for an embedded one; raises BadInput unless they
    answer like what it names."""
    if spark_settings.parse_local_master(url, 1):
        return []
    servers = spark_settings.addresses(url, os.environ)
    name = spark_settings.name_servers(url, servers)
    if servers:
        check_reachable(name, servers)
    if url.startswith("spark://"):
        check_spark(name, servers)
    return servers


def _ask(name: str, address: Address, request: bytes, timeout_s: float) -> bytes:
    """The whole answer of the server; empty if it closes the connection instead."""
    until = time.monotonic() + timeout_s
    answer = b""
    try:
        with socket.create_connection(address, timeout_s) as connection:
            connection.sendall(request)
            while not _is_whole(answer) and len(answer) < _LARGEST_ANSWER:
                connection.settimeout(max(0.001, until - time.monotonic()))
                part = connection.recv(4096)
                if not part:
                    break
                answer += part
    except TimeoutError:
        if not answer:
            raise NoServer(
                name, expected="it to answer", got=f"nothing in {timeout_s:g} s"
            ) from None
    except (ConnectionResetError, BrokenPipeError):
        pass  # The server has closed the connection, with or without an answer.
    except OSError as error:
        raise BadInput(f"{name}: {error.strerror or error}") from None
    return answer


def _is_whole(answer: bytes) -> bool:
    """Return whether to stop reading: the gRPC answer is complete, or it is another protocol."""
    if not _is_http2(answer):
        return len(answer) > 8
    return any(stream == 1 and flags & _END_STREAM for _, flags, stream in _frames(answer))


def _is_http2(answer: bytes) -> bool:
    """True if the bytes so far can start a SETTINGS frame, with which HTTP/2 has to begin."""
    return answer[3:4] in (b"", bytes([_SETTINGS])) and answer[5:9] == bytes(len(answer[5:9]))


def _frames(answer: bytes) -> list[tuple[int, int, int]]:
    """Type, flags and stream of each complete frame."""
    frames, at = [], 0
    while at + 9 <= len(answer):
        size = int.from_bytes(answer[at : at + 3], "big")
        kind, flags, stream = struct.unpack_from(">BBI", answer, at + 3)
        at += 9 + size
        if at <= len(answer):
            frames.append((kind, flags, stream))
    return frames


def _opening(answer: bytes) -> str:
    """The first line of an answer in brackets if it is text, else empty."""
    with suppress(UnicodeDecodeError):
        words = answer[:60].decode("ascii").split("\n")[0].strip()
        if words and words.isprintable():
            return f" ({words})"
    return ""


def _call(method: str, address: Address) -> bytes:
    """The bytes of a gRPC call with an empty message, as stream 1 of a new connection."""
    fields = (
        b"\x83\x86"  # :method POST, :scheme http
         b"\x04" + _text(method)  # :path
        + b"\x01" + _text(f"{address[0]}:{address[1]}")  # :authority
        + b"\x0f\x10" + _text("application/grpc")  # content-type
        + b"\x00" + _text("te") + _text("trailers")
    )  # fmt: skip
    return (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + _frame(_SETTINGS, 0, 0, b"")
        + _frame(_HEADERS, _END_HEADERS, 1, fields)
        + _frame(_DATA, _END_STREAM, 1, bytes(5))
    )


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + body


def _text(text: str) -> bytes:
    """Encode a string of fewer than 127 bytes (RFC 7541, section 5.2)."""
    raw = text.encode("idna" if not text.isascii() else "ascii")[:126]
    return bytes([len(raw)]) + raw


def _stream_request(stream: str) -> bytes:
    """Spark's frame, and an empty line so that an HTTP server sees the end of a bad request."""
    body = bytes([_STREAM_REQUEST]) + struct.pack(">I", len(stream)) + stream.encode()
    return struct.pack(">Q", 8 + len(body)) + body + b"\r\n\r\n"
