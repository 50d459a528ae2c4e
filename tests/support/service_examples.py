"""Examples of the bodies of the service's requests and answers, for its reference."""

from typing import Any

EXAMPLES: dict[str, Any] = {
    "id": "1a209de6a45345f32", "job": "1a209de6a45345f32", "name": "lenet", "project": "vision",
    "owner": "alice", "labels": {"net": "lenet"}, "slots": 4, "state": "RUNNING", "attempt": 1,
    "snapshot": "400", "order_id": "5f0c1a2b3c4d", "created": 1767225600.0, "updated": 1767225660.0,
    "started": 1767225605.0, "ended": None, "time": 1767225660.0, "modified": 1767225660.0,
    "taken_at": 1767225660.0, "head": {"steps": 800, "planned": 4800, "loss": 0.31},
    "settings": {"solver": "/srv/lenet_solver.prototxt", "data": "/srv/mnist", "workers": 4},
    "kind": "state", "data": {"state": "RUNNING"}, "source": "service", "reason": "", "code": "",
    "contact": "", "cause": "", "message": "", "log_tail": "", "role": "submitter",
    "sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "complaints": [], "cursor": None, "address": "127.0.0.1", "action": "POST /jobs",
    "figures": {"loss": [0.31]}, "series": {"loss": [0.31]}, "path": "mnist/train.parquet",
    "url": "https://hooks.example.org/downpour", "jobs": {"RUNNING": 1}, "halted": "",
    "times_s": {"worker-0": {"compute": 41, "data": 2, "wait": 3.5, "network": 6.1, "lost": 1.5}},
    "holds": {"worker-0": 3}, "standing": "runs", "number": 1,
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
