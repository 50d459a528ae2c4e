"""Checkpoints of jobs: listed and verified here; compared and exported by another process.

To compare or export a checkpoint needs the net and whole weights in memory. The service stays
small: it runs `downpour snapshots` for that, one at a time.
"""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec

from deploy.service.problems import Problem
from deploy.settings import TrainSettings
from deploy.snapshot_ref import shelf_of
from ps.snapshots.catalog import SnapshotCatalog, SnapshotStatus
from ps.snapshots.manifest import damage
from shards.errors import BadInput, DownpourError, GiveUp

FORMATS = {"safetensors": ".safetensors", "caffemodel": ".caffemodel", "h5": ".h5"}
_LONGEST_S = 600.0
_COMMAND = (sys.executable, "-c", "from deploy.cli import main; main()", "snapshots")
_one_at_a_time = threading.Lock()
_places = threading.BoundedSemaphore(4)  # other threads of the service answer other requests


def checkpoints(settings: TrainSettings) -> list[dict[str, Any]]:
    """The complete snapshots of a run, the oldest first."""
    try:
        entries = SnapshotCatalog(shelf_of(settings, settings.out)).entries()
    except (DownpourError, OSError):
        return []
    return [
        {
            "name": entry.name,
            "state": str(entry.state),
            "steps": entry.manifest.steps,
            "bytes": entry.manifest.bytes,
            "taken_at": entry.manifest.taken_at,
            "aligned": entry.manifest.aligned,
        }
        for entry in entries
        if entry.manifest is not None and entry.state is not SnapshotStatus.INCOMPLETE
    ]


def verified(settings: TrainSettings, name: str) -> list[str]:
    """Read every byte of a checkpoint; returns its faults, none for a good one."""
    return list(damage(_catalog(settings, name).store.below(name)))


def compared(settings: TrainSettings, first: str, second: str) -> dict[str, Any]:
    """How far each tensor moved between two checkpoints, and what changed in the ledger."""
    for name in (first, second):
        _catalog(settings, name)
    pair = [f"{settings.out}@{name}" for name in (first, second)]
    found: dict[str, Any] = msgspec.json.decode(_run("diff", *pair, "--json"))
    return found


def exported(settings: TrainSettings, name: str, target: Path) -> None:
    """Write the weights of a checkpoint to a file whose suffix is one of `FORMATS`."""
    _catalog(settings, name)
    _run("restore", f"{settings.out}@{name}", "--output", str(target))


def _catalog(settings: TrainSettings, name: str) -> SnapshotCatalog:
    """The catalog that has this checkpoint; raises BadInput without it."""
    catalog = SnapshotCatalog(shelf_of(settings, settings.out))
    if not name.isdecimal() or name not in catalog:
        raise BadInput(f"checkpoint: expected one of the job, got {name[:80]}; see its checkpoints")
    return catalog


def _run(*words: str) -> bytes:
    if not _places.acquire(blocking=False):
        raise Problem(503, "busy", "checkpoints: others are read at present; repeat this later")
    try:
        with _one_at_a_time:
            done = subprocess.run(
                [*_COMMAND, *words], capture_output=True, check=False, timeout=_LONGEST_S
            )
    except subprocess.TimeoutExpired:
        raise GiveUp(f"snapshots {words[0]}: no result for {_LONGEST_S:g} s") from None
    finally:
        _places.release()
    if done.returncode:
        text = done.stderr.decode(errors="replace").strip().splitlines()
        line = text[-1].removeprefix("downpour: error: ") if text else f"status {done.returncode}"
        raise (BadInput if done.returncode == 2 else GiveUp)(line)
    return done.stdout
