"""Files that end with their owner: shared segments and Unix socket folders in /dev/shm, and folders
among the temporary files.

Each is created exclusively, for this user only, and locked (flock) by its owner as long as the
owner lives. The kernel drops the lock however a process ends. So if the lock is free, the owner is
gone; if not, the owner lives, even if it is suspended or slow: a timeout never counts as death. A
forked child gets a copy of the descriptor, which would hold the lock, so the child closes it at
once. Owners remove their own files; `sweep`, which every process calls before it adds a name, and
the driver at the end of a run, removes those of killed owners.

A name contains a digest of the job's id: the id is a secret, and any user can list the folder.
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
# `sweep` removes only these: users may have files that start with the project's name.
_OURS = re.compile(
    _PREFIX + r"([0-9a-f]{16}-(memory-[0-9a-f]{16}|door-[0-9]+-[0-9]+)"
    r"|kept-[a-z]+-[0-9a-f]{32}|ray-[0-9a-f]{8})"
)

# The path of a Unix socket has at most 107 characters. Ray's folder adds 24 to the path of the
# folder for temporary files, and its sockets add 64 to that.
_LONGEST_RAY_ROOT = 107 - 64 - 24


def job_prefix(job: str) -> str:
    """The prefix of the names of `job`."""
    return f"{_PREFIX}{digest_of(job)}-"


_CLAIMS: "weakref.WeakSet[Claim]" = weakref.WeakSet()  # of this process


class Claim:
    """A locked name: a file of mode 0600, or a folder of mode 0700. `fd` is open on it."""

    def __init__(self, path: Path, *, folder: bool = False) -> None:
        """Raises OSError if it cannot be created, FileExistsError if the name is taken."""
        self.path = path
        while True:
            self.fd = _create_folder(path) if folder else _create_file(path)
            fcntl.flock(self.fd, fcntl.LOCK_EX)
            if os.fstat(self.fd).st_nlink:
                break
            os.close(self.fd)  # swept before it was locked
        self._release = weakref.finalize(self, _release, path, self.fd, os.getpid())
        _CLAIMS.add(self)

    @property
    def is_held(self) -> bool:
        return self._release.alive

    def release(self) -> None:
        """Remove the name and drop the lock; may be called twice. Mappings of a file stay valid."""
        self._release()


def _disown() -> None:
    """Close all claims in a forked child, which owns none of them."""
    for claim in _CLAIMS:
        if claim.is_held:
            os.close(claim.fd)
            claim.fd = -1


os.register_at_fork(after_in_child=_disown)


def _release(path: Path, fd: int, owner: int) -> None:
    if os.getpid() != owner:  # a forked child
        return
    _remove(path)
    # A child that was not forked by Python may hold a copy of `fd`, which would keep the lock.
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


@contextlib.contextmanager
def temporary_folder(purpose: str) -> Iterator[Path]:
    """An empty folder for a `purpose`, among the temporary files, while the context lasts.

    If this process is killed, the next one that creates such a folder removes it.
    """
    root = Path(tempfile.gettempdir())
    with _claim_folder(root / f"{_PREFIX}kept-{purpose}-{secrets.token_hex(16)}") as path:
        yield path


@contextlib.contextmanager
def ray_folder() -> Iterator[Path]:
    """An empty folder for an embedded Ray, with the life of a `temporary_folder`.

    Its path is short enough for the Unix sockets that Ray creates in it.
    """
    with _claim_folder(_ray_root() / f"{_PREFIX}ray-{secrets.token_hex(4)}") as path:
        yield path


def sweep_all() -> None:
    """Remove this user's names that no living process owns, also among the temporary files."""
    for root in {ROOT, Path(tempfile.gettempdir()), _ray_root()}:
        sweep(root)


def _ray_root() -> Path:
    """The folder for temporary files, or /tmp if its path is too long for a socket of Ray."""
    root = tempfile.gettempdir()
    return Path(root if len(root) <= _LONGEST_RAY_ROOT else "/tmp")


@contextlib.contextmanager
def _claim_folder(path: Path) -> Iterator[Path]:
    sweep(path.parent)
    claim = Claim(path, folder=True)
    try:
        yield claim.path
    finally:
        claim.release()


def memory_path(job: str) -> Path:
    """A new unique path for a segment of `job`."""
    return ROOT / f"{job_prefix(job)}memory-{secrets.token_hex(8)}"


def is_memory(job: str, name: str) -> bool:
    """Return whether `name` is a valid name of a segment of `job`."""
    return name.startswith(f"{job_prefix(job)}memory-") and bool(_OURS.fullmatch(name))


def unix_socket_path(job: str, shard: int, port: str) -> Path:
    """The path of the folder for the Unix socket of the server of `shard` at `port`."""
    return ROOT / f"{job_prefix(job)}door-{shard}-{port}"


def owner_is_gone(fd: int) -> bool:
    """Return whether the owner of the file open as `fd` has ended; `fd` must not be the owner's."""
    gone = _try_lock(fd)
    if gone:
        fcntl.flock(fd, fcntl.LOCK_UN)
    return gone


def sweep(root: Path = ROOT) -> list[str]:
    """Remove this user's names that no living process owns; returns them."""
    removed = []
    for path in root.glob(f"{_PREFIX}*"):
        if not _OURS.fullmatch(path.name):
            continue
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                # The lock is held until the removal: the owner of a new file must lock it, too.
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
        with contextlib.suppress(FileNotFoundError):  # swept before it was locked
            return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: Path, fd: int) -> bool:
    """Return whether `path` is still the file open as `fd`: the name may have been reused since."""
    return os.path.samestat(path.lstat(), os.fstat(fd))


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
