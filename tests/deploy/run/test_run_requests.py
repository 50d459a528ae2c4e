"""Reshard requests through the run folder, from both sides."""

import os
import threading
from pathlib import Path

import pytest

from deploy.run.folder import SETTINGS, RunFolder
from deploy.run.requests import FolderReshardRequest, RequestInbox, request_reshard
from deploy.run.snapshot_ref import SnapshotRef
from shards.errors import BadInput, DownpourError, GiveUp


class Asking(threading.Thread):
    """`downpour reshard` with this number of shards, and its result."""

    def __init__(self, run: Path, shards: int, wait_s: float = 60.0) -> None:
        super().__init__(daemon=True)
        self.run_folder, self.shards, self.wait_s = run, shards, wait_s
        self.error: DownpourError | None = None
        self.start()

    def run(self) -> None:
        try:
            request_reshard(SnapshotRef("", run=self.run_folder), self.shards, self.wait_s)
        except DownpourError as error:
            self.error = error

    def ended(self) -> DownpourError | None:
        self.join(60)
        assert not self.is_alive()
        return self.error


def left(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir() if "request" in path.name)


@pytest.mark.parametrize("error", [None, BadInput("too many"), GiveUp("it died")])
def test_a_request_is_answered(tmp_path: Path, error: DownpourError | None) -> None:
    """The run receives the number of shards once, the command receives the result, and no file
    of it stays in the folder."""
    with RunFolder.create(tmp_path / "run", {}) as folder:
        inbox = RequestInbox(folder.path)
        assert inbox() is None
        asking = Asking(folder.path, 3)
        while (request := inbox()) is None:
            assert asking.is_alive()
        assert isinstance(request, FolderReshardRequest)
        assert request.shards == 3
        assert inbox() is None
        request.answer(error)
        found = asking.ended()
        assert (type(found), str(found)) == (type(error), str(error))
        assert left(folder.path) == []


def test_nobody_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that the run has not accepted is withdrawn, and the error says that nothing has
    begun; for an accepted one, the error says that it has begun."""
    with RunFolder.create(tmp_path / "run", {}) as folder:
        inbox = RequestInbox(folder.path)
        asking = Asking(folder.path, 3, wait_s=0.2)
        line = f"reshard {folder.path}: the run has not begun to change to 3 shards,"
        assert str(asking.ended()) == f"{line} got no answer in 0.2 s"
        assert inbox() is None
        monkeypatch.setattr("deploy.run.requests.write_whole", lambda *_: None)  # gone: taken up
        asking = Asking(folder.path, 3, wait_s=0.2)
        line = f"reshard {folder.path}: the run has begun to change to 3 shards,"
        assert str(asking.ended()) == f"{line} got no answer in 0.2 s"


def test_the_run_ends_first(tmp_path: Path) -> None:
    """The command does not wait when the run ends."""
    with RunFolder.create(tmp_path / "run", {}) as folder:
        asking = Asking(folder.path, 3)
        inbox = RequestInbox(folder.path)
        while not left(folder.path):
            assert asking.is_alive()
    assert str(asking.ended()) == f"reshard {folder.path}: the run ended before it had 3 shards"
    assert inbox() is None


def test_where_no_run_is_under_way(tmp_path: Path) -> None:
    """It is reported at once, and nothing is written."""
    (tmp_path / SETTINGS).write_text("{}")
    with pytest.raises(BadInput) as caught:
        request_reshard(SnapshotRef("", run=tmp_path), 3, 60.0)
    line = f"reshard {tmp_path}: expected a run under way on this machine, got none"
    assert str(caught.value) == line
    assert [path.name for path in tmp_path.iterdir()] == [SETTINGS]


def test_what_an_earlier_run_was_asked_for_is_forgotten(tmp_path: Path) -> None:
    """Requests to an earlier process of the run, and files that are no requests, are ignored. A
    request may arrive before the run looks for one."""
    ours = f".request-{os.getpid()}-"
    (tmp_path / ".request-1-00.json").write_text('{"type": "reshard", "shards": 3}')
    (tmp_path / f"{ours}01.json").write_text('{"type": "reshard", "shards": 2}')
    inbox = RequestInbox(tmp_path)
    (tmp_path / f"{ours}00.json").write_text("garbage")
    request = inbox()
    assert isinstance(request, FolderReshardRequest)
    assert request.shards == 2
    assert inbox() is None
    assert left(tmp_path) == [f"{ours}00.json", f"{ours}01.taken"]
