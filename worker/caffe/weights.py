"""Weights by layer name: from a file into a net's arena, and from one net to another.

A layer of the file that the net lacks is not used; a layer of the net that the file lacks keeps its
initial weights, as fine-tuning needs. A blob of a different shape is an error that names the layer.
"""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from shards.errors import BadInput
from shards.plurals import format_count
from shards.tables import DenseTable
from worker.caffe.model import CaffeModel
from worker.caffe.net import Network
from worker.caffe.weight_files import Blobs, read_blobs

Floats = NDArray[np.float32]

_MAX_NAMED = 12


class Copied(msgspec.Struct, frozen=True):
    """Which layers were copied into a net, by name; `source` is the file.

    `missing` are layers of the net that keep their initial weights. `unused` are layers of the file
    that the net lacks.
    """

    source: str
    copied: tuple[str, ...]
    missing: tuple[str, ...]
    unused: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.source}: copied {_list_names(self.copied)}; left at their fillers:"
            f" {_list_names(self.missing)}; not used: {_list_names(self.unused)}"
        )


def into_arena(blobs: Blobs, net: Network, arena: Floats, source: str) -> Copied:
    """Copy the blobs of the net's layers into `arena`; `source` names their origin in errors."""
    views = net.table.views(arena)
    blobs_by_layer: dict[str, dict[str, Floats]] = {}
    for name, blob in blobs.items():
        layer, _, index = name.rpartition("/")
        blobs_by_layer.setdefault(layer, {})[index] = blob
    copied: list[str] = []
    filled: set[str] = set()
    for layer, tensors in net.layer_tensors.items():
        # A shared tensor may be stored for the first of its layers only.
        required = {str(at) for at, name in enumerate(tensors) if name == f"{layer}/{at}"}
        every = {str(at): name for at, name in enumerate(tensors)}
        stored = blobs_by_layer.get(layer)
        if stored is None:
            continue
        if not required <= stored.keys() <= every.keys():
            raise BadInput(
                f"{source}: layer {layer}",
                expected=format_count(len(tensors), "blob"),
                got=len(stored),
            )
        for at, blob in stored.items():
            where = f"{source}: layer {layer}: blob {at}"
            _copy(blob, views[every[at]], where, filled=every[at] not in net.buffers)
            filled.add(every[at])
        copied.append(layer)
    missing = [layer for layer, names in net.layer_tensors.items() if not filled.issuperset(names)]
    unused = [layer for layer in blobs_by_layer if layer not in net.layer_tensors]
    return Copied(source, tuple(copied), tuple(missing), tuple(unused))


def lay_out(arena: Floats, table: DenseTable, into: Network, seed: int = 0) -> Floats:
    """The weights of one table, laid out for another net, such as a test net with fewer layers.

    Tensors that `table` lacks are drawn by the net's fillers for `seed`.
    """
    if table == into.table:
        return arena
    laid = into.initial(seed)
    into_arena(table.views(arena), into, laid, f"table {table.name}")
    return laid


def read_weights(
    path: str | Path, net: Network, start: Floats, needed: Collection[str] | None = None
) -> tuple[Floats, Copied]:
    """`start` with the tensors of a file in their places, and which layers those are.

    Raises BadInput unless the file has the tensors `needed`, or, if this is None, at least one
    layer of the net.
    """
    arena, blobs = start.copy(), read_blobs(Path(path))
    copied = into_arena(blobs, net, arena, str(path))
    for name, blob in blobs.items():
        if name.rpartition("/")[0] in copied.copied and not np.isfinite(blob).all():
            raise BadInput(f"{path}: {name}", expected="finite numbers", got="a NaN or infinity")
    lacking: Iterator[str] = iter(()) if copied.copied else iter(copied.missing)
    if needed is not None:
        lacking = (
            layer
            for layer in copied.missing
            if any(name in needed for name in net.layer_tensors[layer])
        )
    layer = next(lacking, None)
    if layer is not None:
        raise BadInput(path, expected=f"weights of layer {layer}", got="a file without")
    return arena, copied


def starting_weights(
    model: CaffeModel, files: Sequence[str | Path], seed: int
) -> tuple[Floats | None, list[Copied]]:
    """Weights to start from: the fillers' values, overwritten by each file in turn.

    None if there are no files. A report says for each file what was copied from it.
    """
    if not files:
        return None, []
    arena: Floats = model.initial(seed)
    reports = []
    for file in files:
        arena, copied = read_weights(file, model.net, arena)
        reports.append(copied)
    return arena, reports


def _copy(blob: Floats, view: Floats, where: str, *, filled: bool) -> None:
    """Copy a blob to its place; `filled` is whether a filler could replace it."""
    if not _same_shape(blob.shape, view.shape):
        remedy = "; to start the layer from its filler, give it another name" if filled else ""
        raise BadInput(where, expected=f"shape {view.shape}", got=f"{blob.shape}{remedy}")
    view[...] = blob.reshape(view.shape)


def _same_shape(stored: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Return whether shapes are equal, apart from axes of size 1, which do not order numbers.

    Older files have four axes: (1, 1, 1, N) for a bias, (1, C, 1, 1) for statistics by channel.
    """
    return _without_ones(stored) == _without_ones(expected)


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _list_names(layers: tuple[str, ...]) -> str:
    if not layers:
        return "none"
    more = len(layers) - _MAX_NAMED
    return ", ".join(layers[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
