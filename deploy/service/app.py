"""The service as one ASGI application: REST, page, metrics, and the thread of the supervisor."""

import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import sqlalchemy as sa
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import DEFAULT_EXCLUDED_CONTENT_TYPES, GZipMiddleware

from deploy.service import api, maintenance_api, page, results_api
from deploy.service.access import AccessGuard, Exposure, FailedLogins
from deploy.service.access_store import AccessStore
from deploy.service.answers import DescribedApp
from deploy.service.clock import SteadyClock
from deploy.service.job_rows import JobRow
from deploy.service.job_store import JobStore
from deploy.service.launcher import Launcher, LocalLauncher
from deploy.service.long_answers import LongAnswers
from deploy.service.metrics import ServiceMetrics
from deploy.service.problems import Problem, of_database_error, of_error, reason_of
from deploy.service.retention import ServiceLimits
from deploy.service.route_roles import API
from deploy.service.states import JobState
from deploy.service.stream import Feed
from deploy.service.strict_requests import refusal, refuse_malformed
from deploy.service.submissions import Submissions
from deploy.service.supervisor import Supervisor
from deploy.service.traces import JobTraces
from deploy.service.uploads import Uploads
from deploy.service.webhooks import Courier, Hosts, Webhooks
from ps import __version__
from ps.logs import logger
from shards.errors import DownpourError

POLL_S = 0.25


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a service. `slots` are workers at a time; `roots` folders that jobs may name.

    `exposure` says whether requests need tokens; `database` names another one than the home does;
    `launcher` starts what starts the jobs' runners.
    """

    home: Path
    slots: int
    roots: Sequence[Path] = ()
    retry_s: float = 5.0
    experiments: Path | None = None
    limits: ServiceLimits = ServiceLimits()
    webhook_hosts: Hosts = Hosts()
    exposure: Exposure = Exposure()
    database: str | None = None
    traces: Callable[[JobStore], JobTraces] | None = None
    launcher: Callable[[], Launcher] = LocalLauncher


class Service:
    """The parts of a running service. `start` begins to drive jobs, `stop` ends that and no job."""

    def __init__(
        self,
        options: ServeOptions,
        engine: sa.Engine,
        launcher: Launcher | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        clock = clock or SteadyClock()
        self.feed = Feed()
        self.exposure = options.exposure
        self.access = AccessStore(engine, clock)
        self.store = JobStore(options.home, engine, self.feed.note_change, clock)
        self._launcher = launcher or options.launcher()
        self.supervisor = Supervisor(
            self.store,
            self._launcher,
            slots=options.slots,
            retry_s=options.retry_s,
            limits=self.access.limits,
            reserve_bytes=options.limits.free_mb << 20,
            silent_s=options.limits.silent_s,
            clock=clock,
            moved=self._trace,
        )
        self.options = options
        self.uploads = Uploads(
            options.home,
            max_bytes=int(options.limits.upload_gb * 1e9),
            reserve_bytes=options.limits.free_mb << 20,
            limits=self.access.limits,
        )
        self.admission = Submissions(
            self.store,
            self.uploads,
            slots=options.slots,
            roots=options.roots,
            confined=options.exposure.tokens,
            limits=self.access.limits,
        )
        self.webhooks = Webhooks(self.store, engine, options.webhook_hosts, clock=clock)
        self._courier = Courier(self.webhooks)
        self._traces = options.traces(self.store) if options.traces is not None else None
        self.looked_at = 0.0
        self._current = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def start(self) -> None:
        with suppress(sa.exc.DBAPIError):  # a locked database: the thread tries again
            self._catch_up()
        self._thread.start()
        self._courier.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()
        self._courier.stop()
        self._launcher.close()
        if self._traces is not None:
            self._traces.stop()

    def _trace(self, before: JobState, row: JobRow) -> None:
        if self._traces is not None:
            self._traces.job_changed(before, row)

    @property
    def ready(self) -> bool:
        """True if the supervisor has looked at all jobs lately."""
        return time.monotonic() - self.looked_at < 30.0 and not self._stopped.is_set()

    def _catch_up(self) -> None:
        if not self._current:
            self.store.catch_up()
            self._current = True

    def _run(self) -> None:
        log, logged = logger("service"), ""
        while not self._stopped.wait(POLL_S):
            try:
                self._catch_up()
                self.supervisor.reconcile()
                self.looked_at, logged = time.monotonic(), ""
            except Exception as error:  # noqa: BLE001  # whatever it is, it may be over soon
                if logged != repr(error):
                    log.error("%s", f"jobs are not driven until this is over: {error!r}")
                logged = repr(error)
                self.supervisor.halted = reason_of(error)
                self._stopped.wait(1.0)
            self.feed.notify(self.supervisor.halted)


def application(service: Service) -> FastAPI:
    """The ASGI application of a service that is started and stopped with it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.feed.open()
        service.start()
        yield
        service.feed.close()
        service.stop()

    app = DescribedApp(
        title="Downpour's training service",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=f"{API}/openapi.json",
    )
    failures, render = FailedLogins(), page.renderer()
    pages = page.ErrorPages(render)
    app.add_middleware(LongAnswers)  # the last one that is added is the first to see a request
    app.add_middleware(
        AccessGuard,
        exposure=service.exposure,
        access=service.access,
        store=service.store,
        failures=failures,
        answer=pages.answer,
    )
    app.add_middleware(
        GZipMiddleware,
        minimum_size=1000,
        compresslevel=5,
        exclude_content_types=(*DEFAULT_EXCLUDED_CONTENT_TYPES, "application/octet-stream"),
    )
    _add_errors(app, pages)
    parts = api.RouteDependencies(
        service.store, service.supervisor, service.admission, service.feed, service.access,
        service.uploads,
    )  # fmt: skip
    options = service.options
    experiments = options.experiments or options.home / "experiments"
    app.include_router(api.routes(parts))
    app.include_router(results_api.routes(service.store, experiments))
    app.include_router(
        maintenance_api.routes(parts, service.webhooks, options.home, options.limits)
    )
    app.include_router(page.routes(parts, service.exposure, failures, experiments, render))
    metrics = ServiceMetrics(service.store, service.feed, service.options.limits.free_mb << 20)

    # Not in a thread, which requests to a locked database may all hold.
    @app.get("/healthz", include_in_schema=False)
    async def healthz() -> dict[str, str]:
        return {"status": "ok", "version": __version__}

    @app.get("/readyz", include_in_schema=False)
    async def readyz() -> JSONResponse:
        ready = service.ready
        return JSONResponse({"ready": ready}, 200 if ready else 503)

    @app.get("/metrics", include_in_schema=False)
    def show_metrics() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


def _add_errors(app: FastAPI, pages: page.ErrorPages) -> None:
    """Answer every error by a problem."""

    @app.exception_handler(Problem)
    def answer_problem(request: Request, problem: Problem) -> Response:
        return pages.answer(problem, request.scope)

    @app.exception_handler(DownpourError)
    @app.exception_handler(OSError)
    def answer_error(request: Request, error: DownpourError | OSError) -> Response:
        return pages.answer(of_error(error), request.scope)

    @app.exception_handler(sa.exc.SQLAlchemyError)
    def unavailable(request: Request, error: sa.exc.SQLAlchemyError) -> Response:
        return pages.answer(of_database_error(error), request.scope)

    @app.exception_handler(RequestValidationError)
    def invalid(request: Request, error: RequestValidationError) -> Response:
        return pages.answer(refusal(request, error), request.scope)

    @app.exception_handler(HTTPException)
    def unreadable(request: Request, error: HTTPException) -> Response:
        # Paths and methods are checked before: this is a body that cannot be read.
        return pages.answer(refuse_malformed(error.status_code), request.scope)
