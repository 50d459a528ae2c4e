"""Files of weights: .caffemodel (binary protobuf), .h5 (Caffe's HDF5) and .safetensors.

Whatever the format, a file is a mapping of "layer/0", "layer/1", ... to arrays of float32. A
.caffemodel may be of any of Caffe's three versions. In HDF5 and safetensors a tensor that layers
share by name is stored once, for the first of them; in a .caffemodel it is stored for each.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ps.path_checks import refuse_pipe
from ps.snapshots.checked_json import CHECK
from ps.snapshots.shard_file import tensors_check
from shards.errors import UNDECODABLE, BadInput, quote
from worker.caffe import hdf5
from worker.caffe.blobs import add_blob, array_of, read_limited, write_whole
from worker.caffe.caffe_pb2 import LayerParameter, NetParameter
from worker.caffe.legacy import layers_of_any_version
from worker.caffe.net import Network

Floats = NDArray[np.float32]
Blobs = Mapping[str, Floats]
Entries = Iterable[tuple[LayerParameter, Sequence[Floats]]]

_DATA = "data/"  # the group of the weights in Caffe's HDF5


class WeightFormat(StrEnum):
    """The formats, by the suffixes of their files."""

    CAFFEMODEL = ".caffemodel"
    HDF5 = ".h5"
    SAFETENSORS = ".safetensors"


FORMATS = ".caffemodel, .h5 or .safetensors"


def format_of(path: Path) -> WeightFormat:
    """The format of a file; raises BadInput for another suffix."""
    try:
        return WeightFormat(path.suffix)
    except ValueError:
        raise BadInput(path, expected=FORMATS, got=f"{path.suffix!r}") from None


def read_blobs(path: Path) -> dict[str, Floats]:
    """The tensors in a file of any format, in the shapes that it states; raises BadInput."""
    reader = _READERS[format_of(path)]
    refuse_pipe(path)
    return reader(path)


def read_caffemodel(path: Path) -> NetParameter:
    """The net in a .caffemodel, of whatever version; raises BadInput."""
    data, net = read_limited(path), NetParameter()
    try:
        net.ParseFromString(data)
    except DecodeError:
        raise BadInput(
            path, expected="a .caffemodel", got=f"{len(data)} bytes of something else"
        ) from None
    if not net.layer and not net.layers:
        raise BadInput(path, expected="a .caffemodel", got="a file with no layers")
    return net


def write_weights(path: str | Path, net: Network, arena: Floats) -> None:
    """Write the tensors of a net in the format of the suffix, whole or not at all.

    `arena` is float32 of the net's table. Raises BadInput.
    """
    path = Path(path)
    kind = format_of(path)
    tensors = net.table.views(arena)
    if kind is not WeightFormat.CAFFEMODEL:
        write_blobs(path, tensors)
        return
    views = list(tensors.values())
    entries = ((node.layer.spec, [views[at] for at in node.tensors]) for node in net.nodes)
    _write_caffemodel(path, net.name, entries)


def write_blobs(path: Path, blobs: Blobs) -> None:
    """Write tensors in the format of the suffix, whole or not at all; raises BadInput.

    The layers of a .caffemodel then have a name and blobs only, which suffices to load it.
    """
    _WRITERS[format_of(path)](path, blobs)


def _blobs_of_caffemodel(path: Path) -> dict[str, Floats]:
    return {
        f"{name}/{index}": array_of(blob, f"{path}: layer {name}: blob {index}")
        for name, blobs in layers_of_any_version(read_caffemodel(path))
        for index, blob in enumerate(blobs)
    }


def _write_caffemodel(path: Path, name: str, entries: Entries) -> None:
    message = NetParameter(name=name)
    for spec, tensors in entries:
        layer = message.layer.add()
        layer.CopyFrom(spec)
        layer.ClearField("blobs")
        for tensor in tensors:
            add_blob(layer.blobs, tensor)
    write_whole(path, message.SerializeToString())


def _write_layers(path: Path, blobs: Blobs) -> None:
    layers: dict[str, list[Floats]] = {}
    for name, tensor in blobs.items():
        layers.setdefault(name.rpartition("/")[0], []).append(tensor)
    entries = ((LayerParameter(name=name), tensors) for name, tensors in layers.items())
    _write_caffemodel(path, "", entries)


def _blobs_of_hdf5(path: Path) -> dict[str, Floats]:
    arrays = hdf5.read_arrays(path, (_DATA[:-1],))
    if not arrays:
        raise BadInput(path, expected="a group `data` with a group for each layer", got="none")
    return {
        name.removeprefix(_DATA): np.asarray(array, np.float32) for name, array in arrays.items()
    }


def _write_hdf5(path: Path, blobs: Blobs) -> None:
    hdf5.write_arrays(path, {f"{_DATA}{name}": tensor for name, tensor in blobs.items()}, {})


def _blobs_of_safetensors(path: Path) -> dict[str, Floats]:
    try:
        with safe_open(path, "numpy") as file:
            check = (file.metadata() or {}).get(CHECK)  # absent in files of other programs
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, *UNDECODABLE) as error:
        text = quote(" ".join(str(error).split()), 200)
        raise BadInput(path, expected=f"a .safetensors file: {text}") from None
    if check is not None and check != tensors_check(tensors, ""):
        raise BadInput(f"{path}: it does not match its checksum: it is damaged")
    return tensors


def _write_safetensors(path: Path, blobs: Blobs) -> None:
    """With a checksum as metadata."""
    tensors = {name: np.ascontiguousarray(blob) for name, blob in blobs.items()}
    # The library would write a file that only its owner can read.
    write_whole(path, save(tensors, {CHECK: tensors_check(tensors, "")}))


_READERS: dict[WeightFormat, Callable[[Path], dict[str, Floats]]] = {
    WeightFormat.CAFFEMODEL: _blobs_of_caffemodel,
    WeightFormat.HDF5: _blobs_of_hdf5,
    WeightFormat.SAFETENSORS: _blobs_of_safetensors,
}
_WRITERS: dict[WeightFormat, Callable[[Path, Blobs], None]] = {
    WeightFormat.CAFFEMODEL: _write_layers,
    WeightFormat.HDF5: _write_hdf5,
    WeightFormat.SAFETENSORS: _write_safetensors,
}
