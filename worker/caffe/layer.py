"""The base class of layers: shapes at construction, arrays afterwards.

A layer is built once for its net from the prototxt entry and the shapes of its bottoms. It checks
that it honours every field set there, declares the tensors that it owns, and computes the shapes
of its tops. After that `forward` and `backward` only compute. `backward` refers to the latest
`forward`: a layer keeps what it needs in between, in memory that it reuses each step, so one
network serves one thread.

Shapes are in Caffe's order (n, c, h, w), as users write and read them. Arrays of four axes are
channels-last in memory; all others are stored in Caffe's order. `to_nhwc` and `to_nchw` convert.
A new type is one class in `layers/`, and its row in the table at the end of its file. `Unary` and
`HostLayer` are bases for common kinds.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import ClassVar

import msgspec
import numpy as np
from google.protobuf.message import Message
from numpy.typing import DTypeLike

from cupy_kernels import backends
from cupy_kernels.backends import as_host
from cupy_kernels.host_pool import HostPool
from cupy_kernels.ops import image_layout, softmax
from cupy_kernels.types import AnyArray, Array, Labels, Precision
from cupy_kernels.workspace import Workspace
from shards.errors import BadInput
from shards.tables import TensorSpec
from worker.caffe import fillers
from worker.caffe.blobs import beside, parse_blob, read_blob
from worker.caffe.caffe_pb2 import TRAIN, FillerParameter, LayerParameter, ParamSpec
from worker.caffe.phases import Phase
from worker.data.columns import ColumnKind, ColumnSpec
from worker.training.model import Batch

Shape = tuple[int, ...]
SupportedFields = Mapping[str, frozenset[str]]
Arrays = Sequence[AnyArray]
Gradients = Sequence[AnyArray | None]
NeedsGrad = Sequence[bool]

# The fields that any layer may set, in addition to its own `*_param` message.
COMMON_FIELDS = {"name", "type", "bottom", "top", "param", "include", "exclude", "phase"}
COMMON_FIELDS |= {"propagate_down", "loss_weight", "blobs"}
_MAX_LISTED = 8
_MAX_NUMBERS = 2**31 - 1  # of one blob or tensor; Caffe's own limit


class LayerContext(msgspec.Struct, frozen=True):
    """A layer's settings from outside its own entry: the file (for errors), the phase, (c, h, w).

    `precision` is that of products in kernels; the host computes in float32. `makers` are the
    names of the layers that compute the bottoms, and `namesakes` how many layers before have the
    layer's name. `row_shapes` are the shapes of a row of columns
    that the data alone knows. `files` are the files that layers name, as bytes; any other is read.
    `pool` is the network's memory on the host.
    """

    file: str
    phase: Phase
    data_shape: tuple[int, int, int] | None = None
    precision: Precision = Precision.FP32
    makers: tuple[str, ...] = ()
    namesakes: int = 0
    row_shapes: Mapping[str, Shape] = MappingProxyType({})
    files: Mapping[str, bytes] = MappingProxyType({})
    pool: HostPool = msgspec.field(default_factory=HostPool)

    def read_blob(self, name: str) -> Array:
        """The array in a file of one blob that a layer names; raises BadInput."""
        if name in self.files:
            return parse_blob(self.files[name], name)
        return read_blob(beside(name, self.file))


class StepKey(msgspec.Struct, frozen=True):
    """The step and the seed that a random layer draws from.

    `step` is a number, or a uint64 array of one element on the network's device.
    """

    step: int | AnyArray
    seed: int

    @property
    def number(self) -> int:
        """The step as a number on the host, for layers without kernels."""
        return self.step if isinstance(self.step, int) else int(as_host(self.step)[0])


class LayerTensor(msgspec.Struct, frozen=True):
    """A tensor of a layer, and the filler of its initial values.

    Layers with the same `shared` name use one tensor; `loose` compares their sizes only, not their
    shapes. A buffer has no gradient: the layer computes its changes (`Layer.buffer_changes`).
    """

    spec: TensorSpec
    filler: FillerParameter
    shared: str = ""
    loose: bool = False


class Layer(ABC):
    """One layer of a net, bound to its shapes.

    `SUPPORTED_FIELDS` lists, for each message that the type reads, the fields that it honours.
    `BOTTOMS` and `TOPS` are how many blobs it may have. `LOSS` is whether its first top is a loss
    by default. `work` is its memory, and `works` is more of it, for results that must outlive those
    of other operations. `key` is unique in a net, for random draws. `LABELS` are the bottoms
    that never have a gradient. `OVERWRITABLE` is whether a layer in place behind may write into its
    top: no bottom shares its memory, and `backward` does not read it.
    """

    SUPPORTED_FIELDS: ClassVar[SupportedFields] = {}
    BOTTOMS: ClassVar[range] = range(1, 2)
    TOPS: ClassVar[range] = range(1, 2)
    LOSS: ClassVar[bool] = False
    LABELS: ClassVar[frozenset[int]] = frozenset()
    OVERWRITABLE: ClassVar[bool] = False
    captures = True  # whether a captured step may contain it: it needs nothing from the host

    def __init__(
        self, spec: LayerParameter, bottoms: Sequence[Shape], context: LayerContext
    ) -> None:
        self.spec = spec
        self.name = spec.name
        self.key = f"{spec.name}#{context.namesakes}" if context.namesakes else spec.name
        self.context = context
        self.where = f"{context.file}: layer {spec.name} ({spec.type})"
        phase = Phase.TRAIN if spec.phase == TRAIN else Phase.TEST
        self.training = (phase if spec.HasField("phase") else context.phase) is Phase.TRAIN
        self.owned: list[LayerTensor] = []
        self.work = Workspace(context.pool)
        self.works = defaultdict[object, Workspace](lambda: Workspace(context.pool))
        self.bottoms = tuple(bottoms)
        self._check_fields()
        self._check_blobs()
        self.tops = self.set_up()
        self._check_sizes()
        self._check_params()

    @abstractmethod
    def set_up(self) -> tuple[Shape, ...]:
        """Read the entry, declare the tensors with `add_parameter`, return the tops' shapes."""

    @abstractmethod
    def forward(self, bottoms: Arrays, weights: Arrays, step_key: StepKey) -> Arrays:
        """The tops' arrays for the bottoms' and this layer's own tensors."""

    def backward(
        self, gradients: Gradients, weights: Arrays, out: Gradients, needs_grad: NeedsGrad
    ) -> Gradients:
        """The bottoms' gradients, given the tops'; writes the tensors' gradients into `out`.

        `needs_grad` says which of the bottoms' gradients are needed; the others, and those that do
        not exist, may be None. A tensor with None as its place in `out` does not learn.
        """
        assert gradients is not None
        assert len(weights) == len(out)
        return [None] * len(needs_grad)

    def buffer_changes(self) -> Mapping[int, AnyArray]:
        """The amounts that the last forward pass subtracts from buffers, by the tensor's index."""
        return {}

    def reset(self) -> None:  # noqa: B027  # few keep anything
        """Forget what the layer keeps from one forward pass for the next, if anything."""

    def fuse_relu(self) -> bool:
        """Apply a ReLU in this layer's own forward pass from now on, and return whether it can."""
        return False

    def fuse_into(self, before: "Layer") -> bool:
        """Try to move this layer's work into `before`, and return whether `before` now does it.

        Called if this layer works in place and alone reads the output of `before`.
        """
        assert before is not self
        return False

    def check_column(self, bottom: int, column: AnyArray) -> None:  # noqa: B027  # few look
        """Raise BadInput for a column, on the host, with values that bottom `bottom` cannot take.

        Called before kernels compute, because they check no values.
        """

    def add_parameter(self, shape: Shape, filler: FillerParameter) -> None:
        """Declare the next tensor, called "layer/0", "layer/1", ... as in Caffe's files."""
        index = len(self.owned)
        fillers.check(filler, shape, self.where)
        param = self.spec.param[index] if index < len(self.spec.param) else ParamSpec()
        spec = TensorSpec(f"{self.name}/{index}", shape, param.lr_mult, param.decay_mult)
        loose = param.share_mode == ParamSpec.PERMISSIVE
        self.owned.append(LayerTensor(spec, filler, param.name, loose))

    def add_buffer(self, shape: Shape) -> None:
        """Declare the next tensor, which starts at zero and has no gradient."""
        spec = TensorSpec(f"{self.name}/{len(self.owned)}", shape, 0.0, 0.0, buffer=True)
        self.owned.append(LayerTensor(spec, FillerParameter()))

    def read_blob(self, name: str) -> Array:
        """The array in a file of one blob that the entry names; BadInput names the layer, too."""
        try:
            return self.context.read_blob(name)
        except BadInput as error:
            raise self.bad(str(error)) from None

    def describe_bottom(self, bottom: int) -> str:
        """A bottom's shape, its name and the layer that makes it, for errors."""
        name = self.spec.bottom[bottom]
        maker = self.context.makers[bottom] if self.context.makers else name
        return f"{self.bottoms[bottom]} ({name} of layer {maker})"

    def bad(self, message: str) -> BadInput:
        """An error that names this layer, for the caller to raise."""
        return BadInput(f"{self.where}: {message}")

    def axis(self, axis: int, shape: Shape) -> int:
        """A possibly negative axis of `shape`, counted from the front."""
        if not -len(shape) <= axis < len(shape):
            raise self.bad(f"axis {axis} does not exist in a bottom of shape {shape}")
        return axis % len(shape)

    def check_alike(self, but: int | None = None) -> None:
        """Raise BadInput unless all bottoms have one shape, apart from axis `but`."""
        first = self.bottoms[0]
        for number, shape in enumerate(self.bottoms[1:], 1):
            fits = len(shape) == len(first) and all(
                a == b or axis == but for axis, (a, b) in enumerate(zip(first, shape, strict=True))
            )
            if not fits:
                where = "" if but is None else f" apart from axis {but}"
                raise self.bad(
                    f"expected bottoms of one shape{where}, got {self.describe_bottom(0)} and"
                    f" {self.describe_bottom(number)}"
                )

    def indices(
        self,
        bottom: int,
        values: AnyArray,
        count: int,
        subject: str = "labels",
        ignored: int | None = None,
    ) -> Labels:
        """The numbers of bottom `bottom`, flat, as int64 in [0, count) or the ignored one.

        Raises BadInput for any other number on the host; kernels do not check.
        """
        listed = flat(values, 0, self.work, f"{subject} in order").reshape(-1)
        try:
            return softmax.whole_labels(listed, count, ignored, self.work)
        except ValueError as error:
            raise self.bad(
                f"{self.spec.bottom[bottom]}: expected whole {subject} {error}"
            ) from None

    def loss_weight(self, top: int) -> float:
        """The weight of a top's sum in the net's loss; 0 for a top that is not a loss."""
        if top < len(self.spec.loss_weight):
            return self.spec.loss_weight[top]
        return 1.0 if self.LOSS and top == 0 and not self.spec.loss_weight else 0.0

    def _check_fields(self) -> None:
        """Refuse fields that would be ignored: a net must not silently train differently."""
        for field, value in self.spec.ListFields():
            if field.name in COMMON_FIELDS:
                continue
            if field.name not in self.SUPPORTED_FIELDS:
                known = ", ".join(sorted(self.SUPPORTED_FIELDS)) or "no settings of its own"
                raise self.bad(f"{field.name} is not supported here; expected {known}")
            if field.message_type is not None:
                self._check_message(field.name, value)
        if len(self.spec.loss_weight) not in {0, len(self.spec.top)}:
            raise self.bad(
                f"expected a loss_weight for each of {len(self.spec.top)} tops, or none, got"
                f" {len(self.spec.loss_weight)}"
            )
        if len(self.spec.propagate_down) not in {0, len(self.spec.bottom)}:
            raise self.bad(
                f"expected a propagate_down for each of {len(self.spec.bottom)} bottoms, or none,"
                f" got {len(self.spec.propagate_down)}"
            )

    def _check_message(self, name: str, message: Message) -> None:
        honoured = self.SUPPORTED_FIELDS[name]
        for field, value in message.ListFields():
            by_default = not field.is_repeated and value == field.default_value
            if field.name not in honoured and not by_default:
                raise self.bad(
                    f"{name}.{field.name} is not supported; expected {', '.join(sorted(honoured))}"
                )

    def _check_blobs(self) -> None:
        for side, names, allowed in (
            ("bottoms", self.spec.bottom, self.BOTTOMS),
            ("tops", self.spec.top, self.TOPS),
        ):
            if len(names) not in allowed:
                expected = (
                    f"at least {allowed[0]}"
                    if len(allowed) > _MAX_LISTED
                    else " or ".join(str(count) for count in allowed)
                )
                raise self.bad(f"expected {expected} {side}, got {len(names)}")

    def _check_sizes(self) -> None:
        """Refuse sizes that do not fit into any memory, before allocating them."""
        tensors = [owned.spec.shape for owned in self.owned]
        for kind, shapes in (("top", self.tops), ("tensor", tensors)):
            for shape in shapes:
                if prod(shape) > _MAX_NUMBERS:
                    raise self.bad(
                        f"expected at most {_MAX_NUMBERS} numbers in a {kind}, got shape {shape}"
                    )

    def _check_params(self) -> None:
        if len(self.spec.param) > len(self.owned):
            raise self.bad(
                f"expected at most {len(self.owned)} param entries, got {len(self.spec.param)}"
            )


class Unary(Layer):
    """A layer with one bottom, and one top of the same shape, without tensors."""

    def set_up(self) -> tuple[Shape, ...]:
        return (self.bottoms[0],)

    @abstractmethod
    def apply(self, x: Array, step_key: StepKey) -> AnyArray:
        """The top."""

    @abstractmethod
    def differentiate(self, dy: Array) -> AnyArray | None:
        """The bottom's gradient, given the top's; None if there is none."""

    def forward(self, bottoms: Arrays, weights: Arrays, step_key: StepKey) -> Arrays:
        return (self.apply(bottoms[0], step_key),)

    def backward(
        self, gradients: Gradients, weights: Arrays, out: Gradients, needs_grad: NeedsGrad
    ) -> Gradients:
        assert gradients[0] is not None
        return [self.differentiate(gradients[0]) if needs_grad[0] else None]


class HostLayer(Layer):
    """A layer that has no kernels: it computes in NumPy, wherever the network runs.

    Its arrays are in Caffe's order. In a network of kernels they are copied to the host and back,
    and steps are not captured.
    """

    captures = False

    @abstractmethod
    def compute(self, bottoms: Arrays, weights: Arrays, step_key: StepKey) -> Arrays:
        """The tops' arrays, in Caffe's order, for the bottoms in that order."""

    def gradients(self, dtops: Gradients, weights: Arrays, out: Gradients) -> Gradients:
        """The bottoms' gradients, given the tops'; writes those of tensors into `out`."""
        assert len(weights) == len(out)
        assert dtops is not None
        return [None] * len(self.bottoms)

    def forward(self, bottoms: Arrays, weights: Arrays, step_key: StepKey) -> Arrays:
        self._like = bottoms[0]
        tops = self.compute(
            [_to_caffe_order(x) for x in bottoms], [*map(as_host, weights)], step_key
        )
        return tuple(self._to_device(top, f"top{number}") for number, top in enumerate(tops))

    def backward(
        self, gradients: Gradients, weights: Arrays, out: Gradients, needs_grad: NeedsGrad
    ) -> Gradients:
        into = [None if o is None else np.zeros(o.shape, np.float32) for o in out]
        ordered = [None if dy is None else _to_caffe_order(dy) for dy in gradients]
        dbottoms = self.gradients(ordered, [*map(as_host, weights)], into)
        for source, target in zip(into, out, strict=True):
            if source is not None and target is not None:
                backends.copy(source, target)
        return [
            None if dx is None or not want else self._to_device(dx, f"d{number}")
            for number, (dx, want) in enumerate(zip(dbottoms, needs_grad, strict=True))
        ]

    def _to_device(self, array: AnyArray, role: str) -> AnyArray:
        """The array in the order of memory, as float32, on the network's device."""
        seen = np.ascontiguousarray(to_nhwc(np.asarray(array)), np.float32)
        seen = seen.reshape(to_nhwc(np.asarray(array)).shape)  # a scalar keeps its shape ()
        if backends.backend_of(self._like) == backends.HOST:
            return seen
        device_array = self.work.take(role, seen.shape, self._like)
        backends.copy(seen, device_array)
        return device_array


class SourceLayer(Layer):
    """A layer without bottoms; its tops are the columns of the batch with the tops' names."""

    BOTTOMS = range(1)
    COLUMNS: ClassVar[bool] = True  # whether the tops are columns of the batch

    @abstractmethod
    def read(self, top: int, batch: Batch, like: AnyArray, step_key: StepKey) -> AnyArray:
        """Top number `top` from its prepared column, on the device of `like`; raises BadInput."""

    def prepare(self, top: int, column: AnyArray, step_key: StepKey) -> AnyArray:
        """The column as the host prepares it for `read`; by default unchanged."""
        return column

    def rows(self, top: int) -> int:
        """The number of rows that the prototxt states for the column of a top."""
        return self.tops[top][0]

    def column_spec(self, top: int) -> ColumnSpec:
        """The column that a top is made of."""
        name, shape = self.spec.top[top], self.tops[top][1:]
        if name == "data":
            return ColumnSpec(name, shape, ColumnKind.IMAGE)
        label = name == "label" and not shape
        return ColumnSpec(name, shape, ColumnKind.LABEL if label else ColumnKind.NUMBERS)

    def fitting(self, top: int, column: AnyArray, shape: Shape) -> AnyArray:
        """The column; its rows must have this shape. Raises BadInput."""
        if column.shape[1:] != shape:
            sizes = "".join(f", {size}" for size in shape)
            raise self.bad(
                f"column {self.spec.top[top]}: expected shape (n{sizes or ','}), got {column.shape}"
            )
        return column

    def forward(self, bottoms: Arrays, weights: Arrays, step_key: StepKey) -> Arrays:
        raise AssertionError("a source is read, not run")

    def column(self, top: int, batch: Batch) -> AnyArray:
        """The batch's column for `top`, which must be there and hold at least one row."""
        name = self.spec.top[top]
        if name not in batch:
            have = ", ".join(batch) or "none"
            raise self.bad(f"expected a column {name} in the batch, got {have}")
        column = batch[name] if hasattr(batch[name], "dtype") else np.asarray(batch[name])
        if column.ndim == 0 or len(column) == 0:
            raise self.bad(f"column {name}: expected at least one row, got shape {column.shape}")
        if column.dtype.kind not in "buif":
            raise self.bad(f"column {name}: expected numbers, got {column.dtype}")
        return column

    def bring_to_device(
        self, column: AnyArray, role: str, dtype: DTypeLike, like: AnyArray
    ) -> AnyArray:
        """The column on the device of `like`: unchanged on the host, as `dtype` for kernels."""
        backend = backends.backend_of(like)
        if not backend.runs_kernels:
            return backends.as_host(column)
        if backends.backend_of(column) == backend and column.dtype == dtype:
            return column
        device_array = self.work.take_as(f"{role} {np.dtype(dtype)}", column.shape, dtype, like)
        backends.copy(column, device_array)
        return device_array

    def numbers(self, top: int, batch: Batch, like: AnyArray) -> AnyArray:
        """A top of plain numbers, as float32, from its column."""
        column = self.fitting(top, self.column(top, batch), self.tops[top][1:])
        device_array = self.bring_to_device(column, f"column{top}", np.float32, like)
        x = self.work.take(f"x{top}", to_nhwc(device_array).shape, like)
        if device_array.ndim == 4:
            image_layout.channels_last(device_array, x)
        else:
            backends.copy(device_array, x)
        return x


def to_nhwc(array: AnyArray) -> AnyArray:
    """From Caffe's order to the order in memory: a view of (n, c, h, w) as (n, h, w, c)."""
    return array.transpose(0, 2, 3, 1) if array.ndim == 4 else array


def to_nchw(array: AnyArray) -> AnyArray:
    """From the order in memory to Caffe's: a view of (n, h, w, c) as (n, c, h, w)."""
    return array.transpose(0, 3, 1, 2) if array.ndim == 4 else array


def caffe_shape(array: AnyArray) -> Shape:
    """The shape in Caffe's order of an array in the order of memory."""
    return to_nchw(array).shape


def flat(array: AnyArray, axis: int, work: Workspace, role: str) -> Array:
    """The array as (product of the axes before `axis`, product of the rest), in Caffe's order.

    It is contiguous; a copy is made only if that is necessary.
    """
    seen = to_nchw(array)
    rows = prod(seen.shape[:axis])
    if not seen.flags.c_contiguous:
        seen = work.take(role, seen.shape, array)
        image_layout.channels_first(array, seen)
    return seen.reshape(rows, -1)


def as_stored(array: AnyArray, work: Workspace, role: str) -> Array:
    """An array in Caffe's order, converted to the order in memory, contiguous."""
    seen: AnyArray = to_nhwc(array)
    if seen.flags.c_contiguous:
        return seen
    copy = work.take(role, seen.shape, array)
    if array.ndim == 4:
        image_layout.channels_last(array, copy)
    else:
        backends.copy(seen, copy)
    return copy


def contiguous(array: Array, work: Workspace, role: str) -> Array:
    """The array if it is contiguous, else a contiguous copy."""
    if array.flags.c_contiguous:
        return array
    copy = work.take(role, array.shape, array)
    backends.copy(array, copy)
    return copy


def by_channel(array: AnyArray, axis: int, count: int, work: Workspace, role: str) -> Array:
    """The array with the `count` axes from `axis` on (in Caffe's order) moved last, as one axis.

    It is contiguous; an image with its channels moved last, and a matrix, need no copy.
    """
    if array.ndim == 4 and (axis, count) == (1, 1):
        return contiguous(array, work, role)
    shape = to_nchw(array).shape
    rows, columns, rest = _cut(shape, axis, count)
    seen = flat(array, axis, work, f"{role} in order")
    if rest == 1:
        return seen.reshape(rows, columns)
    moved = work.take(role, (rows, rest, 1, columns), array)
    image_layout.channels_last(seen.reshape(rows, columns, rest, 1), moved)
    return moved


def from_channel(
    moved: Array, shape: Shape, axis: int, count: int, work: Workspace, role: str
) -> AnyArray:
    """The inverse of `by_channel`: an array of `shape` (Caffe's order), in the order of memory."""
    if len(shape) == 4 and (axis, count) == (1, 1):
        return moved
    rows, columns, rest = _cut(shape, axis, count)
    if rest > 1:
        ordered = work.take(f"{role} in order", (rows, columns, rest, 1), moved)
        image_layout.channels_first(moved.reshape(rows, rest, 1, columns), ordered)
        moved = ordered
    return as_stored(moved.reshape(shape), work, role)


def memory_axis(axis: int, axes: int) -> int:
    """The place in memory of an axis in Caffe's order."""
    return (0, 3, 1, 2)[axis] if axes == 4 else axis


def _cut(shape: Shape, axis: int, count: int) -> tuple[int, int, int]:
    return prod(shape[:axis]), prod(shape[axis : axis + count]), prod(shape[axis + count :])


def _to_caffe_order(array: AnyArray) -> AnyArray:
    """The array on the host, as a view in Caffe's order."""
    return to_nchw(as_host(array))
