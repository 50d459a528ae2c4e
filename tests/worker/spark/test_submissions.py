"""A master that takes programs over HTTP, which Spark does not guard by its secret."""

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from shards.errors import BadInput
from tests.support.ports import free_port
from worker.spark import settings as spark_settings
from worker.spark.tasks import check_submissions


class _Master(BaseHTTPRequestHandler):
    """The answer of Spark 4.3 to a question for a program that it does not have."""

    answer = b'{"action": "SubmissionStatusResponse", "serverSparkVersion": "4.3.0"}'

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.answer)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Print nothing."""


@pytest.fixture
def port() -> Iterator[int]:
    """The port of such a master on loopback."""
    with HTTPServer(("127.0.0.1", 0), _Master) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have loopback count as another host."""
    monkeypatch.setattr(spark_settings, "stays_here", lambda _: False)


@pytest.mark.usefixtures("elsewhere")
def test_a_master_that_runs_anyones_programs_is_refused(port: int) -> None:
    """The error names the setting and the port; any master of several is enough."""
    master = "spark://127.0.0.2:7077,127.0.0.1:7077"
    with pytest.raises(BadInput) as caught:
        check_submissions(master, port)
    assert str(caught.value) == (
        f"Spark at {master}: expected spark.master.rest.enabled=false in the master's "
        "spark-defaults.conf where shards are open to other hosts (docs/explanation/security.md), "
        f"or give --plaintext, got a master that runs anyone's programs, submitted to port {port}"
    )


@pytest.mark.usefixtures("elsewhere")
def test_other_servers_are_accepted(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a closed port nor another program's is a fault, and YARN has no such port."""
    check_submissions("yarn", port)
    check_submissions("spark://127.0.0.1:7077", free_port())
    monkeypatch.setattr(_Master, "answer", b"<html>")
    check_submissions("spark://127.0.0.1:7077", port)


def test_a_master_on_this_host_is_accepted(port: int) -> None:
    """Strangers do not reach it."""
    check_submissions("spark://127.0.0.1:7077", port)
