"""Orders through the run folder, from both sides."""

import os
import threading
from pathlib import Path

import pytest

from deploy.run.folder import SETTINGS, RunFolder
from deploy.run.requests import FolderInbox, ask_run
from deploy.run.snapshot_ref import SnapshotRef
from shards.errors import BadInput, DownpourError, GiveUp
from worker.job.run_control import Order, ReshardOrder, SettingsOrder, SnapshotOrder

RESHARD = ReshardOrder(3)


class Asking(threading.Thread):
    """A command that gives this order to a run, and the answer."""

    def __init__(self, run: Path, order: Order = RESHARD, wait_s: float = 60.0) -> None:
        super().__init__(daemon=True)
        self.run_folder, self.order, self.wait_s = run, order, wait_s
        self.text = ""
        self.error: DownpourError | None = None
        self.start()

    def run(self) -> None:
        try:
            self.text = ask_run(SnapshotRef("", run=self.run_folder), self.order, self.wait_s)
        except DownpourError as error:
            self.error = error

    def ended(self) -> DownpourError | None:
        self.join(60)
        assert not self.is_alive()
        return self.error


def left(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir() if "order" in path.name)


@pytest.mark.parametrize("order", [SnapshotOrder(), RESHARD, SettingsOrder({"staleness": 8})])
@pytest.mark.parametrize("error", [None, BadInput("too many"), GiveUp("it died")])
def test_an_order_is_answered(tmp_path: Path, order: Order, error: DownpourError | None) -> None:
    """The run receives the order once, the command receives the first answer, and no file of it
    stays in the folder."""
    with RunFolder.create(tmp_path / "run", {}) as folder:
        inbox = FolderInbox(folder.path)
        assert inbox() is None
        asking = Asking(folder.path, order)
        while (pending := inbox()) is None:
            assert asking.is_alive()
        assert pending.order == order
        assert inbox() is None
        pending.answer(error, "done")
        pending.answer(GiveUp("later"))
        found = asking.ended()
        assert (type(found), str(found)) == (type(error), str(error))
        assert asking.text == ("done" if error is None else "")
        assert left(folder.path) == []


def test_nobody_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An order that the run has not accepted is withdrawn, and the error says that nothing has
    begun; for an accepted one, the error says that it has begun."""
    with RunFolder.create(tmp_path / "run", {}) as folder:
        inbox = FolderInbox(folder.path)
        asking = Asking(folder.path, wait_s=0.2)
        line = f"reshard {folder.path}: expected 3 shards within 0.2 s, got no answer; the run"
        assert str(asking.ended()) == f"{line} had not begun, and will not"
        assert inbox() is None
        monkeypatch.setattr("deploy.run.requests.write_whole", lambda *_: None)  # gone: taken up
        asking = Asking(folder.path, wait_s=0.2)
        assert str(asking.ended()) == f"{line} has begun, and continues"


def test_the_run_ends_first(tmp_path: Path) -> None:
    """The command does not wait when the run ends."""
    with RunFolder.create(tmp_path / "run", {}) as folder:
        asking = Asking(folder.path)
        inbox = FolderInbox(folder.path)
        while not left(folder.path):
            assert asking.is_alive()
    assert (
        str(asking.ended()) == f"reshard {folder.path}: expected 3 shards, but the run ended first"
    )
    assert inbox() is None


def test_where_no_run_is_under_way(tmp_path: Path) -> None:
    """It is reported at once, and nothing is written."""
    (tmp_path / SETTINGS).write_text("{}")
    with pytest.raises(BadInput) as caught:
        ask_run(SnapshotRef("", run=tmp_path), RESHARD, 60.0)
    line = f"reshard {tmp_path}: expected a run under way on this machine, got none"
    assert str(caught.value) == line
    assert [path.name for path in tmp_path.iterdir()] == [SETTINGS]


def test_what_an_earlier_run_was_asked_for_is_forgotten(tmp_path: Path) -> None:
    """Orders to an earlier process of the run, and files that are no orders, are ignored. An order
    may arrive before the run looks for one."""
    ours = f".order-{os.getpid()}-"
    (tmp_path / ".order-1-00.json").write_text('{"type": "reshard", "shards": 3}')
    (tmp_path / f"{ours}01.json").write_text('{"type": "reshard", "shards": 2}')
    inbox = FolderInbox(tmp_path)
    (tmp_path / f"{ours}00.json").write_text("garbage")
    pending = inbox()
    assert pending is not None
    assert pending.order == ReshardOrder(2)
    assert inbox() is None
    assert left(tmp_path) == [f"{ours}00.json", f"{ours}01.taken"]
