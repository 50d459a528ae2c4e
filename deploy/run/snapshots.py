"""The work of `downpour snapshots`: list, verify, restore and compare snapshots.

Each function takes a `SnapshotRef` (snapshot_ref.py) and returns values; the end of this file
formats them as text. Nothing here writes to a catalog.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from deploy.run.settings import TrainSettings
from deploy.run.snapshot_difference import Difference, LedgerChange, TensorChange
from deploy.run.snapshot_ref import SnapshotRef, read
from ps.snapshots.catalog import CatalogEntry, LoadedSnapshot, SnapshotStatus
from ps.snapshots.manifest import Manifest, damage
from shards.errors import BadInput
from shards.repartition import repartition, whole_weights
from shards.shard_state import WEIGHTS, ShardState, array_name, of_table
from shards.tables import DenseTable, TensorSpec, cut_evenly
from worker.caffe.model import CaffeModel
from worker.caffe.solver import read_solver
from worker.caffe.weight_files import WeightFormat, format_of, write_blobs, write_weights
from worker.caffe.weights import lay_out


class Row(msgspec.Struct, frozen=True):
    """One snapshot in a list; its figures are None if the manifest cannot be read."""

    number: str
    state: SnapshotStatus
    steps: int | None = None
    versions: tuple[int, ...] | None = None
    taken_at: float | None = None
    bytes: int | None = None
    aligned: bool | None = None
    complaint: str = ""


def list_snapshots(origin: SnapshotRef) -> list[Row]:
    """The snapshots in a place, the newest last, with the figures of their manifests.

    Raises BadInput for a name that none of them has.
    """
    catalog = origin.open()
    if origin.name is not None:
        catalog.check_name(origin.name)
    return [_row(entry) for entry in catalog.entries() if origin.name in (None, entry.name)]


def verify_snapshots(origin: SnapshotRef) -> Iterator[tuple[str, list[str]]]:
    """Read every byte of the referenced snapshots, one after another.

    Yields the number of each, with one line for each file that is bad.
    """
    catalog = origin.open()
    rows = list_snapshots(origin)
    if not rows:
        raise BadInput(f"no snapshot in {origin.place}")
    for row in rows:
        if row.state is SnapshotStatus.INCOMPLETE:
            yield row.number, [row.complaint]
        else:
            yield row.number, list(damage(catalog.store.below(row.number)))


def restore_weights(
    origin: SnapshotRef, target: Path, solver: Path | None = None
) -> LoadedSnapshot:
    """Write the weights of a snapshot to a .safetensors, .h5 or .caffemodel file.

    A .caffemodel needs the network: that of `solver`, else that of the run. Returns the snapshot.
    """
    kind = format_of(target)
    snapshot = read(origin)
    table = _only_table(target, snapshot.manifest)
    weights = whole_weights(snapshot.states, snapshot.manifest.layout, snapshot.manifest.map)
    if kind is not WeightFormat.CAFFEMODEL:
        write_blobs(target, table.views(weights))
        return snapshot
    if solver is None and origin.run is not None:
        solver = TrainSettings.load(origin.run / "settings.json").solver
    if solver is None:
        raise BadInput(target, expected="--solver with the network of the .caffemodel", got="none")
    net = CaffeModel(read_solver(solver).train).net
    snapshot_shapes, net_shapes = _shapes(table), _shapes(net.table)
    for name in sorted(snapshot_shapes.keys() | net_shapes.keys()):
        if snapshot_shapes.get(name) != net_shapes.get(name):
            raise BadInput(
                solver,
                expected=(
                    f"the network of {snapshot.place} with {name}"
                    f" {snapshot_shapes.get(name, 'missing')}"
                ),
                got=net_shapes.get(name, "none"),
            )
    write_weights(target, net, lay_out(weights, table, net))
    return snapshot


def compare_snapshots(first: SnapshotRef, second: SnapshotRef) -> Difference:
    """Compare two snapshots by tensor and by worker; raises BadInput if their tensors differ."""
    snapshot_before, snapshot_after = read(first), read(second)
    for snapshot in (snapshot_before, snapshot_after):
        if rows := snapshot.manifest.layout.sparse:
            got = f"rows of table {rows[0].name}"
            raise BadInput(f"diff: {snapshot.place}", expected="dense tables alone", got=got)
    if _tensors(snapshot_before.manifest) != _tensors(snapshot_after.manifest):
        raise BadInput(
            f"diff: {snapshot_before.place} and {snapshot_after.place}",
            expected="the same tensors in both",
            got="different ones",
        )
    states = (
        _whole(snapshot_before.manifest, snapshot_before.states),
        _whole(snapshot_after.manifest, snapshot_after.states),
    )
    changes = [
        change
        for table in snapshot_before.manifest.layout.tables
        for name, before in of_table(states[0].arrays, table.name).items()
        if (after := states[1].arrays.get(array_name(table.name, name))) is not None
        for change in _changes(table, "" if name == WEIGHTS else f"{name} of ", before, after)
    ]
    return Difference(
        snapshot_before.place,
        snapshot_after.place,
        (snapshot_before.manifest.steps, snapshot_after.manifest.steps),
        tuple(changes),
        tuple(_ledger_changes(*states)),
    )


def _shapes(table: DenseTable) -> dict[str, tuple[int, ...]]:
    return {tensor.name: tensor.shape for tensor in table.tensors}


def _row(entry: CatalogEntry) -> Row:
    manifest = entry.manifest
    if manifest is None:
        return Row(entry.name, entry.state, complaint=entry.complaint)
    return Row(
        entry.name,
        entry.state,
        manifest.steps,
        tuple(part.version for part in manifest.parts),
        manifest.taken_at,
        manifest.bytes,
        manifest.aligned,
    )


def _whole(manifest: Manifest, states: Sequence[ShardState]) -> ShardState:
    """The state of a job joined into one shard, so that its weights are the whole arena."""
    layout = manifest.layout
    return repartition(states, layout, manifest.map, cut_evenly(layout, 1))[0]


def _only_table(target: Path, manifest: Manifest) -> DenseTable:
    """The table of a snapshot that has one; raises BadInput, because files hold one network."""
    if len(manifest.layout.tables) != 1 or manifest.layout.sparse:
        names = ", ".join(manifest.layout.all_names)
        raise BadInput(target, expected="a snapshot of one dense table", got=names)
    return manifest.layout.tables[0]


def _tensors(manifest: Manifest) -> list[tuple[TensorSpec, ...]]:
    return [table.tensors for table in manifest.layout.tables]


def _changes(
    table: DenseTable, prefix: str, before: NDArray[np.float32], after: NDArray[np.float32]
) -> Iterator[TensorChange]:
    for (name, old), new in zip(
        table.views(before).items(), table.views(after).values(), strict=True
    ):
        moved_by = new.astype(np.float64) - old
        yield TensorChange(
            prefix + name,
            float(np.linalg.norm(moved_by)),
            float(np.max(np.abs(moved_by))),
            float(np.linalg.norm(old.astype(np.float64))),
        )


def _ledger_changes(before: ShardState, after: ShardState) -> Iterator[LedgerChange]:
    old, new = before.saved.ledger.entries, after.saved.ledger.entries
    for worker in sorted(old.keys() | new.keys()):
        if worker not in old or worker not in new:
            known = "known" if worker in old else "unknown", "known" if worker in new else "unknown"
            yield LedgerChange(worker, "worker", *known)
            continue
        for field in ("incarnation", "seq", "clock", "step", "standing", "takeovers"):
            pair = getattr(old[worker], field), getattr(new[worker], field)
            if pair[0] != pair[1]:
                yield LedgerChange(worker, field, *map(str, pair))


# --- as text --------------------------------------------------------------------------------------


def list_text(rows: Sequence[Row], location: str) -> str:
    """The list as a table, one line for each snapshot."""
    if not rows:
        return f"no snapshots in {location}"
    cells = [("number", "state", "steps", "versions", "taken", "MB", "aligned")]
    cells += [
        (row.number, row.state, *_figures(row)) if row.steps is not None
        else (row.number, row.state, "", "", "", "", "")
        for row in rows
    ]  # fmt: skip
    lines = _columns(cells)
    return "\n".join([*lines, *(row.complaint for row in rows if row.complaint)])


def _figures(row: Row) -> tuple[str, str, str, str, str]:
    assert row.versions is not None
    assert row.taken_at is not None
    assert row.bytes is not None
    when = datetime.fromtimestamp(row.taken_at, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    versions = " ".join(map(str, row.versions))
    return str(row.steps), versions, when, f"{row.bytes / 1e6:.1f}", "yes" if row.aligned else "no"


def diff_text(difference: Difference) -> str:
    """One line for each tensor, then one for each other change."""
    cells = [("tensor", "L2", "largest", "of norm")]
    cells += [
        (t.name, f"{t.l2:.4g}", f"{t.largest:.4g}", f"{t.norm:.4g}") for t in difference.tensors
    ]
    lines = [f"{difference.first} -> {difference.second}", "", *_columns(cells), ""]
    lines.append(f"steps {difference.steps[0]} -> {difference.steps[1]}")
    lines += [f"{c.worker}: {c.field} {c.before} -> {c.after}" for c in difference.ledger]
    return "\n".join(lines if difference.ledger else [*lines, "the ledgers are equal"])


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
