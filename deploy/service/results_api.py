"""The routes of what jobs leave behind: artefacts, snapshots, comparisons, experiments."""

import os
import tempfile
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Path, Query, Response
from fastapi.responses import FileResponse, HTMLResponse, StreamingResponse

from deploy.run.settings import TrainSettings
from deploy.runner.readings import SeriesPoint
from deploy.service.access import Sender
from deploy.service.api import JobId, find, find_visible
from deploy.service.artefacts import KINDS, Artefacts, artefact_file
from deploy.service.comparison import MAX_JOBS, compare
from deploy.service.experiments import experiments, report
from deploy.service.job_store import JobStore
from deploy.service.long_answers import pieces
from deploy.service.problems import Problem, not_found
from deploy.service.snapshots import (
    FORMATS,
    compare_snapshots,
    export_snapshot,
    list_complete_snapshots,
    verify_snapshot,
)
from deploy.service.strict_requests import NUMBER, strict_router

Number = Annotated[str, Path(description="The number of a snapshot.", pattern=NUMBER)]
_REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox"


def routes(store: JobStore, experiments_folder: FilePath) -> APIRouter:
    """All routes of results."""
    router = strict_router()
    _add_artefacts(router, store)
    _add_snapshots(router, store)
    _add_comparisons(router, store, experiments_folder)
    return router


def _settings(store: JobStore, job: str) -> TrainSettings:
    return TrainSettings.of_plain(find(store, job).settings)


def _add_artefacts(router: APIRouter, store: JobStore) -> None:
    artefacts = Artefacts()

    @router.get("/jobs/{job}/artefacts")
    def list_artefacts(job: JobId) -> dict[str, Any]:
        """The files that the run has left by now: name, bytes, when written, SHA-256."""
        return {"artefacts": msgspec.to_builtins(artefacts.of(_settings(store, job).out))}

    @router.get("/jobs/{job}/artefacts/{name:path}")
    def artefact(job: JobId, name: Annotated[str, Path(max_length=200)]) -> Response:
        """One of these files. A range of bytes may be asked for."""
        path = artefact_file(_settings(store, job).out, name)
        if path is None:
            raise not_found("artefact", name[:80])
        kind = KINDS.get(name, "application/octet-stream")
        return FileResponse(path, media_type=kind, filename=path.name)


def _add_snapshots(router: APIRouter, store: JobStore) -> None:
    @router.get("/jobs/{job}/snapshots")
    def list_snapshots(job: JobId) -> dict[str, Any]:
        """The complete snapshots of the run, the oldest first; pinned ones are never deleted."""
        row = find(store, job)
        snapshots = list_complete_snapshots(TrainSettings.of_plain(row.settings))
        return {
            "snapshots": [
                snapshot | {"pinned": snapshot["name"] in row.pinned} for snapshot in snapshots
            ]
        }

    @router.get("/jobs/{job}/snapshots/{number}:verify")
    def verify(job: JobId, number: Number) -> dict[str, Any]:
        """Read every byte of a snapshot; `complaints` name each bad file."""
        complaints = verify_snapshot(_settings(store, job), number)
        return {"snapshot": number, "good": not complaints, "complaints": complaints}

    @router.get("/jobs/{job}/snapshots/{number}:diff")
    def diff(job: JobId, number: Number, to: Annotated[str, Query(max_length=18)]) -> Any:
        """Compare with the snapshot `to`: how far each tensor moved."""
        return compare_snapshots(_settings(store, job), number, to)

    @router.get("/jobs/{job}/snapshots/{number}:export")
    def export(
        job: JobId,
        number: Number,
        form: Annotated[
            Literal["safetensors", "caffemodel", "h5"], Query(alias="format")
        ] = "safetensors",
    ) -> Response:
        """The weights of a snapshot as a file."""
        name = f"{job}-{number}{FORMATS[form]}"
        with tempfile.TemporaryDirectory() as folder:
            export_snapshot(_settings(store, job), number, FilePath(folder) / name)
            file = (FilePath(folder) / name).open("rb")  # it can be read without its name
        size = os.fstat(file.fileno()).st_size
        headers = {
            "Content-Length": str(size),
            "Content-Disposition": f'attachment; filename="{name}"',
        }
        return StreamingResponse(
            pieces(file, size), headers=headers, media_type="application/octet-stream"
        )

    def pin(job: str, number: str, *, pinned: bool) -> dict[str, Any]:
        row = find(store, job)
        if number not in {
            snapshot["name"] for snapshot in list_complete_snapshots(_settings(store, job))
        }:
            raise not_found("snapshot", number)
        numbers = sorted({*row.pinned, number} if pinned else {*row.pinned} - {number}, key=int)
        store.note(row, "pinned", pinned=numbers)
        return {"pinned": numbers}

    @router.post("/jobs/{job}/snapshots/{number}:pin")
    def keep(job: JobId, number: Number) -> dict[str, Any]:
        """Never delete this snapshot."""
        return pin(job, number, pinned=True)

    @router.post("/jobs/{job}/snapshots/{number}:unpin")
    def release(job: JobId, number: Number) -> dict[str, Any]:
        """Delete this snapshot when its time has come."""
        return pin(job, number, pinned=False)


def _add_comparisons(router: APIRouter, store: JobStore, folder: FilePath) -> None:
    @router.get("/compare")
    def compare_jobs(
        sender: Sender,
        jobs: Annotated[str, Query(description="Ids, by comma.", max_length=4000)],
        name: Annotated[str, Query(description="A column of the series.")] = "loss",
        x: Literal["steps", "samples", "seconds"] = "steps",
        points: Annotated[int, Query(ge=2, le=2000)] = 600,
    ) -> Response:
        """Jobs next to each other: a curve of each, figures, and the settings that differ."""
        ids = list(dict.fromkeys(job for job in jobs.split(",") if job))
        if not 0 < len(ids) <= MAX_JOBS:
            detail = f"jobs: expected 1 to {MAX_JOBS} ids, got {len(ids)}"
            raise Problem(422, "bad_input", detail, field="jobs")
        if name not in SeriesPoint.__struct_fields__:
            expected = ", ".join(SeriesPoint.__struct_fields__)
            detail = f"name: expected {expected}, got {name[:80]}"
            raise Problem(422, "bad_input", detail, field="name", got=name[:80])
        comparison = compare(store, find_visible(store, sender, ids), name, x, points)
        return Response(msgspec.json.encode(comparison), media_type="application/json")

    @router.get("/experiments")
    def list_experiments() -> dict[str, Any]:
        """The folders of `downpour exp`: trials that are done and failed."""
        return {"experiments": msgspec.to_builtins(experiments(folder))}

    @router.get("/experiments/{name}/report", response_class=HTMLResponse)
    def experiment_report(name: Annotated[str, Path(max_length=200)]) -> Response:
        """The report of an experiment, one HTML page, up to date with its results."""
        try:
            page = report(folder, name)
        except KeyError:
            raise not_found("experiment", name[:80]) from None
        return HTMLResponse(page, headers={"Content-Security-Policy": _REPORT_POLICY})
