"""The shape of a data row that a prototxt states, known before any data is opened.

A row is a list of values. The prototxt or the data may state its shape. If neither does, a net with
layers that need an image reads a row as a square image, and every other net reads it as a vector
(worker/arrow_images.py has the rule).
"""

import msgspec

from worker.arrow_images import Shape
from worker.caffe.caffe_pb2 import LayerParameter
from worker.caffe.legacy import upgrade
from worker.caffe.net import Description
from worker.caffe.phases import NetState, layers_kept
from worker.caffe.text import parse_net

_NEED_IMAGES = {"Convolution", "Deconvolution", "LRN", "MVN", "Pooling", "SPP"}
_DATA = "data"


class Rows(msgspec.Struct, frozen=True):
    """The (channels, height, width) that a net states, or None; and whether it needs an image."""

    shape: Shape | None
    image: bool


def rows_of(net: Description) -> Rows:
    """What the prototxt of `net` says about its rows."""
    parsed = upgrade(parse_net(net.prototxt, net.file), net.file)
    layers = layers_kept(parsed, NetState(net.phase, net.stages, net.level), net.file)
    stated = (shape for layer in layers if (shape := _stated(layer)) is not None)
    return Rows(next(stated, None), any(layer.type in _NEED_IMAGES for layer in layers))


def _stated(layer: LayerParameter) -> Shape | None:
    """The image shape that a layer states; None unless it is a data layer that states one."""
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
