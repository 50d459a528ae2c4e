"""Converts nets in older forms into the present one, before anything else reads them.

Four forms are found in published files: `layers { type: CONVOLUTION }` (version 1); `layers {
layer { type: "conv" } }` (version 0, legacy_v0.py); inputs declared by `input` and `input_dim` or
`input_shape` at the top of the net; and `ceil_mode`, which forks have in place of `round_mode`.
"""

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from shards.errors import BadInput
from worker.caffe.caffe_pb2 import (
    BlobProto,
    LayerParameter,
    NetParameter,
    ParamSpec,
    PoolingParameter,
    V1LayerParameter,
)
from worker.caffe.legacy_v0 import from_version_0, without_padding_layers

# Where the new name is not the old one in camel case.
_RENAMED = {
    "ABSVAL": "AbsVal",
    "ARGMAX": "ArgMax",
    "BNLL": "BNLL",
    "HDF5_DATA": "HDF5Data",
    "HDF5_OUTPUT": "HDF5Output",
    "IM2COL": "Im2col",
    "LRN": "LRN",
    "MVN": "MVN",
    "RELU": "ReLU",
    "SOFTMAX_LOSS": "SoftmaxWithLoss",
    "TANH": "TanH",
}


def upgrade(net: NetParameter, file: str) -> NetParameter:
    """Upgrade a net to `layer` entries only; the argument is not changed."""
    forked = any(layer.pooling_param.HasField("ceil_mode") for layer in net.layer)
    if not net.layers and not net.input and not forked:
        return net
    if net.layers and net.layer:
        raise BadInput(f"{file}: has both `layer` and older `layers` entries; expected one kind")
    new = NetParameter()
    new.CopyFrom(net)
    for field in ("layers", "layer", "input", "input_dim", "input_shape"):
        new.ClearField(field)
    new.layer.extend(_inputs(net, file))
    new.layer.extend(net.layer)
    new.layer.extend(_layer(old, file) for old in without_padding_layers(net.layers, file))
    for layer in new.layer:
        if layer.pooling_param.HasField("ceil_mode"):
            _set_round_mode(layer, file)
    return new


def layers_of_any_version(net: NetParameter) -> Iterator[tuple[str, Sequence[BlobProto]]]:
    """The name and the blobs of each layer, without converting or copying them."""
    for layer in net.layer:
        yield layer.name, layer.blobs
    for old in net.layers:
        yield (old.layer.name, old.layer.blobs) if old.HasField("layer") else (old.name, old.blobs)


def type_name(kind: int) -> str:
    """The present name of a version-1 layer type: SOFTMAX_LOSS is SoftmaxWithLoss."""
    old = V1LayerParameter.LayerType.Name(V1LayerParameter.LayerType.ValueType(kind))
    return _RENAMED.get(old) or "".join(word.capitalize() for word in old.split("_"))


def _set_round_mode(layer: LayerParameter, file: str) -> None:
    """Replace `ceil_mode` by the `round_mode` that means the same."""
    param = layer.pooling_param
    mode = PoolingParameter.CEIL if param.ceil_mode else PoolingParameter.FLOOR
    if param.HasField("round_mode") and param.round_mode != mode:
        raise BadInput(
            f"{file}: layer {layer.name} ({layer.type})",
            expected="ceil_mode or round_mode, or both alike",
            got=(
                f"ceil_mode: {str(param.ceil_mode).lower()} and round_mode: "
                f"{PoolingParameter.RoundMode.Name(param.round_mode)}"
            ),
        )
    param.round_mode = mode
    param.ClearField("ceil_mode")


def _inputs(net: NetParameter, file: str) -> list[LayerParameter]:
    shapes = [list(shape.dim) for shape in net.input_shape]
    dims = list(net.input_dim)
    if not shapes and not dims:  # as in Caffe: an Input layer makes the blob, or its reader fails
        return []
    if not shapes and len(dims) % 4 == 0:
        shapes = [dims[i : i + 4] for i in range(0, len(dims), 4)]
    if len(shapes) != len(net.input):
        raise BadInput(
            file,
            expected=(
                f"a shape (input_shape, or four input_dim) for each of {len(net.input)} inputs"
            ),
            got=len(shapes),
        )
    layers = []
    for name, shape in zip(net.input, shapes, strict=True):
        layer = LayerParameter(name=name, type="Input", top=[name])
        layer.input_param.shape.add().dim.extend(shape)
        layers.append(layer)
    return layers


def _layer(old: V1LayerParameter, file: str) -> LayerParameter:
    if old.HasField("layer"):
        return from_version_0(old, file)
    if not old.HasField("type") or old.type == V1LayerParameter.NONE:
        raise BadInput(f"{file}: layer {old.name or '(unnamed)'}", expected="a type", got="none")
    new = LayerParameter(name=old.name, type=type_name(old.type))
    for field in ("bottom", "top", "loss_weight", "blobs", "include", "exclude"):
        getattr(new, field).extend(getattr(old, field))
    multipliers = zip_longest(old.param, old.blobs_lr, old.weight_decay, old.blob_share_mode)
    for name, lr_mult, decay_mult, mode in multipliers:
        param = new.param.add()
        if name:
            param.name = name
        if lr_mult is not None:
            param.lr_mult = lr_mult
        if decay_mult is not None:
            param.decay_mult = decay_mult
        if mode is not None:
            loose = mode == V1LayerParameter.PERMISSIVE
            param.share_mode = ParamSpec.PERMISSIVE if loose else ParamSpec.STRICT
    for setting, value in old.ListFields():
        if setting.name.endswith("_param"):
            getattr(new, setting.name).CopyFrom(value)
    _move_transform(new)
    return new


def _move_transform(layer: LayerParameter) -> None:
    """Move the transform that older data layers have among their own fields to where it is now."""
    for name in ("data_param", "image_data_param", "window_data_param"):
        if not layer.HasField(name):
            continue
        param = getattr(layer, name)
        for field in ("scale", "mean_file", "crop_size", "mirror"):
            if param.HasField(field):
                setattr(layer.transform_param, field, getattr(param, field))
                param.ClearField(field)
