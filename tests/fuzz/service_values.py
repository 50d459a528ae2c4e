"""Wrong values in every field of a submission, an adoption and an upload: none fails the service.

    python -m tests.fuzz.service_values [REQUESTS] [SEED]

Schemathesis (service_api.py) makes requests that fit the document; here a good request gets one or
two values that fit no option. Each answer must be a 2xx or 4xx. The exit status is 1 for another.
"""

import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from deploy.run.settings import TrainSettings
from deploy.service.app import ServeOptions, Service, application
from deploy.service.database_tables import DATABASE, open_database
from tests.support import tiny_job
from tests.support.service_in_process import TestClient
from worker.job.option_fields import list_options

VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1.5, 1e308, 2**70, "", " ", "inf", "nan", "-0", "[]", [], [[]], {}, {"a": 1},
    "\0", "/tmp/\0", "a" * 300, "/" + "b" * 300, "/x" * 3000, "ü" * 200, "/" + "ü" * 200,
    "\ud800", "\x1b[31m", "\u202e", "\u009b", "upload:x", "upload:" + "0" * 32 + "/a", "upload:",
    "file://", "file:///\0", "file:///" + "c" * 300, "s3://", "s3://b/" + "d" * 300, "local://x",
    "/proc/self/mem", "/dev/zero", "/root", "/nowhere@1", "@", "@1", "/@" + "9" * 30, "..", "~",
    "/tmp@" + "1" * 18, "hdfs://h", "http://[", "//", "\n", "1\n2",
)  # fmt: skip


def main(requests: int, seed: int) -> int:
    """Send the requests; returns the number of answers that are no 2xx or 4xx."""
    dice, statuses, wrong = random.Random(seed), Counter[int](), 0
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        home.mkdir(mode=0o700)
        service = Service(ServeOptions(home=home, slots=4), open_database(home / DATABASE))
        service.supervisor.reconcile = lambda: None  # type: ignore[method-assign]
        solver = str(tiny_job.write_job(Path(folder)))
        with TestClient(
            application(service), base_url="http://127.0.0.1", raise_server_exceptions=False
        ) as http:
            for _ in range(requests):
                method, path, body = _request(dice, solver)
                answer = http.request(method, f"/api/v1{path}", **body)
                statuses[answer.status_code] += 1
                if answer.status_code >= 500:
                    wrong += 1
                    print(f"{method} {path} {body!r:.300}: {answer.status_code} {answer.text:.300}")
    print(f"seed {seed}: {dict(sorted(statuses.items()))}")
    return wrong


def _request(dice: random.Random, solver: str) -> tuple[str, str, dict[str, Any]]:
    """A request with one or two values of another kind than its fields have."""

    def value() -> Any:
        return dice.choice(VALUES)

    kind = dice.random()
    if kind < 0.6:
        settings: dict[str, Any] = {"solver": solver, "workers": 2}
        for name in dice.sample(sorted(list_options(TrainSettings)), dice.choice((1, 1, 2))):
            settings[name] = value()
        return "POST", "/jobs", _json({"settings": settings})
    if kind < 0.75:
        field = dice.choice(("name", "project", "labels", "priority", "resume", "settings"))
        given = {"x": value()} if field == "labels" and dice.random() < 0.5 else value()
        body: dict[str, Any] = {"settings": {"solver": solver}, field: given}
        return "POST", "/jobs", _json(body)
    if kind < 0.85:
        body = {"run": value(), "name": dice.choice((None, value()))}
        return "POST", "/jobs:adopt", _json(body)
    if kind < 0.95:
        file = {
            "path": "a/b",
            "bytes": 3,
            "sha256": "0" * 64,
            dice.choice(("path", "bytes")): value(),
        }
        return "POST", "/uploads", _json({"files": [file]})
    query = {dice.choice(("q", "label", "project", "cursor", "limit", "state")): str(value())}
    query = {name: text.encode(errors="replace").decode() for name, text in query.items()}
    return "GET", "/jobs", {"params": query}


def _json(body: dict[str, Any]) -> dict[str, Any]:
    """The body of a request as JSON in ASCII, which can have half a surrogate pair."""
    return {"content": json.dumps(body), "headers": {"Content-Type": "application/json"}}


if __name__ == "__main__":
    sys.exit(
        main(
            int(sys.argv[1]) if len(sys.argv) > 1 else 2000,
            int(sys.argv[2]) if len(sys.argv) > 2 else 1,
        )
        > 0
    )
