"""TCP ports that no other test of this machine is given."""

import socket

# The ports that were given out, each held by a name in Linux's abstract space of Unix sockets, so
# that another process of tests is given others, and no port stays taken when this one ends.
_GIVEN: list[socket.socket] = []


def free_port() -> int:
    """A TCP port that nobody listened on a moment ago, below the ones that Ray gives out.

    None is given twice while we live: whoever was given one may not listen on it yet.
    """
    for port in range(7300, 9900):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0downpour-test-port-{port}")
        except OSError:
            claim.close()
            continue
        _GIVEN.append(claim)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
    raise AssertionError("no free port from 7300 to 9900")
