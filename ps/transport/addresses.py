"""Reachability checks and local address discovery.

The checks run before a call to a library that would take a minute to report the failure.
"""

import errno
import socket
from collections.abc import Sequence
from ipaddress import ip_address

import zmq

from ps.socket_context import SocketContext
from shards.errors import BadInput

REACH_S = 10.0
_EVERY_ADDRESS = "0.0.0.0"
_LAST_PORT = 65_535


def check_reachable(
    name: str, addresses: Sequence[tuple[str, int]], timeout_s: float = REACH_S
) -> str:
    """The local IP address from which the first of `addresses` to answer was reached.

    `name` is the server's name in errors. `timeout_s` applies to each address. Raises BadInput when
    none accepts a TCP connection.
    """
    problem = "no address"
    for host, port in addresses:
        try:
            with socket.create_connection((host, port), timeout_s) as connection:
                return str(connection.getsockname()[0])
        except TimeoutError:
            problem = f"no answer in {timeout_s:g} s"
        except OSError as error:
            problem = error.strerror or str(error)
    raise BadInput(f"{name}: expected a server that accepts connections, got: {problem}")


def check_listen(bind: str, ports: Sequence[int]) -> None:
    """Raise BadInput unless a server could listen on the host `bind` at each of `ports` now.

    The ports are bound by ZeroMQ, as a shard binds them, and released before this returns; 0 means
    any free port. Without ports only the host is checked.
    """
    for port in ports:
        if not 0 <= port <= _LAST_PORT:
            raise BadInput(f"expected ports from 0 to {_LAST_PORT}, got {port}")
    with SocketContext() as context:
        for port in ports or (0,):
            with context.socket(zmq.ROUTER) as trial:
                try:
                    trial.bind(f"tcp://{bind}:{port or '*'}")
                except zmq.ZMQError as error:
                    raise BadInput(_why_not(bind, port, error.errno or 0)) from None


def numeric(argument: str, host: str) -> str:
    """A host to listen on, as ZeroMQ takes it: names are resolved. Raises BadInput."""
    try:
        ip_address(host.strip("[]"))
    except ValueError:
        if host in {name for _, name in socket.if_nameindex()}:
            return host
        try:
            return socket.gethostbyname(host)
        except OSError:
            raise BadInput(
                argument,
                expected="an address of this machine, or 0.0.0.0 for all",
                got=f"{host!r}, which does not resolve",
            ) from None
    return host


def _why_not(bind: str, port: int, number: int) -> str:
    match number:
        case errno.EADDRINUSE:
            return f"{bind}:{port}: expected a free port, got one that is already in use"
        case errno.EACCES:
            return f"{bind}:{port}: expected a port that this user may listen on, got one reserved"
        case errno.ENODEV | errno.EADDRNOTAVAIL | errno.EINVAL:
            return f"expected an IPv4 address of this machine, or 0.0.0.0 for all, got {bind!r}"
    return f"{bind}:{port}: cannot listen here: {zmq.strerror(number)}"


HOST_NAME = socket.gethostname()[:128]
"""The name of this host, as shown to others."""


def on_this_host(host: str) -> bool:
    """Return whether only this host's own processes can reach a server that listens on `host`.

    The only name that counts is localhost, because any other may resolve to any address.
    """
    try:
        return host == "localhost" or ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_private(endpoint: str) -> bool:
    """Return whether only this host's processes can reach a server at this ZeroMQ address."""
    kind, _, rest = endpoint.partition("://")
    return kind == "ipc" or on_this_host(rest.rpartition(":")[0])


def local_address() -> str:
    """This machine's IPv4 address as others see it; 127.0.0.1 when it has no route to others."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # A range reserved for documentation; connecting a datagram socket sends nothing.
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def public_endpoint(endpoint: str, local_address: str) -> str:
    """The endpoint as others reach it: 0.0.0.0 is replaced by this host's own address."""
    return endpoint.replace(_EVERY_ADDRESS, local_address)
