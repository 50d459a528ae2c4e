"""Snapshots on disk: a folder that either holds a whole job at one moment or does not exist.

Each shard's weights and slots go into one safetensors file, its ledger into that file's metadata;
`manifest.json` names the files, their checksums and what they belong to. Everything is written and
flushed in a temporary folder beside the final one, whose rename is the moment the snapshot exists.
So a crash, a full disk or a kill leaves the last good snapshot as it was. What is read back is
checked against the manifest, and an error names the file.
"""

import os
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ps.console import ShardState
from shards.errors import BadInput, GiveUp
from shards.state import Saved
from shards.tables import DenseTable, ShardMap

FORMAT = 1
MANIFEST = "manifest.json"
_WEIGHTS, _SLOT, _SAVED = "weights", "slot.", "saved"


class Part(msgspec.Struct, frozen=True):
    """One shard's file."""

    file: str
    bytes: int
    crc32: int
    version: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a snapshot holds. `workers` is how many the job was run with."""

    format: int = FORMAT
    table: DenseTable
    map: ShardMap
    rule: str
    workers: int
    parts: tuple[Part, ...]


def save_snapshot(
    folder: Path,
    states: Sequence[ShardState],
    *,
    table: DenseTable,
    shard_map: ShardMap,
    rule: str,
    workers: int,
) -> None:
    """Write the states of all shards as `folder`; raises GiveUp naming it if the disk fails."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    former = temporary.with_name(temporary.name + ".former")
    try:
        _put_back(former, folder)  # a process of this number may have been killed here before
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        parts = tuple(_write(temporary, shard, state) for shard, state in enumerate(states))
        manifest = Manifest(table=table, map=shard_map, rule=rule, workers=workers, parts=parts)
        _flushed(temporary / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
        _flush_folder(temporary)
        if folder.exists():  # one of the same name stays whole until it is replaced
            folder.rename(former)
        temporary.rename(folder)
        _flush_folder(folder.parent)
    except OSError as error:
        raise GiveUp(f"snapshot {folder}: {error.strerror}; earlier snapshots are intact") from None
    finally:
        _put_back(former, folder)
        shutil.rmtree(temporary, ignore_errors=True)


def _put_back(former: Path, folder: Path) -> None:
    """Undo a replacement that did not come to its end; tidy up after one that did."""
    if former.exists() and not folder.exists():
        former.rename(folder)
    shutil.rmtree(former, ignore_errors=True)


def load_snapshot(folder: Path) -> tuple[Manifest, list[ShardState]]:
    """Read a snapshot back; raises BadInput naming the file that is missing or damaged."""
    manifest = load_manifest(folder)
    return manifest, [_read(folder, part) for part in manifest.parts]


def load_manifest(folder: Path) -> Manifest:
    """What the snapshot in `folder` says it is; raises BadInput."""
    path = folder / MANIFEST
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except OSError as error:
        raise BadInput(f"snapshot {path}: {error.strerror}") from None
    except (msgspec.DecodeError, BadInput) as error:
        raise BadInput(f"snapshot {path}: {error}") from None
    if manifest.format != FORMAT:
        raise BadInput(f"snapshot {path}: expected format {FORMAT}, got {manifest.format}")
    return manifest


def latest_snapshot(folder: Path) -> Path:
    """The newest snapshot below `folder`, by the number it is named by; raises BadInput."""
    found = [path.parent for path in folder.glob(f"*/{MANIFEST}") if path.parent.name.isdigit()]
    if not found:
        raise BadInput(f"no snapshot in {folder}")
    return max(found, key=lambda path: int(path.name))


def _write(folder: Path, shard: int, state: ShardState) -> Part:
    arrays = {_WEIGHTS: state.weights} | {
        _SLOT + name: values for name, values in state.slots.items()
    }
    # One metadata value: the library writes several in random order, and the file would differ.
    metadata = {_SAVED: msgspec.json.encode(state.saved).decode()}
    content = save({name: np.ascontiguousarray(a) for name, a in arrays.items()}, metadata)
    name = f"shard-{shard}.safetensors"
    _flushed(folder / name, content)
    return Part(name, len(content), zlib.crc32(content), state.saved.version)


def _read(folder: Path, part: Part) -> ShardState:
    path = folder / part.file
    if path.name != part.file:
        raise BadInput(f"snapshot {folder}: expected a file name, got {part.file!r}")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadInput(f"snapshot {path}: {error.strerror}") from None
    if (len(content), zlib.crc32(content)) != (part.bytes, part.crc32):
        raise BadInput(
            f"snapshot {path}: expected {part.bytes} bytes with checksum {part.crc32:08x},"
            f" got {len(content)} with {zlib.crc32(content):08x}"
        )
    try:
        with safe_open(path, framework="numpy") as file:
            saved = msgspec.json.decode(file.metadata()[_SAVED], type=Saved)
            slots = {
                key.removeprefix(_SLOT): file.get_tensor(key)
                for key in file.keys()  # noqa: SIM118  # not a mapping
                if key.startswith(_SLOT)
            }
            return ShardState(saved, file.get_tensor(_WEIGHTS), slots)
    except (SafetensorError, KeyError, TypeError, msgspec.DecodeError) as error:
        raise BadInput(f"snapshot {path}: {error}") from None


def _flushed(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
