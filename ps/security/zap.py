"""The porter: libzmq asks here, in each CURVE handshake, whether the key that was proved may enter.

This is ZAP (rfc.zeromq.org/spec/27). It is not optional: a CURVE server that nobody answers for
lets in every key there is. libzmq asks over an inproc socket of the same context, which has to be
bound before the server's own; the server's loop answers, so the register has one thread.

A key may be proved a moment before it is made known, by another way. A patient porter lets the
question of such a key wait until it is; libzmq breaks off the handshake of one that waits too long,
and whoever it was comes again.
"""

import contextlib
from typing import Protocol

import zmq

from ps.security.keys import ZAP_DOMAIN

_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_WAITING = 64  # questions that a patient porter remembers


class KeyPolicy(Protocol):
    """What knows the keys that are let in."""

    def admits(self, key: str) -> bool: ...


class ZapAuthenticator:
    """Answers for a context, from a gate; `socket` is to be polled and `answer`ed."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", gate: KeyPolicy, *, patient: bool = False
    ) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ENDPOINT)
        self._gate = gate
        self._patient = patient
        self._waiting: list[tuple[bytes, bytes, str]] = []
        self.refused = 0

    def answer(self) -> None:
        """Answer all that libzmq asks at this moment."""
        with contextlib.suppress(zmq.Again):
            while True:
                to, _, version, request, domain, *rest = self.socket.recv_multipart(zmq.NOBLOCK)
                mechanism, credentials = rest[2], rest[3:]
                known = (version, domain, mechanism) == (_VERSION, ZAP_DOMAIN, b"CURVE")
                key = credentials[0].hex() if known and len(credentials) == 1 else ""
                admitted = bool(key) and self._gate.admits(key)
                if key and not admitted and self._patient:
                    self._waiting = [*self._waiting[1 - _WAITING :], (to, request, key)]
                    continue
                self.refused += not admitted
                self._reply(to, request, key if admitted else "")

    def look_again(self) -> None:
        """Let in who waits and is known by now; call it when keys were made known."""
        waiting, self._waiting = self._waiting, []
        for to, request, key in waiting:
            if self._gate.admits(key):
                self._reply(to, request, key)
            else:
                self._waiting.append((to, request, key))

    def _reply(self, to: bytes, request: bytes, key: str) -> None:
        status = (b"200", b"OK", key.encode()) if key else (b"400", b"no such key", b"")
        self.socket.send_multipart([to, b"", _VERSION, request, *status, b""])
