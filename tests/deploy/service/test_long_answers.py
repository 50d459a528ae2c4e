"""Answers that are long: in pieces, few at a time, compressed for a client that asks for it."""

import socket
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from deploy.service.long_answers import CHUNK_BYTES, MOST_OF_ONE
from tests.support.eventually import eventually
from tests.support.service_in_process import Running, listening

MIB = 1 << 20


def log_of(running: Running, size: int) -> str:
    """The path of the route of a log with this number of bytes."""
    job = running.submit("train", settings={"solver": str(running.solver), "workers": 1})
    folder = running.service.store.folder(job) / "logs"
    with (folder / "shard-0.log").open("wb") as file:
        for number in range(size // 16):
            file.write(b"line %010d\n" % number)
    return f"/api/v1/jobs/{job}/logs?part=shard-0"


def unread(url: str, path: str, count: int) -> list[socket.socket]:
    """Connections that request `path` and read nothing of the answers."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    opened = []
    for _ in range(count):
        made = socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)  # the kernel keeps little
        made.connect((parts.hostname, parts.port))
        made.sendall(f"GET {path} HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode())
        opened.append(made)
    return opened


def test_clients_that_never_read_hold_few_answers(service: Running) -> None:
    """One sender has some long answers at a time, short ones always; a close makes room."""
    path = log_of(service, 8 * MIB)
    with listening(service) as url, httpx.Client(base_url=url) as http:
        opened = unread(url, f"{path}&tail={8 * MIB}", MOST_OF_ONE)
        for each in opened:
            assert each.recv(15) == b"HTTP/1.1 200 OK"
        answer = http.get(f"{path}&tail={8 * MIB}")
        assert (answer.status_code, answer.json()["code"]) == (429, "busy")
        assert answer.headers["retry-after"] == "5"
        short = http.get(f"{path}&tail={CHUNK_BYTES}")
        assert (short.status_code, len(short.content)) == (200, CHUNK_BYTES)
        assert http.get("/").status_code == 200
        for each in opened:
            each.close()
        eventually(
            lambda: http.get(f"{path}&tail={8 * MIB}").status_code == 200,
            because="the connections are closed",
        )
        assert len(http.get(f"{path}&tail={8 * MIB}").content) == 8 * MIB


def test_a_long_log_arrives_whole(service: Running) -> None:
    """Every byte once, in order, from the end or from a byte on; the header says where it ends."""
    path = log_of(service, 3 * MIB)
    whole = service.http.get(f"{path}&tail={16 * MIB}")
    lines = whole.text.splitlines()
    assert lines == [f"line {number:010d}" for number in range(3 * MIB // 16)]
    assert whole.headers["x-log-next"] == str(3 * MIB)
    rest = service.http.get(f"{path}&after={MIB}")
    assert rest.content == whole.content[MIB:]
    assert service.http.get(f"{path}&after={99 * MIB}").content == b""


def test_what_shrinks_is_compressed(service: Running, tmp_path: Path) -> None:
    """Pages, scripts, JSON and logs are, for a client that asks; a stream and weights are not."""
    path = log_of(service, MIB)
    job = path.split("/")[4]
    run = Path(service.get(job)["settings"]["out"])
    run.mkdir(exist_ok=True)
    (run / "weights.safetensors").write_bytes(b"0" * 5000)
    for route in ("/", f"/jobs/{job}", "/static/page.js", f"/api/v1/jobs/{job}", path):
        answer = service.http.get(route, headers={"Accept-Encoding": "gzip"})
        assert answer.headers.get("content-encoding") == "gzip", route
        plain = service.http.get(route, headers={"Accept-Encoding": "identity"})
        assert "content-encoding" not in plain.headers
        if "static" in route or "logs" in route:
            assert answer.content == plain.content
    weights = service.http.get(f"/api/v1/jobs/{job}/artefacts/weights.safetensors")
    assert "content-encoding" not in weights.headers
    with (
        listening(service) as url,
        httpx.stream("GET", f"{url}/api/v1/stream?after=0") as answer,
    ):
        assert "content-encoding" not in answer.headers
        assert next(answer.iter_lines()) is not None
