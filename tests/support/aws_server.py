"""The server of moto, which answers as AWS does, and keeps all in memory."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

from tests.support.eventually import eventually
from tests.support.ports import free_port
from tests.support.target_tools import tool

KEY, SECRET, REGION = "a-key", "a-secret", "eu-central-1"


@contextmanager
def aws_server(log: Path) -> Iterator[str]:
    """A server on loopback while the context lasts; gives HOST:PORT. Skips the test without moto.

    Its output goes to `log`.
    """
    program, port = tool("moto_server"), free_port()
    with (
        log.open("w") as output,
        subprocess.Popen(
            [program, "--host", "127.0.0.1", "--port", str(port)],
            stdout=output,
            stderr=subprocess.STDOUT,
        ) as server,
    ):
        try:
            eventually(lambda: _answers(port), because=lambda: f"moto answers: {log.read_text()}")
            yield f"127.0.0.1:{port}"
        finally:
            server.kill()


def aws_environ(address: str) -> dict[str, str]:
    """The variables with which boto3 asks this server."""
    return os.environ | {
        "AWS_ENDPOINT_URL": f"http://{address}",
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": REGION,
    }


def _answers(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/moto-api/data.json", timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
