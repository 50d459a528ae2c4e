"""Knock at ports as a stranger does, with the programs of a cluster and none of its secrets.

It is a program of its own: tests.bench.port_scan runs it on a host that has Ray and gRPC, but no
checkout. It reads a request in a line of JSON and prints its findings as JSON.

- With `ports`, a list of [HOST, PORT], it prints the answers of each, as `knock` returns them. It
  sends what would change something, forms and programs, only if `sends` is true.
- With `head`, the address of Ray's head, it prints how that refuses a program, by way.
"""

import http.client
import json
import re
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from typing import Any
from urllib.parse import urlencode, urljoin

_TIMEOUT_S = 3.0
_MOST_BYTES, _MOST_PAGES = 1 << 20, 60
_ZMTP_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_ZMTP_NULL = b"NULL".ljust(20, b"\0") + bytes(32)
_ZMTP_READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
_PATHS = (
    "/json/", "/environment/", "/metrics", "/metrics/json/", "/metrics/prometheus/",
    "/api/v1/applications", "/api/version", "/api/jobs/", "/api/job_agent/jobs/", "/api/v0/actors",
    "/nodes?view=summary", "/logs", "/v1/submissions/status/driver-1",
)  # fmt: skip
_LINK = re.compile(r"""<a href=["']([^"'#]+)""")
_FORM = re.compile(r"(?s)<form action=\"([^\"]+)\"(.*?)</form>")
_FIELD = re.compile(r'name="([^"]+)" value="([^"]*)"')
_SUBMISSION = {
    "action": "CreateSubmissionRequest",
    "appArgs": ["--version"],
    "appResource": "",
    "clientSparkVersion": "4",
    "environmentVariables": {},
    "mainClass": "org.apache.spark.deploy.SparkSubmit",
    "sparkProperties": {"spark.app.name": "a stranger's", "spark.jars": ""},
}
_CALLS = (
    "InternalKVGcsService/InternalKVKeys", "NodeInfoGcsService/GetAllNodeInfo",
    "ActorInfoGcsService/GetAllActorInfo", "NodeManagerService/GetNodeStats",
    "ObjectManagerService/Pull", "CoreWorkerService/GetCoreWorkerStats",
    "ReporterService/GetTraceback", "LogService/ListLogs", "RayletDriver/ClusterInfo",
)  # fmt: skip
_SPARK_MESSAGE, _SPARK_STREAM, _LONGEST_REASON = 3, 6, 400
_SPARK_ANSWERS = {4: "answer", 5: "refusal", 7: "file", 8: "no file"}
_UP = "../" * 12
SPARK_FILES = ("/files/executor.tar.gz", *(
    f"/{folder}/{_UP}etc/passwd" for folder in ("files", "jars", "archives", "artifacts", "classes")
))  # fmt: skip
"""Files to ask Spark's driver for: one that spark-submit adds, and one out of its folders."""


def main() -> None:
    """Read the request, and print the findings."""
    request = json.loads(sys.stdin.readline())
    if "head" in request:
        print(json.dumps(connect_to_ray(request["head"])))
        return
    with ThreadPoolExecutor(16) as pool:
        answers = pool.map(lambda port: knock(*port, sends=request["sends"]), request["ports"])
        print(json.dumps(list(answers)))


def knock(host: str, port: int, *, sends: bool) -> dict[str, Any]:
    """The answers of a port; empty values where it has no such server.

    `mechanism` and `admits` are those of `greet`, `pages` of `read_pages`, `calls` of `call_ray`;
    `message` is Spark's answer to a message, and `files` those to requests for SPARK_FILES, by
    path, all without authentication.
    """
    mechanism, admits = greet(host, port)
    return {
        "mechanism": mechanism,
        "admits": admits,
        "pages": dict(islice(read_pages(host, port, sends=sends), _MOST_PAGES)),
        "calls": call_ray(host, port),
        "message": ask_spark(host, port, _SPARK_MESSAGE, struct.pack(">QI", 1, 4) + b"ping"),
        "files": {
            path: answer
            for path in SPARK_FILES
            for request in [struct.pack(">I", len(path)) + path.encode()]
            if (answer := ask_spark(host, port, _SPARK_STREAM, request))
        },
    }


def greet(host: str, port: int) -> tuple[str, bool]:
    """The mechanism that a ZeroMQ server offers, and whether it admits a client of mechanism NULL.

    The mechanism is empty if the server speaks another protocol. libzmq shows its own only to a
    client that has not named another yet, so this names NULL afterwards
    (https://rfc.zeromq.org/spec/37/).
    """
    with suppress(OSError), socket.create_connection((host, port), _TIMEOUT_S) as connection:
        connection.sendall(_ZMTP_SIGNATURE + b"\x03\x01")
        greeting = _receive(connection, 64)
        if len(greeting) < 64 or (greeting[0], greeting[9]) != (0xFF, 0x7F):
            return "", False
        mechanism = greeting[12:32].rstrip(b"\0").decode(errors="replace")
        with suppress(OSError):
            connection.sendall(_ZMTP_NULL + _ZMTP_READY)
            return mechanism, b"READY" in _receive(connection, 8)
        return mechanism, False
    return "", False


def read_pages(host: str, port: int, *, sends: bool) -> Iterator[tuple[str, tuple[int, str]]]:
    """Status and text by path: of well-known paths of Ray and Spark, and of all links there.

    `sends` says whether to send the forms of these pages, and a program to Spark's master.
    """
    try:
        yield "/", _request(host, port, "/")
    except (OSError, http.client.HTTPException):
        return  # it speaks no HTTP
    waiting: list[tuple[str, str | None]] = [(path, None) for path in _PATHS]
    if sends:
        waiting.append(("/v1/submissions/create", json.dumps(_SUBMISSION)))
    seen = set(waiting)
    while waiting:
        path, body = waiting.pop(0)
        with suppress(OSError, http.client.HTTPException):
            status, text = _request(host, port, path, body)
            yield f"POST {path}" if body else path, (status, text)
            new: list[tuple[str, str | None]] = [
                (urljoin(path, link.replace("&amp;", "&")), None) for link in _LINK.findall(text)
            ]
            for action, inside in _FORM.findall(text) if sends else []:
                new.append((urljoin(path, action), urlencode(_FIELD.findall(inside))))
            waiting += (request for request in new if request not in seen and request[0][0] == "/")
            seen.update(new)


def call_ray(host: str, port: int) -> dict[str, str]:
    """The status of calls of Ray's that are made without a token, by name of the call."""
    import grpc

    answers = {}
    with grpc.insecure_channel(f"{host}:{port}") as channel:
        try:
            grpc.channel_ready_future(channel).result(_TIMEOUT_S)
        except grpc.FutureTimeoutError:
            return {}
        for name in _CALLS:
            try:
                channel.unary_unary(f"/ray.rpc.{name}")(b"", timeout=_TIMEOUT_S)
                answers[name] = "OK"
            except grpc.RpcError as error:
                answers[name] = error.code().name
    return answers


def ask_spark(host: str, port: int, kind: int, body: bytes) -> str:
    """The kind of a Spark server's answer to a frame that comes before any handshake.

    The first line of the reason follows a refusal.
    """
    answer = b""
    with suppress(OSError), socket.create_connection((host, port), _TIMEOUT_S) as connection:
        connection.sendall(struct.pack(">QB", 9 + len(body), kind) + body)
        if len(start := _receive(connection, 9)) == 9 and start[:4] == bytes(4):
            size = int.from_bytes(start[:8], "big") - 9
            answer = start[8:] + _receive(connection, min(size, _LONGEST_REASON))
    if not answer or answer[0] not in _SPARK_ANSWERS:
        return ""
    name = _SPARK_ANSWERS[answer[0]]
    reason = answer[13:].partition(b"\n")[0].decode(errors="replace")  # after two numbers
    return f"{name}: {reason}" if name == "refusal" else name


def connect_to_ray(head: str) -> dict[str, str]:
    """The error of a program that connects to Ray's head, by way; empty if it is admitted."""
    import ray
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled, without stubs

    ways: dict[str, Callable[[], object]] = {
        "ray.init": lambda: ray.init(head, log_to_driver=False, logging_level="ERROR"),
        "GcsClient": lambda: GcsClient(address=head).get_all_node_info(timeout=20),
    }
    errors = dict.fromkeys(ways, "")
    for name, connect in ways.items():
        try:
            connect()
        except Exception as error:  # noqa: BLE001  # Ray's errors have no common class
            errors[name] = f"{type(error).__name__}: {error}"
    return errors


def _receive(connection: socket.socket, size: int) -> bytes:
    """The next `size` bytes, or fewer if the server closes or says no more."""
    content = b""
    with suppress(OSError):
        while len(content) < size and (more := connection.recv(size - len(content))):
            content += more
    return content


def _request(host: str, port: int, path: str, body: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
    kind = "application/json" if body and body[0] == "{" else "application/x-www-form-urlencoded"
    try:
        connection.request("POST" if body else "GET", path, body, {"Content-Type": kind})
        answer = connection.getresponse()
        return answer.status, answer.read(_MOST_BYTES).decode(errors="replace")
    finally:
        connection.close()


if __name__ == "__main__":
    main()
