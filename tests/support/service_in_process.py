"""A training service in the process of a test, and the client that speaks to it."""

import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from deploy.service.app import Service
from tests.support.eventually import eventually

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it would rather have another client than httpx
    from starlette.testclient import TestClient

__all__ = ["STUB", "Running", "Start", "TestClient", "listening"]

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
