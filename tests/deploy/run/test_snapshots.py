"""`downpour snapshots`: list, verify, restore, diff and take."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner, Result

import ps
from deploy.cli.app import app
from deploy.run.folder import RunFolder, writer_of
from deploy.run.requests import FolderInbox
from deploy.run.settings import TrainSettings
from deploy.run.snapshot_ref import origin_of
from ps.snapshots.catalog import SnapshotCatalog
from shards.errors import BadInput, DownpourError
from shards.ledger import LedgerEntry
from shards.tables import Layout
from tests.support import tiny_job
from tests.support.eventually import eventually
from tests.support.snapshot_stores import JOB, states_of
from worker.job.run_control import SnapshotOrder


def run(*words: object) -> Result:
    return CliRunner().invoke(app, ["snapshots", *map(str, words)])


def error(*words: object) -> str:
    caught = run(*words).exception
    assert isinstance(caught, DownpourError)
    return str(caught)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place with two snapshots that differ in one float, one slot and one worker."""
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000.0)
    shelf = SnapshotCatalog(tmp_path / "snapshots")
    for number, version in ((40, 5), (80, 9)):
        states = states_of(version)
        if number == 80:
            states[0].arrays["net/weights"][3] += 2
            states[1].arrays["net/history"][7] -= 3
            for state in states:
                state.saved.ledger.entries["w7"].seq += 1
                state.saved.ledger.entries["w999"] = LedgerEntry(0)
        shelf.save(number, states, **JOB)
    return tmp_path / "snapshots"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    """A run folder with this process as its writer."""
    settings = TrainSettings(solver=tmp_path / "s", data=tmp_path, out=tmp_path / "run")
    with RunFolder.create(tmp_path / "run", settings.plain()) as made:
        yield made


def test_a_list_has_a_line_a_snapshot(place: Path) -> None:
    """Number, state, steps, versions, time, size, alignment, and any fault."""
    (place / "90").mkdir()
    (place / "100").mkdir()
    (place / "100" / "manifest.json").write_text("{")
    lines = run("ls", place).stdout.splitlines()
    assert [line.split() for line in lines[:5]] == [
        ["number", "state", "steps", "versions", "taken", "MB", "aligned"],
        ["90", "incomplete"],
        ["100", "damaged"],
        ["40", "whole", "7", "5", "6", "2023-11-14", "22:13:20Z", "0.1", "yes"],
        ["80", "whole", "7", "9", "10", "2023-11-14", "22:13:20Z", "0.1", "yes"],
    ]
    assert f"snapshot {place}/100/manifest.json: Input data was truncated" in lines[6]
    told = json.loads(run("ls", f"{place}@80", "--json").stdout)
    assert [(row["number"], row["versions"], row["aligned"]) for row in told] == [
        ("80", [9, 10], True)
    ]


def test_a_bad_file_is_named_with_its_chunk(place: Path) -> None:
    """Good ones are listed as well; the exit status says whether all are good."""
    assert run("verify", place).stdout == "40  good\n80  good\n"
    path = place / "80" / "shard-1.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    done = run("verify", place)
    assert done.exit_code == 1
    good, bad = done.stdout.splitlines()
    assert good == "40  good"
    assert bad.startswith(f"80  bad: snapshot {path}: chunk 0 of 1, bytes [0, ")
    assert run("verify", f"{place}@40").exit_code == 0
    for command in ("verify", "ls"):
        assert error(command, f"{place}@7") == f"no snapshot 7 in {place}; it has 40 80"


def test_weights_come_out_of_any_of_them(place: Path, tmp_path: Path) -> None:
    """The requested snapshot, or the newest good one, skipping bad ones."""
    out = tmp_path / "w.safetensors"
    before = np.concatenate([state.arrays["net/weights"] for state in states_of()])[:700]
    after = before.copy()
    after[3] += 2
    for origin, wanted in ((f"{place}@40", before), (place, after)):
        assert run("restore", origin, "--output", out).exit_code == 0
        assert load_file(out)["w"].tobytes() == wanted.tobytes()
    (place / "80" / "shard-0.safetensors").unlink()
    done = run("restore", place, "--output", out)
    assert f"skipped: snapshot {place}/80/shard-0.safetensors: No such file" in done.stderr
    assert f"the weights of {place}/40" in done.stdout
    assert load_file(out)["w"].tobytes() == before.tobytes()
    assert "expected .caffemodel, .h5 or .safetensors" in error(
        "restore", place, "--output", "w.pt"
    )
    assert "expected --solver" in error("restore", place, "--output", tmp_path / "w.caffemodel")


def test_a_caffemodel_is_of_the_network_that_is_told(place: Path, tmp_path: Path) -> None:
    """A solver with other layers is refused, like the weights of another net."""
    solver = tiny_job.write_job(tmp_path)
    out = tmp_path / "w.caffemodel"
    complaint = error("restore", place, "--output", out, "--solver", solver)
    assert complaint == (
        f"{solver}: expected the network of {place}/80 with conv/0 missing, got (4, 1, 3, 3)"
    )
    assert not out.exists()


def test_two_are_compared_tensor_by_tensor(place: Path) -> None:
    """How far each weight and slot moved, and each worker's changes in the ledger."""
    told = json.loads(run("diff", f"{place}@40", f"{place}@80", "--json").stdout)
    moved = {tensor["name"]: (tensor["l2"], tensor["largest"]) for tensor in told["tensors"]}
    assert moved == {"w": (2.0, 2.0), "history of w": (3.0, 3.0)}
    assert [list(change.values()) for change in told["ledger"]] == [
        ["w7", "seq", "8", "9"],
        ["w999", "worker", "unknown", "known"],
    ]
    text = run("diff", f"{place}@40", f"{place}@80").stdout
    assert "w7: seq 8 -> 9" in text
    same = run("diff", place, place).stdout
    assert same.splitlines()[-1] == "the ledgers are equal"


def test_other_tensors_do_not_compare(place: Path, tmp_path: Path) -> None:
    """It is reported before anything is computed."""
    (table,) = JOB["layout"].tables
    (tensor,) = table.tensors
    other = ps.DenseTable("net", (msgspec.structs.replace(tensor, name="other"),))
    about = JOB | {"layout": Layout((other,))}
    SnapshotCatalog(tmp_path / "other").save(1, states_of(), **about)
    assert "expected the same tensors in both" in error("diff", place, tmp_path / "other")


@pytest.mark.parametrize("dense", [True, False])
def test_rows_are_not_left_out_unsaid(dense: bool, tmp_path: Path) -> None:
    """Weights of a job with rows are no file, and its snapshots are not compared without them."""
    tables = {"user": ps.Sparse(3)} | ({"net": ps.Dense.zeros({"w": 3})} if dense else {})
    with ps.local(ps.Tables(tables)) as job, ps.AdminClient(job.cluster) as admin:
        SnapshotCatalog(tmp_path / "rows").save(
            1,
            admin.export(),
            layout=job.cluster.layout,
            shard_map=job.cluster.map,
            rules=("sgd",) * len(tables),
            workers=1,
        )
    place = tmp_path / "rows"
    assert "expected dense tables alone, got rows of table user" in error("diff", place, place)
    expected = "expected a snapshot of one dense table, got"
    assert expected in error("restore", place, "--output", tmp_path / "w.safetensors")
    assert not (tmp_path / "w.safetensors").exists()


# --- asking ---------------------------------------------------------------------------------------


def test_a_run_is_asked(folder: RunFolder) -> None:
    """The writer of the folder receives the order; its answer is printed."""
    assert writer_of(folder.path) is not None
    inbox = FolderInbox(folder.path)

    def answer() -> None:
        pending = eventually(inbox, because="the order is written")
        assert pending is not None
        assert pending.order == SnapshotOrder()
        pending.answer(None, "snapshot 2")

    thread = threading.Thread(target=answer)
    thread.start()
    assert run("take", folder.path).stdout == "snapshot 2\n"
    thread.join()


def test_nobody_is_there_to_ask(folder: RunFolder, place: Path) -> None:
    """If the run has ended, or there is none, no order is written."""
    assert "expected a snapshot within 0.1 s" in error("take", folder.path, "--wait-s", 0.1)
    folder.close()
    assert "expected a run under way on this machine" in error("take", folder.path)
    (folder.path / ".lock").write_text("1")  # another's number
    assert "expected a run under way on this machine" in error("take", folder.path)
    assert "expected the run folder of a run under way" in error("take", place)
    assert list(folder.path.glob(".order-*")) == []


def test_a_place_is_written_in_several_ways(folder: RunFolder, tmp_path: Path) -> None:
    """A run, one of its snapshots by number or folder, and a place that pyarrow can access."""
    SnapshotCatalog(folder.snapshots).save(40, states_of(), **JOB)
    shelf = str(folder.snapshots)
    for text, wanted in (
        (str(folder.path), (shelf, None, folder.path)),
        (f"{folder.path}@40", (shelf, "40", folder.path)),
        (f"file://{folder.path}@40", (shelf, "40", folder.path)),
        (f"{shelf}/40", (shelf, "40", folder.path)),
        (shelf, (shelf, None, None)),
        ("s3://key@bucket/run/", ("s3://key@bucket/run", None, None)),
        ("s3://bucket/run@40", ("s3://bucket/run", "40", None)),
    ):
        origin = origin_of(text)
        assert (origin.catalog, origin.name, origin.run) == wanted
    with pytest.raises(BadInput, match="expected a run folder or a place with snapshots"):
        origin_of(str(tmp_path / "nowhere"))
