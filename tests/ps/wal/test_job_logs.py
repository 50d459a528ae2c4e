"""A job's WALs as something to resume from: those with the most steps, complete, or an error."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from ps.durability import Durability
from ps.wal.job_logs import drop_logs, load_logs, newest_logs
from ps.wal.writer import LoggedShard, WriteAheadLog
from shards.errors import BadInput
from shards.job_ids import short_id
from shards.messages import Install
from shards.shard import Shard
from shards.tables import Layout, cut_evenly
from shards.transition_io import Arrival
from tests.support.shard_dsl import TABLE, fresh, spec
from tests.support.shard_with_wal import written


def test_the_one_that_came_farthest(tmp_path: Path) -> None:
    """Of several jobs' WALs those with the most steps are loaded, in the form of a snapshot.

    A job that was killed before it had weights is passed over. Dropping WALs removes all but the
    given job's.
    """
    assert newest_logs(tmp_path / "none") is None
    early = WriteAheadLog(tmp_path / "early" / "shard-0", Durability.PROCESS)
    early.recover(Shard(spec(), boot=1), 0.0)
    early.close()
    assert newest_logs(tmp_path) is None
    short = short_id("job-short")
    written(tmp_path / short / "shard-0", 2)
    held = written(tmp_path / "long" / "shard-0", 5)
    found = newest_logs(tmp_path)
    assert found is not None
    (tmp_path / "notes").mkdir()
    (state,) = found.states
    told = found.manifest
    assert (found.name, told.steps, told.rules, told.workers) == (
        "long",
        5,
        ("momentum",),
        2,
    )
    assert [array.tobytes() for array in state.arrays.values()] == held
    drop_logs(tmp_path, but="job-short")
    assert {path.name for path in tmp_path.iterdir()} == {short, "notes"}, "not ours"
    drop_logs(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]
    (tmp_path / "notes").rmdir()
    drop_logs(tmp_path)
    assert not tmp_path.exists()


def test_a_shard_whose_log_is_missing(tmp_path: Path) -> None:
    """A job is resumed completely or not at all."""
    folder = tmp_path / "job"
    log = WriteAheadLog(folder / "shard-0", Durability.PROCESS)
    shard = Shard(spec(map=cut_evenly(Layout((TABLE,)), 2)), boot=1)
    log.recover(shard, 0.0)
    weights = fresh(spec=shard.spec)
    install = Arrival(b"o", Install(1, "job"), weights)
    LoggedShard(shard, log).handle_together([install], 1.0)
    log.close()
    with pytest.raises(BadInput) as caught:
        load_logs(folder)
    assert str(caught.value) == (
        f"logs {folder}: expected those of 2 shards, got 1: shard-1 is missing, and may be under"
        " the same path on another machine: copy it here to resume from the logs, or remove"
        f" {folder} to continue without them"
    )
    (folder / "shard-0").rename(folder / "shard-1")
    with pytest.raises(BadInput, match="shard-0 is missing"):
        load_logs(folder)
    with pytest.raises(BadInput, match="shard-0 is missing"):
        newest_logs(tmp_path)
    assert newest_logs(tmp_path, but=folder) is None, "not even read"


@pytest.mark.parametrize("epoch", [1, 2])
def test_a_shard_without_weights_next_to_one_with(tmp_path: Path, epoch: int) -> None:
    """A job with a WAL that was removed and begun again is not passed over as one without weights.

    A job that was being resharded is passed over: its old shards know as much.
    """
    folder = tmp_path / "job"
    for number in range(2):
        log = WriteAheadLog(folder / f"shard-{number}", Durability.PROCESS)
        shard = Shard(
            spec(map=replace(cut_evenly(Layout((TABLE,)), 2), epoch=epoch), shard=number), boot=1
        )
        log.recover(shard, 0.0)
        if number:
            weights = fresh(spec=shard.spec)
            install = Arrival(b"o", Install(1, "job"), weights)
            LoggedShard(shard, log).handle_together([install], 1.0)
        log.close()
    if epoch > 1:
        assert newest_logs(tmp_path) is None
        return
    with pytest.raises(BadInput) as caught:
        newest_logs(tmp_path)
    assert str(caught.value) == (
        f"logs {folder}: expected weights of every shard or of none, got those of shard-1 and none"
        f" of shard-0: put back the missing logs, or remove {folder} to continue without them"
    )
