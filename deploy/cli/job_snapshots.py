"""The snapshots of a job of a training service, as `downpour snapshots` asks the service for them.

JOB         the id of a job: all its snapshots
JOB@400     one of them
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from deploy.cli.connection import ServiceAddress
from shards.errors import BadInput
from shards.plurals import format_count

_REFERENCE = re.compile(r"([0-9a-f]{17})(?:@(\d{1,18}))?")


class JobReference(msgspec.Struct, frozen=True):
    """A job of a service, or its snapshot with this number."""

    job: str
    number: str | None = None

    def require_number(self, command: str) -> str:
        """Return the number of the snapshot; raises BadInput if only a job is named."""
        if self.number is None:
            raise BadInput(
                command,
                expected=f"a snapshot such as {self.job}@400",
                got=f"the job {self.job}",
                hint=f"`downpour snapshots ls {self.job}` shows its snapshots",
            )
        return self.number


def parse_job_reference(text: str) -> JobReference | None:
    """Parse JOB or JOB@NUMBER; None for anything else, and for the name of a folder."""
    match = _REFERENCE.fullmatch(text)
    if match is None or Path(text).is_dir() or Path(match[1]).is_dir():
        return None
    return JobReference(match[1], match[2])


def fetch_snapshots(service: ServiceAddress, reference: JobReference) -> list[dict[str, Any]]:
    """Ask the service for the snapshots of a job, the oldest first."""
    with service.open() as client:
        snapshots: list[dict[str, Any]] = client.get(f"/jobs/{reference.job}/snapshots")[
            "snapshots"
        ]
    return [snapshot for snapshot in snapshots if reference.number in (None, snapshot["name"])]


def format_snapshots(snapshots: list[dict[str, Any]]) -> str:
    """Format the snapshots of a job, one a line."""
    return "\n".join(
        f"{snapshot['name']:>10}  {format_count(snapshot['steps'], 'step')}"
        f"  {snapshot['bytes'] / 1e6:.1f} MB{'  pinned' if snapshot['pinned'] else ''}"
        for snapshot in snapshots
    )


def verify_snapshots(
    service: ServiceAddress, reference: JobReference
) -> Iterator[tuple[str, list[str]]]:
    """Let the service read every byte of snapshots; yields the number and the faults of each."""
    numbers = [reference.number]
    if reference.number is None:
        numbers = [snapshot["name"] for snapshot in fetch_snapshots(service, reference)]
    if not numbers:
        raise BadInput(
            f"verify: expected a job with snapshots, got {reference.job}, which has none"
        )
    with service.open() as client:
        for number in numbers:
            answer = client.get(f"/jobs/{reference.job}/snapshots/{number}:verify")
            yield answer["snapshot"], answer["complaints"]


def compare_snapshots(
    service: ServiceAddress, first: JobReference, second: JobReference
) -> dict[str, Any]:
    """Let the service compare two snapshots of one job."""
    if first.job != second.job:
        raise BadInput(
            "diff",
            expected="two snapshots of one job",
            got=f"those of {first.job} and {second.job}",
        )
    path = f"/jobs/{first.job}/snapshots/{first.require_number('diff')}:diff"
    with service.open() as client:
        difference: dict[str, Any] = client.get(path, to=second.require_number("diff"))
    return difference


def format_difference(difference: dict[str, Any]) -> str:
    """Format the differences of two snapshots, one tensor a line."""
    lines = [
        f"{tensor['name']}  L2 {tensor['l2']:.4g}  largest {tensor['largest']:.4g}"
        f"  of {tensor['norm']:.4g}"
        for tensor in difference["tensors"]
    ]
    before, after = difference["steps"]
    return "\n".join([*lines, f"steps {before} -> {after}"])


def pin_snapshot(service: ServiceAddress, reference: JobReference, *, pinned: bool) -> list[str]:
    """Pin a snapshot of a job, or release it; returns the numbers of all that are pinned."""
    number = reference.require_number("pin")
    verb = "pin" if pinned else "unpin"
    with service.open() as client:
        answer = client.post(f"/jobs/{reference.job}/snapshots/{number}:{verb}", {})
    numbers: list[str] = answer["pinned"]
    return numbers
