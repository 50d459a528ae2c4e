"""Weights to and from .caffemodel files: a net in binary protobuf with each layer's blobs in it.

Blobs are found by layer name. A layer of the file that the net lacks is ignored; a layer of the net
that the file lacks keeps its initial weights, as fine-tuning needs. A blob of a different shape is
an error that names the layer. Files of the older `layers` form, and blobs with the older
four-dimensional shape, can be read as well.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from shards.errors import BadInput
from shards.tables import DenseTable
from worker.caffe.blobs import array_of, read_limited
from worker.caffe.caffe_pb2 import BlobProto, LayerParameter, NetParameter, V1LayerParameter
from worker.caffe.net import Network

Floats = NDArray[np.float32]
Blobs = Mapping[str, Sequence[Floats]]


def read_caffemodel(path: Path) -> dict[str, list[Floats]]:
    """The blobs of each layer, by layer name, in the shapes that the file states."""
    data = read_limited(path)
    net = NetParameter()
    try:
        net.ParseFromString(data)
    except DecodeError:
        raise BadInput(
            f"{path}: expected a .caffemodel, got {len(data)} bytes of something else"
        ) from None
    layers: list[LayerParameter | V1LayerParameter] = [*net.layer, *net.layers]
    if not layers:
        raise BadInput(f"{path}: expected a .caffemodel, got a file with no layers")
    return {
        layer.name: [array_of(blob, f"{path}: layer {layer.name}") for blob in layer.blobs]
        for layer in layers
        if layer.blobs
    }


def into_arena(blobs: Blobs, table: DenseTable, arena: Floats, source: str) -> tuple[str, ...]:
    """Copy the blobs of the table's layers into `arena`; returns the tensors that were missing.

    `source` names the blobs' origin in errors.
    """
    views = table.views(arena)
    counts: dict[str, int] = {}
    for name in views:
        # The highest index: the tensors before it may be shared with another layer.
        layer, _, index = name.rpartition("/")
        counts[layer] = int(index) + 1
    for layer, count in counts.items():
        found = blobs.get(layer)
        if found is not None and len(found) != count:
            raise BadInput(f"{source}: layer {layer}: expected {count} blobs, got {len(found)}")
    missing = []
    for name, view in views.items():
        layer, _, index = name.rpartition("/")
        if layer not in blobs:
            missing.append(name)
            continue
        blob = blobs[layer][int(index)]
        if not _same_shape(blob.shape, view.shape):
            raise BadInput(
                f"{source}: layer {layer}: blob {index}: expected shape {view.shape},"
                f" got {blob.shape}"
            )
        view[...] = blob.reshape(view.shape)
    return tuple(missing)


def from_arena(table: DenseTable, arena: Floats) -> dict[str, list[Floats]]:
    """The arena's tensors as blobs by layer; views, not copies."""
    blobs: dict[str, list[Floats]] = {}
    for name, view in table.views(arena).items():
        blobs.setdefault(name.rpartition("/")[0], []).append(view)
    return blobs


def moved(arena: Floats, table: DenseTable, into: Network, seed: int = 0) -> Floats:
    """The weights of one table, laid out for another net, such as a test net with fewer layers.

    Tensors that `table` lacks are drawn by the net's fillers for `seed`.
    """
    if table == into.table:
        return arena
    laid = into.initial(seed)
    into_arena(from_arena(table, arena), into.table, laid, f"table {table.name}")
    return laid


def write_caffemodel(path: Path, net: Network, arena: Floats) -> None:
    """Write the net's layers with their blobs, whole or not at all."""
    tensors = list(net.table.views(arena).values())
    message = NetParameter(name=net.name)
    for node in net.nodes:
        layer = message.layer.add()
        layer.CopyFrom(node.layer.spec)
        layer.ClearField("blobs")
        for index in node.tensors:  # a shared tensor is written for each of its layers
            tensor = tensors[index]
            blob = layer.blobs.add()
            blob.shape.dim.extend(tensor.shape)
            blob.MergeFromString(_packed(tensor))
    write_whole(path, message.SerializeToString())


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file atomically; after an error the old file is unchanged. Raises BadInput."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(content)
        part.replace(path)
    except BaseException as error:
        with suppress(OSError):
            part.unlink()  # frees the space: the disk may be full
        if not isinstance(error, OSError):
            raise
        raise BadInput(f"{path}: cannot be written: {error.strerror}") from None


def _packed(tensor: Floats) -> bytes:
    """The field `data` of a blob as bytes; many times faster than a list of Python floats."""
    content = np.ascontiguousarray(tensor, "<f4").tobytes()
    number, length = BlobProto.DESCRIPTOR.fields_by_name["data"].number, len(content)
    header = bytearray([number << 3 | 2])  # a field of bytes: tag, length, content
    while length > 127:
        header.append(length & 127 | 128)
        length >>= 7
    return bytes([*header, length]) + content


def _same_shape(stored: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether the shapes are equal, apart from the leading ones of the older form."""
    return stored == wanted or (
        len(stored) == 4 and len(wanted) < 4 and stored == (1,) * (4 - len(wanted)) + wanted
    )
