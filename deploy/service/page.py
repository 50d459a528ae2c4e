"""The browser page: rendered here, kept current by the scripts in the folder static.

All text is escaped by the templates. The scripts and the style sheet come from this service only,
so the page works without any other network.
"""

import asyncio
import hashlib
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qs

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from pydantic import BeforeValidator
from starlette.datastructures import Headers
from starlette.types import Scope

from deploy.run.disk_space import free_bytes
from deploy.service.access import NOBODY, Exposure, FailedLogins, Sender, address_of, note
from deploy.service.access_store import SESSION_S, AccessStore, ProjectLimits
from deploy.service.alerts import ALERTS
from deploy.service.api import RouteDependencies, find, find_visible
from deploy.service.comparison import MAX_JOBS, compare
from deploy.service.experiments import experiments
from deploy.service.job_rows import JobFilter, JobRow
from deploy.service.job_store import JobStore
from deploy.service.problems import Problem, not_found
from deploy.service.route_roles import API
from deploy.service.states import JobState, Verb, states_for
from deploy.service.strict_requests import CURSOR
from deploy.service.submissions import MAX_NAME
from deploy.service.tokens import LOCAL, Principal, TokenRole, csrf_of, token_id
from ps import __version__
from shards.plurals import format_count

_HERE = Path(__file__).parent
_STATIC = {path.name: path for path in sorted((_HERE / "static").iterdir())}
_KINDS = {".js": "text/javascript", ".css": "text/css", ".txt": "text/plain"}
_SHAPES = {
    JobState.QUEUED: "○", JobState.CHECKING: "◔", JobState.STARTING: "◑", JobState.RUNNING: "●",
    JobState.DEGRADED: "◐", JobState.PAUSING: "◫", JobState.PAUSED: "❚❚", JobState.RECOVERING: "↻",
    JobState.STOPPING: "◒", JobState.SUCCEEDED: "✓", JobState.FAILED: "✗", JobState.CANCELLED: "⊘",
}  # fmt: skip
_PER_PAGE = 50
States = Annotated[
    list[JobState], Query(), BeforeValidator(lambda states: [state for state in states if state])
]
"""The states that the form of the list sends; its choice "all" is an empty text."""

Render = Callable[..., str]
"""Renders a template by its name, for a sender, with the values that it names."""


_TITLES = {401: "Sign in first", 403: "Not allowed", 404: "Not found", 409: "Not now"}


class ErrorPages:
    """Answers problems: a browser that opens a page gets one, everything else gets JSON."""

    def __init__(self, render: Render) -> None:
        self._render = render

    def answer(self, problem: Problem, scope: Scope) -> Response:
        if not _opens_page(scope):
            return problem.response()
        principal = scope.get("state", {}).get("principal", NOBODY)
        title = _TITLES.get(problem.status, "This did not work")
        text = self._render("error.html", principal, problem=problem, title=title)
        return HTMLResponse(text, problem.status, headers=problem.headers)


def _opens_page(scope: Scope) -> bool:
    """Return whether a browser shows the answer to a request outside of the REST interface."""
    accepted = Headers(scope=scope).get("accept", "").split(",")
    kinds = {kind.partition(";")[0].strip() for kind in accepted}
    return "text/html" in kinds and not scope["path"].startswith(f"{API}/")


def routes(
    dependencies: RouteDependencies,
    exposure: Exposure,
    failures: FailedLogins,
    folder: Path,
    render: Render,
) -> APIRouter:
    """The routes of the page; `folder` holds the experiments."""
    router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)
    store, access = dependencies.store, dependencies.access
    _add_jobs(router, dependencies, render)
    _add_results(router, store, folder, render)
    _add_signing(router, access, exposure, failures, render)

    @router.get("/service")
    def service(sender: Sender) -> str:
        """The service: its projects, and for an administrator its tokens and the audit."""
        limits = access.limits()
        names = sorted({*limits, *(sender.projects if sender.projects is not None else ())})
        projects = [
            (name, limits.get(name, ProjectLimits()), dependencies.usage(name))
            for name in names
            if sender.sees(name)
        ]
        may = sender.role is TokenRole.ADMINISTRATOR
        return render(
            "service.html",
            sender,
            projects=projects,
            tokens=access.tokens() if may else None,
            audit=access.audit(100) if may else None,
            roles=list(TokenRole),
            now=time.time(),
            version=__version__,
            slots=dependencies.supervisor.slots,
            held=store.slots_held(),
            halted=dependencies.supervisor.halted,
            free=free_bytes(store.folder("")),
            alerts=ALERTS,
        )

    @router.get("/static/{name}")
    def static(name: str) -> Response:
        """A script or a style sheet. The page names it with its digest, so it never changes."""
        path = _STATIC.get(name)
        if path is None:
            raise not_found("file", name[:80])
        headers = {"Cache-Control": "public, max-age=31536000, immutable"}
        kind = _KINDS.get(path.suffix, "application/octet-stream")
        return Response(path.read_bytes(), media_type=kind, headers=headers)

    return router


def _add_jobs(router: APIRouter, dependencies: RouteDependencies, render: Render) -> None:
    store = dependencies.store

    def list_jobs(
        sender: Principal, state: list[JobState], q: str, cursor: str | None
    ) -> dict[str, Any]:
        criteria = JobFilter(state=state, projects=sender.projects, q=q or None)
        matches = store.page(criteria, _PER_PAGE, cursor)
        return {"jobs": matches.jobs, "cursor": matches.cursor, "q": q, "chosen": state}

    @router.get("/")
    def jobs(
        sender: Sender,
        state: States = [],  # noqa: B006
        q: Annotated[str, Query(max_length=200)] = "",
        cursor: Annotated[str | None, Query(pattern=CURSOR)] = None,
    ) -> str:
        """The list of jobs."""
        return render(
            "jobs.html",
            sender,
            last_event=store.last_event(),
            **list_jobs(sender, state, q, cursor),
        )

    @router.get("/parts/jobs")
    def rows(
        sender: Sender,
        state: States = [],  # noqa: B006
        q: Annotated[str, Query(max_length=200)] = "",
        cursor: Annotated[str | None, Query(pattern=CURSOR)] = None,
    ) -> str:
        """The table of the list, for a page that is open."""
        return render("job_table.html", sender, **list_jobs(sender, state, q, cursor))

    @router.get("/jobs/{job}")
    def job(sender: Sender, job: str) -> str:
        """One job."""
        row = dependencies.supervisor.with_position(find(store, job))
        verbs = {verb.value: states_for(verb) for verb in Verb}
        return render(
            "job.html",
            sender,
            job=row,
            verbs=verbs,
            clone_fields=_clone_fields(row),
            last_event=store.last_event(),
        )


def _add_results(router: APIRouter, store: JobStore, folder: Path, render: Render) -> None:
    @router.get("/compare")
    def compare_jobs(
        sender: Sender,
        jobs: Annotated[list[str], Query(max_length=MAX_JOBS)] = [],  # noqa: B006
    ) -> str:
        """Jobs next to each other."""
        ids = list(dict.fromkeys(job for ids_text in jobs for job in ids_text.split(",") if job))
        rows = find_visible(store, sender, ids[:MAX_JOBS])
        return render("compare.html", sender, found=compare(store, rows, "loss", "steps", 2))

    @router.get("/experiments")
    def show_experiments(sender: Sender) -> str:
        """The experiments with their reports."""
        return render("experiments.html", sender, found=experiments(folder), folder=folder)


def _add_signing(
    router: APIRouter,
    access: AccessStore,
    exposure: Exposure,
    failures: FailedLogins,
    render: Render,
) -> None:
    @router.get("/sign-in")
    def ask(
        sender: Sender, target: Annotated[str, Query(alias="next", max_length=2000)] = "/"
    ) -> str:
        """The form for signing in."""
        return render("sign_in.html", sender, target=_own(target), failure="")

    @router.post("/sign-in")
    async def sign_in(request: Request) -> Response:
        """Begin a session in this browser, with the token of the form."""
        form = parse_qs((await request.body()).decode("latin-1"))
        token, target = form.get("token", [""])[0].strip(), _own(form.get("next", ["/"])[0])
        principal = await asyncio.to_thread(access.of_token, token)
        if principal is None:
            failures.count(address_of(request.scope))
            note(request, token=token_id(token) or "")
            failure = "No live token is this one. It may have expired, or have been revoked."
            page = render("sign_in.html", request.state.principal, target=target, failure=failure)
            return HTMLResponse(page, 401)
        note(request, actor=principal.name, token=principal.token)
        secret = await asyncio.to_thread(access.sign_in, principal)
        answer = RedirectResponse(target, 303)
        answer.set_cookie(
            exposure.cookie,
            secret,
            max_age=int(SESSION_S),
            secure=exposure.https,
            httponly=True,
            samesite="strict",
        )
        return answer

    @router.post("/sign-out")
    def sign_out(sender: Sender) -> Response:
        """End the session of this browser."""
        if sender.session:
            access.sign_out(sender.session)
        answer = Response(status_code=204)
        answer.delete_cookie(
            exposure.cookie, secure=exposure.https, httponly=True, samesite="strict"
        )
        return answer


def _own(target: str) -> str:
    """A path of this service to go to after signing in; for anything else, the list of jobs."""
    return target if re.fullmatch(r"/(?![/\\])[^\\\x00-\x20\x7f]*", target) else "/"


def renderer() -> Render:
    """Return the function that renders the templates."""
    environment = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    digests = {
        name: hashlib.sha256(path.read_bytes()).hexdigest()[:12] for name, path in _STATIC.items()
    }
    environment.globals |= {
        "asset": lambda name: f"/static/{name}?v={digests[name]}",
        "states": list(JobState),
        "shape": _SHAPES,
        "sparkline": sparkline,
    }
    environment.filters |= {"number": _number, "utc": _utc, "counted": format_count}

    def render(name: str, sender: Principal, **values: Any) -> str:
        csrf = csrf_of(sender.session) if sender.session else ""
        shown = sender if sender != LOCAL else None
        return str(environment.get_template(name).render(sender=shown, csrf=csrf, **values))

    return render


def sparkline(row: JobRow, width: int = 120, height: int = 24) -> str:
    """The points of a loss line, for an SVG polyline of this size; empty below two points."""
    values = [value for value in row.head.get("line", []) if value is not None]
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    scale = (height - 2) / (high - low) if high > low else 0.0
    step = width / (len(values) - 1)
    return " ".join(
        f"{n * step:.1f},{height - 1 - (value - low) * scale:.1f}" for n, value in enumerate(values)
    )


def _clone_fields(row: JobRow) -> list[tuple[str, str, str, str]]:
    """The fields of the form for a clone: name, label, value, and what stands for none."""
    settings = row.settings
    bound = settings.get("staleness")
    return [
        ("name", "Name", f"{row.name} (copy)"[:MAX_NAME], ""),
        ("snapshot", "Starts from", "", ""),
        ("max_iter", "Steps of each worker", _text(settings.get("max_iter")), "as the solver says"),
        (
            "strategy",
            "Strategy; scale=0.5 halves the rate",
            _text(settings.get("strategy")),
            "downpour",
        ),
        ("staleness", "Staleness bound, or inf", "inf" if bound is None else _text(bound), ""),
        ("workers", "Workers", _text(settings.get("workers")), ""),
        ("shards", "Shards", _text(settings.get("shards")), ""),
    ]


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _number(value: float | None, digits: int = 4) -> str:
    """A figure in a few digits, as `figure` in page.js shows it; a dash if it is unknown."""
    if value is None or not math.isfinite(value):
        return "–"
    size = abs(value)
    if float(value).is_integer() or size >= 1000:
        return f"{round(value):,}"
    if size < 1e-6:
        mantissa, _, power = f"{value:.2e}".partition("e")
        return f"{mantissa}e{int(power)}"
    return f"{float(f'{value:.{digits}g}'):,.12f}".rstrip("0").rstrip(".")


def _utc(value: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(value))
