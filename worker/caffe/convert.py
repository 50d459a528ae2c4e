"""Converts files of Caffe from one format into another, by the suffixes of their names.

weights        .caffemodel, .h5, .safetensors
solver states  .solverstate, .solverstate.h5
nets           .prototxt: into the present form of Caffe's language
"""

from collections.abc import Iterable
from pathlib import Path

import msgspec
from google.protobuf import text_format
from msgspec.structs import replace

from shards.errors import BadInput
from worker.caffe import weight_files
from worker.caffe.blobs import write_whole
from worker.caffe.legacy import upgrade
from worker.caffe.net import Description, Network
from worker.caffe.net_data import data_of, with_files
from worker.caffe.solver_state import is_solver_state, read_solver_state, write_solver_state
from worker.caffe.text import parse_net, read_text
from worker.caffe.weight_files import Floats, WeightFormat, format_of, read_blobs, write_weights
from worker.caffe.weights import Copied, into_arena

_NET = ".prototxt"
_KINDS = (
    f"weights ({weight_files.FORMATS}), solver states (.solverstate or .solverstate.h5) or nets"
    f" ({_NET})"
)


class Conversion(msgspec.Struct, frozen=True):
    """The arrays or layers written to `target`: the name of each and its shape or type.

    `numbers` counts the floats in all. `copied` is the comparison with the net, if one was given.
    """

    source: str
    target: str
    parts: tuple[tuple[str, str], ...]
    numbers: int = 0
    copied: Copied | None = None


def convert(
    source: Path, target: Path, net: Path | None = None, *, force: bool = False
) -> Conversion:
    """Convert `source` into the format of `target`'s suffix; raises BadInput.

    With a `net`, a prototxt, weights are checked against its layers, and a .caffemodel contains
    them; the net's own tensors that the file lacks are an error. A `target` that exists is replaced
    only with `force`.
    """
    kinds = _kind(source), _kind(target)
    if kinds[0] != kinds[1]:
        raise BadInput(target, expected=f"{kinds[0]} as in {source}", got=kinds[1])
    if net is not None and kinds[0] != "weights":
        raise BadInput(f"--net {net}", expected="weights to convert", got=kinds[0])
    if target.exists() and not force:
        raise BadInput(
            target,
            expected="the name of a new file",
            got="one that exists",
            hint="replace it with --force",
        )
    match kinds[0]:
        case "weights":
            return _weights(source, target, net)
        case "a solver state":
            return _state(source, target)
        case _:
            return _net(source, target)


def _kind(path: Path) -> str:
    if is_solver_state(path):
        return "a solver state"
    if path.suffix == _NET:
        return "a net"
    if path.suffix in set(WeightFormat):
        return "weights"
    raise BadInput(path, expected=_KINDS, got=f"{path.suffix!r}")


def _weights(source: Path, target: Path, net: Path | None) -> Conversion:
    copied = None
    if net is not None:
        network = Network(_fit_to_source(Description(read_text(net), file=str(net))))
        arena, blobs = network.table.empty(), read_blobs(source)
        copied = into_arena(blobs, network, arena, str(source))
        if copied.missing:
            raise BadInput(
                source, expected=f"weights of layer {copied.missing[0]}", got="a file without"
            )
        tensors = network.table.views(arena)
        write_weights(target, network, arena)
    elif format_of(source) is format_of(target) is WeightFormat.CAFFEMODEL:
        tensors = read_blobs(source)
        upgraded = upgrade(weight_files.read_caffemodel(source), str(source))
        write_whole(target, upgraded.SerializeToString())
    else:
        tensors = read_blobs(source)
        weight_files.write_blobs(target, tensors)
    parts = tuple((name, _shape(tensor)) for name, tensor in tensors.items())
    return Conversion(str(source), str(target), parts, _count(tensors.values()), copied)


def _fit_to_source(net: Description) -> Description:
    """The net for rows of the source that it names, which may state their shape in its place."""
    data = data_of(net)
    if data.source is None:
        return net
    # Loaded on first use: PyArrow's readers are needed for such nets only.
    from worker.caffe.net_sources import open_net_data
    from worker.data.sources import row_shapes

    source = open_net_data(data)
    return replace(with_files(net), data_shape=source.shape, row_shapes=row_shapes(source))


def _state(source: Path, target: Path) -> Conversion:
    state = read_solver_state(source)
    write_solver_state(target, state)
    parts = [("iter", str(state.iteration)), ("current_step", str(state.current_step))]
    parts += [(f"history/{at}", _shape(array)) for at, array in enumerate(state.history)]
    return Conversion(str(source), str(target), tuple(parts), _count(state.history))


def _net(source: Path, target: Path) -> Conversion:
    net = upgrade(parse_net(read_text(source), str(source)), str(source))
    write_whole(target, text_format.MessageToString(net).encode())
    parts = tuple((layer.name, layer.type) for layer in net.layer)
    return Conversion(str(source), str(target), parts)


def _shape(array: Floats) -> str:
    return " x ".join(str(size) for size in array.shape) or "one number"


def _count(arrays: Iterable[Floats]) -> int:
    return sum(array.size for array in arrays)
