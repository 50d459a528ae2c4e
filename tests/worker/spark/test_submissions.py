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


def at(port: int) -> dict[str, str | None]:
    """The settings of a session that knows the master's port."""
    return {spark_settings.SUBMISSION_PORT: str(port)}


@pytest.mark.parametrize(
    ("settings", "port"),
    [
        ({}, 6066),
        ({"spark.master.rest.port": ""}, 6066),
        ({"spark.master.rest.port": "7066"}, 7066),
    ],
)
def test_a_session_may_name_the_port(settings: dict[str, str | None], port: int) -> None:
    """Without a setting it is Spark's usual one."""
    assert spark_settings.find_submission_port(settings) == port


@pytest.mark.parametrize("given", ["0", "65536", "6066x", "-1", "٣"])
def test_a_wrong_port_is_refused(given: str) -> None:
    """The error names the setting and what a port is."""
    settings: dict[str, str | None] = {"spark.master.rest.port": given}
    with pytest.raises(BadInput, match=r"^spark\.master\.rest\.port: expected a port from 1 to"):
        spark_settings.find_submission_port(settings)


@pytest.mark.usefixtures("elsewhere")
def test_a_master_that_runs_anyones_programs_is_refused(port: int) -> None:
    """The error names the setting and the port; any master of several is enough."""
    master = "spark://127.0.0.2:7077,127.0.0.1:7077"
    with pytest.raises(BadInput) as caught:
        check_submissions(master, at(port))
    assert str(caught.value) == (
        f"Spark at {master}: expected spark.master.rest.enabled=false in the master's "
        "spark-defaults.conf where shards are open to other hosts (docs/explanation/security.md), "
        f"or give --plaintext, got a master that runs anyone's programs, submitted to port {port}"
    )


@pytest.mark.usefixtures("elsewhere")
def test_other_servers_are_accepted(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a closed port nor another program's is a fault, and YARN has no such port."""
    check_submissions("yarn", at(port))
    check_submissions("spark://127.0.0.1:7077", at(free_port()))
    monkeypatch.setattr(_Master, "answer", b"<html>")
    check_submissions("spark://127.0.0.1:7077", at(port))


def test_a_master_on_this_host_is_accepted(port: int) -> None:
    """Strangers do not reach it."""
    check_submissions("spark://127.0.0.1:7077", at(port))
