"""Whether a server answers, and whether one could listen."""

import select
import socket

import pytest

from ps.transport.addresses import check_listen, check_reachable
from shards.errors import BadInput
from tests.support.eventually import eventually


def test_first_that_answers() -> None:
    """A dead address is skipped for a living one; the result is the local IP address."""
    with socket.socket() as dead, socket.create_server(("127.0.0.1", 0)) as living:
        dead.bind(("127.0.0.1", 0))
        addresses = [dead.getsockname(), living.getsockname()]
        assert check_reachable("two of them", addresses) == "127.0.0.1"


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        (("127.0.0.1", 1), "Connection refused"),
        (("no such host.invalid", 80), ".+"),
    ],
)
def test_nobody_there(address: tuple[str, int], problem: str) -> None:
    """The error is one line that names the server and the cause."""
    line = f"^the thing: expected a server that accepts connections, got: {problem}$"
    with pytest.raises(BadInput, match=line):
        check_reachable("the thing", [address])


def test_silence_is_bounded() -> None:
    """A listener whose queue is full never answers; the wait for it ends."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        eventually(lambda: select.select([], fillers, [], 0)[1], because="the queue is full")
        with pytest.raises(BadInput, match=r"no answer in 0\.2 s"):
            check_reachable("the thing", [full.getsockname()], timeout_s=0.2)
        for filler in fillers:
            filler.close()


def test_a_free_port_passes_and_is_given_back() -> None:
    """A free port raises nothing, and is free again afterwards."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    for bind in ("127.0.0.1", "localhost", "0.0.0.0"):
        check_listen(bind, [port])
        check_listen(bind, [0, 0])
        check_listen(bind, [])


@pytest.mark.parametrize("bind", ["xyz.example", "256.1.1.1", "192.0.2.1", "", "a b"])
def test_a_host_that_is_not_this_machine_is_named(bind: str) -> None:
    """An address of another machine is quoted in one line, whatever the ports."""
    line = f"^expected an IPv4 address of this machine, or 0.0.0.0 for all, got {bind!r}$"
    for ports in ([], [0], [7000, 7001]):
        with pytest.raises(BadInput, match=line):
            check_listen(bind, ports)


def test_a_port_in_use_is_named() -> None:
    """The one port of several that another program holds is named with its host."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = f"^127.0.0.1:{port}: expected a free port, got one that is already in use$"
        with pytest.raises(BadInput, match=line):
            check_listen("127.0.0.1", [0, port])


@pytest.mark.parametrize("port", [-1, 65_536, 2**40])
def test_a_port_that_none_can_be_is_named(port: int) -> None:
    """An invalid port number is refused; ZeroMQ would take it modulo 65,536."""
    with pytest.raises(BadInput, match=f"^expected ports from 0 to 65535, got {port}$"):
        check_listen("127.0.0.1", [port])
