"""The data that a prototxt describes, known before any data is opened.

A row is a list of values. The prototxt or the data may state its shape. If neither does, a net with
layers that need an image reads a row as a square image, and every other net reads it as a vector
(worker/data/arrow_images.py has the rule). A data layer may name its source, and how it is read.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec.structs import replace

from shards.errors import BadInput
from worker.caffe.blobs import beside, read_limited
from worker.caffe.caffe_pb2 import LayerParameter
from worker.caffe.layers.data import ENCODED
from worker.caffe.legacy import upgrade
from worker.caffe.net import Description
from worker.caffe.phases import NetState, layers_kept
from worker.caffe.text import parse_net
from worker.data.columns import Shape
from worker.data.read_options import ReadOptions

_NEED_IMAGES = {"Convolution", "Deconvolution", "LRN", "MVN", "Pooling", "SPP"}
_DATA = "data"
_PARAMS = {
    "Data": "data_param",
    "ImageData": "image_data_param",
    "MemoryData": "memory_data_param",
    "HDF5Data": "hdf5_data_param",
    "CoSData": "cos_data_param",
}
_OF_YAHOO = "com.yahoo.ml.caffe."  # the sources of CaffeOnSpark; formats are recognised here


class NetData(msgspec.Struct, frozen=True):
    """The source of a net's data, if its prototxt names one, and how the net reads any data.

    `kind` is a user's own class of sources, by its full name, or empty. `form` is the format of a
    DataFrame's files, as the prototxt states it, or empty. `layer` names the layer in errors, and
    `tops` are its tops. `others` are the sources of further layers, which are read in step.
    """

    options: ReadOptions
    source: Path | None = None
    kind: str = ""
    form: str = ""
    layer: str = ""
    tops: tuple[str, ...] = ()
    others: tuple["NetData", ...] = ()

    def absolute(self) -> "NetData":
        """This with sources that do not depend on the working directory."""
        source = None if self.source is None else self.source.absolute()
        return replace(self, source=source, others=tuple(other.absolute() for other in self.others))


def data_of(net: Description) -> NetData:
    """The description of the data in the prototxt of `net`.

    Raises BadInput for layers with sources and different batch sizes.
    """
    layers = _layers(net)
    stated = (shape for layer in layers if (shape := _read_shape(layer)) is not None)
    params = (layer.memory_data_param for layer in layers)
    encoded = (param.image_encoded for param in params if param.HasField("image_encoded"))
    options = ReadOptions(
        shape=next(stated, None),
        image=any(layer.type in _NEED_IMAGES for layer in layers),
        image_encoded=next(encoded, None),
    )
    named = [layer for layer in layers if _name(layer)]
    if not named:
        by_name = [layer for layer in layers if layer.type in {"CoSData", "HDF5Data"}]
        if len(by_name) == 1:  # the rows come from elsewhere, with columns of the tops' names
            options = _OPTIONS[by_name[0].type](by_name[0], options)
        return NetData(options)
    if len(named) == 1:
        return _source(net, named[0], options)
    for layer in named[1:]:
        if _batch_size(layer) != _batch_size(named[0]):
            raise BadInput(
                f"{net.file}: layers {named[0].name} and {layer.name}",
                expected="one batch_size for both",
                got=f"{_batch_size(named[0])} and {_batch_size(layer)}",
            )
    first, *others = (
        _source(net, layer, replace(options, shape=_read_shape(layer))) for layer in named
    )
    return replace(first, others=tuple(others))


def read_options_of(net: Description) -> ReadOptions:
    """The options by which `net` reads the rows of a table; BadInput for a net with two sources."""
    data = data_of(net)
    if data.others:
        names = " and ".join(source.layer for source in (data, *data.others))
        raise BadInput(
            f"expected one data layer that names a source, as the rows come from one table, got"
            f" {names}; use one HDF5Data or CoSData layer with the tops of all"
        )
    return data.options


def _source(net: Description, layer: LayerParameter, options: ReadOptions) -> NetData:
    """The source that a layer names."""
    kind = layer.source_class
    try:
        options = _OPTIONS[layer.type](layer, options)
    except BadInput as error:
        raise error.within(net.file) from None
    return NetData(
        options=options,
        source=beside(_name(layer).removeprefix("file:"), net.file),
        kind="" if kind.startswith(_OF_YAHOO) else kind,
        form=layer.memory_data_param.dataframe_format or layer.cos_data_param.dataframe_format,
        layer=f"{net.file}: layer {layer.name}",
        tops=tuple(layer.top),
    )


def with_files(net: Description) -> Description:
    """The net with the contents of the files that its layers name, to be built on any machine."""
    files: dict[str, bytes] = {}
    for layer in _layers(net):
        params = [layer.transform_param, *(top.transform_param for top in layer.cos_data_param.top)]
        names = [param.mean_file for param in params]
        if layer.type == "InfogainLoss":
            names.append(layer.infogain_loss_param.source)
        for name in filter(None, names):
            try:
                files[name] = read_limited(beside(name, net.file))
            except BadInput as error:
                raise error.within(f"{net.file}: layer {layer.name} ({layer.type})") from None
    return replace(net, files=files)


def _layers(net: Description) -> list[LayerParameter]:
    parsed = upgrade(parse_net(net.prototxt, net.file), net.file)
    return layers_kept(parsed, NetState(net.phase, net.stages, net.level), net.file)


def _read_shape(layer: LayerParameter) -> Shape | None:
    """The image shape that a layer states; None unless it is a data layer that states one."""
    if layer.type == "MemoryData":
        param = layer.memory_data_param
        said = (param.channels, param.height, param.width)
        return said if all(said) else None
    if layer.type != "Input" or _DATA not in layer.top:
        return None
    shapes = [tuple(shape.dim) for shape in layer.input_param.shape]
    index = list(layer.top).index(_DATA) if len(shapes) > 1 else 0
    extents = shapes[index] if index < len(shapes) else ()
    return (extents[1], extents[2], extents[3]) if len(extents) == 4 else None


def _name(layer: LayerParameter) -> str:
    """The source that a layer names; empty if none."""
    return str(getattr(layer, _PARAMS[layer.type]).source) if layer.type in _PARAMS else ""


def _batch_size(layer: LayerParameter) -> int:
    return int(getattr(layer, _PARAMS[layer.type]).batch_size)


def _colour(layer: LayerParameter) -> bool | None:
    param = layer.transform_param
    return True if param.force_color else False if param.force_gray else None


def _database(layer: LayerParameter, options: ReadOptions) -> ReadOptions:
    forced = True if layer.data_param.force_encoded_color else None
    return replace(options, colour=_colour(layer) if _colour(layer) is not None else forced)


def _image_list(layer: LayerParameter, options: ReadOptions) -> ReadOptions:
    param = layer.image_data_param
    size = (param.new_height, param.new_width)
    if any(size) and not all(size):
        raise BadInput(f"layer {layer.name}", expected="new_height and new_width, or neither")
    return replace(
        options,
        colour=param.is_color,
        resize=size if all(size) else None,
        shuffle=param.shuffle,
        root=param.root_folder,
    )


def _memory(layer: LayerParameter, options: ReadOptions) -> ReadOptions:
    channels = layer.memory_data_param.channels
    return replace(options, colour={1: False, 3: True}.get(channels))


def _hdf5(layer: LayerParameter, options: ReadOptions) -> ReadOptions:
    return replace(options, tops=tuple(layer.top), shuffle=layer.hdf5_data_param.shuffle)


def _column_options(layer: LayerParameter, options: ReadOptions) -> ReadOptions:
    param = layer.cos_data_param
    encoded = [top for top in param.top if top.type in ENCODED]
    return replace(
        options,
        tops=tuple(layer.top),
        encoded=tuple(top.name for top in encoded),
        colour={1: False, 3: True}.get(encoded[0].channels) if encoded else None,
    )


_OPTIONS: dict[str, Callable[[LayerParameter, ReadOptions], ReadOptions]] = {
    "Data": _database,
    "ImageData": _image_list,
    "MemoryData": _memory,
    "HDF5Data": _hdf5,
    "CoSData": _column_options,
}
