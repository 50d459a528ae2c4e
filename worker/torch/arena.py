"""The weights of a PyTorch model in one flat array, as the shards have them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shards.errors import BadInput
from shards.tables import Layout, TensorSpec
from worker.torch.model_tensors import check_names, load_torch, tensors_of

Floats = NDArray[np.float32]


class Arena:
    """One flat array of the tables' size that the model's parameters and buffers are views of."""

    def __init__(self, model: Any, layout: Layout) -> None:
        self.layout = layout
        torch = load_torch()
        trained, buffers = tensors_of("wrap", model)
        tensors = {**trained, **buffers}
        check_names(
            "wrap: the job's table",
            trained,
            tensors,
            {spec.name for table in layout.tables for spec in table.tensors},
        )
        devices = {tensor.device for tensor in tensors.values()}
        if len(devices) != 1:
            named = ", ".join(sorted(map(str, devices)))
            raise BadInput("wrap: model", expected="one device", got=named)
        self._host = layout.empty()
        self._on_device = torch.from_numpy(self._host).to(*devices)  # on the CPU the same memory
        self._trained = trained
        self._buffers: dict[str, tuple[Any, str, Any]] = {}
        self._slices: dict[str, tuple[slice, tuple[int, ...]]] = {}
        modules = dict(model.named_modules())
        for spec, start in _places(layout):
            if tuple(tensors[spec.name].shape) != spec.shape:
                got = tuple(tensors[spec.name].shape)
                raise BadInput(f"wrap: {spec.name}", expected=f"shape {spec.shape}", got=got)
            if spec.buffer != (spec.name in buffers):
                raise BadInput(
                    f"wrap: {spec.name}",
                    expected=(
                        "a buffer of the model to be one of the table: "
                        "worker.torch.params describes it"
                    ),
                )
            extent = slice(start, start + spec.size)
            view = self._on_device[extent].view(spec.shape)
            if spec.buffer:
                path, _, attribute = spec.name.rpartition(".")
                self._slices[spec.name] = (extent, spec.shape)
                self._buffers[spec.name] = modules[path], attribute, view
            else:
                trained[spec.name].data = view
        self._attach()

    def show(self, weights: Floats) -> None:
        """Give the model these weights."""
        if weights is not self._host:
            np.copyto(self._host, weights)
        if self._on_device.device.type != "cpu":
            self._on_device.copy_(load_torch().from_numpy(self._host))
        self._attach()

    def read(self) -> Floats:
        """The model's weights and buffers: memory that they are in, or are copied to."""
        self._gather()
        if self._on_device.device.type != "cpu":
            self._host[:] = self._on_device.cpu().numpy()
        return self._host

    def gradients(self, weights: Floats) -> dict[str, Any]:
        """The gradients by name; of buffers what they lost since the model was given `weights`."""
        gradients = {name: parameter.grad for name, parameter in self._trained.items()}
        if self._buffers:
            now = self.read()
            for name, (extent, shape) in self._slices.items():
                gradients[name] = (weights[extent] - now[extent]).reshape(shape)
        return gradients

    def _attach(self) -> None:
        """Make the buffers views."""
        for module, attribute, view in self._buffers.values():
            module._buffers[attribute] = view

    def _gather(self) -> None:
        """Copy buffers that the model has replaced by assignment."""
        with load_torch().no_grad():
            for module, attribute, view in self._buffers.values():
                if module._buffers[attribute] is not view:
                    view.copy_(module._buffers[attribute])


def _places(layout: Layout) -> list[tuple[TensorSpec, int]]:
    """Each tensor, and where it begins in the arena."""
    return [
        (spec, layout.section(table.name).start + offset)
        for table in layout.tables
        for spec, offset in zip(table.tensors, table.offsets, strict=True)
    ]
