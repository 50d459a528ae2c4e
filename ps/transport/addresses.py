"""Reachability checks and local address discovery.

The checks run before a call to a library that would take a minute to report the failure.
"""

import errno
import re
import socket
from collections.abc import Sequence
from ipaddress import ip_address

import zmq

from ps.socket_context import SocketContext
from shards.errors import BadInput, NoServer

REACH_S = 10.0
LAST_PORT = 65_535
_RANGE = re.compile(r"(tcp://.+):(\d+)-(\d+)")


def check_reachable(
    name: str, addresses: Sequence[tuple[str, int]], timeout_s: float = REACH_S
) -> str:
    """The local IP address from which the first of `addresses` to answer was reached.

    `name` is the server's name in errors. `timeout_s` applies to each address. Raises NoServer when
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
    raise NoServer(f"{name}: expected a server that accepts connections, got: {problem}")


def check_listen(bind: str, ports: Sequence[int]) -> None:
    """Raise BadInput unless a server could listen on the host `bind` at each of `ports` now.

    The ports are bound by ZeroMQ, as a shard binds them, and released before this returns; 0 means
    any free port. Without ports only the host is checked.
    """
    for port in ports:
        if not 0 <= port <= LAST_PORT:
            raise BadInput(f"expected ports from 0 to {LAST_PORT}, got {port}")
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


def bind_socket(socket: "zmq.Socket[bytes]", address: str) -> str:
    """Bind a ZeroMQ address, with a range of ports such as 7500-7599 the first that is free.

    Returns the endpoint; raises zmq.ZMQError.
    """
    ports = _RANGE.fullmatch(address)
    if ports is None:
        socket.bind(address)
    else:
        first, last = int(ports[2]), int(ports[3])
        for port in range(first, last + 1):
            try:
                socket.bind(f"{ports[1]}:{port}")
                break
            except zmq.ZMQError as error:
                if error.errno != errno.EADDRINUSE or port == last:
                    raise
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
