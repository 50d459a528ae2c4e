"""Which role each route needs. A route that is not in this table cannot be reached."""

import re
from typing import NamedTuple

from starlette.routing import compile_path

from deploy.service.problems import Problem
from deploy.service.tokens import TokenRole

MAX_BODY_BYTES = 1 << 20
API = "/api/v1"
_HINT = f"{API}/openapi.json describes every route"


class Rule(NamedTuple):
    """The requirements of a request to a route. `role` None: nothing, not even a token.

    `owner_role`: a lower role may do it to the jobs that it has submitted. `everywhere`: the answer
    shows jobs of all projects. `page`: a browser without a session is sent to sign in.
    """

    role: TokenRole | None
    owner_role: TokenRole | None = None
    everywhere: bool = False
    page: bool = False
    max_body: int = MAX_BODY_BYTES


class Route(NamedTuple):
    """A route of the table that a request has matched; `name` is its method and path."""

    name: str
    rule: Rule
    job: str | None


_ANYONE = Rule(None)
_VIEW = Rule(TokenRole.VIEWER)
_PAGE = Rule(TokenRole.VIEWER, page=True)
_CHANGE = Rule(TokenRole.OPERATOR, owner_role=TokenRole.SUBMITTER)
_ADMINISTER = Rule(TokenRole.ADMINISTRATOR)

RULES: dict[str, Rule] = {
    "GET /healthz": _ANYONE,
    "GET /readyz": _ANYONE,
    "GET /metrics": Rule(TokenRole.VIEWER, everywhere=True),
    "GET /static/{name}": _ANYONE,
    "GET /sign-in": _ANYONE,
    "POST /sign-in": Rule(None, max_body=4096),
    "POST /sign-out": _VIEW,
    "GET /": _PAGE,
    "GET /parts/jobs": _VIEW,
    "GET /jobs/{job}": _PAGE,
    "GET /service": _PAGE,
    f"GET {API}/openapi.json": _VIEW,
    f"GET {API}/whoami": _VIEW,
    f"POST {API}/jobs": Rule(TokenRole.SUBMITTER),
    f"GET {API}/jobs": _VIEW,
    f"GET {API}/jobs/{{job}}": _VIEW,
    f"PATCH {API}/jobs/{{job}}": _CHANGE,
    f"DELETE {API}/jobs/{{job}}": _CHANGE,
    **{
        f"POST {API}/jobs/{{job}}:{verb}": _CHANGE
        for verb in ("cancel", "pause", "resume", "snapshot", "reshard", "set")
    },
    f"POST {API}/jobs/{{job}}:clone": Rule(TokenRole.SUBMITTER),
    **{
        f"GET {API}/jobs/{{job}}/{part}": _VIEW
        for part in (
            *("attempts", "events", "snapshots", "reading", "series", "logs", "artefacts"),
            "artefacts/{name:path}",
            *(f"snapshots/{{number}}:{verb}" for verb in ("verify", "diff", "export")),
        )
    },
    **{
        f"POST {API}/jobs/{{job}}/snapshots/{{number}}:{verb}": _CHANGE for verb in ("pin", "unpin")
    },
    "GET /compare": _PAGE,
    "GET /experiments": Rule(TokenRole.VIEWER, everywhere=True, page=True),
    f"GET {API}/compare": _VIEW,
    f"GET {API}/experiments": Rule(TokenRole.VIEWER, everywhere=True),
    f"GET {API}/experiments/{{name}}/report": Rule(TokenRole.VIEWER, everywhere=True),
    f"POST {API}/uploads": Rule(TokenRole.SUBMITTER),
    f"GET {API}/uploads/{{upload}}": Rule(TokenRole.SUBMITTER),
    f"PUT {API}/uploads/{{upload}}/files": Rule(TokenRole.SUBMITTER),
    f"GET {API}/webhooks": _ADMINISTER,
    f"POST {API}/webhooks": _ADMINISTER,
    f"DELETE {API}/webhooks/{{webhook}}": _ADMINISTER,
    f"GET {API}/service": Rule(TokenRole.VIEWER, everywhere=True),
    f"POST {API}/service:gc": _ADMINISTER,
    f"POST {API}/jobs:adopt": _ADMINISTER,
    f"GET {API}/stream": _VIEW,
    f"GET {API}/projects": _VIEW,
    f"PUT {API}/projects/{{project}}": _ADMINISTER,
    f"GET {API}/tokens": _ADMINISTER,
    f"POST {API}/tokens": _ADMINISTER,
    f"DELETE {API}/tokens/{{token}}": _ADMINISTER,
    f"GET {API}/audit": _ADMINISTER,
}

_Pattern = tuple[str, re.Pattern[str], str, Rule]
_ROUTES: list[_Pattern] = [
    (name.partition(" ")[0], compile_path(name.partition(" ")[2])[0], name, rule)
    for name, rule in RULES.items()
]


def _verbs() -> list[tuple[re.Pattern[str], list[str]]]:
    """The things that verbs are asked of, as paths, with the verbs of each."""
    by_path: dict[str, list[str]] = {}
    for name in RULES:
        path, colon, verb = name.partition(" ")[2].rpartition(":")
        if colon and "}" not in verb:
            by_path.setdefault(path, []).append(verb)
    # Ids have no colon: with one, the last part of a path is a thing and a verb.
    return [(compile_path(path)[0], verbs) for path, verbs in by_path.items()]


_VERBS = _verbs()


def _check_verb(path: str) -> None:
    """Raise the problem 404 for a verb that does not exist."""
    thing, colon, verb = path.rpartition(":")
    if not colon or "/" in verb:
        return
    for pattern, verbs in _VERBS:
        if pattern.match(thing) and verb not in verbs:
            known = ", ".join(sorted(verbs))
            text = f"verb: expected one of {known}, got {verb[:80] or 'none'}"
            raise Problem(
                404, "not_found", text, field="verb", expected=f"one of {known}",
                got=verb[:80] or "none", hint=_HINT,
            )  # fmt: skip


def route_of(method: str, path: str) -> Route:
    """The route of a request; raises the problem 404 or 405."""
    _check_verb(path)
    allowed = []
    for verb, pattern, name, rule in _ROUTES:
        match = pattern.match(path)
        if match is None:
            continue
        if verb == method:
            return Route(name, rule, match.groupdict().get("job"))
        allowed.append(verb)
    if allowed:
        verbs = ", ".join(sorted(set(allowed)))
        text = f"method: expected {verbs}, got {method[:20]}"
        raise Problem(
            405, "wrong_method", text, headers={"Allow": verbs}, field="method", expected=verbs,
            got=method[:20], hint=_HINT,
        )  # fmt: skip
    raise Problem(
        404, "not_found", f"path {path[:200]}: not found", field="path",
        expected="a path of the interface or of the page", got=path[:200], hint=_HINT,
    )  # fmt: skip
