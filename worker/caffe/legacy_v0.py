"""Layers of version 0: one message with the settings of all types, and padding as a layer.

A `padding` layer in front of a convolution or a pooling becomes the `pad` of that layer.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest

from shards.errors import BadInput
from worker.caffe.caffe_pb2 import (
    LayerParameter,
    PoolingParameter,
    V0LayerParameter,
    V1LayerParameter,
)

_TYPES = {
    "accuracy": "Accuracy",
    "bnll": "BNLL",
    "concat": "Concat",
    "conv": "Convolution",
    "data": "Data",
    "dropout": "Dropout",
    "euclidean_loss": "EuclideanLoss",
    "flatten": "Flatten",
    "hdf5_data": "HDF5Data",
    "hdf5_output": "HDF5Output",
    "im2col": "Im2col",
    "images": "ImageData",
    "infogain_loss": "InfogainLoss",
    "innerproduct": "InnerProduct",
    "lrn": "LRN",
    "multinomial_logistic_loss": "MultinomialLogisticLoss",
    "pool": "Pooling",
    "relu": "ReLU",
    "sigmoid": "Sigmoid",
    "softmax": "Softmax",
    "softmax_loss": "SoftmaxWithLoss",
    "split": "Split",
    "tanh": "TanH",
    "window_data": "WindowData",
}

_CONV, _PRODUCT, _POOL, _LRN = (
    "convolution_param",
    "inner_product_param",
    "pooling_param",
    "lrn_param",
)
_DATA = {
    "data": "data_param",
    "hdf5_data": "hdf5_data_param",
    "images": "image_data_param",
    "window_data": "window_data_param",
}
_WEIGHTED = {"conv": _CONV, "innerproduct": _PRODUCT}
_WINDOWED = {"conv": _CONV, "pool": _POOL}
_ANY = dict.fromkeys(_TYPES, "transform_param")

# For each field of version 0 its present name, and the message that has it, by type.
FIELDS: dict[str, tuple[str, Mapping[str, str]]] = {
    "num_output": ("num_output", _WEIGHTED),
    "biasterm": ("bias_term", _WEIGHTED),
    "weight_filler": ("weight_filler", _WEIGHTED),
    "bias_filler": ("bias_filler", _WEIGHTED),
    "pad": ("pad", _WINDOWED),
    "kernelsize": ("kernel_size", _WINDOWED),
    "stride": ("stride", _WINDOWED),
    "group": ("group", {"conv": _CONV}),
    "pool": ("pool", {"pool": _POOL}),
    "dropout_ratio": ("dropout_ratio", {"dropout": "dropout_param"}),
    "local_size": ("local_size", {"lrn": _LRN}),
    "alpha": ("alpha", {"lrn": _LRN}),
    "beta": ("beta", {"lrn": _LRN}),
    "k": ("k", {"lrn": _LRN}),
    "source": ("source", {**_DATA, "infogain_loss": "infogain_loss_param"}),
    "batchsize": ("batch_size", _DATA),
    "scale": ("scale", _ANY),
    "meanfile": ("mean_file", _ANY),
    "cropsize": ("crop_size", _ANY),
    "mirror": ("mirror", _ANY),
    "rand_skip": ("rand_skip", {"data": "data_param", "images": "image_data_param"}),
    "shuffle_images": ("shuffle", {"images": "image_data_param"}),
    "new_height": ("new_height", {"images": "image_data_param"}),
    "new_width": ("new_width", {"images": "image_data_param"}),
    "concat_dim": ("concat_dim", {"concat": "concat_param"}),
    "det_fg_threshold": ("fg_threshold", {"window_data": "window_data_param"}),
    "det_bg_threshold": ("bg_threshold", {"window_data": "window_data_param"}),
    "det_fg_fraction": ("fg_fraction", {"window_data": "window_data_param"}),
    "det_context_pad": ("context_pad", {"window_data": "window_data_param"}),
    "det_crop_mode": ("crop_mode", {"window_data": "window_data_param"}),
}
# Those of every type.
EVERYWHERE = {"name", "type", "blobs", "blobs_lr", "weight_decay", "hdf5_output_param"}


def from_version_0(entry: V1LayerParameter, file: str) -> LayerParameter:
    """The present form of a layer of version 0; raises BadInput for an unknown type.

    As in Caffe, a field that layers of this type do not read is left out.
    """
    old = entry.layer
    where = f"{file}: layer {old.name or '(unnamed)'}"
    if old.type not in _TYPES:
        raise BadInput(where, expected=f"a type among {', '.join(_TYPES)}", got=f"{old.type!r}")
    new = LayerParameter(name=old.name, type=_TYPES[old.type])
    new.bottom.extend(entry.bottom)
    new.top.extend(entry.top)
    new.blobs.extend(old.blobs)
    for lr_mult, decay_mult in zip_longest(old.blobs_lr, old.weight_decay):
        param = new.param.add()
        if lr_mult is not None:
            param.lr_mult = lr_mult
        if decay_mult is not None:
            param.decay_mult = decay_mult
    if old.HasField("hdf5_output_param"):
        new.hdf5_output_param.CopyFrom(old.hdf5_output_param)
    for field, value in old.ListFields():
        if field.name not in EVERYWHERE:
            _set(new, old.type, field.name, value)
    return new


def without_padding_layers(
    layers: Iterable[V1LayerParameter], file: str
) -> Iterator[V1LayerParameter]:
    """The layers, with each padding moved into the layers that read it."""
    padded: dict[str, V1LayerParameter] = {}
    for entry in layers:
        old = entry.layer
        if old.type == "padding":
            if len(entry.bottom) != 1 or len(entry.top) != 1:
                raise BadInput(f"{file}: layer {old.name}", expected="one bottom and one top")
            padded[entry.top[0]] = entry
        elif any(bottom in padded for bottom in entry.bottom):
            yield _with_pad(entry, padded, file)
        else:
            yield entry


def _with_pad(
    entry: V1LayerParameter, padded: Mapping[str, V1LayerParameter], file: str
) -> V1LayerParameter:
    if entry.layer.type not in {"conv", "pool"} or len(entry.bottom) != 1:
        raise BadInput(
            f"{file}: layer {entry.layer.name or entry.name}",
            expected="a conv or a pool layer with one bottom behind a padding layer",
            got=f"type {entry.layer.type!r}",
        )
    padding = padded[entry.bottom[0]]
    new = V1LayerParameter()
    new.CopyFrom(entry)
    new.layer.pad = padding.layer.pad
    new.bottom[0] = padding.bottom[0]
    return new


def _set(new: LayerParameter, kind: str, field: str, value: object) -> None:
    name, messages = FIELDS.get(field, ("", {}))
    if kind not in messages:
        return
    message = getattr(new, messages[kind])
    described = message.DESCRIPTOR.fields_by_name[name]
    if described.message_type is not None:
        getattr(message, name).CopyFrom(value)
    elif described.is_repeated:
        getattr(message, name).append(value)
    elif field == "pool":
        assert isinstance(value, int), "protobuf keeps an enum as its number"
        method = V0LayerParameter.PoolMethod.Name(V0LayerParameter.PoolMethod.ValueType(value))
        message.pool = PoolingParameter.PoolMethod.Value(method)
    else:
        setattr(message, name, value)
