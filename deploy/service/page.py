"""The browser page: rendered here, kept current by the scripts in the folder static.

All text is escaped by the templates. The scripts and the style sheet come from this service only,
so the page works without any other network.
"""

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from deploy.disk_space import free_bytes
from deploy.service.alerts import ALERTS
from deploy.service.api import find
from deploy.service.comparison import MOST_JOBS, compare
from deploy.service.experiments import experiments
from deploy.service.job_store import JobFilter, JobRow, JobStore
from deploy.service.problems import not_found
from deploy.service.states import JobState, Verb, states_for
from deploy.service.supervisor import Supervisor
from ps import __version__

_HERE = Path(__file__).parent
_STATIC = {path.name: path for path in sorted((_HERE / "static").iterdir())}
_KINDS = {".js": "text/javascript", ".css": "text/css", ".txt": "text/plain"}
_SHAPES = {
    JobState.QUEUED: "○", JobState.CHECKING: "◔", JobState.STARTING: "◑", JobState.RUNNING: "●",
    JobState.DEGRADED: "◐", JobState.PAUSING: "◫", JobState.PAUSED: "❚❚", JobState.RECOVERING: "↻",
    JobState.STOPPING: "◒", JobState.SUCCEEDED: "✓", JobState.FAILED: "✗", JobState.CANCELLED: "⊘",
}  # fmt: skip
_PER_PAGE = 50


def routes(store: JobStore, supervisor: Supervisor, folder: Path) -> APIRouter:
    """The routes of the page; `folder` holds the experiments."""
    router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)
    render = _renderer()

    def listed(state: list[JobState], q: str, cursor: str | None) -> dict[str, Any]:
        found = store.page(JobFilter(state=state, q=q or None), _PER_PAGE, cursor)
        return {"jobs": found.jobs, "cursor": found.cursor, "q": q, "chosen": state}

    @router.get("/")
    def jobs(
        state: Annotated[list[JobState], Query()] = [],  # noqa: B006
        q: Annotated[str, Query(max_length=200)] = "",
        cursor: Annotated[str | None, Query(max_length=64)] = None,
    ) -> str:
        """The list of jobs."""
        return render("jobs.html", last_event=store.last_event(), **listed(state, q, cursor))

    @router.get("/parts/jobs")
    def rows(
        state: Annotated[list[JobState], Query()] = [],  # noqa: B006
        q: Annotated[str, Query(max_length=200)] = "",
        cursor: Annotated[str | None, Query(max_length=64)] = None,
    ) -> str:
        """The table of the list, for a page that is open."""
        return render("job_table.html", **listed(state, q, cursor))

    @router.get("/jobs/{job}")
    def job(job: str) -> str:
        """One job."""
        row = find(store, job)
        verbs = {verb.value: states_for(verb) for verb in Verb}
        return render("job.html", job=row, verbs=verbs, last_event=store.last_event())

    @router.get("/compare")
    def compare_jobs(jobs: Annotated[list[str], Query(max_length=MOST_JOBS)] = []) -> str:  # noqa: B006
        """Jobs next to each other."""
        ids = list(dict.fromkeys(job for each in jobs for job in each.split(",") if job))
        rows = [find(store, job) for job in ids[:MOST_JOBS]]
        return render("compare.html", found=compare(store, rows, "loss", "updates", 2))

    @router.get("/experiments")
    def show_experiments() -> str:
        """The experiments with their reports."""
        return render("experiments.html", found=experiments(folder), folder=folder)

    @router.get("/service")
    def service() -> str:
        """The service itself."""
        return render(
            "service.html",
            version=__version__,
            home=store.folder("").parent,
            slots=supervisor.slots,
            held=store.slots_held(),
            halted=supervisor.halted,
            free=free_bytes(store.folder("")),
            counts=store.counts(),
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


def _renderer() -> Callable[..., str]:
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
    environment.filters |= {"number": _number, "utc": _utc}

    def render(name: str, **values: Any) -> str:
        return str(environment.get_template(name).render(**values))

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


def _number(value: float | None, digits: int = 4) -> str:
    """A figure in a few digits; a dash if it is unknown."""
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:.{digits}g}"


def _utc(value: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(value))
