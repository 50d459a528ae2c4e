"""Finds the WALs of a whole job, one folder a shard, to resume the job from.

    logs/JOB/shard-0, shard-1, ...
    logs/JOB.2/shard-0, ...            the shards after resharding, under map epoch 2

JOB is the public short id of the job (job_ids.py), since any user may be able to list `logs`.

A job that has ended cleanly has a snapshot and no longer needs its WALs. If a job was killed with
all of its shards, the WALs hold every push that it had acknowledged.
"""

import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ps.snapshots.catalog import LoadedSnapshot
from ps.snapshots.manifest import Manifest, load_snapshot
from ps.storage import LocalStore, Place, open_store
from ps.wal.recovery import has_begun, read_state
from shards.errors import BadInput, Retry
from shards.job_ids import short_id
from shards.live_settings import newest_settings
from shards.shard_state import ShardState
from shards.spec import ShardSpec, list_rules


def logs_of(folder: Path, specs: Sequence[ShardSpec]) -> Path:
    """The folder below `folder` in which these shards of a job keep their WALs."""
    job, epoch = short_id(specs[0].job), specs[0].map.epoch
    return folder / (job if epoch == 1 else f"{job}.{epoch}")


def load_logs(folder: Path) -> LoadedSnapshot:
    """Read the state of a job's shards from their WALs, in the form of a snapshot.

    At least one shard must have begun its WAL. Raises BadInput naming what is missing or damaged,
    Retry if no shard had weights yet, or if a job was killed while it was resharded and not all of
    its new shards had weights.
    """
    states_by_name: dict[str, tuple[ShardSpec, ShardState]] = {}
    empty: dict[str, Retry] = {}
    for path in _find_begun(folder):
        try:
            states_by_name[path.name] = read_state(path)
        except Retry as error:
            empty[path.name] = error
    if not states_by_name:
        raise next(iter(empty.values()))
    spec, _ = next(iter(states_by_name.values()))
    # The job was killed while it was resharded: the shards of the epoch before have all pushes.
    if empty and spec.map.epoch > 1:
        raise next(iter(empty.values()))
    if empty:
        raise BadInput(
            f"logs {folder}",
            expected="weights of every shard or of none",
            got=(
                f"those of {', '.join(states_by_name)} and none of {', '.join(empty)}: put "
                f"back the missing logs, or remove {folder} to continue without "
                "them"
            ),
        )
    names = [f"shard-{shard}" for shard in range(spec.map.shards)]
    if missing := [name for name in names if name not in states_by_name]:
        single = len(missing) == 1
        raise BadInput(
            f"logs {folder}",
            expected=f"those of {spec.map.shards} shards",
            got=(
                f"{len(states_by_name)}: {' '.join(missing)} {('is' if single else 'are')} "
                "missing, and may be under the same path on "
                f"{('another machine' if single else 'other machines')}: copy "
                f"{('it' if single else 'them')} here to resume from the logs, or "
                f"remove {folder} to continue without them"
            ),
        )
    states = [states_by_name[name][1] for name in names]
    manifest = Manifest(
        layout=spec.layout,
        map=spec.map,
        rules=list_rules(spec.tables),
        workers=spec.workers,
        steps=states[0].saved.steps,
        taken_at=max(path.stat().st_mtime for path in folder.glob("*/*")),
        aligned=False,  # a push may be in the log of one shard and not yet in another's
        parts=(),
        settings=newest_settings(states),
    )
    return LoadedSnapshot(LocalStore(folder), folder.name, manifest, states)


def load_state(source: Place) -> LoadedSnapshot:
    """Read a snapshot, or the WALs of a job.

    If `source` has the WALs of several jobs, those of the job with the most steps are read. Raises
    BadInput naming the place if it has neither.
    """
    if "://" not in str(source):  # a bucket has snapshots only: logs are on local disks
        folder = Path(source)
        if is_job(folder):
            return load_logs(folder)
        if (logs := newest_logs(folder)) is not None:
            return logs
    store = open_store(source)
    return LoadedSnapshot(store, Path(store.place).name, *load_snapshot(store))


def newest_logs(folder: Path, *, but: Path | None = None) -> LoadedSnapshot | None:
    """The state of the job in `folder` with the most steps; None if no job has begun its WALs.

    All WALs of each job are read; the folder `but` is left out. If a job was killed while it was
    resharded, the state is that of the old shards: the new ones have applied no further push.
    """
    snapshots = []
    # Absolute on both sides: one path may be relative and the other not.
    excluded = None if but is None else but.absolute()
    for job in (path for path in folder.glob("*") if path.absolute() != excluded and is_job(path)):
        try:
            snapshots.append(load_logs(job))
        except Retry:
            continue  # the job was killed before it had weights
    return max(snapshots, key=lambda logs: logs.manifest.steps, default=None)


def is_job(folder: Path) -> bool:
    """Return whether a job's shards have begun their WALs in `folder`."""
    return bool(_find_begun(folder))


def _find_begun(job: Path) -> list[Path]:
    return [path for path in sorted(job.glob("shard-*")) if has_begun(path)]


def drop_logs(folder: Path, *, but: str | None = None) -> None:
    """Remove the WALs of every job in `folder` but the one with the id `but`.

    Call it when their content is stored elsewhere.
    """
    retained = None if but is None else short_id(but)
    for job in folder.glob("*"):
        if job.name != retained and any(job.glob("shard-*")):
            # What cannot be removed costs disk space alone: its content is stored elsewhere.
            shutil.rmtree(job, ignore_errors=True)
    if but is None:
        with suppress(OSError):  # it holds other files, which are not ours
            folder.rmdir()
