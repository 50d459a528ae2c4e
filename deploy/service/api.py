"""The REST interface, below /api/v1. Each route reads its arguments and calls one function."""

import asyncio
import csv
import hashlib
import io
import re
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Body, Header, Path, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from pydantic import Field

from deploy.run.settings import TrainSettings
from deploy.runner import job_folder
from deploy.runner.readings import SeriesPoint, read_newest
from deploy.service import stream, tokens_api
from deploy.service.access import Sender, note
from deploy.service.access_store import AccessStore, ProjectLimits
from deploy.service.comparison import curve
from deploy.service.job_rows import JobDetails, JobFilter, JobRow, JobShown
from deploy.service.job_store import JobStore
from deploy.service.long_answers import CHUNK_BYTES, open_at, pieces
from deploy.service.problems import Problem, not_found
from deploy.service.states import JobState, Verb
from deploy.service.strict_requests import CURSOR, NUMBER, RequestBody, strict_router
from deploy.service.submissions import Cloning, Submissions, Submitted
from deploy.service.supervisor import Supervisor, delete_folder, evaluations
from deploy.service.tokens import LOCAL, Principal
from deploy.service.uploads import Uploads
from shards.argument_checks import MAX_INT

MAX_LOG_BYTES = 16 << 20

JobId = Annotated[str, Path(description="The id of a job.", max_length=64)]
Key = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        description="A repeated request with the same key gets the first one's answer, for 48 h.",
        min_length=1,
        max_length=200,
    ),
]


class JobChange(RequestBody):
    """The body of PATCH: what changes of a job's name, labels and priority."""

    name: str | None = None
    labels: dict[str, str] | None = None
    priority: int | None = Field(default=None, ge=-1000, le=1000)


class Cancellation(RequestBody):
    """The body of `:cancel`. `drain` leaves a snapshot, `now` ends the job at once."""

    mode: Literal["drain", "now"] = "drain"


class Resharding(RequestBody):
    """The body of `:reshard`."""

    shards: int = Field(ge=1, le=1024)


class Changes(RequestBody):
    """The body of `:set`: options of `downpour train` that change, by name."""

    settings: dict[str, Any] = Field(min_length=1)


class RouteDependencies(msgspec.Struct, frozen=True):
    """The components that every route is given."""

    store: JobStore
    supervisor: Supervisor
    admission: Submissions
    feed: stream.Feed
    access: AccessStore
    uploads: Uploads

    def usage(self, project: str) -> ProjectLimits:
        """The present use of a project, in the terms of its limits."""
        sent = self.uploads.usage(project)
        return msgspec.structs.replace(
            self.store.usage(project), uploads=sent.uploads, upload_bytes=sent.upload_bytes
        )


def show_job(row: JobRow, *, settings: bool = False) -> dict[str, Any]:
    """A job as the interface shows it."""
    plain: dict[str, Any] = msgspec.to_builtins(row)
    kind = JobDetails if settings else JobShown
    return {name: plain[name] for name in kind.__struct_fields__}


def routes(dependencies: RouteDependencies) -> APIRouter:
    """All routes, for these dependencies."""
    router = strict_router()
    for add in (_add_jobs, _add_verbs, _add_details, _add_streams):
        add(router, dependencies)
    tokens_api.add_routes(router, dependencies.access, dependencies.usage)
    return router


def find(store: JobStore, job: str) -> JobRow:
    """The job; raises the problem 404."""
    try:
        return store.get(job)
    except KeyError:
        raise not_found("job", job) from None


def find_visible(store: JobStore, sender: Principal, jobs: Sequence[str]) -> list[JobRow]:
    """These jobs; raises the problem 404 for one that the sender may not see."""
    rows = [find(store, job) for job in jobs]
    for row in rows:
        if not sender.sees(row.project):
            raise not_found("job", row.id)
    return rows


def own_key(sender: Principal, key: str | None) -> str | None:
    """An idempotency key as it is stored: no sender gets the answer to another one's request."""
    if key is None or sender == LOCAL:
        return key
    # The name of a revoked token may be given again, for other projects.
    return f"{sender.name} {','.join(sorted(sender.projects or ('*',)))} {key}"


class _Once:
    """Answers a repeated request as the first one was answered."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._busy: set[str] = set()
        self._lock = threading.Lock()

    def __call__(
        self, key: str | None, request: str, status: int, make: Callable[[], dict[str, Any]]
    ) -> JSONResponse:
        """The answer of `make`, or that of the request that had this key before."""
        if key is None:
            return JSONResponse(make(), status)
        digest = hashlib.sha256(request.encode()).hexdigest()
        with self._lock:
            if key in self._busy:
                text = "Idempotency-Key: an earlier request with this key is in progress"
                raise Problem(409, "in_progress", text, hint="repeat the request later")
            self._busy.add(key)
        try:
            earlier = self._store.earlier_answer(key)
            if earlier is None:
                answer = make()
                self._store.answer(key, digest, status, answer)
                return JSONResponse(answer, status)
            body, status, answer = earlier
            if body != digest:
                text = "Idempotency-Key: expected the request that had this key before, got another"
                raise Problem(422, "key_reused", text, hint="use a new key")
            return JSONResponse(answer, status)
        finally:
            with self._lock:
                self._busy.discard(key)


def _add_jobs(router: APIRouter, dependencies: RouteDependencies) -> None:
    store, once = dependencies.store, _Once(dependencies.store)

    @router.post("/jobs", status_code=201)
    def submit(request: Request, body: Submitted, sender: Sender, key: Key = None) -> Response:
        """Submit a job. It is on disk before this is answered."""
        key = own_key(sender, key)

        def act() -> dict[str, Any]:
            row = dependencies.admission.submit(body, key, sender)
            note(request, job=row.id, project=row.project)
            return show_job(row)

        return once(key, f"POST /jobs {body.model_dump_json()}", 201, act)

    @router.get("/jobs")
    def list_jobs(
        sender: Sender,
        state: Annotated[list[JobState], Query(description="Repeatable.")] = [],  # noqa: B006
        project: str | None = None,
        label: Annotated[str | None, Query(description="NAME or NAME=VALUE.")] = None,
        q: Annotated[str | None, Query(description="A part of the name.", max_length=200)] = None,
        cursor: Annotated[str | None, Query(pattern=CURSOR)] = None,
        limit: Annotated[int, Query(ge=1, le=200)] = 50,
    ) -> Response:
        """Jobs, the newest first. `cursor` of an answer continues the list."""
        criteria = JobFilter(
            state=state, projects=sender.projects, project=project, label=label, q=q
        )
        page = store.page(criteria, limit, cursor)
        answer = {"jobs": [show_job(row) for row in page.jobs], "cursor": page.cursor}
        return Response(msgspec.json.encode(answer), media_type="application/json")

    @router.get("/jobs/{job}")
    def describe(job: JobId) -> dict[str, Any]:
        """One job with its settings and, while it is queued, its position and what it waits for."""
        return show_job(dependencies.supervisor.with_position(find(store, job)), settings=True)

    @router.patch("/jobs/{job}")
    def change(job: JobId, body: JobChange) -> dict[str, Any]:
        """Change the name, the labels or the priority."""
        row = find(store, job)
        values = dependencies.admission.check_changes(body.model_dump(exclude_none=True))
        if values:
            store.note(row, "changed", **values)
        return show_job(find(store, job), settings=True)

    @router.delete("/jobs/{job}", status_code=204)
    def delete(job: JobId) -> None:
        """Delete a job in a terminal state, with its folder."""
        delete_folder(store, find(store, job))


def _add_verbs(router: APIRouter, dependencies: RouteDependencies) -> None:
    store, once = dependencies.store, _Once(dependencies.store)

    def ask(
        sender: Principal, job: str, verb: Verb, key: str | None, **details: Any
    ) -> JSONResponse:
        def act() -> dict[str, Any]:
            order_id, row = dependencies.supervisor.ask(job, verb, **details)
            return {"order_id": order_id, "id": row.id, "state": row.state}

        find(store, job)
        return once(own_key(sender, key), f"POST /jobs/{job}:{verb} {details}", 202, act)

    @router.post("/jobs/{job}:cancel", status_code=202)
    def cancel(
        sender: Sender,
        job: JobId,
        body: Annotated[Cancellation, Body()] = Cancellation(),  # noqa: B008
        key: Key = None,
    ) -> Response:
        """Cancel a job; it ends as CANCELLED."""
        return ask(sender, job, Verb.CANCEL, key, mode=body.mode)

    @router.post("/jobs/{job}:pause", status_code=202)
    def pause(sender: Sender, job: JobId, key: Key = None) -> Response:
        """End the attempt with a snapshot and release the slots."""
        return ask(sender, job, Verb.PAUSE, key)

    @router.post("/jobs/{job}:resume", status_code=202)
    def resume(sender: Sender, job: JobId, key: Key = None) -> Response:
        """Queue a paused job again; it continues from its newest snapshot."""
        return ask(sender, job, Verb.RESUME, key)

    @router.post("/jobs/{job}:snapshot", status_code=202)
    def snapshot(sender: Sender, job: JobId, key: Key = None) -> Response:
        """Take a snapshot. The event `answer` with the order's id says which, or why not."""
        return ask(sender, job, Verb.SNAPSHOT, key)

    @router.post("/jobs/{job}:reshard", status_code=202)
    def reshard(sender: Sender, job: JobId, body: Resharding, key: Key = None) -> Response:
        """Move a job that trains to another number of shards; the event `answer` says how it went.

        It keeps that number in later attempts.
        """
        return ask(sender, job, Verb.RESHARD, key, shards=body.shards)

    @router.post("/jobs/{job}:set", status_code=202)
    def change_settings(sender: Sender, job: JobId, body: Changes, key: Key = None) -> Response:
        """Change options of a job that trains, or is to train again.

        The bound and the rate change while it trains; the event `answer` says how it went. With
        others it continues from a snapshot, in another attempt.
        """
        row = find(store, job)
        settings = dependencies.admission.apply_changes(row, body.settings)
        return ask(sender, job, Verb.SET, key, settings=settings, changes=body.settings)

    @router.post("/jobs/{job}:clone", status_code=202)
    def clone(
        request: Request,
        sender: Sender,
        job: JobId,
        body: Annotated[Cloning, Body()] = Cloning(),  # noqa: B008
        key: Key = None,
    ) -> Response:
        """Submit a copy, with other settings, perhaps from a snapshot."""
        row, key = find(store, job), own_key(sender, key)

        def act() -> dict[str, Any]:
            clone_row = dependencies.admission.clone(row, body, key, sender)
            note(request, job=job, project=row.project, detail=f"made {clone_row.id}")
            return {"order_id": clone_row.id, **show_job(clone_row)}

        return once(key, f"POST /jobs/{job}:clone {body.model_dump_json()}", 202, act)


def _add_details(router: APIRouter, dependencies: RouteDependencies) -> None:
    store = dependencies.store

    @router.get("/jobs/{job}/attempts")
    def attempts(job: JobId) -> dict[str, Any]:
        """The attempts: cause of the end, exit status, snapshot, the last lines of the log."""
        return {"attempts": store.attempts(find(store, job).id)}

    @router.get("/jobs/{job}/events")
    def events(
        job: JobId,
        after: Annotated[int, Query(ge=0, le=MAX_INT)] = 0,
        limit: Annotated[int, Query(ge=1, le=1000)] = 200,
        tail: Annotated[int | None, Query(ge=1, le=1000)] = None,
    ) -> dict[str, Any]:
        """The events with an id above `after`, or the last `tail` ones, in order."""
        row = find(store, job)
        if tail is not None:
            return {"events": store.newest_events(row.id, tail)}
        return {"events": store.events([row.id], after, limit)}

    @router.get("/jobs/{job}/reading")
    def reading(job: JobId) -> dict[str, Any]:
        """The newest figures: workers, shards, staleness, waits."""
        newest = read_newest(store.folder(find(store, job).id) / job_folder.READINGS)
        return {"reading": msgspec.to_builtins(newest)}

    @router.get("/jobs/{job}/series", responses={200: {"content": {"text/csv": {}}}})
    def series(
        job: JobId,
        names: Annotated[str, Query(description="Columns, by comma.")] = "loss",
        x: Literal["steps", "samples", "seconds"] = "steps",
        points: Annotated[int, Query(ge=2, le=2000)] = 600,
        form: Annotated[Literal["json", "csv"], Query(alias="format")] = "json",
    ) -> Response:
        """Columns of the job's series, `points` points at most, and the tests of the weights."""
        row = find(store, job)
        selected = [name for name in names.split(",") if name]
        for name in selected:
            if name not in SeriesPoint.__struct_fields__:
                expected = ", ".join(SeriesPoint.__struct_fields__)
                detail = f"names: expected {expected}, got {name[:80]}"
                raise Problem(422, "bad_input", detail, field="names", got=name[:80])
        across, columns = curve(store, row, selected, x, points)
        if form == "csv":
            return _as_csv(x, across, columns)
        tests = evaluations(TrainSettings.of_plain(row.settings))
        answer = {"x": across, "series": columns, "evaluations": tests}
        return Response(msgspec.json.encode(answer), media_type="application/json")

    @router.get("/jobs/{job}/logs", response_class=PlainTextResponse)
    def logs(
        job: JobId,
        part: Annotated[str | None, Query(max_length=100)] = None,
        tail: Annotated[int, Query(ge=1, le=MAX_LOG_BYTES)] = CHUNK_BYTES,
        after: Annotated[int | None, Query(ge=0, le=MAX_INT)] = None,
    ) -> Response:
        """The end of a log, or what follows the byte `after`.

        Header X-Log-Parts names all parts, X-Log-Next the byte from which to continue.
        """
        row = find(store, job)
        parts = {path.stem: path for path in (store.folder(row.id) / job_folder.LOGS).glob("*.log")}
        name = part or f"driver-{row.attempt}"
        headers = {"X-Log-Parts": ",".join(sorted(parts)), "X-Log-Next": "0"}
        if name not in parts:
            if part is None:
                return Response("", media_type="text/plain", headers=headers)
            raise not_found("part", name[:80], f"this job has {', '.join(sorted(parts)) or 'none'}")
        try:
            file, start, size = open_at(parts[name], tail, after, MAX_LOG_BYTES)
        except FileNotFoundError:
            raise Problem(410, "gone", f"part {name}: deleted") from None
        except OSError as error:
            raise Problem(503, "unreachable", f"part {name}: {error.strerror}") from None
        headers |= {"X-Log-Next": str(start + size), "Content-Length": str(size)}
        content = pieces(file, size)
        return StreamingResponse(content, media_type="text/plain; charset=utf-8", headers=headers)


def _as_csv(x: str, across: list[float], columns: dict[str, list[Any]]) -> Response:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow([x, *columns])
    rows.writerows(zip(across, *columns.values(), strict=True))
    return Response(text.getvalue(), media_type="text/csv; charset=utf-8")


def _add_streams(router: APIRouter, dependencies: RouteDependencies) -> None:
    @router.get("/stream")
    async def follow(
        request: Request,
        sender: Sender,
        jobs: Annotated[str, Query(description="Ids, by comma; default: all.")] = "",
        after: Annotated[int | None, Query(ge=0, le=MAX_INT)] = None,
    ) -> Response:
        """Server-sent events: `event` with an id, and `reading`. Last-Event-ID is honoured."""
        last = request.headers.get("last-event-id", "")
        since = int(last) if re.fullmatch(NUMBER, last) else after
        ids = [job for job in jobs.split(",") if job]
        for job in ids:
            row = await asyncio.to_thread(find, dependencies.store, job)
            if not sender.sees(row.project):
                raise not_found("job", job)

        async def body() -> AsyncIterator[bytes]:
            async for text in stream.messages(
                dependencies.store,
                dependencies.feed,
                ids,
                since,
                sender.projects,
                lambda: dependencies.access.is_valid(sender),
            ):
                yield text

        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(body(), media_type="text/event-stream", headers=headers)
