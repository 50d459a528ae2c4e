"""Uploads of nets and data sets: trees of files, sent in chunks, resumed after a break.

The client first sends a manifest: the path, size and SHA-256 of each file. Its digest is the id of
the upload, so a client that was killed sends the same manifest again and learns what is missing. A
file grows as `PATH.part`; it gets its name once its digest is right. Nothing is unpacked, and a
file can only be written below the upload's own folder:

    uploads/ID/manifest.json    the manifest
    uploads/ID/use.json         the projects that it counts for, its bytes, whether it is complete
    uploads/ID/files/PATH       a complete file
"""

import hashlib
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import msgspec

from deploy.run.disk_space import free_bytes, megabytes
from deploy.run.folder import write_whole
from deploy.runner import job_folder
from deploy.service.access_store import ProjectLimits, remaining_quota
from deploy.service.artefacts import sha256_of
from deploy.terminal_text import is_plain
from shards.errors import UNDECODABLE, BadInput, DownpourError, GiveUp

UPLOADS = "uploads"
PREFIX = "upload:"
"""Begins a path in settings that names a file of an upload: `upload:ID/PATH`."""
MAX_BYTES = 20 << 30
MAX_FILES = 5000
CHUNK_BYTES = 1 << 20
_ID = re.compile(r"[0-9a-f]{32}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_WORD = re.compile(r"[^/\\\x00-\x1f\x7f]{1,200}")
_MAX_NAME_BYTES = 250  # a file that is not complete has five more
_MANIFEST, _USE, _FILES = "manifest.json", "use.json", "files"


class UploadedFile(msgspec.Struct, frozen=True):
    """A file of a manifest."""

    path: str
    bytes: int
    sha256: str


class FileProgress(msgspec.Struct, frozen=True):
    """The bytes of a file that have arrived, and whether it is complete with the right digest."""

    path: str
    bytes: int
    received: int
    complete: bool


class UploadStatus(msgspec.Struct, frozen=True):
    """An upload: `path` is what settings name it by."""

    id: str
    path: str
    complete: bool
    files: list[FileProgress]


class UploadUse(msgspec.Struct, frozen=True, kw_only=True):
    """The projects whose limits an upload counts towards; in progress until `complete`."""

    projects: list[str]
    bytes: int
    complete: bool = False


class WrongOffset(GiveUp):
    """The chunk does not continue the file; `expected` is the offset that does."""

    def __init__(self, expected: int, got: int) -> None:
        super().__init__(f"offset: expected {expected}, got {got}")
        self.expected = expected


class Uploads:
    """All uploads of one home. Threads may share it; a file has one writer at a time."""

    def __init__(
        self,
        home: Path,
        *,
        max_bytes: int = MAX_BYTES,
        reserve_bytes: int = 0,
        limits: Callable[[], Mapping[str, ProjectLimits]] = dict,
    ) -> None:
        self.folder = home / UPLOADS
        self._limits = limits
        self._max_bytes = max_bytes
        self._reserve_bytes = reserve_bytes
        self._lock = threading.Lock()

    def begin(self, files: Sequence[UploadedFile], project: str = "default") -> UploadStatus:
        """Begin an upload of a project, or continue it.

        Raises BadInput for a manifest that is not allowed, or that the project has no room for.
        """
        check_manifest(files, self._max_bytes)
        content = msgspec.json.encode(sorted(files, key=lambda file: file.path))
        upload = hashlib.sha256(content).hexdigest()[:32]
        folder = self.folder / upload
        size = sum(file.bytes for file in files)
        with self._lock, _remove_if_refused(folder):
            known = job_folder.load(folder / _USE, UploadUse)
            if not (folder / _MANIFEST).is_file():
                self._check_room(size)
            if known is None or project not in known.projects:
                complete = known is not None and known.complete
                self._check_quota(project, size, complete=complete)
                projects = [*(known.projects if known is not None else ()), project]
                known = UploadUse(projects=projects, bytes=size, complete=complete)
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                job_folder.save(folder / _USE, known)
            if not (folder / _MANIFEST).is_file():
                (folder / _FILES).mkdir(mode=0o700, parents=True, exist_ok=True)
                write_whole(folder / _MANIFEST, content, private=True)
            for file in files:
                if not file.bytes and not self._target(upload, file.path).is_file():
                    self._finish(self._target(upload, file.path), file)
            os.utime(folder)  # its age counts from the last use
            self._note_complete(upload)
        return self.status(upload)

    def usage(self, project: str) -> ProjectLimits:
        """The present use of a project's uploads, in the terms of its limits."""
        uses = [
            use
            for path in self.folder.glob(f"*/{_USE}")
            if (use := job_folder.load(path, UploadUse)) is not None and project in use.projects
        ]
        return ProjectLimits(
            uploads=sum(not use.complete for use in uses),
            upload_bytes=sum(use.bytes for use in uses),
        )

    def status(self, upload: str) -> UploadStatus:
        """The progress of an upload; raises KeyError for an unknown id."""
        files = []
        for file in self._manifest(upload):
            target = self._target(upload, file.path)
            complete = target.is_file()
            received = file.bytes if complete else _size(_part(target))
            files.append(FileProgress(file.path, file.bytes, received, complete))
        complete = all(file.complete for file in files)
        return UploadStatus(upload, f"{PREFIX}{upload}", complete, files)

    def write(self, upload: str, path: str, offset: int, chunk: bytes) -> FileProgress:
        """Add a chunk to a file of an upload.

        Raises KeyError for an unknown upload or file, WrongOffset for a chunk that does not follow
        the bytes that are there, and BadInput for one that is too long, or if the whole file has
        another digest: it then begins again at 0.
        """
        files = {file.path: file for file in self._manifest(upload)}
        file, target = files[path], self._target(upload, path)
        with self._lock:
            received = file.bytes if target.is_file() else _size(_part(target))
            if offset != received:
                raise WrongOffset(received, offset)
            if received + len(chunk) > file.bytes:
                raise BadInput(path, expected=f"{file.bytes} bytes", got="more")
            if chunk:
                self._check_room(len(chunk))
                _append(_part(target), chunk)
                received += len(chunk)
            if received == file.bytes and not target.is_file():
                self._finish(target, file)
                self._note_complete(upload)
                os.utime(self.folder / upload)
        return FileProgress(path, file.bytes, received, target.is_file())

    def resolve(self, text: str) -> str:
        """The path that `upload:ID/PATH` names; another text as it is. Raises BadInput."""
        if not text.startswith(PREFIX):
            return text
        upload, _, path = text.removeprefix(PREFIX).partition("/")
        try:
            status = self.status(upload)
        except KeyError:
            raise BadInput(text[:200], expected="an upload", got="none with this id") from None
        if not status.complete:
            missing = next(file.path for file in status.files if not file.complete)
            raise BadInput(text[:200], expected="a complete upload", got=f"one without {missing}")
        if path:
            check_path(path)
        target = self.folder / upload / _FILES / path
        if not target.exists():
            raise BadInput(text[:200], expected="a file of the upload", got="none")
        return str(target)

    def _check_quota(self, project: str, size: int, *, complete: bool) -> None:
        limits = self._limits().get(project)
        if limits is None:
            return
        used = self.usage(project)
        if not complete and remaining_quota(limits.uploads, used.uploads) < 1:
            raise BadInput(
                "uploads",
                expected=f"at most {limits.uploads} in progress in project {project}",
                got=f"{used.uploads} and this one",
                hint="finish one of them first",
            )
        if remaining_quota(limits.upload_bytes, used.upload_bytes) < size:
            assert limits.upload_bytes is not None
            assert used.upload_bytes is not None
            raise BadInput(
                "upload_bytes",
                expected=(
                    f"at most {megabytes(limits.upload_bytes)} of uploads in project {project}"
                ),
                got=f"{megabytes(used.upload_bytes)} and {megabytes(size)} more",
                hint=(
                    "let an administrator delete old ones, with downpour service "
                    "gc, or set a larger limit"
                ),
            )

    def _note_complete(self, upload: str) -> None:
        path = self.folder / upload / _USE
        use = job_folder.load(path, UploadUse)
        if use is not None and not use.complete and self.status(upload).complete:
            job_folder.save(path, msgspec.structs.replace(use, complete=True))

    def _check_room(self, size: int) -> None:
        free = free_bytes(self.folder)
        if free is not None and free < size + self._reserve_bytes:
            raise GiveUp(f"uploads: expected {megabytes(size)} of room, got {megabytes(free)} free")

    def _manifest(self, upload: str) -> list[UploadedFile]:
        if not _ID.fullmatch(upload):
            raise KeyError(upload)
        try:
            content = (self.folder / upload / _MANIFEST).read_bytes()
            return msgspec.json.decode(content, type=list[UploadedFile])
        except (OSError, *UNDECODABLE):
            raise KeyError(upload) from None

    def _target(self, upload: str, path: str) -> Path:
        return self.folder / upload / _FILES / path

    def _finish(self, target: Path, file: UploadedFile) -> None:
        """Give a file its name if its digest is right, else remove it."""
        part = _part(target)
        if not file.bytes:
            _append(part, b"")
        if sha256_of(part) != file.sha256:
            part.unlink()
            raise BadInput(
                file.path, expected=f"SHA-256 {file.sha256}", got="another", hint="send it again"
            )
        part.replace(target)


@contextmanager
def _remove_if_refused(folder: Path) -> Iterator[None]:
    """Remove the folder of an upload that cannot begin: it would count as one in progress."""
    new = not folder.exists()
    try:
        yield
    except (DownpourError, OSError):
        if new:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def check_manifest(files: Sequence[UploadedFile], max_bytes: int) -> None:
    """Raise BadInput for paths, digests or sizes that are not allowed."""
    if not 0 < len(files) <= MAX_FILES:
        raise BadInput("files", expected=f"1 to {MAX_FILES}", got=len(files))
    total = 0
    folders: set[str] = set()
    for file in files:
        check_path(file.path)
        if not _DIGEST.fullmatch(file.sha256):
            raise BadInput("sha256", expected="64 hexadecimal digits", got=f"{file.sha256[:80]!r}")
        if file.bytes < 0:
            raise BadInput("bytes", expected="at least 0", got=file.bytes)
        total += file.bytes
        folders |= {str(parent) for parent in PurePosixPath(file.path).parents}
    names = [file.path for file in files]
    if len(set(names)) < len(names) or folders & set(names):
        raise BadInput(
            "files", expected="different paths", got="one twice, or a file that is a folder"
        )
    if total > max_bytes:
        raise BadInput("files", expected=f"at most {megabytes(max_bytes)}", got=megabytes(total))


def check_path(path: str) -> None:
    """Raise BadInput for a path that is not relative, or has parts that could lead elsewhere."""
    parts = path.split("/")
    plain = is_plain(path) and all(_WORD.fullmatch(part) for part in parts)
    plain = plain and not any(part.startswith(".") for part in parts)
    if plain and max(len(os.fsencode(part)) for part in parts) > _MAX_NAME_BYTES:
        raise BadInput(
            "path", expected=f"names of at most {_MAX_NAME_BYTES} bytes", got=f"{path[:200]!r}"
        )
    if not plain or len(parts) > 8 or path.endswith(".part"):
        raise BadInput("path", expected="names separated by /", got=f"{path[:200]!r}")


def _part(target: Path) -> Path:
    return target.with_name(f"{target.name}.part")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _append(path: Path, chunk: bytes) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(path, flags, 0o600)
        before = os.fstat(file).st_size
        try:
            if os.write(file, chunk) < len(chunk):
                os.ftruncate(file, before)
                raise GiveUp(f"{path.name}: the disk is full")
            os.fsync(file)
        finally:
            os.close(file)
    except OSError as error:
        raise GiveUp(f"{path.name}: {error.strerror}") from None
