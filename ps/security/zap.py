"""The ZAP handler: decides in each CURVE handshake whether to admit the key that was proved.

This is ZAP (rfc.zeromq.org/spec/27). It is not optional: a CURVE server without a ZAP handler
admits every key. libzmq sends its requests over an inproc socket of the same context, which must be
bound before the server's own socket. The server's loop answers them, so the registry is used by one
thread only.

A key may be proved a moment before it is registered over another connection. A patient handler
delays the answer for such a key until it is registered. If that takes too long, libzmq breaks off
the handshake, and the peer reconnects.
"""

import contextlib
from typing import Protocol

import zmq

from ps.security.keys import ZAP_DOMAIN

_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_WAITING = 64  # most requests that a patient handler keeps waiting


class KeyPolicy(Protocol):
    """Knows which keys to admit."""

    def admits(self, key: str) -> bool: ...


class ZapAuthenticator:
    """Answers a context's ZAP requests from a `KeyPolicy`; poll `socket`, then call `answer`."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", policy: KeyPolicy, *, patient: bool = False
    ) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ENDPOINT)
        self._policy = policy
        self._patient = patient
        self._waiting: list[tuple[bytes, bytes, str]] = []
        self.refused = 0

    def answer(self) -> None:
        """Answer all requests that are waiting."""
        with contextlib.suppress(zmq.Again):
            while True:
                to, _, version, request, domain, *rest = self.socket.recv_multipart(zmq.NOBLOCK)
                mechanism, credentials = rest[2], rest[3:]
                known = (version, domain, mechanism) == (_VERSION, ZAP_DOMAIN, b"CURVE")
                key = credentials[0].hex() if known and len(credentials) == 1 else ""
                admitted = bool(key) and self._policy.admits(key)
                if key and not admitted and self._patient:
                    self._waiting = [*self._waiting[1 - _WAITING :], (to, request, key)]
                    continue
                self.refused += not admitted
                self._reply(to, request, key if admitted else "")

    def look_again(self) -> None:
        """Admit waiting keys that are known by now; call it when keys were registered."""
        waiting, self._waiting = self._waiting, []
        for to, request, key in waiting:
            if self._policy.admits(key):
                self._reply(to, request, key)
            else:
                self._waiting.append((to, request, key))

    def _reply(self, to: bytes, request: bytes, key: str) -> None:
        status = (b"200", b"OK", key.encode()) if key else (b"400", b"no such key", b"")
        self.socket.send_multipart([to, b"", _VERSION, request, *status, b""])
