"""Names that die with their owner: shared segments and the folders of Unix sockets in /dev/shm, and
folders among the temporary files.

Each is created exclusively, for this user alone, and locked (flock) by its owner for as long as the
owner lives. The kernel drops the lock however a process ends, so a lock that can be had proves that
the owner is gone, and one that cannot proves that it lives, be it stopped or slow: no timeout is
ever taken for death. Who forks gives its child a copy of the descriptor, which would hold the lock
for it: the child closes it at once. Owners remove what is theirs; what a killed one left is removed
by `sweep`, which everybody calls before adding a name.

A name tells its job by a digest: the job's id is a secret, and any user can list the folder.
"""

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

from shards.job_ids import digest_of

ROOT = Path("/dev/shm")
_PREFIX = "downpour-"
# What is swept: nothing else that somebody may have called after the project.
_OURS = re.compile(
    _PREFIX + r"([0-9a-f]{16}-(memory-[0-9a-f]{16}|door-[0-9]+-[0-9]+)|kept-[a-z]+-[0-9a-f]{32})"
)


def job_prefix(job: str) -> str:
    """What the names of `job` start with."""
    return f"{_PREFIX}{digest_of(job)}-"


_CLAIMS: "weakref.WeakSet[Claim]" = weakref.WeakSet()  # this process's


class Claim:
    """A locked name: a file of mode 0600, or a folder of mode 0700. `fd` is open on it."""

    def __init__(self, path: Path, *, folder: bool = False) -> None:
        """Raises OSError when it cannot be had, FileExistsError when somebody has it."""
        self.path = path
        while True:
            self.fd = _create_folder(path) if folder else _create_file(path)
            fcntl.flock(self.fd, fcntl.LOCK_EX)
            if os.fstat(self.fd).st_nlink:
                break
            os.close(self.fd)  # swept in between
        self._release = weakref.finalize(self, _release, path, self.fd, os.getpid())
        _CLAIMS.add(self)

    @property
    def held(self) -> bool:
        return self._release.alive

    def release(self) -> None:
        """Remove the name and drop the lock; may be called twice. Mappings of a file last on."""
        self._release()


def _disown() -> None:
    """In a forked child, which owns nothing."""
    for claim in _CLAIMS:
        if claim.held:
            os.close(claim.fd)
            claim.fd = -1


os.register_at_fork(after_in_child=_disown)


def _release(path: Path, fd: int, owner: int) -> None:
    if os.getpid() != owner:  # forked off it
        return
    _remove(path)
    # A child that was forked by other means than Python's may hold a copy, which would stay locked.
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


@contextlib.contextmanager
def temporary_folder(what: str) -> Iterator[Path]:
    """An empty folder for `what`, among the temporary files, while the context lasts.

    Where this process is killed, the next one that asks for such a folder removes it.
    """
    root = Path(tempfile.gettempdir())
    sweep(root)
    claim = Claim(root / f"{_PREFIX}kept-{what}-{secrets.token_hex(16)}", folder=True)
    try:
        yield claim.path
    finally:
        claim.release()


def memory_path(job: str) -> Path:
    """For a segment: a path that nobody else has."""
    return ROOT / f"{job_prefix(job)}memory-{secrets.token_hex(8)}"


def is_memory(job: str, name: str) -> bool:
    """Whether a segment of `job` may be called so."""
    return name.startswith(f"{job_prefix(job)}memory-") and bool(_OURS.fullmatch(name))


def door_path(job: str, shard: int, port: str) -> Path:
    """For the folder of the Unix socket of the one server of `shard` at `port`."""
    return ROOT / f"{job_prefix(job)}door-{shard}-{port}"


def owner_is_gone(fd: int) -> bool:
    """Whether the owner of what `fd` is open on has ended; `fd` must not be the owner's own."""
    gone = _try_lock(fd)
    if gone:
        fcntl.flock(fd, fcntl.LOCK_UN)
    return gone


def sweep(root: Path = ROOT) -> list[str]:
    """Remove every name of this user's whose owner is gone; returns them."""
    removed = []
    for path in root.glob(f"{_PREFIX}*"):
        if not _OURS.fullmatch(path.name):
            continue
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                # Locked until it is removed: one that is being made is its owner's once it can be.
                if os.fstat(fd).st_uid == os.geteuid() and _try_lock(fd) and _is_at(path, fd):
                    _remove(path)
                    removed.append(path.name)
            finally:
                os.close(fd)
    return removed


def _create_file(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _create_folder(path: Path) -> int:
    while True:
        path.mkdir(0o700)
        with contextlib.suppress(FileNotFoundError):  # swept in between
            return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: Path, fd: int) -> bool:
    """Whether the name is still of what `fd` is open on: another may have been given it since."""
    return os.path.samestat(path.lstat(), os.fstat(fd))


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
