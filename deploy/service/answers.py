"""The types of the answers of the service's routes, and its OpenAPI document.

The document has these types, so that a client that is generated from it has them, too. The routes
answer with plain values: tests/deploy/service/test_answers.py compares them with the types.
"""

from typing import Any

import msgspec
from fastapi import FastAPI

from deploy.run.snapshot_difference import Difference
from deploy.runner.readings import Reading
from deploy.service.access_store import AuditEntry, ProjectLimits, TokenRow
from deploy.service.artefacts import Artefact
from deploy.service.experiments import Experiment
from deploy.service.job_rows import JobDetails, JobShown
from deploy.service.retention import Removal, ServiceLimits
from deploy.service.route_roles import API
from deploy.service.states import JobState
from deploy.service.tokens import TokenRole
from deploy.service.uploads import FileProgress, UploadStatus
from worker.training.evaluation import Evaluation


class JobList(msgspec.Struct):
    """Jobs, the newest first; `cursor` continues the list, null at its end."""

    jobs: list[JobShown]
    cursor: str | None


class OrderAccepted(msgspec.Struct):
    """An order that is stored: its id, the job, and the job's state now."""

    order_id: str
    id: str
    state: JobState


class JobCloned(JobShown, frozen=True, kw_only=True):
    """The new job; `order_id` is its id, too."""

    order_id: str


class AttemptShown(msgspec.Struct):
    """An attempt: when it began and ended, the cause of its end, the last lines of its log."""

    job: str
    number: int
    started: float
    ended: float | None
    cause: str
    message: str
    exit_status: int | None
    snapshot: str | None
    log_tail: str


class AttemptList(msgspec.Struct):
    """The attempts in order."""

    attempts: list[AttemptShown]


class EventShown(msgspec.Struct):
    """An event; `number` counts those of its `source`, the service or the job's process."""

    id: int
    job: str
    source: str
    number: int
    time: float
    attempt: int
    kind: str
    data: dict[str, Any]


class EventList(msgspec.Struct):
    """Events in order."""

    events: list[EventShown]


class NewestReading(msgspec.Struct):
    """The newest figures; null before the first."""

    reading: Reading | None


class SeriesAnswer(msgspec.Struct):
    """Columns by name over `x`, and the tests of the weights."""

    x: list[float]
    series: dict[str, list[float | None]]
    evaluations: list[Evaluation]


class JobSnapshot(msgspec.Struct):
    """A complete snapshot; `aligned` is whether all shards hold the same pushes."""

    name: str
    state: str
    steps: int
    bytes: int
    taken_at: float
    aligned: bool
    pinned: bool


class SnapshotList(msgspec.Struct):
    """The snapshots, the oldest first."""

    snapshots: list[JobSnapshot]


class SnapshotVerdict(msgspec.Struct):
    """The verdict on a snapshot; `complaints` name each bad file."""

    snapshot: str
    good: bool
    complaints: list[str]


class PinnedList(msgspec.Struct):
    """The snapshots that are never deleted."""

    pinned: list[str]


class ArtefactList(msgspec.Struct):
    """The files that a run has left by now."""

    artefacts: list[Artefact]


class ComparedJob(msgspec.Struct):
    """A job of a comparison."""

    id: str
    name: str
    state: JobState


class ComparedCurve(msgspec.Struct):
    """The curve of a job."""

    x: list[float]
    y: list[float | None]


class JobComparison(msgspec.Struct):
    """Jobs, a curve of each, and a value of each for every figure and every differing setting."""

    jobs: list[ComparedJob]
    curves: list[ComparedCurve]
    figures: dict[str, list[Any]]
    settings: dict[str, list[Any]]


class ExperimentList(msgspec.Struct):
    """The experiments by name."""

    experiments: list[Experiment]


class TokenOwner(msgspec.Struct):
    """The name, the role and the projects of a token; null: all projects."""

    name: str
    role: TokenRole
    projects: list[str] | None


class TokenList(msgspec.Struct):
    """The tokens, the newest first."""

    tokens: list[TokenRow]


class TokenMade(TokenRow, frozen=True, kw_only=True):
    """The new token; `token` is its secret, shown this once."""

    token: str


class TokenRevoked(msgspec.Struct):
    """The token that was revoked."""

    id: str
    name: str


class ProjectShown(msgspec.Struct):
    """A project: its limits, null for none, and what it uses now."""

    name: str
    limits: ProjectLimits
    use: ProjectLimits


class ProjectList(msgspec.Struct):
    """The projects by name."""

    projects: list[ProjectShown]


class ProjectLimited(msgspec.Struct):
    """A project with its new limits."""

    name: str
    limits: ProjectLimits


class AuditPage(msgspec.Struct):
    """Entries, the newest first; `cursor` continues the list, null at its end."""

    entries: list[AuditEntry]
    cursor: int | None


class WebhookMade(msgspec.Struct):
    """The new webhook; `secret` signs what it sends, shown this once."""

    id: str
    url: str
    project: str | None
    secret: str


class WebhookShown(msgspec.Struct):
    """A webhook: the id of the last event sent, tries of the next one, and the last answer."""

    id: str
    url: str
    project: str | None
    sent: int
    tries: int
    not_before: float
    delivered: int
    given_up: int
    last: str
    created: float


class WebhookList(msgspec.Struct):
    """The webhooks, the oldest first."""

    webhooks: list[WebhookShown]


class GarbageFound(msgspec.Struct):
    """The files that may be deleted, their bytes, and the bytes that were deleted."""

    removals: list[Removal]
    bytes: int
    freed: int


class ServiceShown(msgspec.Struct):
    """The service; `halted` says why no job is started, and `jobs` counts them by state."""

    slots: int
    slots_held: int
    halted: str
    free_bytes: int | None
    jobs: dict[JobState, int]
    limits: ServiceLimits


_VERBS = ("cancel", "pause", "resume", "snapshot", "reshard", "set")
ANSWERS: dict[str, type[Any]] = {
    "POST /jobs": JobShown,
    "GET /jobs": JobList,
    "GET /jobs/{job}": JobDetails,
    "PATCH /jobs/{job}": JobDetails,
    **{f"POST /jobs/{{job}}:{verb}": OrderAccepted for verb in _VERBS},
    "POST /jobs/{job}:clone": JobCloned,
    "GET /jobs/{job}/attempts": AttemptList,
    "GET /jobs/{job}/events": EventList,
    "GET /jobs/{job}/reading": NewestReading,
    "GET /jobs/{job}/series": SeriesAnswer,
    "GET /whoami": TokenOwner,
    "GET /tokens": TokenList,
    "POST /tokens": TokenMade,
    "DELETE /tokens/{token}": TokenRevoked,
    "GET /projects": ProjectList,
    "PUT /projects/{project}": ProjectLimited,
    "GET /audit": AuditPage,
    "GET /jobs/{job}/artefacts": ArtefactList,
    "GET /jobs/{job}/snapshots": SnapshotList,
    "GET /jobs/{job}/snapshots/{number}:verify": SnapshotVerdict,
    "GET /jobs/{job}/snapshots/{number}:diff": Difference,
    "POST /jobs/{job}/snapshots/{number}:pin": PinnedList,
    "POST /jobs/{job}/snapshots/{number}:unpin": PinnedList,
    "GET /compare": JobComparison,
    "GET /experiments": ExperimentList,
    "POST /uploads": UploadStatus,
    "GET /uploads/{upload}": UploadStatus,
    "PUT /uploads/{upload}/files": FileProgress,
    "GET /webhooks": WebhookList,
    "POST /webhooks": WebhookMade,
    "POST /service:gc": GarbageFound,
    "GET /service": ServiceShown,
    "POST /jobs:adopt": JobShown,
}
"""The type of the JSON that each route answers with, by method and path."""
OTHERS = {
    "DELETE /jobs/{job}": "",
    "DELETE /webhooks/{webhook}": "",
    "GET /jobs/{job}/logs": "text/plain",
    "GET /stream": "text/event-stream",
    "GET /jobs/{job}/artefacts/{name}": "application/octet-stream",
    "GET /jobs/{job}/snapshots/{number}:export": "application/octet-stream",
    "GET /experiments/{name}/report": "text/html",
}
"""The media type of what the other routes answer with; empty for nothing, with status 204."""


class DescribedApp(FastAPI):
    """An application with an OpenAPI document that has the type of each answer."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            _add_answers(super().openapi())
        assert self.openapi_schema is not None, "the call before has set it"
        return self.openapi_schema


def _add_answers(document: dict[str, Any]) -> None:
    """Describe what each route answers with where it succeeds."""
    kinds = list(dict.fromkeys(ANSWERS.values()))
    schemas, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    types = dict(zip(kinds, schemas, strict=True))
    for name, component in components.items():
        if "description" in component:
            component["description"] = " ".join(component["description"].split())
        document["components"]["schemas"][name] = component
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            route = f"{method.upper()} {path.removeprefix(API)}"
            (answer,) = [
                answer_of_status
                for status, answer_of_status in operation["responses"].items()
                if status.startswith("2")
            ]
            if route in ANSWERS:
                content = answer.setdefault("content", {})
                content["application/json"] = {"schema": types[ANSWERS[route]]}
            elif media_type := OTHERS[route]:
                answer["content"] = {media_type: {"schema": {"type": "string"}}}
