"""A network: the layers that one phase keeps, wired by blob names, with their tensors in one table.

Layers run in the order of the file. For users, a layer with the same name for its top and its
bottom works in place; here every top is a separate value, which takes over the name, so that
nothing that a backward pass needs is lost. If several layers read one value, its gradients are
summed, and so are the gradients of a tensor that layers share by name.

A buffer, such as the statistics of a BatchNorm, is a tensor without a gradient. Its place in the
gradient's arena gets the difference between its old and its new value.

Tensors are named "layer/0", "layer/1" and laid out in Caffe's order, so an arena and a .caffemodel
hold the same bytes. Padding in the arena's gradient is zero.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from cupy_kernels import backends
from cupy_kernels.host_pool import HostPool
from cupy_kernels.ops import eltwise, reduction
from cupy_kernels.ops.reduction.spec import Term
from cupy_kernels.types import AnyArray, Array, Precision
from cupy_kernels.workspace import Workspace
from shards.errors import BadInput
from shards.tables import DenseTable
from worker.caffe import fillers
from worker.caffe.caffe_pb2 import LayerParameter
from worker.caffe.layer import (
    Arrays,
    Layer,
    LayerContext,
    LayerTensor,
    Shape,
    SourceLayer,
    StepKey,
    to_nchw,
    to_nhwc,
)
from worker.caffe.legacy import upgrade
from worker.caffe.phases import NetState, Phase, layers_kept
from worker.caffe.prototxt_faults import list_unsupported
from worker.caffe.registry import LAYERS
from worker.caffe.text import parse_net
from worker.data.columns import ColumnKind, ColumnSpec
from worker.training.model import Batch

TABLE = "weights"
START = StepKey(step=0, seed=0)


class Description(msgspec.Struct, frozen=True):
    """Everything a network is built from, in plain values that can be sent to another machine.

    `data_shape` is (c, h, w), for data layers that do not state it in the prototxt, and
    `row_shapes` are the shapes of a row of other columns; `file` is for errors; `precision` is that
    of products in kernels, if the network runs in kernels. `files` are the files that layers name,
    such as a mean file, as bytes.
    """

    prototxt: str
    phase: Phase = Phase.TRAIN
    stages: tuple[str, ...] = ()
    level: int = 0
    data_shape: tuple[int, int, int] | None = None
    file: str = "net"
    precision: Precision = Precision.FP32
    row_shapes: Mapping[str, Shape] = {}
    files: Mapping[str, bytes] = {}


class Node(msgspec.Struct, frozen=True):
    """A layer in the graph: the values that it reads and computes, and its own tensors.

    `needs_grad` says for each bottom whether its gradient is needed.
    """

    layer: Layer
    bottoms: tuple[int, ...]
    tops: tuple[int, ...]
    tensors: tuple[int, ...]
    needs_grad: tuple[bool, ...]


class Network:
    """A net ready to run. It keeps buffers between calls, so one network serves one thread."""

    def __init__(self, description: Description) -> None:
        self.description = description
        file = description.file
        self.parsed = upgrade(parse_net(description.prototxt, file), file)
        state = NetState(description.phase, description.stages, description.level)
        self.nodes: list[Node] = []
        self._shapes: list[Shape] = []
        self._needs: list[bool] = []
        self._names: dict[str, int] = {}
        self._read: set[int] = set()
        self._columns: dict[int, str] = {}
        self._tensors: list[LayerTensor] = []
        self._shared: dict[str, int] = {}
        pool = HostPool()
        context = LayerContext(
            file,
            description.phase,
            description.data_shape,
            description.precision,
            row_shapes=description.row_shapes,
            files=description.files,
            pool=pool,
        )
        specs = layers_kept(self.parsed, state, file)
        faults = list_unsupported(((layer.name, layer.type) for layer in specs), file)
        if faults:
            raise BadInput(faults)
        for spec in specs:
            self._add(spec, context)
        self._fillers = {tensor.spec.name: tensor.filler for tensor in self._tensors}
        self.table = DenseTable(TABLE, tuple(tensor.spec for tensor in self._tensors))
        self._extents = [
            (start, start + tensor.size, tensor.shape)
            for tensor, start in zip(self.table.tensors, self.table.offsets, strict=True)
        ]
        self._values: dict[int, AnyArray] = {}
        self._last = {value: i for i, node in enumerate(self.nodes) for value in node.bottoms}
        self._work = Workspace(pool)
        self._sums = defaultdict[int, Workspace](lambda: Workspace(pool))

    @property
    def name(self) -> str:
        """The net's name in the prototxt."""
        return self.parsed.name

    @property
    def blobs(self) -> dict[str, Shape]:
        """Every blob's name and its shape in Caffe's order, at the prototxt's batch size."""
        return {name: self._shapes[value] for name, value in self._names.items()}

    @property
    def inputs(self) -> tuple[str, ...]:
        """The columns that a batch must have."""
        return tuple(top for source in self._sources for top in source.spec.top)

    @property
    def _sources(self) -> list[SourceLayer]:
        """The layers with columns of the batch as their tops."""
        layers = [node.layer for node in self.nodes]
        return [x for x in layers if isinstance(x, SourceLayer) and x.COLUMNS]

    @property
    def column_specs(self) -> tuple[ColumnSpec, ...]:
        """The columns that a batch must have, as the rows of data hold them."""
        return tuple(
            source.column_spec(top) for source in self._sources for top in range(len(source.tops))
        )

    @property
    def row_shape(self) -> Shape | None:
        """The shape of one row of the net's images, before a crop; None for a net without any."""
        kinds = (column.shape for column in self.column_specs if column.kind is ColumnKind.IMAGE)
        return next(kinds, None)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The blobs that no layer reads: losses, accuracies, probabilities."""
        return tuple(name for name, value in self._names.items() if value not in self._read)

    @property
    def figures(self) -> tuple[str, ...]:
        """The outputs that are one number a batch: losses and accuracies."""
        return tuple(name for name in self.outputs if self.blobs[name] == ())

    @property
    def batch_size(self) -> int:
        """The first input's leading dimension: rows a step on one device."""
        if not self.inputs:
            raise BadInput(f"{self.description.file}: the net has no data layer in this phase")
        return next(source.rows(0) for source in self._sources)

    def check(self, batch: Batch) -> None:
        """Raise BadInput unless those of the net's columns that are present are of one length.

        Columns for which the prototxt states different lengths (of time and of rows) may differ.
        """
        stated: dict[int, dict[str, int]] = {}
        for source in self._sources:
            for top, name in enumerate(source.spec.top):
                if name in batch:
                    stated.setdefault(source.rows(top), {})[name] = len(batch[name])
        for rows in stated.values():
            if len(set(rows.values())) > 1:
                raise BadInput(self.description.file, expected="columns of one length", got=rows)

    def columns(self, batch: Batch) -> dict[str, AnyArray]:
        """The columns that the net reads, each checked alone, and all checked for equal length."""
        columns = {
            name: source.column(top, batch)
            for source in self._sources
            for top, name in enumerate(source.spec.top)
        }
        self.check(columns)
        self._check_values(columns)
        return columns

    def prepare(self, batch: Batch, step_key: StepKey) -> Batch:
        """The batch as `forward` takes it, after the steps of data layers that the host computes.

        They are a random crop, for example. Columns that are not there are left out.
        """
        prepared = dict(batch)
        for source in self._sources:
            for top, name in enumerate(source.spec.top):
                if name in batch:
                    prepared[name] = source.prepare(top, source.column(top, batch), step_key)
        return prepared

    def tensors_for(self, blobs: Collection[str]) -> frozenset[str]:
        """The names of the tensors that the named blobs depend on."""
        needed = self._find_needed(blobs)
        nodes = [node for node in self.nodes if needed.intersection(node.tops)]
        return frozenset(self._tensors[i].spec.name for node in nodes for i in node.tensors)

    def columns_for(self, blobs: Collection[str]) -> frozenset[str]:
        """The columns of a batch that the named blobs depend on."""
        needed = self._find_needed(blobs)
        return frozenset(name for value, name in self._columns.items() if value in needed)

    @property
    def layer_tensors(self) -> dict[str, tuple[str, ...]]:
        """The names of each layer's tensors, by layer; layers without tensors are left out.

        A shared tensor has the name of the first of its layers.
        """
        return {
            node.layer.name: tuple(self._tensors[i].spec.name for i in node.tensors)
            for node in self.nodes
            if node.tensors
        }

    @property
    def learnable_tensors(self) -> frozenset[str]:
        """The names of the tensors that training changes.

        Those are the tensors with an lr_mult other than 0 which a loss sends a gradient to.
        """
        reached, names = set(self._losses()), set[str]()
        for node in reversed(self.nodes):
            if not reached.intersection(node.tops):
                continue
            reached.update(
                value for value, needs in zip(node.bottoms, node.needs_grad, strict=True) if needs
            )
            names.update(self._tensors[i].spec.name for i in node.tensors if self._trains(i))
        return frozenset(names)

    @property
    def buffers(self) -> frozenset[str]:
        """The names of the tensors without a gradient, which layers change by themselves."""
        return frozenset(tensor.spec.name for tensor in self._tensors if tensor.spec.buffer)

    def initial(self, seed: int) -> NDArray[np.float32]:
        """A new arena, with each tensor drawn by its filler for `seed`."""
        arena = self.table.empty()
        for name, tensor in self.table.views(arena).items():
            fillers.fill(tensor, name, self._fillers[name], seed)
        return arena

    def reset(self) -> None:
        """Forget what layers keep from one forward pass for the next: the state of an LSTM."""
        for node in self.nodes:
            node.layer.reset()

    @property
    def keeps_state(self) -> bool:
        """True if a layer keeps something from one forward pass for the next."""
        return any(type(node.layer).reset is not Layer.reset for node in self.nodes)

    def forward(
        self,
        weights: Array,
        batch: Batch,
        step_key: StepKey = START,
        blobs: Collection[str] | None = None,
        *,
        release: bool = False,
    ) -> None:
        """Compute all values, or those that the blobs `blobs` depend on, for `blob` to read.

        `batch` is what `prepare` returns; a net without a crop, a mirror, a mean file or a
        transposed column takes it as it is.
        The network runs on the device that holds `weights`; columns may be there or on the host.
        With `release`, each blob is dropped behind its last reader: layers then keep only what a
        backward pass needs.
        """
        tensors = self._bind(weights)
        if backends.backend_of(weights).runs_kernels:
            self._check_values(batch, blobs)
        needed = None if blobs is None else self._find_needed(blobs)
        self._values, losses = {}, self._losses()
        for number, node in enumerate(self.nodes):
            if needed is not None and not needed.intersection(node.tops):
                continue
            if isinstance(node.layer, SourceLayer):
                for top, value in enumerate(node.tops):
                    if needed is None or value in needed:
                        self._values[value] = node.layer.read(top, batch, weights, step_key)
                continue
            bottoms = [self._values[value] for value in node.bottoms]
            tops = node.layer.forward(bottoms, _of(node, tensors), step_key)
            self._values.update(zip(node.tops, tops, strict=True))
            if release:
                for value in set(node.bottoms).difference(losses):
                    if self._last[value] == number:
                        del self._values[value]
                del bottoms

    def blob(self, name: str) -> AnyArray:
        """A copy of a blob of the latest forward pass, in Caffe's order."""
        return _caffes(self._values[self._names[name]])

    @property
    def loss_weights(self) -> tuple[float, ...]:
        """The weight of each loss in their sum, in the order of `losses`."""
        return tuple(self._losses().values())

    def losses(self) -> list[AnyArray]:
        """The losses of the latest forward pass, arrays without axes, on the network's device."""
        return [self._total(value) for value in self._losses()]

    def loss(self) -> float:
        """Wait for the latest forward pass; return the weighted sum of its losses."""
        pairs = zip(self.loss_weights, self.losses(), strict=True)
        return float(sum(weight * float(backends.as_host(loss)) for weight, loss in pairs))

    def backward(
        self, weights: Array, out: Array, seeds: Mapping[str, AnyArray] | None = None
    ) -> dict[str, AnyArray]:
        """Write the gradient of the latest forward pass into `out`, an arena in the same place.

        It starts from the losses, or from the blobs' gradients in `seeds`. Returns the gradients,
        in Caffe's order, of the inputs that have one; without force_backward no input has one.
        """
        tensors, into = self._bind(weights), self._bind(out)
        out.fill(0.0)
        gradients = self._seeds(seeds, out)
        summed: set[int] = set()
        written: set[int] = set()
        for node in reversed(self.nodes):
            for index, change in node.layer.buffer_changes().items():
                backends.copy(change, into[node.tensors[index]])
            if isinstance(node.layer, SourceLayer):
                continue
            tops = [gradients.pop(value, None) for value in node.tops]
            if all(top is None for top in tops):
                continue
            if not any(node.needs_grad) and not node.tensors:
                continue
            outputs = self._gradient_arrays(node, into, written)
            dbottoms = node.layer.backward(tops, _of(node, tensors), outputs, node.needs_grad)
            self._merge(node, outputs, into, written)
            for value, gradient in zip(node.bottoms, dbottoms, strict=True):
                if gradient is not None and value in gradients:
                    gradient = self._sum(value, gradients[value], gradient, summed)
                if gradient is not None:
                    gradients[value] = gradient
            del tops, dbottoms, gradient
        return {
            name: _caffes(gradients[self._names[name]])
            for name in self.inputs
            if self._names[name] in gradients
        }

    def _add(self, spec: LayerParameter, context: LayerContext) -> None:
        """Build one layer on the values that earlier layers compute."""
        where = f"{context.file}: layer {spec.name} ({spec.type})"
        namesakes = [node for node in self.nodes if node.layer.name == spec.name]
        for name in spec.bottom:
            if name not in self._names:
                raise BadInput(f"{where}: no layer before this one makes its bottom {name}")
        bottoms = tuple(self._names[name] for name in spec.bottom)
        makers = tuple(self._maker(value).name for value in bottoms)
        context = msgspec.structs.replace(context, makers=makers, namesakes=len(namesakes))
        kind = LAYERS[spec.type]
        if kind.LOSS and not spec.top:  # as in Caffe, its top may be left out
            spec.top.append(spec.name if spec.name not in self._names else f"{spec.name} (loss)")
        layer = kind(spec, [self._shapes[value] for value in bottoms], context)
        if layer.owned and any(node.tensors for node in namesakes):
            raise BadInput(where, expected="a unique name, another layer with tensors has it")
        needs_grad = [self._needs[value] for value in bottoms]
        for index, propagates in enumerate(spec.propagate_down):
            needs_grad[index] = propagates
        for label in layer.LABELS.intersection(range(len(needs_grad))):
            # force_backward asks for every gradient that exists; labels have none.
            if needs_grad[label] and not self.parsed.force_backward:
                raise layer.bad(f"{spec.bottom[label]}: labels have no gradient")
            needs_grad[label] = False
        if list(spec.top) == list(spec.bottom) and bottoms[0] not in self._read:
            layer.fuse_into(self._maker(bottoms[0]))
        self._read.update(bottoms)
        tensors = tuple(self._tensor(layer, tensor) for tensor in layer.owned)
        trains = any(self._trains(index) for index in tensors)
        needs = (
            any(needs_grad)
            or trains
            or (isinstance(layer, SourceLayer) and self.parsed.force_backward)
        )
        tops = tuple(
            self._make(layer, name, shape, needs)
            for name, shape in zip(spec.top, layer.tops, strict=True)
        )
        if isinstance(layer, SourceLayer) and layer.COLUMNS:
            self._columns.update(zip(tops, spec.top, strict=True))
        self.nodes.append(Node(layer, bottoms, tops, tensors, tuple(needs_grad)))

    def _make(self, layer: Layer, name: str, shape: Shape, needs: bool) -> int:
        if name in self._names and name not in layer.spec.bottom:
            raise layer.bad(f"another layer makes the top {name} already")
        self._names[name] = len(self._shapes)
        self._shapes.append(shape)
        self._needs.append(needs)
        return self._names[name]

    def _maker(self, value: int) -> Layer:
        return next(node.layer for node in self.nodes if value in node.tops)

    def _trains(self, index: int) -> bool:
        """Return whether a tensor learns; Caffe computes no gradient where lr_mult is 0."""
        return self._tensors[index].spec.lr_mult != 0

    def _tensor(self, layer: Layer, tensor: LayerTensor) -> int:
        """The number of a layer's tensor: a new one, or one that another layer shares with it."""
        first = self._shared.get(tensor.shared) if tensor.shared else None
        if first is not None:
            spec = self._tensors[first].spec
            fits = (
                spec.size == tensor.spec.size if tensor.loose else spec.shape == tensor.spec.shape
            )
            if not fits:
                raise layer.bad(
                    f"param {tensor.shared}: expected the shape of {spec.name}, {spec.shape}, got"
                    f" {tensor.spec.shape}"
                )
            return first
        self._tensors.append(tensor)
        if tensor.shared:
            self._shared[tensor.shared] = len(self._tensors) - 1
        return len(self._tensors) - 1

    def _gradient_arrays(
        self, node: Node, into: Arrays, written: set[int]
    ) -> list[AnyArray | None]:
        """Where a layer writes its tensors' gradients: in the arena, or aside for a second part."""
        outputs: list[AnyArray | None] = []
        for index, view in zip(node.tensors, _of(node, into), strict=True):
            if not self._trains(index):
                outputs.append(None)
            elif index in written:
                outputs.append(self._work.take(f"part{index}", view.shape, view))
            else:
                outputs.append(view)
        return outputs

    def _merge(
        self, node: Node, outputs: list[AnyArray | None], into: Arrays, written: set[int]
    ) -> None:
        """Add the second and later parts of shared tensors' gradients to the first."""
        for index, output in zip(node.tensors, outputs, strict=True):
            if output is not None and index in written:
                eltwise.accumulate(output.reshape(into[index].shape), into[index])
            written.add(index)

    def _total(self, value: int) -> AnyArray:
        """The sum of a value's numbers, without axes, on its device."""
        array = self._values[value]
        if array.ndim == 0:
            return array
        rows = array.reshape(1, -1)
        return reduction.row_sums(rows, Term.VALUES, 1.0, self._sums[value]).reshape(())

    def _bind(self, arena: Array) -> list[Array]:
        """The tensors as views of an arena, a float32 array of the table's size."""
        if arena.shape != (self.table.size,) or arena.dtype != np.float32:
            raise BadInput(
                self.description.file,
                expected=f"an arena of {self.table.size} float32",
                got=f"shape {arena.shape} of {arena.dtype}",
            )
        return [arena[start:stop].reshape(shape) for start, stop, shape in self._extents]

    def _check_values(self, batch: Batch, blobs: Collection[str] | None = None) -> None:
        """Have each wanted layer check the columns that it reads, if they are on the host."""
        needed = None if blobs is None else self._find_needed(blobs)
        for node in self.nodes:
            if needed is not None and not needed.intersection(node.tops):
                continue
            for bottom, value in enumerate(node.bottoms):
                column = batch.get(self._columns.get(value, ""))
                if column is not None and backends.backend_of(column) == backends.HOST:
                    node.layer.check_column(bottom, column)

    def _find_needed(self, names: Collection[str]) -> set[int]:
        """The values of the named blobs, and all values that they depend on."""
        unknown = [name for name in names if name not in self._names]
        if unknown:
            raise BadInput(
                f"{self.description.file}: no blob {unknown[0]}; expected among"
                f" {', '.join(self._names)}"
            )
        values = {self._names[name] for name in names}
        for node in reversed(self.nodes):
            if values.intersection(node.tops):
                values.update(node.bottoms)
        return values

    def _losses(self) -> dict[int, float]:
        weights = {
            value: node.layer.loss_weight(top)
            for node in self.nodes
            for top, value in enumerate(node.tops)
        }
        return {value: weight for value, weight in weights.items() if weight}

    def _sum(self, value: int, first: Array, more: Array, summed: set[int]) -> Array:
        """The sum of two gradients of a value, in separate memory: `first` may be a layer's own."""
        if value not in summed:
            total = self._work.take(f"sum{value}", first.shape, first)
            backends.copy(first, total)
            summed.add(value)
            first = total
        eltwise.accumulate(more, first)
        return first

    def _seed(self, value: int, weight: float) -> Array:
        """The gradient of the net's loss by one of its terms: the weight of each number."""
        array = self._values[value]
        if array.ndim == 0:
            return np.asarray(weight, np.float32)
        seed = self._work.take(f"seed{value}", array.shape, array)
        seed.fill(weight)
        return seed

    def _seeds(self, gradients: Mapping[str, AnyArray] | None, like: Array) -> dict[int, Array]:
        """The gradients that a backward pass starts from; those of losses stay on the host."""
        if gradients is None:
            return {value: self._seed(value, w) for value, w in self._losses().items()}
        seeds = {}
        for name, gradient in gradients.items():
            seed = np.array(to_nhwc(gradient), np.float32, order="C")
            seeds[self._names[name]] = (
                seed if seed.ndim == 0 else backends.copy_to(seed, backends.backend_of(like))
            )
        return seeds


def _caffes(array: AnyArray) -> AnyArray:
    """A copy on the host, in Caffe's order."""
    return np.array(to_nchw(backends.as_host(array)), order="C")


def _of(node: Node, tensors: Arrays) -> list[AnyArray]:
    """A layer's own tensors of all, in the shapes that it declares."""
    return [
        tensors[index].reshape(owned.spec.shape)
        for index, owned in zip(node.tensors, node.layer.owned, strict=True)
    ]
