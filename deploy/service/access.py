"""Which requests the service accepts on loopback, where it asks for no token.

A browser would send a request to loopback for any page that a user has open. So a request must name
this machine in its header Host, which stops DNS rebinding, and must not come from another site: a
browser says so in Origin and Sec-Fetch-Site. Bodies are JSON, and have a largest size.
"""

import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.service.problems import Problem
from shards.errors import BadInput

MOST_BODY_BYTES = 1 << 20
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    b"content-security-policy": POLICY.encode(),
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
}
_UNSAFE = {"POST", "PUT", "PATCH", "DELETE"}


def check_loopback(host: str) -> None:
    """Raise BadInput for an address that other machines can reach: the service has no tokens."""
    if not is_loopback(host):
        raise BadInput(
            f"--host: expected a loopback address, got {host}; other addresses need TLS and tokens,"
            " which this version lacks: reach it through an SSH tunnel"
        )


def is_loopback(host: str) -> bool:
    """Whether a host name means this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class LoopbackGuard:
    """ASGI middleware that refuses foreign requests and adds the headers of every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = {name for name, _ in message["headers"]}
                more = [each for each in _HEADERS.items() if each[0] not in own]
                message["headers"] = [*message["headers"], *more]
            await send(message)

        problem = _refusal(scope["method"], Headers(scope=scope))
        if problem is not None:
            await problem.response()(scope, receive, answer)
            return
        await self._app(scope, _limited(receive), answer)


def _refusal(method: str, headers: Headers) -> Problem | None:
    host = headers.get("host", "")
    if not is_loopback(urlsplit(f"//{host}").hostname or ""):
        return Problem(421, "wrong_host", f"Host: expected this machine, got {host[:100]!r}")
    if method not in _UNSAFE:
        return None
    origin = headers.get("origin")
    site = headers.get("sec-fetch-site", "same-origin")
    if site not in {"same-origin", "none"} or (
        origin is not None and urlsplit(origin).netloc != host
    ):
        return Problem(403, "foreign_origin", "Origin: expected this service's own page")
    length = headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > MOST_BODY_BYTES:
        return Problem(413, "too_large", f"body: expected at most {MOST_BODY_BYTES} bytes")
    return None


def _limited(receive: Receive) -> Receive:
    """Receive that ends a body without a length as soon as it is too large."""
    size = 0

    async def limited() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > MOST_BODY_BYTES:
            return {"type": "http.disconnect"}
        return message

    return limited
