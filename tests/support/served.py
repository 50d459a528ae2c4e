"""A `downpour serve` as a process of its own, with jobs that train for real."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deploy.service.client import ServiceClient
from tests.support.cli_process import PATIENCE_S, Child
from tests.support.eventually import eventually
from tests.support.job_processes import kill_processes
from tests.support.ports import free_port

START = "from deploy.cli.app import main; main()"


class Served:
    """A `downpour serve` of its own process, which can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = ServiceClient(self.url)
        self.start()

    def start(self) -> None:
        options = ("serve", "--port", self.port, "--retry-s", 0.1, "--limit", "silent-s=3")
        home = str(self.folder / "home")
        # Its own output goes to a file: nobody reads a pipe here.
        self.child = Child(self.folder, *options, DOWNPOUR_HOME=home)
        self.client.call("GET", "/jobs", patience_s=PATIENCE_S)

    def kill(self) -> None:
        self.child.process.send_signal(signal.SIGKILL)
        self.child.process.wait()

    def get(self, job: str) -> dict[str, Any]:
        return self.client.get(f"/jobs/{job}")

    def ask(self, job: str, verb: str, **body: Any) -> dict[str, Any]:
        return self.client.post(f"/jobs/{job}:{verb}", body)

    def await_state(self, job: str, state: str, attempt: int) -> dict[str, Any]:
        def there() -> bool:
            found = self.get(job)
            return (found["state"], found["attempt"]) == (state, attempt)

        def seen() -> str:
            return f"{self.get(job)} {list(self.client.logs(job, None, 4096, follow=False))}"

        eventually(there, because=seen, within_s=PATIENCE_S)
        return self.get(job)

    def command(self, *words: object) -> tuple[int, dict[str, Any]]:
        """Run a command of the client with --json; returns its status and answer."""
        done = subprocess.run(
            [sys.executable, "-c", START, *map(str, words), "--server", self.url, "--json"],
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)

    def runner(self, job: str) -> int:
        path = self.folder / "home" / "jobs" / job / "attempt.json"
        return int(json.loads(path.read_text())["pid"])


@contextmanager
def served_in(folder: Path) -> Iterator[Served]:
    """A service with its home in this folder. Whatever it has started is ended."""
    found = Served(folder)
    try:
        yield found
    finally:
        jobs = found.client.get("/jobs")["jobs"]
        found.kill()
        kill_processes(job["id"] for job in jobs)
