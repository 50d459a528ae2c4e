"""The address that a server's clients are given, which is not always the one that it binds.

A server that binds 0.0.0.0 listens on every address of its host, and one of these must be chosen. A
server in a container, or behind NAT, is reached by an address that its host does not have. And
127.0.0.1 leads every client to its own host, so it is never given to another one.

Each server's own host chooses, in this order: what the job was started with (`--advertise`); the
variable DOWNPOUR_ADVERTISE, which may differ from host to host; the bound address, unless that is
0.0.0.0; the address by which Ray knows the host; the address from which the host reaches the peer
of the job, such as Spark's master; the one from which it reaches the internet.
"""

import os
import re
import socket
from pathlib import Path

import msgspec

from ps.transport.addresses import HOST_NAME, LAST_PORT, on_this_host
from shards import argument_checks
from shards.errors import BadInput

VARIABLE = "DOWNPOUR_ADVERTISE"
_EVERY_ADDRESS = "0.0.0.0"
_ELSEWHERE = "192.0.2.1"  # reserved for documentation, so it is on no host's own network
_ENDPOINT = re.compile(r"((?:tcp|curve)://(?:[0-9a-f]{64}@)?)(.+):(\d+)")
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9])?")
_EXPECTED = "HOST or HOST:PORT, as other hosts reach it"


class Advertised(msgspec.Struct, frozen=True):
    """The launcher's part of the choice: see the order above.

    `host`, and `port` if a NAT changes that too, are what the job was started with. `peer` is a
    host that the clients are near. `network` is the launcher's `network_id`.
    """

    host: str | None = None
    port: int | None = None
    peer: str | None = None
    network: str = ""


def parse_advertised(label: str, text: object) -> tuple[str, int | None]:
    """The host and the port, if any, of HOST or HOST:PORT; raises BadInput naming `label`."""
    given = argument_checks.text(label, text, _EXPECTED)
    host, colon, port = given.partition(":")
    is_port = not colon or (port.isdecimal() and len(port) <= 5 and 0 < int(port) <= LAST_PORT)
    if not _HOST.fullmatch(host) or host == _EVERY_ADDRESS or not is_port:
        raise BadInput(label, expected=_EXPECTED, got=f"{given[:80]!r}")
    return host, int(port) if colon else None


def network_id() -> str:
    """An id that two processes share if 127.0.0.1 is the same to both.

    Containers and network namespaces of one machine have different ones.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return HOST_NAME


def address_towards(host: str) -> str | None:
    """The address from which this host reaches `host`; None if it has no route there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # connecting a datagram socket sends nothing
        except OSError:
            return None
        return str(probe.getsockname()[0])


def own_address(peer: str | None = None) -> str | None:
    """This host's address as others see it, best the one towards `peer`; None if it has none."""
    for host in (peer, _ELSEWHERE):
        address = address_towards(host) if host else None
        if address is not None and not on_this_host(address):
            return address
    return None


def advertise(bound: str, advertised: Advertised, node: str | None = None) -> str:
    """The endpoint that clients are given for the one that a server has `bound`.

    `node` is the address by which Ray knows this host. Raises BadInput if there is none but
    127.0.0.1, and the launcher is on another host or the server is meant for others.
    """
    match = _ENDPOINT.fullmatch(bound)
    if match is None:  # a Unix socket
        return bound
    prefix, host, port = match.groups()
    host = advertised.host or _address_of(host, advertised.peer, node)
    if on_this_host(host) and advertised.network not in ("", network_id()):
        raise BadInput(
            f"listening on {host} of {HOST_NAME}",
            expected="an address that this job's driver, on another host, can reach",
            hint="give --bind 0.0.0.0, or --advertise",
        )
    return f"{prefix}{host}:{advertised.port or port}"


def check_advertised(host: str, advertised: Advertised) -> None:
    """Raise BadInput if a server of this host that binds `host` would have no address to give."""
    advertise(f"tcp://{host}:1", advertised)


def _address_of(host: str, peer: str | None, node: str | None) -> str:
    """The address to give for a server that has bound `host`."""
    if on_this_host(host):
        return host
    if set_here := os.environ.get(VARIABLE):
        return parse_advertised(VARIABLE, set_here)[0]
    if host != _EVERY_ADDRESS:
        return host
    address = node if node is not None and not on_this_host(node) else own_address(peer)
    if address is None:
        raise BadInput(
            f"listening on every address of {HOST_NAME}",
            expected="one that other hosts can reach",
            got="127.0.0.1 only, as there is no default route",
            hint=f"give --bind ADDRESS, or --advertise, or set {VARIABLE} on that host",
        )
    return address
