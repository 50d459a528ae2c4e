"""What the routes of the service answer with, as types, for its reference.

tests/deploy/service/test_answers.py sends requests to the routes and compares the answers.
"""

from typing import Any

import msgspec

from deploy.runner.readings import Reading
from deploy.service.access_store import AuditEntry, ProjectLimits, TokenRow
from deploy.service.artefacts import Artefact
from deploy.service.experiments import Experiment
from deploy.service.job_store import JobDetails, JobShown
from deploy.service.retention import Removal, ServiceLimits
from deploy.service.states import JobState
from deploy.service.tokens import TokenRole
from deploy.service.uploads import FileProgress, UploadStatus
from deploy.snapshots import Difference
from worker.evaluation import Evaluation


class JobList(msgspec.Struct, forbid_unknown_fields=True):
    """Jobs, the newest first; `cursor` continues the list, null at its end."""

    jobs: list[JobShown]
    cursor: str | None


class WishAccepted(msgspec.Struct, forbid_unknown_fields=True):
    """An order that is stored: its id, the job, and the job's state now."""

    wish: str
    id: str
    state: JobState


class JobCloned(JobShown, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The new job; `wish` is its id, too."""

    wish: str


class AttemptShown(msgspec.Struct, forbid_unknown_fields=True):
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


class AttemptList(msgspec.Struct, forbid_unknown_fields=True):
    """The attempts in order."""

    attempts: list[AttemptShown]


class EventShown(msgspec.Struct, forbid_unknown_fields=True):
    """An event; `number` counts those of its `source`, the service or the job's process."""

    id: int
    job: str
    source: str
    number: int
    time: float
    attempt: int
    kind: str
    data: dict[str, Any]


class EventList(msgspec.Struct, forbid_unknown_fields=True):
    """Events in order."""

    events: list[EventShown]


class SeriesAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """Columns by name over `x`, and the tests of the weights."""

    x: list[float]
    series: dict[str, list[float | None]]
    evaluations: list[Evaluation]


class CheckpointShown(msgspec.Struct, forbid_unknown_fields=True):
    """A complete snapshot; `aligned` is whether all shards hold the same pushes."""

    name: str
    state: str
    steps: int
    bytes: int
    taken_at: float
    aligned: bool
    pinned: bool


class CheckpointList(msgspec.Struct, forbid_unknown_fields=True):
    """The checkpoints, the oldest first."""

    checkpoints: list[CheckpointShown]


class CheckpointVerdict(msgspec.Struct, forbid_unknown_fields=True):
    """Whether a checkpoint is good; `complaints` name each bad file."""

    checkpoint: str
    good: bool
    complaints: list[str]


class PinnedList(msgspec.Struct, forbid_unknown_fields=True):
    """The checkpoints that are never deleted."""

    pinned: list[str]


class ArtefactList(msgspec.Struct, forbid_unknown_fields=True):
    """The files that a run has left by now."""

    artefacts: list[Artefact]


class ComparedJob(msgspec.Struct, forbid_unknown_fields=True):
    """A job of a comparison."""

    id: str
    name: str
    state: JobState


class ComparedCurve(msgspec.Struct, forbid_unknown_fields=True):
    """The curve of a job."""

    x: list[float]
    y: list[float | None]


class JobComparison(msgspec.Struct, forbid_unknown_fields=True):
    """Jobs, a curve of each, and a value of each for every figure and every differing setting."""

    jobs: list[ComparedJob]
    curves: list[ComparedCurve]
    figures: dict[str, list[Any]]
    settings: dict[str, list[Any]]


class ExperimentList(msgspec.Struct, forbid_unknown_fields=True):
    """The experiments by name."""

    experiments: list[Experiment]


class TokenOwner(msgspec.Struct, forbid_unknown_fields=True):
    """The name, the role and the projects of a token; null: all projects."""

    name: str
    role: TokenRole
    projects: list[str] | None


class TokenList(msgspec.Struct, forbid_unknown_fields=True):
    """The tokens, the newest first."""

    tokens: list[TokenRow]


class TokenMade(TokenRow, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The new token; `token` is its secret, shown this once."""

    token: str


class TokenRevoked(msgspec.Struct, forbid_unknown_fields=True):
    """The token that was revoked."""

    id: str
    name: str


class ProjectShown(msgspec.Struct, forbid_unknown_fields=True):
    """A project: its limits, null for none, and what it uses now."""

    name: str
    limits: ProjectLimits
    use: ProjectLimits


class ProjectList(msgspec.Struct, forbid_unknown_fields=True):
    """The projects by name."""

    projects: list[ProjectShown]


class ProjectLimited(msgspec.Struct, forbid_unknown_fields=True):
    """A project with its new limits."""

    name: str
    limits: ProjectLimits


class AuditPage(msgspec.Struct, forbid_unknown_fields=True):
    """Entries, the newest first; `cursor` continues the list, null at its end."""

    entries: list[AuditEntry]
    cursor: int | None


class WebhookMade(msgspec.Struct, forbid_unknown_fields=True):
    """The new webhook; `secret` signs what it sends, shown this once."""

    id: str
    url: str
    project: str | None
    secret: str


class WebhookShown(msgspec.Struct, forbid_unknown_fields=True):
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


class WebhookList(msgspec.Struct, forbid_unknown_fields=True):
    """The webhooks, the oldest first."""

    webhooks: list[WebhookShown]


class GarbageFound(msgspec.Struct, forbid_unknown_fields=True):
    """What may be deleted, its bytes, and the bytes that were deleted."""

    removals: list[Removal]
    bytes: int
    freed: int


class ServiceShown(msgspec.Struct, forbid_unknown_fields=True):
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
    **{f"POST /jobs/{{job}}:{verb}": WishAccepted for verb in _VERBS},
    "POST /jobs/{job}:clone": JobCloned,
    "GET /jobs/{job}/attempts": AttemptList,
    "GET /jobs/{job}/events": EventList,
    "GET /jobs/{job}/reading": Reading,
    "GET /jobs/{job}/series": SeriesAnswer,
    "GET /whoami": TokenOwner,
    "GET /tokens": TokenList,
    "POST /tokens": TokenMade,
    "DELETE /tokens/{token}": TokenRevoked,
    "GET /projects": ProjectList,
    "PUT /projects/{project}": ProjectLimited,
    "GET /audit": AuditPage,
    "GET /jobs/{job}/artefacts": ArtefactList,
    "GET /jobs/{job}/checkpoints": CheckpointList,
    "GET /jobs/{job}/checkpoints/{number}:verify": CheckpointVerdict,
    "GET /jobs/{job}/checkpoints/{number}:diff": Difference,
    "POST /jobs/{job}/checkpoints/{number}:pin": PinnedList,
    "POST /jobs/{job}/checkpoints/{number}:unpin": PinnedList,
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
    "DELETE /jobs/{job}": "nothing, with status 204",
    "DELETE /webhooks/{webhook}": "nothing, with status 204",
    "GET /jobs/{job}/logs": "text",
    "GET /stream": "server-sent events",
    "GET /jobs/{job}/artefacts/{name}": "the file",
    "GET /jobs/{job}/checkpoints/{number}:export": "the file",
    "GET /experiments/{name}/report": "an HTML page",
}
"""What the other routes answer with."""
EXAMPLES: dict[str, Any] = {
    "id": "1a209de6a45345f32", "job": "1a209de6a45345f32", "name": "lenet", "project": "vision",
    "owner": "alice", "labels": {"net": "lenet"}, "slots": 4, "state": "RUNNING", "attempt": 1,
    "snapshot": "400", "wish": "5f0c1a2b3c4d", "created": 1767225600.0, "updated": 1767225660.0,
    "started": 1767225605.0, "ended": None, "time": 1767225660.0, "modified": 1767225660.0,
    "taken_at": 1767225660.0, "head": {"steps": 800, "planned": 4800, "loss": 0.31},
    "settings": {"solver": "/srv/lenet_solver.prototxt", "data": "/srv/mnist", "workers": 4},
    "kind": "state", "data": {"state": "RUNNING"}, "source": "service", "reason": "", "code": "",
    "contact": "", "cause": "", "message": "", "log_tail": "", "role": "submitter",
    "sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "complaints": [], "cursor": None, "address": "127.0.0.1", "action": "POST /jobs",
    "figures": {"loss": [0.31]}, "series": {"loss": [0.31]}, "path": "mnist/train.parquet",
    "url": "https://hooks.example.org/downpour", "jobs": {"RUNNING": 1}, "halted": "",
    "times_s": {"worker-0": {"compute": 41.0, "data": 2.0, "wait": 3.5, "network": 6.1}},
    "holds": {"worker-0": 3}, "standing": "runs", "checkpoint": "400", "number": 1,
    "removals": [], "evaluations": [], "experiments": [], "alerts": [], "pinned": ["400"],
    "revoked": None, "token": "dps_...", "secret": "64 hexadecimal digits", "actor": "alice",
    "last": "204", "why": "", "detail": "", "ledger": [], "first": "200", "second": "400",
}  # fmt: skip
"""Values that examples have, by the name of the field; others are made from its type."""
REQUESTS: dict[str, dict[str, Any]] = {
    "Adoption": {"run": "/home/alice/runs/demo", "project": "vision"},
    "Cancellation": {"mode": "now"},
    "Changes": {"settings": {"staleness": 8, "max_iter": 4000}},
    "Cloning": {"snapshot": "newest", "settings": {"max_iter": 9000, "staleness": 8}},
    "Collection": {"delete": True},
    "JobChange": {"name": "second try", "priority": 10},
    "LimitsRequest": {"running": 4, "queued": 100, "workers": 32},
    "NewToken": {"name": "alice", "role": "submitter", "projects": ["vision"], "days": 30},
    "NewWebhook": {"url": "https://hooks.example.org/downpour", "project": "vision"},
    "Resharding": {"shards": 4},
    "Submitted": {
        "settings": {"solver": "/srv/lenet_solver.prototxt", "data": "/srv/mnist", "workers": 4},
        "name": "lenet",
        "labels": {"net": "lenet"},
    },
    "UploadRequest": {
        "files": [{"path": "mnist/train.parquet", "bytes": 1200, "sha256": EXAMPLES["sha256"]}],
        "project": "vision",
    },
}
"""An example of each body of a request, by the name of its model."""
