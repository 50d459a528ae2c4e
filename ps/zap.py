"""The porter: libzmq asks here, in each CURVE handshake, whether the key that was proved may enter.

This is ZAP (rfc.zeromq.org/spec/27). It is not optional: a CURVE server that nobody answers for
lets in every key there is. libzmq asks over an inproc socket of the same context, which has to be
bound before the server's own; the server's loop answers, so the register has one thread.
"""

import contextlib

import zmq

from ps.admission import Register
from ps.keys import ZAP_DOMAIN

_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"


class Porter:
    """Answers for a context, from a register; `socket` is to be polled and `answer`ed."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", register: Register) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ENDPOINT)
        self._register = register
        self.refused = 0

    def answer(self) -> None:
        """Answer all that libzmq asks at this moment."""
        with contextlib.suppress(zmq.Again):
            while True:
                to, _, version, request, domain, *rest = self.socket.recv_multipart(zmq.NOBLOCK)
                mechanism, credentials = rest[2], rest[3:]
                known = (version, domain, mechanism) == (_VERSION, ZAP_DOMAIN, b"CURVE")
                key = credentials[0].hex() if known and len(credentials) == 1 else ""
                admitted = self._register.admits(key)
                self.refused += not admitted
                status = (
                    (b"200", b"OK", key.encode()) if admitted else (b"400", b"no such key", b"")
                )
                self.socket.send_multipart([to, b"", _VERSION, request, *status, b""])
