"""The logs of a whole job, a folder a shard, as something to resume from.

    logs/JOB/shard-0, shard-1, ...
    logs/JOB.2/shard-0, ...            the shards that the job has moved to, under map epoch 2

JOB is what everybody may call it (job_ids.py), for any user may be able to list `logs`.

A job that ended cleanly has a snapshot and needs its logs no more. One that was killed, with all of
its shards, left in them every push that it had acknowledged.
"""

import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ps.snapshots.catalog import LoadedSnapshot
from ps.snapshots.manifest import Manifest
from ps.snapshots.object_store import LocalStore
from ps.wal.recovery import has_begun, recovered
from shards.errors import BadInput, Retry
from shards.job_ids import short_id
from shards.parameters import ShardState
from shards.spec import ShardSpec


def logs_of(folder: Path, specs: Sequence[ShardSpec]) -> Path:
    """Where below `folder` these shards of a job keep their logs."""
    job, epoch = short_id(specs[0].job), specs[0].map.epoch
    return folder / (job if epoch == 1 else f"{job}.{epoch}")


def load_logs(folder: Path) -> LoadedSnapshot:
    """What a job's shards held, in the form of a snapshot; one of them has begun its log.

    Raises BadInput naming what is missing or damaged, Retry where no shard had weights yet, or not
    all of the shards that a job was about to move to.
    """
    held: dict[str, tuple[ShardSpec, ShardState]] = {}
    empty: dict[str, Retry] = {}
    for path in _begun(folder):
        try:
            held[path.name] = recovered(path)
        except Retry as error:
            empty[path.name] = error
    if not held:
        raise next(iter(empty.values()))
    spec, _ = next(iter(held.values()))
    if empty and spec.map.epoch > 1:
        raise next(iter(empty.values()))
    if empty:
        raise BadInput(
            f"logs {folder}: expected weights of every shard or of none, got those of"
            f" {', '.join(held)} and none of {', '.join(empty)}: put back the missing logs, or"
            f" remove {folder} to go on without"
        )
    names = [f"shard-{shard}" for shard in range(spec.map.shards)]
    if missing := [name for name in names if name not in held]:
        one = len(missing) == 1
        raise BadInput(
            f"logs {folder}: expected those of {spec.map.shards} shards, got {len(held)}:"
            f" {' '.join(missing)} {'is' if one else 'are'} missing, and may be under the same path"
            f" on {'another machine' if one else 'other machines'}: copy"
            f" {'it' if one else 'them'} here to go on from the logs, or remove {folder} to go on"
            " without"
        )
    states = [held[name][1] for name in names]
    manifest = Manifest(
        table=spec.table,
        map=spec.map,
        rule=str(spec.rule.__struct_config__.tag),
        workers=spec.workers,
        steps=states[0].saved.steps,
        taken_at=max(path.stat().st_mtime for path in folder.glob("*/*")),
        aligned=False,
        parts=(),
    )
    return LoadedSnapshot(LocalStore(folder), folder.name, manifest, states)


def newest_logs(folder: Path, *, but: Path | None = None) -> LoadedSnapshot | None:
    """Of the jobs whose logs lie in `folder`, the one that came farthest; None if none began.

    The logs of a job are read whole; those in `but` are left out.

    Where a job was about to move, that is where it was: the new shards know no more than the old.
    """
    found = []
    left_out = None if but is None else but.absolute()
    for job in (path for path in folder.glob("*") if path.absolute() != left_out and is_job(path)):
        try:
            found.append(load_logs(job))
        except Retry:
            continue  # killed before it had weights
    return max(found, key=lambda logs: logs.manifest.steps, default=None)


def is_job(folder: Path) -> bool:
    """Whether a job's shards have begun their logs in `folder`."""
    return bool(_begun(folder))


def _begun(job: Path) -> list[Path]:
    return [path for path in sorted(job.glob("shard-*")) if has_begun(path)]


def drop_logs(folder: Path, *, but: str | None = None) -> None:
    """Remove the logs of every job in `folder`, but the one whose id is `but`: what they held is
    elsewhere now.
    """
    kept = None if but is None else short_id(but)
    for job in folder.glob("*"):
        if job.name != kept and any(job.glob("shard-*")):
            shutil.rmtree(job, ignore_errors=True)
    if but is None:
        with suppress(OSError):  # what else lies there is not ours
            folder.rmdir()
