"""`updates_parquet.parquet`: every applied update once, readable however the run ended."""

import io
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from deploy.run import updates_parquet
from deploy.run.folder import RunFolder
from deploy.run.observer import RunObserver
from deploy.run.progress import Progress
from deploy.run.settings import TrainSettings
from deploy.run.updates_parquet import SCHEMA, UpdatesWriter, parts_of, read_updates
from ps import DenseTable, TensorSpec
from ps.job_spec import make_cluster, shard_specs
from shards.errors import BadInput, GiveUp
from shards.update_records import RECORD
from tests.support.run_records import records, status
from tests.support.snapshot_stores import full_disk
from worker.training.figures import UpdateTally


def write(path: Path, *looks: tuple[int, ...], restored: list[int] | None = None) -> UpdatesWriter:
    """Write the records of two shards, (first, last) version on both."""
    with UpdatesWriter(path, job="job-1", seed=3, restored=restored) as writer:
        for first, last in looks:
            rows = records(last)[first - 1 :]
            rows["time"] += 1e6
            writer.write([rows, rows])
    return writer


def test_every_column_of_a_record_is_written(tmp_path: Path) -> None:
    """Each field of RECORD has its column with its value; job, seed and shard come with it."""
    rng = np.random.default_rng(4)
    path, rows = tmp_path / "updates.parquet", np.zeros(9, RECORD)
    for name in RECORD.names or ():
        rows[name] = rng.integers(1, 100, 9) / (1 if rows[name].dtype.kind == "i" else 8)
    rows["worker"] = [f"wörker-{number}".encode() for number in range(9)]
    with UpdatesWriter(path, job="job-1", seed=3) as writer:
        writer.write([records(0), rows])
    read = pd.read_parquet(path)
    assert set(read.columns) == {"job", "seed", "shard", *(RECORD.names or ())}
    assert set(read.job) == {"job-1"}
    assert set(read.seed) == {3}
    assert set(read["shard"]) == {1}
    assert list(read.worker) == [f"wörker-{number}" for number in range(9)]
    assert list(read.time) == list(rows["time"] - rows["time"][0])
    for name in set(RECORD.names or ()) - {"worker", "time"}:
        assert list(read[name]) == list(rows[name]), name


def test_a_float_that_does_not_exist_is_null(tmp_path: Path) -> None:
    """A NaN loss, a round trip not yet measured and an unknown age are null."""
    path = tmp_path / "updates.parquet"
    with UpdatesWriter(path, job="j", seed=0) as writer:
        writer.write([records(2, loss=[np.nan, 0.0], rtt_s=[0.0, 0.5], wall_age_s=[0.25, 0.0])])
    table = pq.read_table(path)
    assert table["loss"].to_pylist() == [None, 0.0]
    assert table["rtt_s"].to_pylist() == [None, 0.5]
    assert table["wall_age_s"].to_pylist() == [0.25, None]
    assert table["wait_s"].to_pylist() == [0.0, 0.0]


def test_parts_can_be_read_while_the_run_continues(tmp_path: Path) -> None:
    """A part is closed when its time is over; a run that is killed loses the open one alone, and
    the next writer removes what is left of it."""
    path, times = tmp_path / "updates.parquet", [100.0, 159.9, 160.0, 161.0]
    writer = UpdatesWriter(path, job="j", seed=0, part_s=60.0, clock=lambda: times[0])
    for first in (0, 2, 4, 6):
        writer.write([records(first + 2)[first:]])
        times.pop(0)
    assert [part.name for part in parts_of(path)] == ["part-000000.parquet"]
    assert seqs(path) == [1, 2, 3, 4, 5, 6]
    writer._part.write(pa.Table.from_batches(writer._waiting, SCHEMA))
    assert pd.read_parquet(path).seq.tolist() == [1, 2, 3, 4, 5, 6], "readers see no open part"
    with UpdatesWriter(path, job="j", seed=0, restored=[5]) as later:
        later.write([records(7)[5:]])
    assert seqs(path) == [1, 2, 3, 4, 5, 6, 7]
    assert [part.name for part in sorted(path.iterdir())] == [
        "part-000000.parquet",
        "part-000001.parquet",
    ]


def seqs(path: Path) -> list[int]:
    """The numbers of all pushes in the order of the rows."""
    return [seq for batch in read_updates(path) for seq in batch.column("seq").to_pylist()]


def test_memory_is_bounded_by_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are written as soon as a group is full, in order and without loss."""
    monkeypatch.setattr(updates_parquet, "_GROUP_ROWS", 100)
    path = tmp_path / "updates.parquet"
    held = []
    with UpdatesWriter(path, job="j", seed=0) as writer:
        for first in range(0, 1000, 30):
            writer.write([records(first + 30)[first:]])
            held.append(writer._waiting_rows)
    assert max(held) < 100
    assert pq.ParquetFile(path / "part-000000.parquet").metadata.num_row_groups == 9
    assert pq.read_table(path)["seq"].to_pylist() == list(range(1, 1021))


def test_an_interrupted_run_leaves_a_readable_file(tmp_path: Path) -> None:
    """Ctrl-C closes the file like any other end, and leaves no half-written file."""
    path = tmp_path / "updates.parquet"

    def run() -> None:
        with UpdatesWriter(path, job="j", seed=0) as writer:
            writer.write([records(5)])
            assert parts_of(path) == []
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert pq.read_table(path).num_rows == 5
    assert list(path.iterdir()) == parts_of(path)


def test_a_run_without_updates_leaves_an_empty_table(tmp_path: Path) -> None:
    """The file exists with its columns, so that readers need no special case."""
    path = tmp_path / "updates.parquet"
    write(path).close()
    assert pq.read_table(path).schema == SCHEMA
    assert [batch.num_rows for batch in read_updates(path)] == []


def test_a_resumed_run_goes_on_in_the_same_file(tmp_path: Path) -> None:
    """Updates after the snapshot are dropped, because the weights no longer contain them: each
    version of each shard is there once, in order, and time continues where the kept rows end."""
    path = tmp_path / "updates.parquet"
    write(path, (1, 6), (7, 10))
    writer = write(path, (8, 12), restored=[7, 5])
    table = pq.read_table(path)
    for shard, kept in ((0, 7), (1, 5)):
        rows = [row for row in table.to_pylist() if row["shard"] == shard]
        assert [row["apply_version"] for row in rows] == [*range(1, kept + 1), *range(8, 13)]
        assert [row["time"] for row in rows] == [*range(kept), *range(kept - 1, kept + 4)]
    assert writer.earlier == UpdateTally.of([records(7), records(5)])
    assert writer.fresh == UpdateTally.of([records(5), records(5)])


def moving(path: Path, restored: list[int] | None, *looks: tuple[int, int, int]) -> UpdatesWriter:
    """Write records (shards, first, last version), each after a resharding to this number of
    shards."""
    with UpdatesWriter(path, job="j", seed=0, restored=restored) as writer:
        for number, (shards, first, last) in enumerate(looks):
            rows = records(last)[first - 1 :]
            rows["time"] += 1e6 * (number + 1)
            if number:
                writer.restart_clocks()
            writer.write([rows] * shards)
    return writer


def rows_of(path: Path, column: str) -> dict[int, list[float]]:
    table = pq.read_table(path).to_pandas()
    return {shard: rows[column].tolist() for shard, rows in table.groupby("shard")}


def test_a_run_that_moves_goes_on_in_the_same_file(tmp_path: Path) -> None:
    """Rows of other shards follow those of the former ones, in version and in time, whatever
    their clocks; an update's samples count once, whatever the number of shards."""
    path = tmp_path / "updates.parquet"
    writer = moving(path, None, (2, 1, 4), (3, 5, 6), (1, 7, 8))
    early, late = [1, 2, 3, 4], [5, 6]
    assert rows_of(path, "apply_version") == {0: [*early, *late, 7, 8], 1: [*early, *late], 2: late}
    assert rows_of(path, "time") == {0: [0, 1, 2, 3, 3, 4, 4, 5], 1: [0, 1, 2, 3, 3, 4], 2: [3, 4]}
    assert writer.fresh_samples == records(8)["samples"].sum()


@pytest.mark.parametrize(
    ("restored", "kept"),
    [
        ([8], {0: 8, 1: 6, 2: 2}),
        ([5, 5, 5], {0: 5, 1: 5, 2: 1}),
        ([3, 4], {0: 3, 1: 4}),
    ],
)
def test_a_run_that_moved_is_resumed(
    tmp_path: Path, restored: list[int], kept: dict[int, int]
) -> None:
    """From before or after a resharding: the rows that the snapshot contains stay, including
    those of shards that it no longer has."""
    path = tmp_path / "updates.parquet"
    moving(path, None, (2, 1, 4), (3, 5, 6), (1, 7, 9))
    moving(path, restored)
    assert {shard: len(rows) for shard, rows in rows_of(path, "seq").items()} == kept


def test_a_resumed_run_needs_no_earlier_updates(tmp_path: Path) -> None:
    """A run that was killed has left a snapshot and no updates: the file starts empty."""
    path = tmp_path / "updates.parquet"
    path.mkdir()
    (path / ".part-000000.parquet.partial").write_bytes(b"what a killed run had written")
    write(path, (8, 9), restored=[7, 7])
    assert pq.read_table(path)["apply_version"].to_pylist() == [8, 9, 8, 9]


@pytest.mark.parametrize("damage", ["truncated", "other"])
def test_a_damaged_part_is_named_and_left_alone(tmp_path: Path, damage: str) -> None:
    """A record that cannot be continued is refused in one line, and stays unchanged."""
    path = tmp_path / "updates.parquet"
    write(path, (1, 3))
    write(path, (4, 6), restored=[3, 3])
    first, bad = parts_of(path)
    if damage == "truncated":
        bad.write_bytes(bad.read_bytes()[:-10])
    elif damage == "other":
        pq.write_table(pa.table({"shard": [1]}), bad)
    before = [part.read_bytes() for part in (first, bad)]
    with pytest.raises(BadInput, match=r"updates\.parquet/part-000001") as caught:
        UpdatesWriter(path, job="j", seed=0, restored=[2, 2])
    assert "\n" not in str(caught.value)
    assert [part.read_bytes() for part in path.iterdir()] in (before, before[::-1])


def test_a_file_of_an_earlier_version_is_set_aside(tmp_path: Path) -> None:
    """A run that continues keeps the single file under another name; readers name it."""
    path = tmp_path / "updates.parquet"
    path.write_bytes(b"PAR1")
    with pytest.raises(BadInput, match="expected a folder of updates"):
        list(read_updates(path))
    UpdatesWriter(path, job="j", seed=0, restored=[1]).close()
    assert (path.is_dir(), path.with_name("updates.parquet.former").read_bytes()) == (True, b"PAR1")


def test_a_disk_that_refuses_is_named(tmp_path: Path) -> None:
    """If the file cannot be created, the error names it."""
    with pytest.raises(GiveUp, match=r"gone/updates\.parquet"):
        UpdatesWriter(tmp_path / "gone" / "updates.parquet", job="j", seed=0)


def test_a_disk_that_is_full_costs_a_part_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is reported once; its updates are still counted, and the other parts stay."""
    monkeypatch.setattr(updates_parquet, "_GROUP_ROWS", 100)
    path = tmp_path / "updates.parquet"
    write(path, (1, 4))
    many = records(10_000, loss=np.random.default_rng(5).random(10_000))
    writer = UpdatesWriter(path, job="j", seed=0, restored=[4, 4])
    with full_disk(), pytest.raises(GiveUp, match=r"updates\.parquet: .* File too large"):
        writer.write([many, many])
    writer.write([records(7), records(7)])
    writer.close()
    assert writer.lost
    assert writer.fresh.rows == 2 * (10_000 + 7)
    assert writer.fresh_samples == 64 * (10_000 + 7)
    assert len(seqs(path)) == 2 * (4 + 7)
    assert sorted(path.iterdir()) == parts_of(path)


def test_a_run_goes_on_without_its_record_of_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The observer of a run reports the full disk once, and the run does not fail."""
    monkeypatch.setattr(updates_parquet, "_GROUP_ROWS", 100)
    (spec,) = shard_specs(DenseTable("net", (TensorSpec("w", (60,)),)))
    out, run = io.StringIO(), tmp_path / "run"
    settings = TrainSettings(solver=run, data=run, out=run)
    console = Console(file=out, force_terminal=False)
    with (
        RunFolder.create(run, settings.plain()) as folder,
        Progress(steps=1, workers=1, bound=None, console=console) as progress,
        RunObserver(folder, progress, settings) as observer,
    ):
        observer.started(make_cluster([spec], ["tcp://127.0.0.1:5001"]), None)
        with full_disk():
            observer.progressed([status()], [records(10_000, loss=np.arange(10_000.0))])
        observer.progressed([status()], [records(5)])
    told = [line for line in out.getvalue().splitlines() if "updates.parquet" in line]
    assert len(told) == 1
    assert told[0].endswith("File too large; the run continues without it")
    assert len(seqs(run / "updates.parquet")) == 5


def test_a_reader_chooses_columns_and_a_shard(tmp_path: Path) -> None:
    """Only the requested columns of the requested shard are read."""
    path = tmp_path / "updates.parquet"
    write(path, (1, 4))
    batches = list(read_updates(path, ("seq", "loss"), shard=1))
    assert {tuple(batch.schema.names) for batch in batches} == {("seq", "loss")}
    assert [seq for batch in batches for seq in batch.column("seq").to_pylist()] == [1, 2, 3, 4]
