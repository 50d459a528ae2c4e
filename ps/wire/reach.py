"""Whether a server is there at all, who could reach one, and by which address this machine is seen.

Asked before a library that would wait a minute to say no.
"""

import socket
from collections.abc import Sequence
from ipaddress import ip_address

from shards.errors import BadInput

REACH_S = 10.0
_EVERY_ADDRESS = "0.0.0.0"


def reach(name: str, addresses: Sequence[tuple[str, int]], timeout_s: float = REACH_S) -> str:
    """The local IP address from which the first answering one of `addresses` was reached.

    `name` stands for the server in the error. `timeout_s` is for each address. Raises BadInput
    when none accepts a TCP connection.
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


def on_this_host(host: str) -> bool:
    """Whether only this host's own processes reach what listens on `host`.

    A name may come to mean anything, so none counts but localhost.
    """
    try:
        return host == "localhost" or ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_private(endpoint: str) -> bool:
    """Whether only this host's processes reach what listens at a ZeroMQ address."""
    kind, _, rest = endpoint.partition("://")
    return kind == "ipc" or on_this_host(rest.rpartition(":")[0])


def own_address() -> str:
    """This machine's IPv4 address towards others; 127.0.0.1 when it has no way to any."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Of a range kept for documentation; connecting a datagram socket sends nothing.
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def told_as(endpoint: str, own_address: str) -> str:
    """The endpoint as others reach it: every address is this host's own."""
    return endpoint.replace(_EVERY_ADDRESS, own_address)
