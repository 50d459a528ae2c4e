"""Checks that an archive with a Python runs where it is unpacked: on this kind of machine, alone.

It reads any `.tar.gz` of an environment, also one that another tool packed. A link in it that leads
out of it works only where it was built, and so does an interpreter for another machine.
"""

import posixpath
import tarfile
from pathlib import Path
from platform import libc_ver, machine
from typing import NamedTuple

import msgspec

from deploy.clusters.archive_libraries import machine_of
from shards.errors import BadInput

MANIFEST = "downpour-archive.json"
_REMEDY = "build it with `downpour pack` on a machine like those that it is for"


class ArchiveContents(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of an archive, as they are written in it.

    `glibc` is the oldest that it runs with; `packages` are names and versions.
    """

    version: str
    build: str
    python: str
    machine: str
    glibc: str
    extras: list[str]
    packages: dict[str, str]


class ArchiveFacts(NamedTuple):
    """The machine that an archive's interpreter is built for, and its manifest, if it has one."""

    machine: str
    manifest: ArchiveContents | None


def check_archive(path: Path) -> ArchiveFacts:
    """Raise BadInput unless the Python in an archive can run on this machine, wherever unpacked."""
    subject = f"archive {path}"
    programs: dict[str, bytes] = {}
    links: dict[str, str] = {}
    manifest = None
    try:
        with tarfile.open(path, "r:*") as archive:
            for member in archive:
                name = posixpath.normpath(member.name)
                if member.issym() or member.islnk():
                    links[name] = _check_link(subject, name, member)
                elif _leaves(name):
                    raise BadInput(subject, expected="names inside it", got=name, hint=_REMEDY)
                elif name.startswith("bin/python") and member.isfile():
                    content = archive.extractfile(member)
                    assert content is not None
                    programs[name] = content.read(20)
                elif name == MANIFEST and member.isfile():
                    content = archive.extractfile(member)
                    assert content is not None
                    manifest = _read_manifest(subject, content.read(1 << 20))
    except (tarfile.TarError, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise BadInput(f"{subject}: {error.strerror}") from None
        raise BadInput(subject, expected="a whole .tar.gz", got=str(error) or "less") from None
    name = "bin/python"
    while name in links:
        name = links.pop(name)
    built_for = machine_of(programs.get(name, b""))
    if built_for is None:
        raise BadInput(subject, expected="an interpreter at bin/python", got="none", hint=_REMEDY)
    if built_for != machine():
        raise BadInput(
            subject,
            expected=f"an interpreter for {machine()}, as this machine",
            got=f"one for {built_for}",
            hint=_REMEDY,
        )
    if manifest is not None:
        _check_glibc(subject, manifest.glibc, libc_ver()[1])
    return ArchiveFacts(built_for, manifest)


def check_links(root: Path) -> None:
    """Raise BadInput for a link below `root` that leads out of it, or to nothing."""
    for path in sorted(root.rglob("*")):
        if not path.is_symlink():
            continue
        target = path.readlink()
        inside = not target.is_absolute() and path.resolve().is_relative_to(root.resolve())
        if not inside or not path.exists():
            raise BadInput(
                f"link {path.relative_to(root)}",
                expected="a target in the archive",
                got=target,
                hint="install that package again with files, not links, or give --wheelhouse",
            )


def _check_link(subject: str, name: str, member: tarfile.TarInfo) -> str:
    """The member that a link leads to; raises BadInput if it is not in the archive."""
    base = posixpath.dirname(name) if member.issym() else ""
    target = posixpath.normpath(posixpath.join(base, member.linkname))
    if _leaves(name) or _leaves(target):
        raise BadInput(
            f"{subject}: {name}",
            expected="a link to a file in the archive",
            got=f"one to {member.linkname}",
            hint=_REMEDY,
        )
    return target


def _leaves(name: str) -> bool:
    return name.startswith(("/", "../")) or name == ".."


def _read_manifest(subject: str, content: bytes) -> ArchiveContents:
    try:
        return msgspec.json.decode(content, type=ArchiveContents)
    except (msgspec.MsgspecError, ValueError) as error:
        raise BadInput(f"{subject}: {MANIFEST}: {error}", hint=_REMEDY) from None


def _check_glibc(subject: str, needed: str, present: str) -> None:
    if present and _numbers(present) < _numbers(needed):
        raise BadInput(
            subject,
            expected=f"glibc {needed} or newer on this machine",
            got=present,
            hint=_REMEDY,
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
