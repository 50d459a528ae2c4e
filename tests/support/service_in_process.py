"""A training service in the process of a test, and the client that speaks to it."""

import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from deploy.service.app import Service
from tests.support.eventually import eventually

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it would rather have another client than httpx
    from starlette.testclient import TestClient

__all__ = ["STUB", "CutLine", "Running", "Start", "TestClient", "listening"]

STUB = Path(__file__).parent / "stub_runner.py"


class Running:
    """A service that runs, with what tests ask of it."""

    def __init__(self, service: Service, http: TestClient, solver: Path) -> None:
        self.service = service
        self.http = http
        self.solver = solver

    def submit(self, stub: str = "succeed", **more: Any) -> str:
        """Submit a job whose runner does as `stub` says; returns its id."""
        body = {"settings": {"solver": str(self.solver)}, "labels": {"stub": stub}, **more}
        answer = self.http.post("/api/v1/jobs", json=body)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def get(self, job: str) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get(f"/api/v1/jobs/{job}").json()
        return found

    def ask(self, job: str, verb: str, **body: Any) -> httpx.Response:
        answer: httpx.Response = self.http.post(f"/api/v1/jobs/{job}:{verb}", json=body)
        return answer

    def await_state(self, job: str, *states: str) -> dict[str, Any]:
        eventually(lambda: self.get(job)["state"] in states, because=lambda: str(self.get(job)))
        return self.get(job)

    def await_attempt(self, job: str, number: int) -> None:
        """Return when the job is in its attempt `number`."""
        eventually(lambda: self.get(job)["attempt"] == number, because=lambda: str(self.get(job)))


Start = Callable[..., AbstractContextManager[Running]]


@contextmanager
def listening(running: Running) -> Iterator[str]:
    """The URL of a server for this service, for clients that need a connection."""
    server = uvicorn.Server(uvicorn.Config(running.http.app, lifespan="off", log_level="error"))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()  # before the server runs: the first request must find it
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


class CutLine:
    """A line to a server of this machine that can be cut, and spliced again at the same port."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._open: list[socket.socket] = []
        self._listener: socket.socket | None = None
        self.port = 0
        self.splice()

    def splice(self) -> None:
        """Accept connections, and carry their bytes both ways."""
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def cut(self) -> None:
        """End every connection, and refuse new ones."""
        assert self._listener is not None
        for each in (self._listener, *self._open):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._open.clear()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
                self._open += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=pair, daemon=True).start()

    @staticmethod
    def _carry(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
