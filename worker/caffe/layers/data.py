"""The layers that provide a net's data: Data, MemoryData, Input and DummyData.

None of them opens a file here. The batch arrives as columns, and a data layer's tops name the
columns that it reads; `source` and `backend` in the prototxt have no effect here. The transform is
Caffe's: (pixel - mean) * scale.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from cupy_kernels import layout
from cupy_kernels.backends import backend_of, copied, copy
from cupy_kernels.types import AnyArray, Array
from worker.caffe import fillers
from worker.caffe.caffe_pb2 import FillerParameter
from worker.caffe.layer import Layer, Shape, SourceLayer, StepKey, Takes, to_nhwc
from worker.model import Batch

_TRANSFORM = frozenset({"scale", "mean_value"})


class _Images(SourceLayer):
    """A top of images, and optionally a second one of labels."""

    TOPS = range(1, 3)

    def shapes(self, batch_size: int, image: tuple[int, int, int]) -> tuple[Shape, ...]:
        """Prepare the transform, and return the tops' shapes."""
        if batch_size < 1:
            raise self.bad("expected a batch_size of at least 1")
        transform = self.spec.transform_param
        means: Sequence[float] = transform.mean_value
        if len(means) not in {0, 1, image[0]}:
            raise self.bad(
                f"expected 1 or {image[0]} mean_value entries, one a channel, got {len(means)}"
            )
        each = [*means] if len(means) == image[0] else [*means] * image[0]
        self._mean: Array | None = np.array(each, np.float32) if means else None
        self._scale = transform.scale
        return ((batch_size, *image), (batch_size,))[: len(self.spec.top)]

    def read(self, top: int, batch: Batch, like: AnyArray, moment: StepKey) -> AnyArray:
        column = self.column(top, batch)
        if column.shape[1:] != self.tops[top][1:]:
            raise self.bad(
                f"column {self.spec.top[top]}: expected shape (n, {_listed(self.tops[top][1:])}),"
                f" got {column.shape}"
            )
        if top:
            whole = column.dtype.kind in "bui"
            return self.brought(column, "labels", np.int64 if whole else np.float32, like)
        pixel = np.uint8 if column.dtype == np.uint8 else np.float32
        return self._transform(self.brought(column, "pixels", pixel, like))

    def _transform(self, pixels: AnyArray) -> Array:
        x = self.work.take("x", to_nhwc(pixels).shape, pixels)
        if self._mean is not None and backend_of(self._mean) != backend_of(x):
            self._mean = copied(self._mean, backend_of(x))
        layout.images(pixels, self._mean, self._scale, x)
        return x

    def given_shape(self) -> tuple[int, int, int]:
        """The (c, h, w) passed in with the prototxt, for layers that do not state it themselves."""
        if self.setting.data_shape is None:
            raise self.bad("the prototxt states no image size; expected data_shape=(c, h, w)")
        return self.setting.data_shape


class Data(_Images):
    """A database in Caffe; here the rows of the worker's batches."""

    SUPPORTED_FIELDS: ClassVar[Takes] = {
        "transform_param": _TRANSFORM,
        "data_param": frozenset({"source", "backend", "batch_size", "prefetch"}),
    }

    def set_up(self) -> tuple[Shape, ...]:
        return self.shapes(self.spec.data_param.batch_size, self.given_shape())


class MemoryData(_Images):
    """Rows in memory; the image size is in the prototxt, or passed in with it."""

    SUPPORTED_FIELDS: ClassVar[Takes] = {
        "transform_param": _TRANSFORM,
        "memory_data_param": frozenset(
            {
                "batch_size",
                "channels",
                "height",
                "width",
                "source",
                "share_in_parallel",
            }
        ),
    }

    def set_up(self) -> tuple[Shape, ...]:
        param, given = self.spec.memory_data_param, self.setting.data_shape
        said = (param.channels, param.height, param.width)
        if not all(said):
            return self.shapes(param.batch_size, self.given_shape())
        if given is not None and given != said:
            raise self.bad(f"expected images of shape {said}, the data has {given}")
        return self.shapes(param.batch_size, said)


class Input(SourceLayer):
    """Blobs of given shapes: the caller's columns, as float32."""

    SUPPORTED_FIELDS: ClassVar[Takes] = {"input_param": frozenset({"shape"})}
    TOPS = range(1, 17)

    def set_up(self) -> tuple[Shape, ...]:
        shapes = [tuple(shape.dim) for shape in self.spec.input_param.shape]
        count = len(self.spec.top)
        if len(shapes) not in {1, count}:
            raise self.bad(f"expected 1 or {count} shapes for {count} tops, got {len(shapes)}")
        if any(size < 1 for shape in shapes for size in shape):
            raise self.bad(f"expected dimensions of at least 1, got {shapes}")
        return tuple(shapes * count if len(shapes) == 1 else shapes)

    def read(self, top: int, batch: Batch, like: AnyArray, moment: StepKey) -> AnyArray:
        column = self.column(top, batch)
        if column.shape[1:] != self.tops[top][1:]:
            raise self.bad(
                f"column {self.spec.top[top]}: expected shape (n, {_listed(self.tops[top][1:])}),"
                f" got {column.shape}"
            )
        there = self.brought(column, f"column{top}", np.float32, like)
        x = self.work.take(f"x{top}", to_nhwc(there).shape, like)
        if there.ndim == 4:
            layout.channels_last(there, x)
        else:
            copy(there, x)
        return x


class DummyData(SourceLayer):
    """Blobs of given shapes, drawn by fillers, again for each step."""

    SUPPORTED_FIELDS: ClassVar[Takes] = {
        "dummy_data_param": frozenset({
            "data_filler", "shape", "num", "channels", "height", "width",
        })
    }  # fmt: skip
    TOPS = range(1, 1025)
    COLUMNS = False
    captures = False

    def set_up(self) -> tuple[Shape, ...]:
        param, count = self.spec.dummy_data_param, len(self.spec.top)
        old = zip(param.num, param.channels, param.height, param.width, strict=False)
        shapes = [tuple(shape.dim) for shape in param.shape] or [tuple(shape) for shape in old]
        given = list(param.data_filler) or [FillerParameter()]
        for what, found in (("shapes", shapes), ("data_fillers", given)):
            if len(found) not in {1, count}:
                raise self.bad(f"expected 1 or {count} {what} for {count} tops, got {len(found)}")
        if any(size < 1 for shape in shapes for size in shape):
            raise self.bad(f"expected dimensions of at least 1, got {shapes}")
        for filler in given:
            fillers.check(filler, self.where)
        self._fillers = given * count if len(given) == 1 else given
        return tuple(shapes * count if len(shapes) == 1 else shapes)

    def read(self, top: int, batch: Batch, like: AnyArray, moment: StepKey) -> AnyArray:
        values = np.empty(self.tops[top], np.float32)
        fillers.fill(values, f"{self.name}/{top}/{moment.number}", self._fillers[top], moment.seed)
        x = self.work.take(f"x{top}", to_nhwc(values).shape, like)
        copy(np.ascontiguousarray(to_nhwc(values)), x)
        return x


def _listed(sizes: Shape) -> str:
    return ", ".join(str(size) for size in sizes)


ROWS: Mapping[str, type[Layer]] = {
    "Data": Data,
    "MemoryData": MemoryData,
    "Input": Input,
    "DummyData": DummyData,
}
