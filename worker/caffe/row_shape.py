"""How a net reads a row of data, as far as its prototxt says: known before any data is opened.

A row is a list of values. What shape it has may stand in the prototxt or in the data. Where neither
says it, a net with layers that need an image reads a row as a square image, and every other net as
a vector (worker/arrow_images.py has the rule).
"""

import msgspec

from worker.arrow_images import Shape
from worker.caffe.caffe_pb2 import LayerParameter
from worker.caffe.legacy import upgrade
from worker.caffe.net import Description
from worker.caffe.phases import NetState, layers_kept
from worker.caffe.text import parse_net

_NEED_IMAGES = {"Convolution", "Pooling"}
_DATA = "data"


class Rows(msgspec.Struct, frozen=True):
    """The (channels, height, width) that a net states, if it does; whether it needs an image."""

    shape: Shape | None
    image: bool


def rows_of(net: Description) -> Rows:
    """What the prototxt of `net` says about its rows."""
    parsed = upgrade(parse_net(net.prototxt, net.file), net.file)
    layers = layers_kept(parsed, NetState(net.phase, net.stages, net.level), net.file)
    stated = (shape for layer in layers if (shape := _stated(layer)) is not None)
    return Rows(next(stated, None), any(layer.type in _NEED_IMAGES for layer in layers))


def _stated(layer: LayerParameter) -> Shape | None:
    """The image shape that a data layer states, if it is one and does."""
    if layer.type == "MemoryData":
        param = layer.memory_data_param
        said = (param.channels, param.height, param.width)
        return said if all(said) else None
    if layer.type != "Input" or _DATA not in layer.top:
        return None
    shapes = [tuple(shape.dim) for shape in layer.input_param.shape]
    place = list(layer.top).index(_DATA) if len(shapes) > 1 else 0
    found = shapes[place] if place < len(shapes) else ()
    return (found[1], found[2], found[3]) if len(found) == 4 else None
