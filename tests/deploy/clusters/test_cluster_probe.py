"""One small request identifies servers other than Ray and Spark."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from socket import create_server, socket

import pytest

from deploy.clusters.probe import check_ray, check_spark
from shards.errors import BadInput

SETTINGS = bytes(3) + b"\x04" + bytes(5)
TRAILERS = b"\x00\x00\x10\x01\x05\x00\x00\x00\x01@\x0bgrpc-status\x02"


@contextmanager
def server(answer: bytes) -> Iterator[tuple[str, int]]:
    """A server that reads a request, sends this answer and closes; yields its address."""
    listening = create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection: socket
        connection, _ = listening.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listening.getsockname()
    finally:
        thread.join(60)
        listening.close()


def ray(address: tuple[str, int]) -> None:
    check_ray("Ray at x", "", address, timeout_s=60)


def spark(address: tuple[str, int]) -> None:
    check_spark("Spark at x", [address], timeout_s=60)


@pytest.mark.parametrize(
    ("check", "answer"),
    [
        (ray, SETTINGS + TRAILERS + b"16\x00\x00"),
        (ray, SETTINGS),
        (spark, (22).to_bytes(8, "big") + b"\x08" + bytes(13)),
        (spark, b"\x15\x03\x03\x00\x02\x02\x0a"),
        (spark, b""),
    ],
    ids=["ray with a token", "ray that is slow", "spark", "TLS", "TLS that closes"],
)
def test_the_right_server_passes(check: Callable[[tuple[str, int]], None], answer: bytes) -> None:
    """A server with an inconclusive answer passes: the connection itself then decides."""
    with server(answer) as address:
        check(address)


@pytest.mark.parametrize(
    ("check", "answer", "line"),
    [
        (ray, b"HTTP/1.1 400 Bad Request\r\n\r\n", r"Ray head, .* \(HTTP/1\.1 400 Bad Request\)"),
        (ray, b"SSH-2.0-OpenSSH_9.2\r\n", r"Ray head, got another kind of server \(SSH-2\.0"),
        (ray, SETTINGS + TRAILERS + b"12\x00\x00", "Ray head, got another kind of server;"),
        (ray, b"", "Ray head, got another kind of server;"),
        (spark, b"HTTP/1.1 400 Bad Request\r\n\r\n", r"Spark master, .* \(HTTP/1\.1 400 Bad"),
        (spark, SETTINGS, "Spark master, got another kind of server"),
    ],
)
def test_another_server_is_named(
    check: Callable[[tuple[str, int]], None], answer: bytes, line: str
) -> None:
    """The error says what was expected there, and how the answer starts if it is text."""
    with server(answer) as address, pytest.raises(BadInput, match=f" at x: expected a {line}"):
        check(address)


def test_a_silent_server_is_not_waited_for() -> None:
    """The server accepts connections but never answers."""
    with create_server(("127.0.0.1", 0)) as silent:
        line = "expected it to answer, got nothing in 0.2 s"
        with pytest.raises(BadInput, match=line):
            check_ray("Ray at x", "", silent.getsockname(), timeout_s=0.2)
        with pytest.raises(BadInput, match=line):
            check_spark("Spark at x", [silent.getsockname()], timeout_s=0.2)
