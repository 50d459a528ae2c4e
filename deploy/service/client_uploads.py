"""Sends a client's files to a service on another machine, and continues after a break."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.service.artefacts import sha256_of
from deploy.service.uploads import CHUNK_BYTES
from shards.errors import BadInput

if TYPE_CHECKING:
    from deploy.service.client import ServiceClient

_INPUTS = ("data", "test_data", "weights")
_NAMED = re.compile(
    r'^\s*(?:net|train_net|test_net|mean_file|source)\s*:\s*"([^"]+)"', re.MULTILINE
)


def upload(
    client: "ServiceClient",
    settings: dict[str, Any],
    note: Callable[[str], object],
    project: str = "default",
) -> dict[str, Any]:
    """Send the files that settings name; returns these settings as they are on the service.

    They count for the limits of `project`.

    The solver is sent with the nets next to it that it names. What the service has already is not
    sent again. Raises BadInput for a file that cannot be read.
    """
    changed = {}
    if settings.get("solver") is not None:
        solver = Path(settings["solver"])
        files = _with_named(solver)
        changed["solver"] = f"{_send(client, files, note, project)}/{solver.name}"
    for name in _INPUTS:
        if settings.get(name) is None:
            continue
        source = Path(settings[name])
        if source.is_dir():
            paths = sorted(path for path in source.rglob("*") if path.is_file())
            files = {f"{source.name}/{path.relative_to(source).as_posix()}": path for path in paths}
        else:
            files = {source.name: source}
        changed[name] = f"{_send(client, files, note, project)}/{source.name}"
    return changed


def _with_named(solver: Path) -> dict[str, Path]:
    """A solver, and the files below its folder that it and its nets name."""
    files: dict[str, Path] = {}
    pending = [solver]
    while pending:
        path = pending.pop()
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"{path}: expected a file to send, got: {error}") from None
        files[path.relative_to(solver.parent).as_posix()] = path
        for name in _NAMED.findall(text):
            named = solver.parent / name
            inside = named.resolve().is_relative_to(solver.parent.resolve())
            if named.is_file() and inside and named not in files.values():
                if named.suffix == ".prototxt":
                    pending.append(named)
                else:
                    files[named.relative_to(solver.parent).as_posix()] = named
    return files


def _send(
    client: "ServiceClient",
    files: dict[str, Path],
    note: Callable[[str], object],
    project: str,
) -> str:
    """Send files by name, from where an earlier attempt ended; returns what names the upload."""
    if not files:
        raise BadInput("upload", expected="files", got="an empty folder")
    try:
        manifest = [
            {"path": name, "bytes": path.stat().st_size, "sha256": sha256_of(path)}
            for name, path in files.items()
        ]
    except OSError as error:
        raise BadInput(f"{error.filename}: {error.strerror}") from None
    begun = client.post("/uploads", {"files": manifest, "project": project})
    for file in begun["files"]:
        if file["complete"]:
            continue
        note(f"sending {file['path']}: {(file['bytes'] - file['received']) / 1e6:.1f} MB")
        for offset, chunk in _chunks(files[file["path"]], file["received"]):
            client.send_chunk(begun["id"], file["path"], offset, chunk)
    return str(begun["path"])


def _chunks(path: Path, offset: int) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        file.seek(offset)
        while chunk := file.read(CHUNK_BYTES):
            yield offset, chunk
            offset += len(chunk)
