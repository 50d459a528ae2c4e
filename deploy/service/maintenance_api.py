"""The routes of the service itself: uploads, webhooks, retention, and adopted runs."""

import time
from pathlib import Path as FilePath
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Body, Path, Query, Request
from pydantic import Field

from deploy.run.disk_space import free_bytes
from deploy.service.access import Sender, check_project
from deploy.service.api import RouteDependencies, find, show_job
from deploy.service.job_store import JobStore
from deploy.service.problems import Problem, not_found
from deploy.service.retention import ServiceLimits, collect, plan
from deploy.service.states import JobState
from deploy.service.strict_requests import RequestBody, strict_router
from deploy.service.submissions import check_project_name
from deploy.service.uploads import CHUNK_BYTES, UploadedFile, Uploads, WrongOffset
from deploy.service.webhooks import Webhooks

UploadId = Annotated[str, Path(description="The id of an upload.", max_length=64)]


class ManifestFile(RequestBody):
    """A file of an upload."""

    path: str = Field(description="Names separated by /, relative.")
    bytes: int = Field(ge=0)
    sha256: str = Field(description="64 hexadecimal digits.")


class UploadRequest(RequestBody):
    """The body of an upload: all its files."""

    files: list[ManifestFile]
    project: str = Field(default="default", description="Whose limits it counts for.")


class NewWebhook(RequestBody):
    """The body of a webhook."""

    url: str = Field(max_length=2000)
    project: str | None = Field(default=None, description="Only events of this project.")


class Collection(RequestBody):
    """The body of `:gc`. Nothing is deleted unless `delete` says so."""

    delete: bool = False


class Adoption(RequestBody):
    """The body of `:adopt`: the run folder of `downpour train`."""

    run: str = Field(max_length=4000)
    name: str | None = None
    project: str = "default"


def routes(
    dependencies: RouteDependencies, webhooks: Webhooks, home: FilePath, limits: ServiceLimits
) -> APIRouter:
    """All routes of the service itself."""
    router = strict_router()
    _add_uploads(router, dependencies.uploads)
    _add_webhooks(router, webhooks)
    _add_maintenance(router, dependencies, home, limits)
    return router


def _add_uploads(router: APIRouter, uploads: Uploads) -> None:
    @router.post("/uploads", status_code=201)
    def begin_upload(body: UploadRequest, sender: Sender) -> dict[str, Any]:
        """Begin an upload, or learn what an earlier one with the same files still lacks."""
        check_project(sender, body.project)
        files = [UploadedFile(file.path, file.bytes, file.sha256) for file in body.files]
        status: dict[str, Any] = msgspec.to_builtins(
            uploads.begin(files, check_project_name(body.project))
        )
        return status

    @router.get("/uploads/{upload}")
    def describe_upload(upload: UploadId) -> dict[str, Any]:
        """The progress of an upload: the received bytes of each file."""
        try:
            status: dict[str, Any] = msgspec.to_builtins(uploads.status(upload))
        except KeyError:
            raise not_found("upload", upload) from None
        return status

    @router.put("/uploads/{upload}/files")
    async def write_chunk(
        request: Request,
        upload: UploadId,
        path: Annotated[str, Query(description="A path of the manifest.", max_length=2000)],
        offset: Annotated[int, Query(description="Where the chunk begins.", ge=0)],
    ) -> dict[str, Any]:
        """Add a chunk to a file; 409 names the offset that continues it. At most 1 MiB a chunk."""
        from starlette.concurrency import run_in_threadpool

        chunk = await request.body()
        if len(chunk) > CHUNK_BYTES:
            raise Problem(413, "too_large", f"chunk: expected at most {CHUNK_BYTES} bytes")
        try:
            progress = await run_in_threadpool(uploads.write, upload, path, offset, chunk)
        except KeyError:
            raise not_found("upload", f"{upload} {path[:80]}") from None
        except WrongOffset as error:
            raise Problem(
                409, "wrong_offset", str(error), field="offset",
                expected=str(error.expected), got=str(offset),
            ) from None  # fmt: skip
        done: dict[str, Any] = msgspec.to_builtins(progress)
        return done


def _add_webhooks(router: APIRouter, webhooks: Webhooks) -> None:
    @router.post("/webhooks", status_code=201)
    def add_webhook(body: NewWebhook) -> dict[str, Any]:
        """Send alerts and the ends of jobs to a URL. The answer has the secret, this once."""
        return webhooks.add(body.url, body.project)

    @router.get("/webhooks")
    def list_webhooks() -> dict[str, Any]:
        """The webhooks, without their secrets: deliveries, tries, the last answer."""
        return {"webhooks": webhooks.all()}

    @router.delete("/webhooks/{webhook}", status_code=204)
    def remove_webhook(webhook: Annotated[str, Path(max_length=64)]) -> None:
        """Forget a webhook."""
        try:
            webhooks.remove(webhook)
        except KeyError:
            raise not_found("webhook", webhook) from None


def _add_maintenance(
    router: APIRouter, dependencies: RouteDependencies, home: FilePath, limits: ServiceLimits
) -> None:
    store: JobStore = dependencies.store

    @router.post("/service:gc")
    def collect_garbage(
        body: Annotated[Collection, Body()] = Collection(),  # noqa: B008
    ) -> dict[str, Any]:
        """List what may be deleted, with the reason of each; with `delete` it is deleted."""
        removals = plan(store, home, limits, time.time())
        freed = collect(removals) if body.delete else 0
        total = sum(removal.bytes for removal in removals)
        return {"removals": msgspec.to_builtins(removals), "bytes": total, "freed": freed}

    @router.get("/service")
    def describe_service() -> dict[str, Any]:
        """The service: slots, free disk space, and why the queue is halted, if it is."""
        counts = store.counts()
        return {
            "slots": dependencies.supervisor.slots,
            "slots_held": store.slots_held(),
            "halted": dependencies.supervisor.halted,
            "free_bytes": free_bytes(home),
            "jobs": {state.value: counts[state] for state in JobState},
            "limits": msgspec.to_builtins(limits),
        }

    @router.post("/jobs:adopt", status_code=201)
    def adopt(body: Adoption, sender: Sender) -> dict[str, Any]:
        """List a run that `downpour train` has made; its folder stays where it is."""
        row = dependencies.admission.adopt(FilePath(body.run), body.name, body.project, sender)
        return show_job(find(store, row.id))
