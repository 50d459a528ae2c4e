"""Layer types by their names in a prototxt.

A type is a class in a file of `worker/caffe/layers/`, and its row at the end of that file. A new
file takes one line here.
"""

from worker.caffe.layer import Layer
from worker.caffe.layers import (
    accuracy,
    convolution,
    data,
    dropout,
    elementwise,
    embed,
    inner_product,
    joining,
    losses,
    normalisation,
    pooling,
    recurrent,
    scaling,
    selection,
    shaping,
    softmax,
)

FAMILIES = (
    data,
    convolution,
    pooling,
    inner_product,
    embed,
    recurrent,
    elementwise,
    dropout,
    normalisation,
    scaling,
    joining,
    shaping,
    selection,
    softmax,
    accuracy,
    losses,
)

UNSUPPORTED = {
    "HDF5Output": "`downpour features` writes any blob",
    "Im2col": "a Convolution computes it by itself",
    "Parameter": "a tensor belongs to a layer that computes with it, such as Scale or Bias",
    "Python": "docs/how-to/extending.md shows how to write a layer in Python",
    "WindowData": "an ImageData layer reads windows that are images of their own",
}
"""Caffe's other types, each with what to use in its place."""

LAYERS: dict[str, type[Layer]] = {
    name: layer for family in FAMILIES for name, layer in family.ROWS.items()
}
