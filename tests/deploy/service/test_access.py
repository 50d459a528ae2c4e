"""Who may do what, from where: tokens, roles, projects, sessions, limits, the audit, secrets."""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from fastapi import FastAPI
from fastapi.routing import APIRoute

from deploy.service import tokens
from deploy.service.access import MAX_FAILURES, Exposure, FailedLogins, exposure_of
from deploy.service.access_store import AccessStore, ProjectLimits
from deploy.service.database_tables import DATABASE, DatabasePlace, open_database
from deploy.service.problems import Problem
from deploy.service.route_roles import API, RULES, route_of
from deploy.service.server import backup, reindex
from deploy.service.states import QueuedJob, Quota, schedule
from deploy.service.tokens import TokenRole
from shards.errors import BadInput
from tests.support.postgres_server import PASSWORD as DATABASE_PASSWORD
from tests.support.service_in_process import Running, Start

DATABASES = ("sqlite", "postgresql")
DAY_S = 86400.0
PASSWORD = "correct-horse-battery"


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


class Guarded(Running):
    """A service that asks for tokens, with a token for each role in project `a`, and one in `b`."""

    def __init__(self, running: Running) -> None:
        super().__init__(running.service, running.http, running.solver)
        self.access = running.service.access
        self.tokens = {
            role: self.access.create_token(role, role, ["a"], DAY_S)[1]
            for role in (TokenRole.VIEWER, TokenRole.SUBMITTER, TokenRole.OPERATOR)
        }
        self.admin = self.access.create_token("root", TokenRole.ADMINISTRATOR, None, DAY_S)[1]
        self.other = self.access.create_token("other", TokenRole.OPERATOR, ["b"], DAY_S)[1]

    def call(self, token: str, method: str, path: str, **more: Any) -> Any:
        headers = bearer(token) | more.pop("headers", {})
        return self.http.request(method, f"{API}{path}", headers=headers, **more)

    def make(self, token: str, project: str = "a", **settings: Any) -> Any:
        given = {"solver": str(self.solver), **settings}
        return self.call(token, "POST", "/jobs", json={"settings": given, "project": project})


@pytest.fixture
def guarded(start: Start, solver: Path) -> Iterator[Guarded]:
    options = {"exposure": Exposure(tokens=True), "roots": (solver.parent,)}
    with start(driven=False, **options) as running:
        yield Guarded(running)


def routes_of(app: FastAPI) -> set[str]:
    """Every route of an application, those of included routers too, as `METHOD /path`."""
    found = set()
    ahead = list(app.router.routes)
    while ahead:
        route = ahead.pop()
        inner = getattr(route, "original_router", None)
        if inner is not None:
            ahead += inner.routes
        elif isinstance(route, APIRoute):
            found |= {f"{method} {route.path}" for method in route.methods or ()}
        else:
            found.add(f"GET {route.path}")  # type: ignore[attr-defined]
    return found


def test_every_route_has_a_rule(guarded: Guarded) -> None:
    """The table names the routes of the application, all of them and no others."""
    app = guarded.http.app
    assert isinstance(app, FastAPI)
    assert routes_of(app) == set(RULES)


def test_every_route_refuses_strangers(guarded: Guarded) -> None:
    """Without a good token each route but the public ones refuses; others' jobs do not exist."""
    job = guarded.make(guarded.tokens[TokenRole.OPERATOR]).json()["id"]
    store = guarded.access
    row, expired = store.create_token("late", TokenRole.ADMINISTRATOR, None, DAY_S)
    with store._engine.begin() as connection:
        connection.exec_driver_sql(f"UPDATE token SET expires = 1 WHERE id = '{row.id}'")
    row, revoked = store.create_token("gone", TokenRole.ADMINISTRATOR, None, DAY_S)
    store.revoke(row.id)
    wrong = guarded.admin[:-1] + ("0" if guarded.admin[-1] != "0" else "1")
    public = {"GET /healthz", "GET /readyz", "GET /static/{name}", "GET /sign-in", "POST /sign-in"}
    assert {name for name, rule in RULES.items() if rule.role is None} == public
    for name, rule in RULES.items():
        method, path = name.split(" ")
        path = path.replace("{job}", job).replace("{token}", row.id)
        if rule.role is None:
            continue
        answer = guarded.http.request(method, path, follow_redirects=False)
        if rule.page:
            assert (answer.status_code, answer.headers["location"][:9]) == (303, "/sign-in?"), name
        else:
            assert (answer.status_code, answer.json()["code"]) == (401, "unauthenticated"), name
            assert answer.headers["www-authenticate"] == "Bearer"
        for token in (wrong, expired, revoked, "dps_", "x" * 90):
            answer = guarded.http.request(
                method, path, headers=bearer(token), follow_redirects=False
            )
            assert answer.status_code in ({303, 429} if rule.page else {401, 429}), (name, token)
        if "{job}" in name:
            answer = guarded.http.request(method, path, headers=bearer(guarded.other))
            assert answer.status_code == 404, name
        if rule.role is TokenRole.ADMINISTRATOR:
            answer = guarded.http.request(
                method, path, headers=bearer(guarded.tokens[TokenRole.OPERATOR])
            )
            assert (answer.status_code, answer.json()["field"]) == (403, "role"), name


def test_roles(guarded: Guarded) -> None:
    """A viewer looks, a submitter acts on its own jobs, an operator on all of its project."""
    viewer, submitter, operator = (guarded.tokens[role] for role in list(TokenRole)[:3])
    refused = guarded.make(viewer)
    assert (refused.status_code, refused.json()["expected"]) == (403, "submitter")
    own, foreign = guarded.make(submitter).json()["id"], guarded.make(operator).json()["id"]
    assert guarded.call(submitter, "GET", f"/jobs/{own}").json()["owner"] == "submitter"
    for job, status in ((own, 202), (foreign, 403)):
        assert guarded.call(viewer, "GET", f"/jobs/{job}").status_code == 200
        assert guarded.call(viewer, "POST", f"/jobs/{job}:pause").status_code == 403
        assert guarded.call(submitter, "POST", f"/jobs/{job}:pause").status_code == status
        answer = guarded.call(submitter, "PATCH", f"/jobs/{job}", json={"priority": 1})
        assert answer.status_code == {202: 200}.get(status, status)
    assert guarded.call(operator, "POST", f"/jobs/{own}:resume").status_code == 202
    assert guarded.call(submitter, "POST", f"/jobs/{foreign}:clone").status_code == 202
    assert guarded.call(viewer, "GET", "/whoami").json() == {
        "name": "viewer", "role": "viewer", "projects": ["a"],
    }  # fmt: skip


def test_projects_do_not_see_each_other(guarded: Guarded) -> None:
    """Lists, events, streams and idempotency keys show a project's own jobs only."""
    mine, key = guarded.tokens[TokenRole.OPERATOR], {"Idempotency-Key": "same"}
    body = {"settings": {"solver": str(guarded.solver)}, "project": "a"}
    job = guarded.call(mine, "POST", "/jobs", json=body, headers=key).json()["id"]
    again = guarded.call(mine, "POST", "/jobs", json=body, headers=key).json()["id"]
    other = guarded.call(
        guarded.other, "POST", "/jobs", json=body | {"project": "b"}, headers=key
    ).json()["id"]
    assert (again == job, other == job) == (True, False)
    for token, expected in ((mine, [job]), (guarded.other, [other]), (guarded.admin, [other, job])):
        found = guarded.call(token, "GET", "/jobs").json()["jobs"]
        assert [each["id"] for each in found] == expected
    assert guarded.call(mine, "GET", "/jobs?project=b").json()["jobs"] == []
    refused = guarded.make(mine, "b")
    assert (refused.status_code, refused.json()["expected"]) == (403, "a")
    assert guarded.http.get("/metrics", headers=bearer(mine)).status_code == 403
    assert guarded.http.get("/metrics", headers=bearer(guarded.admin)).status_code == 200
    assert job not in guarded.http.get("/", headers=bearer(guarded.other)).text
    store = guarded.service.store
    assert {each["job"] for each in store.events(projects={"b"})} == {other}
    assert {row.id for row in store.heads(projects={"b"})} == {other}
    assert guarded.call(mine, "GET", f"/stream?jobs={other}").status_code == 404
    assert [p["name"] for p in guarded.call(mine, "GET", "/projects").json()["projects"]] == ["a"]


def test_paths_of_other_jobs_and_of_the_service(guarded: Guarded, home: Path) -> None:
    """No setting may name another project's job, the home's own files, or a folder to write in."""
    mine = guarded.tokens[TokenRole.SUBMITTER]
    other = guarded.make(guarded.other, "b").json()["id"]
    own = guarded.make(mine).json()["id"]
    theirs = home / "jobs" / other
    link = guarded.solver.parent / "link"
    link.symlink_to(theirs)
    for settings in (
        {"data": str(home / DATABASE)},
        {"data": str(home)},
        {"data": str(theirs / "settings.json")},
        {"data": str(link / "settings.json")},
        {"weights": "/etc/passwd"},
        {"out": str(home / "jobs" / own / "run")},
        {"out": str(home / "new")},
        {"snapshots": f"file://{theirs}/run"},
        {"snapshots": "/tmp/elsewhere"},
        {"snapshots": f"local://{theirs}/run"},
        {"snapshots": f"fsspec+file://{theirs}/run"},
    ):
        answer = guarded.make(mine, **settings)
        assert (answer.status_code, answer.json()["field"]) == (422, *settings), settings
    for resume in (f"{theirs}@7", str(theirs), f"{link}@7", f"file://{theirs}@1"):
        body = {"settings": {"solver": str(guarded.solver)}, "project": "a", "resume": resume}
        answer = guarded.call(mine, "POST", "/jobs", json=body)
        assert (answer.status_code, answer.json()["field"]) == (422, "resume"), resume
    assert guarded.make(mine, data=str(home / "jobs" / own / "settings.json")).status_code == 201


def test_settings_hold_no_secret(guarded: Guarded) -> None:
    """An address with a key in it is refused: all that see the job would see the key."""
    for name, place in (
        ("spark", f"sc://host:15002/;token={PASSWORD}"),
        ("snapshots", f"s3://key:{PASSWORD}@bucket/run"),
    ):
        answer = guarded.make(guarded.admin, **{name: place})
        assert (answer.status_code, answer.json()["field"]) == (422, name)
        assert PASSWORD not in answer.text
    assert guarded.make(guarded.admin, spark="sc://host:15002/").status_code == 201


def test_a_browser_session(guarded: Guarded) -> None:
    """Signing in sets a strict cookie; changes need the page's own text; signing out ends it."""
    http, token = guarded.http, guarded.tokens[TokenRole.OPERATOR]
    asked = http.get("/?q=x", follow_redirects=False)
    assert asked.headers["location"] == "/sign-in?next=/%3Fq%3Dx"
    failed = http.post("/sign-in", data={"token": token + "0"}, follow_redirects=False)
    assert (failed.status_code, "set-cookie" in failed.headers) == (401, False)
    assert 'role="alert">No live token' in failed.text
    for target, leads in (("/jobs/x", "/jobs/x"), ("//evil.example", "/"), ("/\\evil", "/")):
        done = http.post("/sign-in", data={"token": token, "next": target}, follow_redirects=False)
        assert (done.status_code, done.headers["location"]) == (303, leads)
    cookie = done.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= {part.strip() for part in cookie.split(";")}
    assert token not in cookie
    page = http.get("/").text
    assert "operator, operator" in page
    csrf = re.search(r'name="csrf" content="([0-9a-f]{64})"', page)
    assert csrf is not None
    body = {"settings": {"solver": str(guarded.solver)}, "project": "a"}
    for headers in ({}, {"X-CSRF-Token": "0" * 64}, {"X-CSRF-Token": "é"}):
        answer = http.post(f"{API}/jobs", json=body, headers=_latin(headers))
        assert (answer.status_code, answer.json()["code"]) == (403, "csrf")
    good = {"X-CSRF-Token": csrf[1]}
    assert http.post(f"{API}/jobs", json=body, headers=good).status_code == 201
    foreign = http.post(f"{API}/jobs", json=body, headers=good | {"Origin": "http://evil.example"})
    assert foreign.json()["code"] == "foreign_origin"
    assert http.post("/sign-out", headers=good).status_code == 204
    assert http.get("/", follow_redirects=False).status_code == 303
    http.cookies.set("downpour", cookie.split("=")[1].split(";")[0])
    assert http.get(f"{API}/whoami").status_code == 401


def _latin(headers: dict[str, str]) -> Any:
    return {name: value.encode("latin-1") for name, value in headers.items()}


def test_a_session_ends_with_its_token(guarded: Guarded) -> None:
    """Revoking a token ends its sessions, and what was valid for a stream is so no longer."""
    http, store = guarded.http, guarded.access
    http.post("/sign-in", data={"token": guarded.tokens[TokenRole.VIEWER]})
    principal = store.of_token(guarded.tokens[TokenRole.VIEWER])
    assert principal is not None
    session = store.of_session(http.cookies["downpour"])
    assert session is not None
    assert (session.name, http.get(f"{API}/whoami").status_code) == ("viewer", 200)
    answer = guarded.call(guarded.admin, "DELETE", "/tokens/viewer")
    assert answer.json()["name"] == "viewer"
    assert http.get(f"{API}/whoami").status_code == 401
    assert not store.is_valid(session)
    assert not store.is_valid(principal)


def test_https_cookies_belong_to_one_host(start: Start) -> None:
    """Behind TLS the cookie is secure and bound to the host; the proxy's URL is the origin."""
    exposure = Exposure(tokens=True, https=True, origin="trainer.example", loopback=False)
    with start(driven=False, exposure=exposure) as running:
        _, token = running.service.access.create_token("v", TokenRole.VIEWER, None, DAY_S)
        headers = {"Host": "upstream:8600", "Origin": "https://trainer.example"}
        done = running.http.post(
            "/sign-in", data={"token": token}, headers=headers, follow_redirects=False
        )
        assert done.headers["set-cookie"].startswith("__Host-downpour=")
        assert "Secure" in done.headers["set-cookie"]
        wrong = running.http.post("/sign-in", headers=headers | {"Origin": "https://upstream:8600"})
        assert wrong.json()["code"] == "foreign_origin"


def test_too_many_wrong_tokens() -> None:
    """The address is refused for a while; another one is not, nor this one later."""
    now = [0.0]
    failures = FailedLogins(lambda: now[0])
    for _ in range(MAX_FAILURES):
        failures.count("10.0.0.1")
    with pytest.raises(Problem) as caught:
        failures.count("10.0.0.1")
    assert (caught.value.status, caught.value.code) == (429, "too_many_failures")
    failures.count("10.0.0.2")
    now[0] = 61.0
    failures.count("10.0.0.1")


def test_good_tokens_pass_while_wrong_ones_are_limited(guarded: Guarded) -> None:
    """A flood of wrong tokens locks nobody out."""
    wrong = "dps_" + "0" * 12 + "_" + "0" * 64
    found = [guarded.call(wrong, "GET", "/jobs").status_code for _ in range(MAX_FAILURES + 2)]
    assert found == [401] * MAX_FAILURES + [429] * 2
    assert guarded.call(guarded.admin, "GET", "/jobs").status_code == 200


def test_the_audit(guarded: Guarded) -> None:
    """Each change and each failed login is one entry with its sender; nobody can rewrite them."""
    job = guarded.make(guarded.tokens[TokenRole.SUBMITTER]).json()["id"]
    guarded.call(guarded.tokens[TokenRole.VIEWER], "POST", f"/jobs/{job}:cancel")
    guarded.call(guarded.admin, "POST", f"/jobs/{job}:cancel", json={"mode": "now"})
    guarded.http.post("/sign-in", data={"token": "nonsense"})
    guarded.call(guarded.admin, "PUT", "/projects/a", json={"queued": 3})
    answer = guarded.call(guarded.admin, "GET", "/audit?limit=4").json()
    rest = guarded.call(guarded.admin, "GET", f"/audit?cursor={answer['cursor']}").json()
    entries = [*answer["entries"], *rest["entries"]]
    assert [(e["actor"], e["action"], e["job"], e["status"]) for e in entries] == [
        ("root", "PUT /projects/{project}", "", 200),
        ("unknown", "POST /sign-in", "", 401),
        ("root", "POST /jobs/{job}:cancel", job, 202),
        ("viewer", "POST /jobs/{job}:cancel", job, 403),
        ("submitter", "POST /jobs", job, 201),
    ]
    assert entries[-1]["project"] == "a"
    assert entries[0]["detail"] == (
        "running=None queued=3 workers=None uploads=None upload_bytes=None"
    )
    assert len(guarded.call(guarded.admin, "GET", "/audit?actor=viewer").json()["entries"]) == 1
    for change in ("UPDATE audit SET actor = 'x'", "DELETE FROM audit"):
        with (
            guarded.access._engine.begin() as connection,
            pytest.raises(sa.exc.DBAPIError, match="append-only"),
        ):
            connection.exec_driver_sql(change)


def test_planted_secrets_are_nowhere(
    guarded: Guarded, home: Path, tmp_path: Path, capfd: Any
) -> None:
    """No token, session or password is in the home, in its database, in an answer or in the log.

    Nor is the password of the database.
    """
    created = guarded.call(
        guarded.admin, "POST", "/tokens", json={"name": "new", "role": "viewer"}
    ).json()
    wrong = "dps_" + "1" * 12 + "_" + PASSWORD.encode().hex().ljust(64, "0")
    guarded.call(wrong, "POST", "/jobs", json={"settings": {}})
    guarded.http.post("/sign-in", data={"token": wrong})
    guarded.http.post("/sign-in", data={"token": created["token"]})
    session = guarded.http.cookies["downpour"]
    csrf = tokens.csrf_of(session)
    guarded.http.post(f"{API}/jobs", json={"settings": {}}, headers={"X-CSRF-Token": csrf})
    guarded.make(guarded.admin, snapshots=f"s3://key:{PASSWORD}@bucket/run")
    guarded.make(guarded.admin, nonsense=PASSWORD)
    listed = guarded.call(guarded.admin, "GET", "/tokens").text
    shown = guarded.http.get("/service", headers=bearer(guarded.admin)).text
    audit = guarded.call(guarded.admin, "GET", "/audit").text
    secrets = [
        created["token"], created["token"][17:], guarded.admin, wrong, session, csrf, PASSWORD,
        DATABASE_PASSWORD, *guarded.tokens.values(),
    ]  # fmt: skip
    output = "".join(capfd.readouterr())
    copy = tmp_path / "copy.db"
    backup(home, copy)
    files = [copy, *(path for path in home.rglob("*") if path.is_file())]
    content = b"".join(path.read_bytes() for path in files)
    assert created["id"].encode() in content  # what is looked for would be found
    for secret in secrets:
        assert secret.encode() not in content
        assert secret not in listed + shown + audit + output


def test_limits_of_a_project(guarded: Guarded) -> None:
    """More queued jobs or workers than a project may have are refused with the figures."""
    mine = guarded.tokens[TokenRole.OPERATOR]
    answer = guarded.call(guarded.admin, "PUT", "/projects/a", json={"queued": 1, "workers": 2})
    expected = {"running": None, "queued": 1, "workers": 2, "uploads": None, "upload_bytes": None}
    assert answer.json()["limits"] == expected
    refused = guarded.make(mine, workers=3).json()
    assert (refused["field"], refused["got"]) == ("workers", "3")
    assert "2, the limit of project a" in refused["expected"]
    job = guarded.make(mine).json()["id"]
    refused = guarded.make(mine).json()
    assert (refused["field"], refused["expected"]) == ("project", "at most 1 queued jobs in a")
    clone = guarded.call(mine, "POST", f"/jobs/{job}:clone")
    assert clone.status_code == 422
    assert guarded.make(guarded.other, "b").status_code == 201
    assert guarded.call(mine, "GET", "/projects").json()["projects"][0]["use"]["queued"] == 1
    assert guarded.call(mine, "PUT", "/projects/a", json={}).status_code == 403


def test_the_scheduler_keeps_to_quotas() -> None:
    """A project at its limit waits; jobs of other projects behind it start."""
    jobs = [QueuedJob(f"{project}{n}", 2, 0, project) for n in range(3) for project in "ab"]
    assert schedule(jobs, 8, {"a": Quota(jobs=1)}) == ["a0", "b0", "b1", "b2"]
    assert schedule(jobs, 12, {"a": Quota(workers=5)}) == ["a0", "b0", "a1", "b1", "b2"]
    assert schedule(jobs, 4, {"a": Quota(0, 0)}) == ["b0", "b1"]


def test_running_jobs_keep_to_the_limit(start: Start) -> None:
    """The second job of a project that may run one waits until the first has ended."""
    with start() as running:
        running.service.access.set_limits("default", ProjectLimits(running=1))
        first, second = running.submit("train"), running.submit("train")
        running.await_state(first, "RUNNING")
        assert running.get(second)["state"] == "QUEUED"
        running.ask(first, "cancel")
        running.await_state(second, "RUNNING")
        running.ask(second, "cancel")
        running.await_state(second, "CANCELLED")


WRONG: list[tuple[str, str, dict[str, Any], int]] = [
    ("GET", "/jobs?q=" + "x" * 9000, {}, 414),
    ("GET", "/jobs", {"headers": {"X-Long": "x" * 17000}}, 431),
    ("POST", "/jobs", {"content": b"x" * (1 << 20) + b"x"}, 413),
    ("POST", "/jobs", {"content": [b"x" * (1 << 19)] * 3}, 413),
    ("POST", "/jobs", {"content": b"{", "headers": {"Content-Type": "application/json"}}, 422),
    ("POST", "/jobs", {"content": b"{}", "headers": {"Content-Type": "text/plain"}}, 422),
    ("GET", "/nothing", {}, 404),
    ("PUT", "/jobs", {}, 405),
    ("GET", "/jobs?limit=0", {}, 422),
    ("POST", "/tokens", {"json": {"name": "a b", "role": "viewer"}}, 422),
    (
        "POST", "/tokens",
        {"json": {"name": "a", "role": "administrator", "projects": ["p"]}}, 422,
    ),
    ("POST", "/tokens", {"json": {"name": "root", "role": "viewer"}}, 422),
    ("POST", "/tokens", {"json": {"name": "a", "role": "viewer", "days": 367}}, 422),
    ("DELETE", "/tokens/nobody", {}, 422),
    ("PUT", "/projects/a%20b", {"json": {}}, 422),
]  # fmt: skip


def test_every_error_is_a_problem(guarded: Guarded) -> None:
    """Too large, malformed, unknown: problem+json with a code, and the headers of every answer."""
    for method, path, more, status in WRONG:
        answer = guarded.call(guarded.admin, method, path, **more)
        found = (answer.status_code, answer.headers["content-type"])
        assert found == (status, "application/problem+json"), path
        assert answer.json()["code"]
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_defect_is_a_problem(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception of our own is answered by a problem that shows nothing of it."""
    empty: dict[str, str] = {}
    monkeypatch.setattr(guarded.access, "tokens", lambda: empty[PASSWORD])
    answer = guarded.call(guarded.admin, "GET", "/tokens")
    assert (answer.status_code, answer.json()["code"]) == (500, "defect")
    assert PASSWORD not in answer.text
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_other_sites_cannot_look(guarded: Guarded) -> None:
    """A script of another site reads nothing; a link from there opens the page."""
    headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
    assert guarded.call(guarded.admin, "GET", "/jobs", headers=headers).status_code == 403
    headers["Sec-Fetch-Mode"] = "navigate"
    assert guarded.http.get("/sign-in", headers=headers).status_code == 200


def test_unknown_paths_are_not_reached() -> None:
    """A path that the table lacks has no route, whatever the application would answer."""
    assert route_of("GET", f"{API}/jobs/x").job == "x"
    assert route_of("POST", f"{API}/jobs/x:cancel").name.endswith("{job}:cancel")
    for path in ("/docs", "/jobs/x/y", f"{API}/../etc", "//", ""):
        with pytest.raises(Problem) as caught:
            route_of("GET", path)
        assert caught.value.status == 404


@pytest.mark.parametrize(
    ("host", "tls", "proxy", "expected"),
    [
        ("127.0.0.1", False, None, Exposure()),
        ("::1", True, None, Exposure(https=True)),
        ("0.0.0.0", True, None, Exposure(tokens=True, https=True, loopback=False)),
        ("0.0.0.0", False, None, "--host: expected a loopback address"),
        ("example.org", False, None, "--tls-cert"),
        ("0.0.0.0", False, "http://trainer", "--behind-proxy: expected a URL such as https"),
        ("0.0.0.0", False, "https://trainer/path", "--behind-proxy"),
        (
            "127.0.0.1", False, "https://trainer:443/",
            Exposure(tokens=True, https=True, origin="trainer:443", loopback=False),
        ),
    ],
)  # fmt: skip
def test_where_it_may_be_served(host: str, tls: bool, proxy: str | None, expected: object) -> None:
    """Loopback is open; another address needs TLS or a proxy, and then tokens."""
    if isinstance(expected, str):
        with pytest.raises(BadInput, match=expected):
            exposure_of(host, tls=tls, proxy=proxy, require_tokens=False)
    else:
        assert exposure_of(host, tls=tls, proxy=proxy, require_tokens=False) == expected


def test_tokens_outlive_the_index(guarded: Guarded, home: Path, place: DatabasePlace) -> None:
    """`reindex` rebuilds the jobs with their owners, and keeps tokens, limits and the audit."""
    job = guarded.make(guarded.tokens[TokenRole.SUBMITTER]).json()["id"]
    guarded.access.set_limits("a", ProjectLimits(queued=9))
    assert reindex(home) == 1
    engine = open_database(place)
    store = AccessStore(engine)
    assert store.of_token(guarded.admin) is not None
    assert store.limits() == {"a": ProjectLimits(queued=9)}
    assert [entry.job for entry in store.audit(10)] == [job]
    engine.dispose()
    assert guarded.service.store.get(job).owner == "submitter"


def test_a_name_means_one_token_at_a_time(guarded: Guarded) -> None:
    """A name is free again once its token is revoked."""
    with pytest.raises(BadInput, match="that no live token has"):
        guarded.access.create_token("viewer", TokenRole.VIEWER, None, DAY_S)
    guarded.access.revoke("viewer")
    row, text = guarded.access.create_token("viewer", TokenRole.VIEWER, None, DAY_S)
    assert row.expires > time.time()
    assert guarded.access.of_token(text) is not None
