"""A run checks for room on the disk before it starts, and reports a lack in one line."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from deploy.run import disk_space
from deploy.run.disk_space import check_room, free_bytes
from deploy.run.finish import with_hint
from shards.errors import GiveUp
from tests.support.cli_in_process import Run
from tests.support.cli_refusals import TRAIN, refuses


def test_a_disk_with_room_passes(tmp_path: Path) -> None:
    """For a folder that does not exist yet, its nearest parent counts."""
    check_room({tmp_path / "a/b": 1, tmp_path / "c": 1})
    assert (free_bytes(tmp_path / "a") or 0) > 0


def test_what_one_disk_gets_is_summed_up(
    downpour: Run, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and snapshot go to the same disk: nothing starts without room for both."""
    monkeypatch.setattr(disk_space, "free_bytes", lambda _: 1 << 20)
    line = r"\S*: expected room for at least 1\.\d MB, for the weights in two formats and one snap"
    refuses(downpour, job, TRAIN, line)


@pytest.mark.parametrize("snapshot", ["run/snapshots/10", None])
def test_a_full_disk_at_the_end_says_how_to_continue(snapshot: str | None, tmp_path: Path) -> None:
    """If there is a snapshot to resume from, the error names it and the command."""
    settings = SimpleNamespace(out=tmp_path, snapshots=None)
    outcome = SimpleNamespace(snapshot=snapshot)
    with pytest.raises(GiveUp) as raised, with_hint(settings, outcome):  # type: ignore[arg-type]
        raise GiveUp("weights: No space left on device")
    hint = f"make room, then continue with: downpour train --resume {tmp_path}"
    assert (hint in str(raised.value)) is (snapshot is not None)
