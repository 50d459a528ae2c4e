"""The files of a shard's WAL: a crash's remains are cut, damage is named, old files are reused.

Shards without a network; a crash is a WAL that is not closed, or bytes that a kill left behind.
"""

import errno
import os
import random
import resource
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploy.simulation.disk import DeferredTask, Died, SimulatedDisk
from ps import storage
from ps.durability import Durability
from ps.wal import log_folder
from ps.wal.job_logs import load_logs
from ps.wal.recovery import MARK, LogFileKind, read_spec, read_state
from ps.wal.writer import WriteAheadLog
from shards import wal_format
from shards.errors import BadInput, GiveUp
from shards.rules import Momentum
from shards.shard import Shard
from tests.support.shard_dsl import spec
from tests.support.shard_with_wal import Life, life, written
from tests.support.small_disk import enlarge, small_disk

LEVELS = (Durability.PROCESS, Durability.LOGGED)


def last_log(folder: Path) -> Path:
    return max(folder.glob("log-*"))


@pytest.mark.parametrize("durability", LEVELS)
def test_lives_go_on_from_one_another(durability: Durability, tmp_path: Path) -> None:
    """Each process starts where the one before it ended, in files that only their owner can read.

    Another reader gets the same state.
    """
    folder = tmp_path / "logs" / "job" / "shard-0"
    held: list[bytes] = []
    for lives in range(4):
        with life(folder, durability) as one:
            assert one.shard.version == 3 * lives
            if lives:
                assert one.held() == held
            one.enter()
            one.push(3)
            held = one.held()
    read, state = read_state(folder)
    assert (read, state.saved.version) == (spec(rule=Momentum(0.5), bound=None), 12)
    assert [array.tobytes() for array in state.arrays.values()] == held
    assert {one.stat().st_mode & 0o777 for one in (folder, *folder.parents[:2])} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


@pytest.mark.parametrize("seed", range(10))
def test_what_a_life_goes_on_from_is_flushed(seed: int) -> None:
    """A process dies between writing a push and flushing it; the next process has the push.

    If then the power fails, the process after that still has it.
    """
    disk = SimulatedDisk("disk", random.Random(seed))
    first = Life(disk, Durability.LOGGED)
    first.enter()
    first.push(2)
    disk.fuse = 1
    with pytest.raises(Died):
        first.push()
    assert Life(disk, Durability.LOGGED).shard.version == 3
    disk.fail()
    assert Life(disk, Durability.LOGGED).shard.version == 3


@pytest.mark.parametrize("seed", range(5))
def test_what_a_life_at_process_wrote_is_flushed_by_one_at_logged(seed: int) -> None:
    """All files, the base among them, survive a power failure from then on."""
    disk = SimulatedDisk("disk", random.Random(seed))
    first = Life(disk, Durability.PROCESS, 1 << 13)
    first.enter()
    first.push(40)
    assert first.log._base is not None
    first.log._base.join()
    first.push(5)
    held, names = first.held(), disk.names()
    assert sum(name.startswith("base-") for name in names) > 0
    assert sum(name.startswith("log-") for name in names) > 1
    assert Life(disk, Durability.LOGGED, 1 << 13).held() == held
    disk.fail()
    assert Life(disk, Durability.LOGGED, 1 << 13).held() == held


def test_old_files_are_written_over(tmp_path: Path) -> None:
    """One base after another replaces a long WAL, in the same few files, without losing a push or
    bit.
    """
    folder = tmp_path / "shard-0"
    with life(folder, Durability.PROCESS, 1 << 14) as one:
        one.enter()
        seen: list[set[int]] = []
        for _ in range(300):
            one.push()
            if one.log._base is not None:
                one.log._base.join()
            seen.append({path.stat().st_ino for path in folder.iterdir()})
        held, version = one.held(), one.shard.version
    assert set().union(*seen[150:]) == set().union(*seen[:150]), "no file is new"
    kinds = Counter(path.name.partition("-")[0] for path in folder.iterdir())
    assert (kinds["base"], kinds["lock"]) == (2, 1)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 60_000
    with life(folder) as again:
        assert (again.held(), again.shard.version, version) == (held, 300, 300)
        assert again.shard.metrics.pushes == 300


@pytest.mark.parametrize("durability", LEVELS)
def test_what_a_file_held_before_does_not_count(durability: Durability, tmp_path: Path) -> None:
    """Records of a file's earlier use, after the last new record, are never replayed.

    Processes die anywhere in files that are reused; complete records of earlier pushes are among
    the rest.
    """
    folder, held, pushes, behind = tmp_path / "shard-0", list[bytes](), 0, 0
    for lives in range(25):
        with life(folder, durability, 1 << 14) as one:
            assert one.shard.version == pushes
            assert not held or one.held() == held
            one.enter()
            for _ in range(5 + lives % 4):
                one.push(3)
                if one.log._base is not None:
                    one.log._base.join()
            held, pushes = one.held(), one.shard.version
        behind += last_log(folder).stat().st_size > one.log._filled
    assert behind > 5, "it did happen"


def test_a_base_that_was_not_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash during its writing leaves the logs before it, and a file that the next process
    removes.
    """
    folder = tmp_path / "shard-0"
    with life(folder, Durability.PROCESS, 1 << 14) as one:
        monkeypatch.setattr(one.log, "_save", lambda *_: None)
        one.enter()
        one.push(20)
        held = one.held()
    (folder / "base-00000001.partial").write_bytes(b"begun")
    assert len(list(folder.glob("log-*"))) > 1
    with life(folder) as again:
        assert again.held() == held
    assert not list(folder.glob("*.partial"))


def test_a_base_that_lacks_only_its_name(tmp_path: Path) -> None:
    """After a crash between a base's last byte and its rename, a reader uses the logs before it.

    It leaves the file unchanged.
    """
    folder = tmp_path / "shard-0"
    with life(folder) as one:
        one.enter()
        one.push(20)
        held = one.held()
        unfinished = folder / "base-00000001.partial"
        unfinished.write_bytes(
            b"".join(wal_format.encode(*wal_format.state_of(one.shard, 1), number=1))
        )
    _, state = read_state(folder)
    assert state.arrays["net/weights"].tobytes() == held[0]
    assert unfinished.exists()


@pytest.mark.parametrize("left", ["half", "head", "zeros", "flipped"])
def test_a_torn_tail_is_cut(left: str, tmp_path: Path) -> None:
    """An incomplete record was never acknowledged: the push before it is the last.

    The next process appends after it, and the mark includes that push, too.
    """
    folder = tmp_path / "shard-0"
    held = written(folder, 4)
    with life(folder) as one:
        one.enter()
        size, mark = last_log(folder).stat().st_size, (folder / MARK).read_bytes()
        one.push()
    (folder / MARK).write_bytes(mark)
    path, content = last_log(folder), bytearray(last_log(folder).read_bytes())
    match left:
        case "half":
            content = content[: size + 1000]
        case "head":
            content = content[: size + 20]
        case "zeros":
            content[size:] = bytes(len(content) - size)
        case _:
            content[-100] ^= 4
    path.write_bytes(content)
    with life(folder) as again:
        assert again.held() == held
        assert path.stat().st_size == size
        again.enter()
        again.push()
        held = again.held()
    with life(folder) as third:
        assert (third.held(), third.shard.version) == (held, 5)


def test_a_log_that_was_just_created(tmp_path: Path) -> None:
    """A crash before its opening was written leaves a file that does not count."""
    folder = tmp_path / "shard-0"
    held = written(folder)
    mark = (folder / MARK).read_bytes()
    for content in (b"", b"\x93DPS"):
        (folder / "log-00000001").write_bytes(content)
        with life(folder) as again:
            assert again.held() == held
        last_log(folder).unlink()
        (folder / MARK).write_bytes(mark)


def test_damage_in_the_middle_is_named(tmp_path: Path) -> None:
    """For a flipped bit before the end, the error names file and place, and the shard does not
    start.

    The same holds in a base or an older log. Reading changes nothing.
    """
    folder = tmp_path / "shard-0"
    written(folder)
    path = folder / "log-00000000"
    content = bytearray(path.read_bytes())
    content[2000] ^= 1
    path.write_bytes(content)
    line = rf"^log {path}: the record at byte \d+ does not match its checksum$"
    for look in (lambda: Life(folder), lambda: read_state(folder)):
        with pytest.raises(BadInput, match=line):
            look()
    assert path.read_bytes() == content
    assert [one.name for one in folder.glob("log-*")] == [path.name]


def ends(path: Path) -> list[int]:
    """Where each record of a log ends."""
    content, places = memoryview(path.read_bytes()), [0]
    while places[-1] < len(content):
        number = int(path.name.removeprefix("log-"))
        places.append(wal_format.read(content, places[-1], path.name, number=number).end)
    return places[1:]


@pytest.mark.parametrize("durability", LEVELS)
@pytest.mark.parametrize(
    "left", ["nothing", "no bytes", "records", "half a record", "a flipped bit"]
)
def test_a_newest_log_that_ends_too_early_is_named(
    durability: Durability, left: str, tmp_path: Path
) -> None:
    """A newest log that is gone, emptied, cut, or damaged at its last record is named.

    Acknowledged pushes would be missing. Removing the mark accepts their loss.
    """
    folder = tmp_path / "shard-0"
    for lives in (1, 2):
        with life(folder, durability) as one:
            one.enter()
            one.push(5)
            held = one.held()
        path = last_log(folder)
        content, places = path.read_bytes(), ends(path)
        spoiled = {
            "no bytes": b"",
            "records": content[: places[-3]],
            "half a record": content[:-50],
            "a flipped bit": content[:-50] + bytes([content[-50] ^ 8]) + content[-49:],
        }
        path.unlink()
        if left in spoiled:
            path.write_bytes(spoiled[left])
        for look in (lambda: Life(folder, durability), lambda: load_logs(tmp_path)):
            with pytest.raises(BadInput) as caught:
                look()
            assert str(caught.value).startswith(f"log {path}: expected ")
            if left in ("nothing", "no bytes"):
                assert "expected this log, got none, or one without an opening" in str(caught.value)
            else:
                assert f"expected records up to byte {len(content)}, got them" in str(caught.value)
            assert str(caught.value).endswith(
                f"; restore the missing records, or remove {folder / MARK} to continue without them"
            )
        path.write_bytes(content)
        _, state = read_state(folder)
        assert (state.arrays["net/weights"].tobytes(), state.saved.version) == (held[0], 5 * lives)
    path.unlink()
    (folder / MARK).unlink()
    with life(folder, durability) as again:
        assert again.shard.version == 5


def test_an_older_log_that_ends_too_early_is_named(tmp_path: Path) -> None:
    """It was cut between two records, so all that are left are complete.

    The opening after it holds its length.
    """
    folder = tmp_path / "shard-0"
    written(folder)
    written(folder)
    path = folder / "log-00000000"
    content = path.read_bytes()
    for end in ends(path)[:-1]:
        path.write_bytes(content[:end])
        with pytest.raises(BadInput) as caught:
            Life(folder)
        assert str(caught.value) == (
            f"log {path}: expected {len(content)} bytes, as log-00000001 says, got {end}"
        )


@pytest.mark.parametrize("spoiled", [b"", bytes(28), b"\x93DPMARK\n" + bytes(20), b"x" * 100])
def test_a_spoiled_mark_says_nothing(spoiled: bytes, tmp_path: Path) -> None:
    """A power failure may leave any bytes in it; then the log is read as far as it goes."""
    folder = tmp_path / "shard-0"
    held = written(folder)
    (folder / MARK).write_bytes(spoiled)
    with life(folder) as again:
        assert again.held() == held


def test_a_damaged_base_is_named(tmp_path: Path) -> None:
    """Older logs, if still there, are replayed instead, to the same bits; else it is an error."""
    folder = tmp_path / "shard-0"
    with life(folder, Durability.PROCESS, 1 << 14) as one:
        one.log._run_in_background = DeferredTask  # written when it is joined
        one.enter()
        while one.log._base is None:
            one.push()
        one.push()
        held, version = one.held(), one.shard.version
        older = {path: path.read_bytes() for path in folder.glob("log-*")}
        one.log._base.join()
    (base,) = folder.glob("base-*")
    content = bytearray(base.read_bytes())
    content[-500] ^= 1
    base.write_bytes(content)
    with life(folder) as again:
        assert (again.held(), again.shard.version) == (held, version)
    first = min(older)
    first.unlink()
    with pytest.raises(BadInput, match=rf"^log {base}: the record at byte 0 does not match"):
        Life(folder)


def test_a_missing_log_is_named(tmp_path: Path) -> None:
    """Two processes have written, and the first one's file is gone."""
    folder = tmp_path / "shard-0"
    written(folder)
    written(folder, 0)
    (folder / "log-00000000").unlink()
    with pytest.raises(BadInput) as caught:
        Life(folder)
    gone = folder / "log-00000000"
    assert (
        str(caught.value)
        == f"log {gone}: expected this log, because others of its sequence exist, got none"
    )


def test_another_jobs_log(tmp_path: Path) -> None:
    """A folder belongs to one job, one shard, one build, and one setting of each."""
    folder = tmp_path / "shard-0"
    written(folder)
    assert read_spec(folder).job == "job"
    path = folder / "log-00000000"
    for changes, text in (
        ({"job": "other"}, "expected job other, got job"),
        ({"build": "b2"}, "expected build b2, got build"),
        ({"bound": 3}, "expected the same configuration, got another rule, map or setting"),
    ):
        files = WriteAheadLog(folder, Durability.PROCESS)
        shard = Shard(spec(**{"rule": Momentum(0.5), "bound": None} | changes), boot=3)
        with pytest.raises(BadInput) as caught:
            files.recover(shard, 1.0)
        files.close()
        assert str(caught.value) == f"log {path}: {text}"


def test_a_log_of_an_earlier_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names both formats, and the file stays; openings of all formats can be read."""
    folder = tmp_path / "shard-0"
    monkeypatch.setattr(wal_format, "FORMAT", 3)
    written(folder)
    monkeypatch.undo()
    content = last_log(folder).read_bytes()
    for look in (lambda: Life(folder), lambda: read_state(folder)):
        with pytest.raises(BadInput) as caught:
            look()
        assert str(caught.value) == f"log {last_log(folder)}: expected format 7, got 3"
    assert last_log(folder).read_bytes() == content


def test_a_log_whose_records_had_another_layout(tmp_path: Path) -> None:
    """A log of the formats 1 to 4 is refused in one line, and stays: it is not taken for empty."""
    folder = tmp_path / "shard-0"
    written(folder)
    content = b"\x93DPSLOG\n" + bytes(100)
    last_log(folder).write_bytes(content)
    for look in (lambda: Life(folder), lambda: read_state(folder)):
        with pytest.raises(BadInput) as caught:
            look()
        assert str(caught.value) == f"log {last_log(folder)}: expected format 7, got an earlier one"
    assert last_log(folder).read_bytes() == content


def test_one_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second process waits for the first to be gone, but not for ever."""
    monkeypatch.setattr(log_folder, "_LOCK_S", 0.1)
    folder = tmp_path / "shard-0"
    with life(folder), pytest.raises(GiveUp) as caught:
        WriteAheadLog(folder, Durability.PROCESS)
    assert str(caught.value) == f"log {folder}: another process writes it"
    with pytest.raises(BadInput, match=r"^log /proc/no: No such file or directory$"):
        WriteAheadLog(Path("/proc/no"), Durability.PROCESS)


@pytest.mark.parametrize("soon", [True, False])
@pytest.mark.parametrize("system", ["linux", "other"])
def test_what_is_written_in_slices_is_whole(
    soon: bool, system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of all sizes, more than one call takes, are written in order.

    A disk that is to start soon is asked for each slice, if the system supports that. (Seed 7.)
    """
    told: list[tuple[int, int]] = []

    def begin(_: int, at: int, size: int, how: int) -> int:
        assert how == 2
        told.append((at, size))
        return 0

    call = begin if system == "linux" else None
    monkeypatch.setattr(storage, "_sync_file_range", lambda: call)
    monkeypatch.setattr(log_folder, "_SLICE", 1 << 12)
    rng = np.random.default_rng(7)
    pieces = [rng.bytes(size) for size in (10, 1 << 12, 0, 20_000, *[3] * 1200, (1 << 13) + 1)]
    file = log_folder.LogFolder(tmp_path).create("name")
    sizes = [file.write(pieces, soon=soon), file.write([b"end"], soon=soon)]
    file.sync()
    file.close()
    content = b"".join(pieces)
    assert (tmp_path / "name").read_bytes() == content + b"end"
    assert sizes == [len(content), 3]
    if soon and system == "linux":
        ends = [at + size for at, size in told]
        assert [at for at, _ in told] == [0, *ends[:-1]], "one behind another"
        assert max(size for _, size in told) < 2 << 12
        assert ends[-1] == len(content), "and nothing for what is short"
    else:
        assert not told


@contextmanager
def no_more_files() -> Iterator[None]:
    """This process may open none: every lower number is in use."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.open(os.devnull, os.O_RDONLY)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("durability", LEVELS)
@pytest.mark.parametrize("reused", [False, True])
def test_without_a_free_descriptor_the_present_file_goes_on(
    durability: Durability, reused: bool, tmp_path: Path
) -> None:
    """No push is lost or refused, and the next file and base come once files may be opened."""
    folder = tmp_path / "shard-0"
    with life(folder, durability, 1 << 14) as one:
        one.enter()
        while reused and not one.log._spares[LogFileKind.LOG]:
            one.push()
            if one.log._base is not None:
                one.log._base.join()
        name, before = one.log.name, one.shard.version
        with no_more_files():
            for _ in range(150):
                one.push()
                if one.log._base is not None:
                    one.log._base.join()
        names = {name, one.log.name}
        assert len(names) == 1, "one file has all of them"
        assert one.log.record_bytes > 1 << 14
        one.push(2)
        assert one.log.name not in names
        if one.log._base is not None:
            one.log._base.join()
        held = one.held()
    with life(folder) as again:
        assert (again.held(), again.shard.version) == (held, before + 152)


def test_a_base_without_a_descriptor_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files before it remain, the shard serves on, and the next file brings a base."""
    folder, refused = tmp_path / "shard-0", list[str]()
    create = log_folder.LogFolder.create

    def refuse_base(self: Any, name: str, over: str | None = None) -> Any:
        if name.startswith("base-") and not refused:
            refused.append(name)
            raise OSError(errno.EMFILE, "Too many open files")
        return create(self, name, over)

    monkeypatch.setattr(log_folder.LogFolder, "create", refuse_base)
    with life(folder, Durability.PROCESS, 1 << 14) as one:
        one.enter()
        while not list(folder.glob("base-*")):
            one.push()
            if one.log._base is not None:
                one.log._base.join()
        assert refused
        assert one.log._grown < 1 << 14, "it came with the next file"
        held = one.held()
    with life(folder) as again:
        assert again.held() == held


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KB."""
    with small_disk(tmp_path / "small", "256k") as disk:
        yield disk


def test_a_full_disk(disk: Path) -> None:
    """The push that found no space is not answered, nor any after it; the error names the file.

    With space again, every acknowledged push is there, and no other.
    """
    folder = disk / "shard-0"
    with life(folder, Durability.LOGGED, 1 << 22) as one:
        one.enter()
        with pytest.raises(GiveUp) as caught:
            one.push(1000)
        acknowledged = one.seq - 1
    path = folder / "log-00000000"
    assert str(caught.value) == (
        f"log {path}: No space left on device (the disk of {folder} has 0.0 of 0.3 MB free);"
        " the log has all acknowledged updates"
    )
    enlarge(disk, "1m")
    with life(folder) as again:
        assert again.shard.version == acknowledged > 50
        again.enter()
        again.push()
