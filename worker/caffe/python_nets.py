"""Networks written in Python, and nets and solvers from files to change and train.

    from worker.caffe.python_nets import Convolution, Input, Net, Pooling, SoftmaxWithLoss

    net = Net("small", [
        Input("data", shape=(64, 1, 28, 28)),
        Input("label", shape=(64,)),
        Convolution("conv1", "data", num_output=20, kernel_size=5, weight_filler="xavier"),
        ...
        SoftmaxWithLoss("loss", ["conv1", "label"]),
    ])

Each type in the registry of layers is a function here, with its name, and its keywords are the
fields that the type honours: adding a layer to the registry adds it here. A function returns a
prototxt's entry, a `LayerParameter`.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from msgspec.structs import replace

from shards import argument_checks
from shards.errors import BadInput, quote
from worker.caffe.blobs import write_whole
from worker.caffe.caffe_pb2 import TEST, TRAIN, LayerParameter, NetParameter, NetStateRule
from worker.caffe.layer import COMMON_FIELDS, Layer, SourceLayer
from worker.caffe.legacy import upgrade
from worker.caffe.net import Description
from worker.caffe.phases import Phase
from worker.caffe.registry import LAYERS
from worker.caffe.solver import Solver, read_solver
from worker.caffe.text import parse_net, read_text

_Field = Any  # a FieldDescriptor of Python's protobuf or of its C library
_OWN = {"name", "type", "bottom", "top", "blobs"}  # not settings
_COUNTS = ("train_batch", "test_batch", "channels", "height", "width")
_EXPECTED = {
    FieldDescriptor.CPPTYPE_STRING: "a text",
    FieldDescriptor.CPPTYPE_BOOL: "True or False",
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
}


class Net:
    """A network: its name and its layers, in order. It does not change."""

    def __init__(
        self, name: str, layers: Iterable[LayerParameter], *, force_backward: bool = False
    ) -> None:
        """`force_backward` computes the gradients of all inputs, too."""
        self._message = NetParameter(name=argument_checks.text("Net: name", name, "a text"))
        if argument_checks.flag("Net: force_backward", force_backward):
            self._message.force_backward = True
        for number, layer in enumerate(layers):
            if not isinstance(layer, LayerParameter):
                raise argument_checks.wrong(f"Net {name}: layer {number}", "a layer", layer)
            self._message.layer.append(layer)

    @property
    def name(self) -> str:
        """The network's name."""
        return self._message.name

    @property
    def layers(self) -> tuple[LayerParameter, ...]:
        """Copies of the layers, for another net."""
        return tuple(_copy(layer) for layer in self._message.layer)

    @property
    def prototxt(self) -> str:
        """The network in Caffe's language."""
        return text_format.MessageToString(self._message)

    def __repr__(self) -> str:
        return f"Net({self.name!r}, {len(self._message.layer)} layers)"

    def save(self, path: str | Path) -> Path:
        """Write the network as a prototxt; raises BadInput."""
        target = Path(path)
        write_whole(target, self.prototxt.encode())
        return target

    def description(self, phase: Phase = Phase.TRAIN, **more: Any) -> Description:
        """The description for a `CaffeModel`; `more` are other fields of `Description`."""
        return Description(self.prototxt, phase, **{"file": self.name or "net"} | more)

    def replace_data_layers(
        self, *, train_batch: int, test_batch: int, channels: int, height: int, width: int
    ) -> "Net":
        """A net for rows of another size: each layer that reads data becomes a MemoryData layer.

        It keeps its name, its tops, its transform and its rules. One without a rule about the phase
        becomes one layer for each phase.
        """
        counts = (train_batch, test_batch, channels, height, width)
        for name, count in zip(_COUNTS, counts, strict=True):
            argument_checks.whole(f"replace_data_layers: {name}", count, 1)
        batches = {TRAIN: train_batch, TEST: test_batch}
        layers: list[LayerParameter] = []
        for layer in self._message.layer:
            kind = LAYERS.get(layer.type)
            if kind is None or not issubclass(kind, SourceLayer) or not kind.COLUMNS:
                layers.append(_copy(layer))
                continue
            rules = [rule.phase for rule in layer.include if rule.HasField("phase")]
            for phase in rules or (TRAIN, TEST):
                param: dict[str, Any] = {
                    "batch_size": batches[phase],
                    "channels": channels,
                    "height": height,
                    "width": width,
                }
                new = make_layer("MemoryData", layer.name, top=list(layer.top), **param)
                new.transform_param.CopyFrom(layer.transform_param)
                new.include.extend(layer.include if rules else [NetStateRule(phase=phase)])
                layers.append(new)
        return _with_layers(self._message, layers)


def load_net(path: str | Path) -> Net:
    """The network in a prototxt of any of Caffe's versions; raises BadInput."""
    file = str(path)
    parsed = upgrade(parse_net(read_text(Path(path)), file), file)
    return _with_layers(parsed, parsed.layer)


def load_solver(path: str | Path, net: Net | None = None) -> Solver:
    """The solver in a prototxt, to pass to `worker.train`; raises BadInput.

    With a `net`, that is the network to train and to test, in place of the ones in the file.
    """
    solver = read_solver(Path(path))
    if net is None:
        return solver
    tests = tuple(
        replace(test, net=replace(test.net, prototxt=net.prototxt)) for test in solver.tests
    )
    return replace(solver, train=replace(solver.train, prototxt=net.prototxt), tests=tests)


def make_layer(
    kind: str,
    name: str,
    bottom: str | Sequence[str] = (),
    *,
    top: str | Sequence[str] | None = None,
    **settings: Any,
) -> LayerParameter:
    """The entry of a layer of the type `kind`; the function of that name calls this one.

    `bottom` and `top` are names of blobs; the default top is the layer's name. A setting is a field
    of the type's own messages, or one that every layer has, such as `param` or `include`. If two
    messages have a field of its name, write `softmax_param={"axis": 2}`. A message is a dictionary;
    a filler may be its type or a constant, and a shape a tuple. Raises BadInput naming the layer
    and the setting.
    """
    if kind not in LAYERS:
        raise BadInput(f"layer {name}", expected=f"a type among {', '.join(LAYERS)}", got=kind)
    where = f"layer {quote(name)} ({kind})"
    layer = LayerParameter(name=argument_checks.text(f"{kind}: name", name, "a text"), type=kind)
    if top is None:
        top = name if LAYERS[kind].TOPS.stop > 1 else ()
    for field, blobs in (("bottom", bottom), ("top", top)):
        names = _names(f"{where}: {field}", blobs)
        _set(layer, LayerParameter.DESCRIPTOR.fields_by_name[field], names, f"{where}: {field}")
    for key, value in settings.items():
        message = _message_with(layer, LAYERS[kind], key, where)
        _set(message, message.DESCRIPTOR.fields_by_name[key], value, f"{where}: {key}")
    return layer


def _message_with(layer: LayerParameter, kind: type[Layer], key: str, where: str) -> Message:
    """The message of a layer that has the field `key`."""
    if key in (COMMON_FIELDS | kind.SUPPORTED_FIELDS.keys()) - _OWN:
        return layer
    owners = [name for name, fields in kind.SUPPORTED_FIELDS.items() if key in fields]
    if len(owners) > 1:
        raise BadInput(f"{where}: {key}", expected=f"it in one of {', '.join(owners)}")
    if not owners:
        fields = {
            field for message_fields in kind.SUPPORTED_FIELDS.values() for field in message_fields
        }
        known = ", ".join(sorted(fields | COMMON_FIELDS - _OWN))
        raise BadInput(where, expected=f"settings among {known}", got=quote(key))
    message = getattr(layer, owners[0])
    assert isinstance(message, Message)
    return message


def _set(message: Message, field: _Field, value: Any, where: str) -> None:
    """Set a field from a plain value; raises BadInput naming `where`."""
    if not field.is_repeated:
        _set_one(message, field, value, where)
        return
    shape = field.message_type is not None and field.message_type.name == "BlobShape"
    numbers = isinstance(value, tuple | list) and all(isinstance(size, Integral) for size in value)
    several = isinstance(value, tuple | list) and not (shape and numbers)
    container = getattr(message, field.name)
    for element in value if several else [value]:
        if field.message_type is not None:
            _fill(container.add(), element, where)
        else:
            try:
                container.append(_plain(field, element))
            except (TypeError, ValueError):
                raise _wrong(field, element, where) from None


def _set_one(message: Message, field: _Field, value: Any, where: str) -> None:
    if field.message_type is not None:
        inner = getattr(message, field.name)
        inner.SetInParent()
        _fill(inner, value, where)
        return
    try:
        setattr(message, field.name, _plain(field, value))
    except (TypeError, ValueError):
        raise _wrong(field, value, where) from None


def _fill(message: Message, value: Any, where: str) -> None:
    """Set a message's fields from a dictionary, or from the short form of its kind."""
    kind = message.DESCRIPTOR
    match kind.name, value:
        case "FillerParameter", str():
            value = {"type": value}
        case "FillerParameter", int() | float():
            value = {"type": "constant", "value": value}
        case "BlobShape", list() | tuple():
            value = {"dim": value}
    if not isinstance(value, dict):
        raise argument_checks.wrong(
            where, f"a dictionary of {', '.join(kind.fields_by_name)}", value
        )
    for key, setting in value.items():
        if key not in kind.fields_by_name:
            known = ", ".join(kind.fields_by_name)
            raise BadInput(where, expected=f"fields among {known}", got=quote(key))
        _set(message, kind.fields_by_name[key], setting, f"{where}: {key}")


def _plain(field: _Field, value: Any) -> Any:
    """A value as protobuf takes it; raises TypeError or ValueError."""
    if field.enum_type is not None:
        return field.enum_type.values_by_name[_enum_name(field, value)].number
    if isinstance(value, bool) != (field.cpp_type == FieldDescriptor.CPPTYPE_BOOL):
        raise TypeError
    return value


def _enum_name(field: _Field, value: Any) -> str:
    assert field.enum_type is not None
    if not isinstance(value, str) or value not in field.enum_type.values_by_name:
        raise ValueError
    return value


def _wrong(field: _Field, value: Any, where: str) -> BadInput:
    if field.enum_type is not None:
        expected = f"one of {', '.join(field.enum_type.values_by_name)}"
    else:
        expected = _EXPECTED.get(field.cpp_type, "a whole number")
    return argument_checks.wrong(where, expected, value)


def _names(where: str, value: Any) -> list[Any]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, tuple | list):
        raise argument_checks.wrong(where, "names of blobs", value)
    return list(value)


def _with_layers(message: NetParameter, layers: Iterable[LayerParameter]) -> Net:
    """A net with other layers and the rest of a message: its name, its state."""
    net = Net(message.name, layers, force_backward=message.force_backward)
    if message.HasField("state"):
        net._message.state.CopyFrom(message.state)
    return net


def _copy(layer: LayerParameter) -> LayerParameter:
    new = LayerParameter()
    new.CopyFrom(layer)
    return new


__all__ = ["Net", "load_net", "load_solver", "make_layer", *LAYERS]  # noqa: PLE0604  # all are names


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Callable[..., LayerParameter]:
    if name not in LAYERS:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return partial(make_layer, name)
