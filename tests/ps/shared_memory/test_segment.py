"""Shared memory: the reach of references, access to segments, and what dead processes leave."""

import errno
import mmap
import os
import random
import secrets
import signal
import stat
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ps.shared_memory import shm_files
from ps.shared_memory.segment import (
    PAGE,
    ROW_SLOTS,
    ContiguousMapping,
    MappedPiece,
    Reference,
    SharedBuffers,
    ShmSegment,
    Window,
)
from shards.errors import BadMessage

JOB = f"test-job-{secrets.token_hex(8)}"  # its names are nobody else's
SEED = 12


@pytest.fixture
def segment() -> Iterator[ShmSegment]:
    """Three slots of 1500 floats, a page and a half each."""
    made = ShmSegment(JOB, 1500, 3)
    yield made
    made.close()


def there() -> set[str]:
    return {path.name for path in shm_files.ROOT.glob(f"{shm_files.job_prefix(JOB)}*")}


def test_what_is_written_is_read(segment: ShmSegment) -> None:
    """A reference to any part of an array is a view of the same floats on the other side."""
    buffers, window = SharedBuffers(1500, segment), Window(JOB, segment.name)
    arrays = [buffers.take() for _ in range(3)]
    for number, array in enumerate(arrays):
        array[:] = np.arange(1500) + 10_000 * number
        cut = [array[:256], array[256:1024], array[1024:]]
        for part in cut:
            reference = segment.refer(part)
            assert reference is not None
            found = window.view(Reference.unpack(reference.pack()))
            assert found is not None
            np.testing.assert_array_equal(found.view(np.float32), part)
            assert not found.flags.writeable
    arrays[0][0] = -1  # and no copy
    reference = segment.refer(arrays[0])
    assert reference is not None
    view = window.view(reference)
    assert view is not None
    assert view.view(np.float32)[0] == -1


def test_what_lies_elsewhere_is_not_referred_to(segment: ShmSegment) -> None:
    """Arrays on the heap, bytes and empty arrays get no reference."""
    first = SharedBuffers(1500, segment).take()
    for frame in (np.zeros(4, np.float32), b"bytes", first[:0]):
        assert segment.refer(frame) is None
    assert first in segment
    assert np.zeros(4, np.float32) not in segment


def test_a_recycled_slot_voids_old_references(segment: ShmSegment) -> None:
    """A reference to an earlier use of a slot is outdated; one to a later use is refused."""
    buffers, window = SharedBuffers(1500, segment), Window(JOB, segment.name)
    array = buffers.take()
    old = segment.refer(array)
    assert old is not None
    del array
    again = buffers.take()
    new = segment.refer(again)
    assert new is not None
    assert (new.slot, new.generation) == (old.slot, old.generation + 1)
    assert window.view(old) is None
    assert window.view(new) is not None
    with pytest.raises(BadMessage, match="generation 9 of slot 0, at 2"):
        window.view(new._replace(generation=9))


def test_no_reference_reaches_outside_its_slot(segment: ShmSegment) -> None:
    """Random and extreme numbers are refused, or give exactly the bytes of one slot."""
    window, array = Window(JOB, segment.name), segment.allocate(1500)
    good = segment.refer(array)
    assert good is not None
    dice = random.Random(SEED)
    edges = [0, 1, 4, PAGE, segment.stride, 3 * segment.stride, 2**31, 2**32, 2**63, 2**64 - 1]
    for _ in range(20_000):
        drawn = [dice.choice((*good, *edges)) + dice.choice((0, 0, 1, 4)) for _ in range(4)]
        reference = Reference(*(number % 2**64 for number in drawn))
        slot, offset, length, generation = reference
        inside = slot < 3 and offset % 4 == 0 and 0 < length <= segment.stride - offset
        if inside and generation == 0:
            view = window.view(reference)
            assert view is not None, f"seed {SEED}: {reference}"
            assert view.nbytes == length
        else:
            with pytest.raises(BadMessage):
                window.view(reference)
    for junk in (b"", b"x" * 31, b"x" * 33):
        with pytest.raises(BadMessage, match="reference: expected 32 bytes"):
            Reference.unpack(junk)


def test_slots_for_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of any size are read where they were written; a slot grows, and is used again.

    What exceeds a slot, and what there is no slot for, gets no memory.
    """
    monkeypatch.setattr("ps.shared_memory.segment.ROW_SLOT_BYTES", 256 << 10)
    for floats, slots in ((1500, 3), (0, 3)):
        segment = ShmSegment(JOB, floats, slots, rows=True)
        window, weights = Window(JOB, segment.name), segment.allocate(floats)
        assert (segment.refer(weights) is None) == (not floats)
        taken, references = [], []
        for number in range(ROW_SLOTS):
            rows = segment.take_rows(1000 + 4000 * number)
            assert rows is not None
            rows[:] = number
            reference = segment.refer(rows[8:])
            assert reference is not None
            view = window.view(reference)
            assert view is not None
            assert (view.nbytes, view.min(), view.max()) == (992 + 4000 * number, number, number)
            assert not view.flags.writeable
            taken.append(rows)
            references.append(reference)
        first = 3 * bool(floats)
        assert [reference.slot for reference in references] == list(range(first, first + ROW_SLOTS))
        assert segment.take_rows(1000) is None, "each slot is in use"
        assert [(rows.min(), rows.max()) for rows in taken] == [(n, n) for n in range(ROW_SLOTS)]
        del rows, taken[-1]
        assert segment.take_rows((256 << 10) + 1) is None
        again = segment.take_rows(256 << 10)
        assert again is not None
        new = segment.refer(again)
        assert new is not None
        assert window.view(new) is not None
        assert window.view(references[-1]) is None, "an earlier use of the slot"
        segment.close()
        assert segment.take_rows(1000) is None
    assert not there()


def test_memory_for_rows_that_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that cannot grow is not given out, and a smaller message finds room in it."""
    segment = ShmSegment(JOB, 0, 1, rows=True)
    assert segment.take_rows(100_000) is not None
    real = os.posix_fallocate

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert segment.take_rows(1_000_000) is None
    smaller = segment.take_rows(100_000)
    assert smaller is not None
    assert segment.take_rows(8192) is None
    monkeypatch.setattr(os, "posix_fallocate", real)
    assert segment.take_rows(1_000_000) is not None
    segment.close()


def test_only_its_user_may_open_it(segment: ShmSegment) -> None:
    """Its mode is 0600, and its name does not reveal the job's id, which is a secret."""
    path = shm_files.ROOT / segment.name
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert JOB not in segment.name
    assert "0123456789abcdef" not in segment.name
    path.chmod(0o644)
    with pytest.raises(BadMessage, match="expected this user's own file of mode 0600"):
        Window(JOB, segment.name)


def test_names_that_are_no_segments(segment: ShmSegment, tmp_path: Path) -> None:
    """Paths, links, other jobs' segments, files without our header: none is mapped."""
    fake, link = shm_files.memory_path(JOB), shm_files.memory_path(JOB)
    fake.touch(0o600)
    fake.write_bytes(bytes(2 * PAGE))
    link.symlink_to(segment.name)
    try:
        for name in (
            "../etc/passwd",
            "/etc/passwd",
            "",
            segment.name + "/..",
            segment.name[:-1],
            shm_files.memory_path("another job").name,
            shm_files.memory_path(JOB).name,
            fake.name,
            link.name,
        ):
            with pytest.raises(BadMessage, match="segment"):
                Window(JOB, name)
    finally:
        fake.unlink()
        link.unlink()


def test_a_closed_segment_leaves_no_name() -> None:
    """Its arrays stay valid, here and in windows; new ones come from the heap."""
    segment = ShmSegment(JOB, 100, 2)
    array, window = segment.allocate(100), Window(JOB, segment.name)
    reference = segment.refer(array)
    assert reference is not None
    assert not window.owner_is_gone()
    segment.close()
    segment.close()
    assert window.owner_is_gone()
    assert not there()
    array[:] = 5
    view = window.view(reference)
    assert view is not None
    assert set(view.view(np.float32)) == {5.0}
    assert segment.allocate(100) not in segment


def test_a_forgotten_segment_leaves_no_name() -> None:
    """A segment that is collected without being closed is released."""
    ShmSegment(JOB, 100, 2)
    assert not there()


def test_when_slots_or_memory_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Further arrays come from the heap; with no room for the header there is no segment."""
    segment = ShmSegment(JOB, 100, 2)
    assert [segment.allocate(100) in segment for _ in range(3)] == [True, True, False]
    segment.close()

    def full(fd: int, offset: int, length: int) -> None:
        if offset:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    segment = ShmSegment(JOB, 100, 2)
    assert segment.allocate(100) not in segment
    segment.close()
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: full(0, 1, 1))
    with pytest.raises(OSError, match="No space left"):
        ShmSegment(JOB, 100, 2)
    assert not there()


def test_slots_side_by_side() -> None:
    """Parts of three segments read as one array, which shows what their owners write.

    A part that does not end with a page can only be the last; the same parts give the same memory.
    """
    floats, mosaic = (2048, 1024, 300), ContiguousMapping()
    owners = [ShmSegment(JOB, size, 3) for size in floats]
    windows = [Window(JOB, owner.name) for owner in owners]

    def lay(order: list[int]) -> np.ndarray[tuple[int], np.dtype[np.float32]] | None:
        tiles = []
        for index in order:
            reference = owners[index].refer(arrays[index])
            assert reference is not None
            view = windows[index].view(reference)
            assert view is not None
            tile = windows[index].tile([view])
            assert isinstance(tile, MappedPiece)
            assert windows[index].tile([view[4:]]) is None, "not a slot's beginning"
            tiles.append(tile)
        memory = mosaic.lay(tiles)
        if memory is None:
            return None
        memories.append(weakref.ref(memory))
        return np.frombuffer(memory, np.float32)

    addresses = set()
    memories: list[weakref.ref[mmap.mmap]] = []
    for _ in range(3):
        arrays = [owner.allocate(size) for owner, size in zip(owners, floats, strict=True)]
        for number, array in enumerate(arrays):
            array[:] = number + np.random.default_rng(SEED).random(array.size, np.float32)
        for _ in range(2):
            whole = lay([0, 1, 2])
            assert whole is not None
            np.testing.assert_array_equal(whole, np.concatenate(arrays))
            arrays[1][5] = -7
            assert whole[2048 + 5] == -7
            addresses.add(whole.ctypes.data)
        assert lay([2, 0]) is None
    assert len(addresses) == 3
    del whole
    assert all(memory() is not None for memory in memories), "kept for when they come again"
    mosaic.forget(owners[1].name)
    assert all(memory() is None for memory in memories), "each is of all three"
    for owner in owners:
        owner.close()


_OWNER = """
import sys, time
from ps.shared_memory.segment import ShmSegment
segment = ShmSegment(sys.argv[1], 100, 2)
print(segment.name, flush=True)
time.sleep(60)
"""


def test_what_the_killed_leave_is_swept() -> None:
    """A live owner's segment stays, even if suspended; a killed one's goes with the next sweep.

    Its peers keep what they have mapped.
    """
    owner = subprocess.Popen([sys.executable, "-c", _OWNER, JOB], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        name = owner.stdout.readline().strip()
        window = Window(JOB, name)
        owner.send_signal(signal.SIGSTOP)
        assert name not in shm_files.sweep()
        assert name in there()
        assert not window.owner_is_gone()
        owner.kill()
        owner.wait()
        assert window.owner_is_gone()  # from now on any other job's process may sweep it, too
    finally:
        owner.kill()
        owner.wait()
        owner.communicate()
    ShmSegment(JOB, 100, 2).close()
    assert not there()
    view = window.view(Reference(0, 0, 400, 0))
    assert view is not None
    assert not view.any()


_PARENT = """
import os, sys
from ps.shared_memory.segment import ShmSegment
segment = ShmSegment(sys.argv[1], 100, 2)
array = segment.allocate(100)
ready, said = os.pipe()
if os.fork() == 0:
    os.write(said, b"x")
    sys.stdin.read()
    os._exit(0)
os.read(ready, 1)
print(segment.name, flush=True)
sys.stdin.read()
"""


def test_a_child_does_not_stand_for_its_parent() -> None:
    """A forked child that outlives the owner does not make the owner count as alive."""
    command = [sys.executable, "-c", _PARENT, JOB]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        window = Window(JOB, owner.stdout.readline().strip())
        assert not window.owner_is_gone()
        owner.kill()
        owner.wait()
        assert window.owner_is_gone()
    finally:
        owner.kill()
        owner.communicate()  # the child ends with its input
    shm_files.sweep()
    assert not there()


def test_nobody_gets_what_is_being_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner that cannot lock a name because a sweep has it waits, and creates it again."""
    path = tmp_path / "downpour-0123456789abcdef-memory-0123456789abcdef"
    path.touch()
    remove, could = shm_files._remove, []

    def trying(found: Path) -> None:
        with found.open() as file:
            could.append(shm_files._try_lock(file.fileno()))
        remove(found)

    monkeypatch.setattr(shm_files, "_remove", trying)
    assert shm_files.sweep(tmp_path) == [path.name]
    assert could == [False]


def test_a_name_that_has_another_owner_by_now_is_not_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restarted shard takes its socket's old name between a sweep's check and its lock."""
    path = tmp_path / "downpour-0123456789abcdef-door-0-7000"
    path.mkdir()

    def late(_: int) -> bool:
        path.rmdir()
        (path / "socket").mkdir(parents=True)
        return True

    monkeypatch.setattr(shm_files, "_try_lock", late)
    assert shm_files.sweep(tmp_path) == []
    assert (path / "socket").is_dir()


def test_only_our_names_are_swept(tmp_path: Path) -> None:
    """A user's own file with the project's prefix is not touched, locked or not."""
    keep = ["downpour-data", "downpour-0123456789abcdef-notes", "other"]
    gone = ["downpour-0123456789abcdef-memory-0123456789abcdef"]
    for name in keep + gone:
        (tmp_path / name).touch()
    (tmp_path / "downpour-0123456789abcdef-door-0-7000").mkdir()
    (tmp_path / "downpour-folder").mkdir()
    assert sorted(shm_files.sweep(tmp_path)) == ["downpour-0123456789abcdef-door-0-7000", *gone]
    assert {path.name for path in tmp_path.iterdir()} == {*keep, "downpour-folder"}
