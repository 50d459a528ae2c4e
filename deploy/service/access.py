"""The one place that decides whether a request is answered, and that records what was changed.

Every request passes `AccessGuard` before the application sees it:

1. Its sizes are within limits, it has no NUL character, and its path is a route of the table in
   route_roles.py.
2. A browser did not make it for another site. On loopback it names this machine in the header Host,
   which stops DNS rebinding. Origin and Sec-Fetch-Site name no other site.
3. Its token, or the session of its cookie, is good. On loopback no token is asked for by default.
4. Its role suffices, and its job is in one of its projects; others' jobs are not found.

Changes are in the audit, with the answer's status, and never with a body or a token.
"""

import asyncio
import time
from collections.abc import Callable
from http.cookies import CookieError, SimpleCookie
from typing import Annotated
from urllib.parse import quote, urlsplit

import msgspec
import sqlalchemy as sa
from fastapi import Depends, Request
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.service import tokens
from deploy.service.access_store import AccessStore, AuditEntry
from deploy.service.job_store import JobStore
from deploy.service.problems import Answer, Problem, not_found, of_database_error
from deploy.service.route_roles import Route, route_of
from deploy.service.tokens import LOCAL, Principal, TokenRole
from ps.logs import logger
from ps.transport.addresses import on_this_host
from shards.errors import BadInput

MAX_HEADER_BYTES = 16 << 10
MAX_PATH_BYTES = 8 << 10
MAX_FAILURES, FAILURES_S = 10, 60.0
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
# No Strict-Transport-Security: it would hold for every port of this host, Spark's pages among them.
_HEADERS = {
    b"content-security-policy": POLICY.encode(),
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"same-origin",  # `no-referrer` would make the Origin of our forms null
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
}
_UNSAFE = {"POST", "PUT", "PATCH", "DELETE"}
_MAX_ADDRESSES = 4096

NOBODY = Principal(name="", role=TokenRole.VIEWER, projects=frozenset())
"""The sender of a request to a route that anyone may use."""


class Exposure(msgspec.Struct, frozen=True, kw_only=True):
    """From where the service can be reached, and what follows.

    `tokens`: every request needs one. `https`: browsers reach it by https. `origin`: the host and
    port of the proxy's URL, if there is one. `loopback`: only names of this machine are good.
    """

    tokens: bool = False
    https: bool = False
    origin: str | None = None
    loopback: bool = True

    @property
    def cookie(self) -> str:
        """The name of the cookie; browsers bind this prefix to https and to one host."""
        return "__Host-downpour" if self.https else "downpour"


def exposure_of(host: str, *, tls: bool, proxy: str | None, require_tokens: bool) -> Exposure:
    """The protections that `host` requires; BadInput if it would be reachable without them."""
    if proxy is not None:
        parts = urlsplit(proxy)
        if parts.scheme != "https" or not parts.netloc or parts.path.strip("/"):
            raise BadInput(
                "--behind-proxy", expected="a URL such as https://trainer.example", got=proxy
            )
        return Exposure(tokens=True, https=True, origin=parts.netloc, loopback=False)
    if on_this_host(host):
        return Exposure(tokens=require_tokens, https=tls)
    if not tls:
        raise BadInput(
            "--host",
            expected="a loopback address",
            got=host,
            hint="another one needs --tls-cert and --tls-key, or --behind-proxy",
        )
    return Exposure(tokens=True, https=True, loopback=False)


def sender(request: Request) -> Principal:
    """The sender of a request that the guard has let through."""
    principal: Principal = request.state.principal
    return principal


Sender = Annotated[Principal, Depends(sender)]
"""What a route declares to get the sender of its request."""


def note(request: Request, **details: str) -> None:
    """Add details to the request's entry of the audit."""
    request.state.audit.update(details)


def check_project(principal: Principal, project: str) -> None:
    """Raise the problem 403 for a project in which the sender may submit nothing."""
    if not principal.sees(project):
        names = ", ".join(sorted(principal.projects or ()))
        text = f"project: expected one of {names}, got {project[:80]}"
        raise Problem(403, "forbidden", text, field="project", expected=names, got=project[:80])


class FailedLogins:
    """Counts wrong tokens of each address. Good tokens pass whatever the count is."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: dict[str, tuple[float, int]] = {}

    def count(self, address: str) -> None:
        """Count a wrong token; raises the problem 429 if the address had too many lately."""
        now = self._clock()
        since, count = self._counts.pop(address, (now, 0))
        if now - since > FAILURES_S:
            since, count = now, 0
        self._counts[address] = since, count + 1
        if len(self._counts) > _MAX_ADDRESSES:
            del self._counts[next(iter(self._counts))]
        if count >= MAX_FAILURES:
            text = f"token: expected at most {MAX_FAILURES} wrong ones in {FAILURES_S:g} s"
            headers = {"Retry-After": f"{FAILURES_S:g}"}
            raise Problem(429, "too_many_failures", text, headers=headers)


class AccessGuard:
    """ASGI middleware around the whole application."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        exposure: Exposure,
        access: AccessStore,
        store: JobStore,
        failures: FailedLogins,
        answer: Answer,
    ) -> None:
        self._app = app
        self._answer = answer
        self._exposure = exposure
        self._access = access
        self._store = store
        self._failures = failures
        self._log = logger("service")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        reply = _Reply(send)
        headers = Headers(scope=scope)
        try:
            _check_sizes(scope, headers)
            route = route_of(scope["method"], scope["path"])
            self._check_site(scope["method"], headers)
            check_length(headers, route.rule.max_body)
        except Problem as problem:
            await self._answer(problem, scope)(scope, receive, reply.send)
            return
        state = scope.setdefault("state", {})
        state["audit"] = note = {"job": route.job or "", "project": "", "detail": ""}
        try:
            state["principal"] = await self._find_sender(scope, route, headers, note)
        except Problem as problem:
            await self._refusal(problem, route, scope)(scope, receive, reply.send)
        except sa.exc.SQLAlchemyError as error:
            await self._answer(of_database_error(error), scope)(scope, receive, reply.send)
        else:
            await self._pass(scope, _Body(receive, route.rule.max_body), reply)
        if scope["method"] in _UNSAFE or (reply.status == 401 and "token" in note):
            await self._record(scope, route, note, reply.status)

    async def _pass(self, scope: Scope, body: "_Body", reply: "_Reply") -> None:
        """Let the application answer; a body that grows too large, or a defect, is a problem."""

        async def answer(message: Message) -> None:
            if not body.too_large or reply.started:
                await reply.send(message)

        try:
            await self._app(scope, body.receive, answer)
        except ClientDisconnect:
            pass
        except Exception:
            if reply.started:
                raise
            if not body.too_large:
                self._log.exception("%s", f"{scope['method']} {scope['path']}")
                problem = Problem(500, "defect", "the service failed; its log says why")
                await self._answer(problem, scope)(scope, body.receive, reply.send)
        if body.too_large and not reply.started:
            await _too_large(body.most).response()(scope, body.receive, reply.send)

    async def _find_sender(
        self, scope: Scope, route: Route, headers: Headers, note: dict[str, str]
    ) -> Principal:
        """The sender of the request; raises a Problem if it may not do this."""
        if route.rule.role is None:
            return NOBODY
        asks = self._exposure.tokens or "authorization" in headers
        changes = scope["method"] in _UNSAFE
        if not asks and (route.job is None or not changes):
            return LOCAL  # nothing to look up
        return await asyncio.to_thread(self._admit, scope, route, headers, note, asks)

    def _admit(
        self, scope: Scope, route: Route, headers: Headers, note: dict[str, str], asks: bool
    ) -> Principal:
        principal = self._authenticate(headers, address_of(scope), note) if asks else LOCAL
        note["actor"], note["token"] = principal.name, principal.token
        if scope["method"] in _UNSAFE and principal.session:
            token = headers.get("x-csrf-token", "")
            if not tokens.constant_time_equal(token, tokens.csrf_of(principal.session)):
                text = "X-CSRF-Token: expected the text of this session's pages, got another"
                raise Problem(403, "csrf", text, hint="load the page again")
        _check_role(principal, route)
        if route.job is not None:
            self._check_job(principal, route, note)
        return principal

    def _authenticate(self, headers: Headers, address: str, note: dict[str, str]) -> Principal:
        """The sender by its token or its cookie; raises the problem 401 or 429."""
        authorisation = headers.get("authorization")
        if authorisation is None:
            session = session_of(headers, self._exposure.cookie)
            principal = self._access.of_session(session) if session else None
            if principal is None:
                raise refuse_unauthenticated("expected a token, got none")
            return principal
        scheme, _, token = authorisation.partition(" ")
        principal = self._access.of_token(token.strip())
        if principal is None or scheme.lower() != "bearer":
            self._failures.count(address)
            note["token"] = tokens.token_id(token) or ""
            raise refuse_unauthenticated(
                "expected one that is neither revoked nor expired, got another"
            )
        return principal

    def _check_job(self, principal: Principal, route: Route, note: dict[str, str]) -> None:
        """Raise the problem 404 for a job that the sender cannot see, 403 if it may only look."""
        assert route.job is not None
        try:
            project, owner = self._store.standing(route.job)
        except KeyError:
            raise not_found("job", route.job[:80]) from None
        if not principal.sees(project):
            raise not_found("job", route.job[:80])
        note["project"] = project
        rule = route.rule
        assert rule.role is not None
        if not principal.role.includes(rule.role) and owner != principal.name:
            raise _forbidden(rule.role, principal, f"; job {route.job} is {owner}'s")

    def _check_site(self, method: str, headers: Headers) -> None:
        """Raise a Problem for a request that a browser makes for another site."""
        host = headers.get("host", "")
        if self._exposure.loopback and not on_this_host(_hostname(host)):
            raise Problem(421, "wrong_host", f"Host: expected this machine, got {host[:100]!r}")
        site = headers.get("sec-fetch-site", "same-origin")
        foreign = site not in {"same-origin", "none"}
        if method not in _UNSAFE:
            if foreign and headers.get("sec-fetch-mode") != "navigate":
                raise _foreign()
            return
        origin = headers.get("origin")
        allowed = self._exposure.origin or host
        if foreign or (origin is not None and urlsplit(origin).netloc != allowed):
            raise _foreign()

    def _refusal(self, problem: Problem, route: Route, scope: Scope) -> Response:
        """The answer to a request that is not let through: a page leads to that for signing in."""
        if problem.status != 401 or not route.rule.page:
            return self._answer(problem, scope)
        query = scope["query_string"].decode("latin-1")
        target = scope["path"] + (f"?{query}" if query else "")
        return RedirectResponse(f"/sign-in?next={quote(target)}", 303)

    async def _record(self, scope: Scope, route: Route, note: dict[str, str], status: int) -> None:
        """Add a change, or the refusal of one, to the audit."""
        actor = note.get("actor") or scope["state"].get("principal", NOBODY).name
        if not actor and "token" not in note:
            return  # a stranger without a token, or a flood of wrong ones
        entry = AuditEntry(
            time=time.time(),
            actor=actor or "unknown",
            token=note.get("token", ""),
            action=route.name.replace("/api/v1", ""),
            job=note["job"][:64],
            project=note["project"],
            status=status,
            address=address_of(scope),
            detail=note["detail"],
        )
        try:
            await asyncio.to_thread(self._access.record, entry)
        except Exception as error:  # noqa: BLE001  # the change is made: it cannot be undone
            self._log.error("%s", f"audit: {entry.actor} {entry.action} {status}: {error!r}")


class _Reply:
    """Sends an answer with the headers of every answer, and remembers its status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0
        self.started = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started, self.status = True, message["status"]
            names = {name.lower() for name, _ in message["headers"]}
            if b"cache-control" not in names:
                message["headers"] = [*message["headers"], (b"cache-control", b"no-store")]
            more = [header for header in _HEADERS.items() if header[0] not in names]
            message["headers"] = [*message["headers"], *more]
        await self._send(message)


class _Body:
    """Receives a body, and ends one without a length as soon as it is too large."""

    def __init__(self, receive: Receive, most: int) -> None:
        self._receive = receive
        self.most = most
        self._size = 0
        self.too_large = False

    async def receive(self) -> Message:
        message = await self._receive()
        self._size += len(message.get("body", b""))
        if self._size > self.most:
            self.too_large = True
            return {"type": "http.disconnect"}
        return message


def address_of(scope: Scope) -> str:
    """The address of the client."""
    client = scope.get("client")
    return str(client[0]) if client else ""


def session_of(headers: Headers, cookie: str) -> str:
    """The secret in the session's cookie; empty without one."""
    try:
        morsel = SimpleCookie(headers.get("cookie", "")).get(cookie)
    except CookieError:
        return ""
    return morsel.value if morsel is not None else ""


def _hostname(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _check_sizes(scope: Scope, headers: Headers) -> None:
    if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > MAX_PATH_BYTES:
        raise Problem(414, "too_large", f"path: expected at most {MAX_PATH_BYTES} bytes")
    if sum(len(name) + len(value) for name, value in headers.raw) > MAX_HEADER_BYTES:
        raise Problem(431, "too_large", f"headers: expected at most {MAX_HEADER_BYTES} bytes")
    if "\0" in scope["path"] or b"%00" in scope["query_string"]:
        expected, got = "text without NUL characters", "text with one"
        raise Problem(
            422, "bad_input", f"path: expected {expected}, got {got}", field="path",
            expected=expected, got=got, hint="leave out %00",
        )  # fmt: skip


def check_length(headers: Headers, most: int) -> None:
    """Raise the problem 413 for a body that says it is too large."""
    length = headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > most:
        raise _too_large(most)


def _check_role(principal: Principal, route: Route) -> None:
    rule = route.rule
    if rule.role is None:
        return
    lowest = rule.owner_role or rule.role
    if not principal.role.includes(lowest):
        raise _forbidden(lowest, principal)
    if rule.everywhere and principal.projects is not None:
        text = "token: expected one for all projects, got one for some"
        raise Problem(403, "forbidden", text, field="token")


def _forbidden(role: TokenRole, principal: Principal, why: str = "") -> Problem:
    text = f"role: expected {role}, got {principal.role}{why}"
    return Problem(403, "forbidden", text, field="role", expected=role, got=principal.role)


def _too_large(most: int) -> Problem:
    return Problem(413, "too_large", f"body: expected at most {most} bytes")


def _foreign() -> Problem:
    return Problem(403, "foreign_origin", "Origin: expected this service's own page")


def refuse_unauthenticated(why: str) -> Problem:
    hint = "send the header Authorization: Bearer TOKEN, or give --token-file"
    headers = {"WWW-Authenticate": "Bearer"}
    return Problem(401, "unauthenticated", f"token: {why}", hint=hint, headers=headers)
