"""The run folder: one run, one folder, and files that appear whole."""

import json
import multiprocessing
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from deploy.run.folder import RunFolder
from deploy.run.summary import Summary
from shards.errors import BadInput, GiveUp
from tests.support.run_records import records, summary

SETTINGS = {"workers": 4, "staleness": None, "data": "/data"}


def told(path: Path) -> dict[str, object]:
    """The settings in a file, without their checksum."""
    settings: dict[str, object] = json.loads(path.read_text())
    assert settings.pop("check")
    return settings


def test_a_new_run_gets_a_folder_with_its_settings(tmp_path: Path) -> None:
    """Missing parents are created, and the settings are written as given."""
    with RunFolder.create(tmp_path / "runs" / "demo", SETTINGS) as folder:
        assert told(folder.settings) == SETTINGS
        assert folder.settings == tmp_path / "runs" / "demo" / "settings.json"


def test_others_on_the_machine_cannot_look_in(tmp_path: Path) -> None:
    """A new folder is accessible to its owner only; an existing one keeps its mode, but no other
    user can take its lock."""
    (tmp_path / "shared").mkdir(mode=0o755)
    for name, mode in (("own", 0o700), ("shared", 0o755)):
        with RunFolder.create(tmp_path / name, SETTINGS):
            assert (tmp_path / name).stat().st_mode & 0o777 == mode
            assert (tmp_path / name / ".lock").stat().st_mode & 0o777 == 0o600


def test_another_runs_folder_is_refused(tmp_path: Path) -> None:
    """A new run never uses the folder of a run that has begun, and the error states the remedy."""
    with RunFolder.create(tmp_path, SETTINGS) as folder:
        folder.write_summary(summary())
    with pytest.raises(BadInput, match=r"holds a run; choose another --out, or .* --resume"):
        RunFolder.create(tmp_path, {"workers": 1})
    assert told(tmp_path / "settings.json") == SETTINGS


def test_a_run_folder_below_a_file(tmp_path: Path) -> None:
    """A folder that no disk can make is refused with the file above it and what to do."""
    file = tmp_path / "notes"
    file.touch()
    with pytest.raises(BadInput, match=f"below the file {file}; choose another --out"):
        RunFolder.create(file / "runs" / "demo", SETTINGS)


def test_a_folder_of_other_files_is_refused(tmp_path: Path) -> None:
    """A folder with other files is refused."""
    (tmp_path / "thesis.tex").write_text("...")
    with pytest.raises(BadInput, match=r"expected a new folder, got one with thesis\.tex"):
        RunFolder.create(tmp_path, SETTINGS)


def test_a_run_that_never_began_leaves_its_folder_free(tmp_path: Path) -> None:
    """After a refused start, the same command works once the cause is removed."""
    RunFolder.create(tmp_path, SETTINGS).close()
    with RunFolder.create(tmp_path, {"workers": 2}) as folder:
        assert told(folder.settings) == {"workers": 2}


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    """A path that cannot be a folder is refused in one line."""
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"run folder .*/file: "):
        RunFolder.create(tmp_path / "file", SETTINGS)


def test_resuming_goes_on_in_the_folder(tmp_path: Path) -> None:
    """The earlier run's files stay, and the settings are replaced by the present ones."""
    with RunFolder.create(tmp_path, SETTINGS) as folder:
        folder.write_summary(summary())
    with RunFolder.resume(tmp_path, {"workers": 4, "max_iter": 9}) as folder:
        assert folder.summary.exists()
        assert told(folder.settings) == {"workers": 4, "max_iter": 9}


def test_there_must_be_a_run_to_resume(tmp_path: Path) -> None:
    """An empty or missing folder cannot be resumed."""
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(BadInput, match=r"expected one with settings\.json"):
            RunFolder.resume(path, SETTINGS)


def test_two_runs_never_share_a_folder(tmp_path: Path) -> None:
    """While a run writes, neither a new nor a resumed run gets its folder; afterwards it does."""
    with RunFolder.create(tmp_path, SETTINGS):
        for enter in (RunFolder.create, RunFolder.resume):
            with pytest.raises(BadInput, match="in use by a run"):
                enter(tmp_path, SETTINGS)
    RunFolder.resume(tmp_path, SETTINGS).close()


def _take_and_die(path: Path) -> None:
    RunFolder.create(path, SETTINGS)
    os._exit(9)


def test_a_dead_run_does_not_hold_its_folder(tmp_path: Path) -> None:
    """The lock ends with its process, even if that was killed."""
    process = multiprocessing.get_context("spawn").Process(target=_take_and_die, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 9
    RunFolder.resume(tmp_path, SETTINGS).close()


def test_a_summary_is_written_as_json(tmp_path: Path) -> None:
    """Every key is there, unknown values are null, and no partial file is left behind."""
    with RunFolder.create(tmp_path, SETTINGS) as folder:
        folder.write_summary(replace(summary(staleness_bound=None), test_loss=float("nan")))
        written = json.loads(folder.summary.read_text())
    assert tuple(written) == Summary.__struct_fields__
    assert written["staleness_bound"] is None
    assert written["test_loss"] is None
    assert written["updates"] == 10
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "settings.json", "summary.json"}


def test_a_summary_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    """The file is replaced by a complete one or not at all."""
    with RunFolder.create(tmp_path, SETTINGS) as folder:
        folder.write_summary(summary())
        before = folder.summary.read_bytes()
        (tmp_path / ".summary.json.partial").mkdir()
        with pytest.raises(GiveUp, match=r"summary\.json"):
            folder.write_summary(summary(seconds=9.0))
        assert folder.summary.read_bytes() == before


def test_updates_go_into_the_folder(tmp_path: Path) -> None:
    """The folder opens `updates.parquet` under its own name."""
    with RunFolder.create(tmp_path, SETTINGS) as folder:
        with folder.open_updates(job="j", seed=1, part_s=60.0) as updates:
            updates.write([records(3)])
        assert folder.updates.name == "updates.parquet"
        assert (folder.updates / "part-000000.parquet").is_file()


def test_a_file_is_no_run_folder(tmp_path: Path) -> None:
    """The error says what is there and what to do, and the file stays as it was."""
    file = tmp_path / "ok.parquet"
    file.write_text("rows")
    with pytest.raises(BadInput, match="expected a new folder, got a file; choose another --out"):
        RunFolder.create(file, {})
    assert file.read_text() == "rows"
