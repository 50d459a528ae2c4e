"""Asking whether anybody listens."""

import socket
import time

import pytest

from ps.wire.reach import reach
from shards.errors import BadInput


def test_first_that_answers() -> None:
    """A dead address is passed over for a living one; what comes back is the near end's IP."""
    with socket.socket() as dead, socket.create_server(("127.0.0.1", 0)) as living:
        dead.bind(("127.0.0.1", 0))
        addresses = [dead.getsockname(), living.getsockname()]
        assert reach("two of them", addresses) == "127.0.0.1"


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        (("127.0.0.1", 1), "Connection refused"),
        (("no such host.invalid", 80), ".+"),
    ],
)
def test_nobody_there(address: tuple[str, int], problem: str) -> None:
    """The error is one line that names the server and what went wrong."""
    line = f"^the thing: expected a server that accepts connections, got: {problem}$"
    with pytest.raises(BadInput, match=line):
        reach("the thing", [address])


def test_silence_is_bounded() -> None:
    """A listener whose queue is full never answers; the wait for it ends."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        time.sleep(0.1)
        with pytest.raises(BadInput, match=r"no answer in 0\.2 s"):
            reach("the thing", [full.getsockname()], timeout_s=0.2)
        for filler in fillers:
            filler.close()
