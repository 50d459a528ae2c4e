"""Where a net's data comes in: Data, MemoryData and Input.

None of them opens a file here. The batch arrives as columns, and a data layer's tops name the
columns it wants; `source` and `backend` in the prototxt are left to whoever reads the data. The
transform is Caffe's: (pixel - mean) * scale.
"""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from cupy_kernels.types import AnyArray, Array
from worker.caffe.layer import Shape, Source, Takes, inward
from worker.model import Batch

_TRANSFORM = frozenset({"scale", "mean_value"})


class _Images(Source):
    """A top of images, and a second one of labels if it is asked for."""

    TOPS = range(1, 3)

    def shapes(self, batch_size: int, image: tuple[int, int, int]) -> tuple[Shape, ...]:
        """The tops' shapes, and the transform made ready."""
        if batch_size < 1:
            raise self.bad("expected a batch_size of at least 1")
        transform = self.spec.transform_param
        means: Sequence[float] = transform.mean_value
        if len(means) not in {0, 1, image[0]}:
            raise self.bad(
                f"expected 1 or {image[0]} mean_value entries, one a channel, got {len(means)}"
            )
        self._mean = np.array(means, np.float32)
        self._scale = np.float32(transform.scale)
        return ((batch_size, *image), (batch_size,))[: len(self.spec.top)]

    def read(self, top: int, batch: Batch) -> AnyArray:
        column = self.column(top, batch)
        if column.shape[1:] != self.tops[top][1:]:
            raise self.bad(
                f"column {self.spec.top[top]}: expected shape (n, {_listed(self.tops[top][1:])}),"
                f" got {column.shape}"
            )
        return column if top else self._transform(column)

    def _transform(self, pixels: AnyArray) -> Array:
        seen = inward(pixels)
        x = self.work.take("x", seen.shape)
        if self._mean.size:
            np.subtract(seen, self._mean, out=x)
            return np.multiply(x, self._scale, out=x)
        return np.multiply(seen, self._scale, out=x, casting="same_kind")

    def given_shape(self) -> tuple[int, int, int]:
        """The (c, h, w) passed in with the prototxt, for layers that do not say it themselves."""
        if self.setting.data_shape is None:
            raise self.bad("the prototxt says no image size; expected data_shape=(c, h, w) with it")
        return self.setting.data_shape


class Data(_Images):
    """A database in Caffe; here the rows that the worker is given."""

    TAKES: ClassVar[Takes] = {
        "transform_param": _TRANSFORM,
        "data_param": frozenset({"source", "backend", "batch_size", "prefetch"}),
    }

    def set_up(self) -> tuple[Shape, ...]:
        return self.shapes(self.spec.data_param.batch_size, self.given_shape())


class MemoryData(_Images):
    """Rows in memory; the image size stands in the prototxt, or is given where it does not."""

    TAKES: ClassVar[Takes] = {
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


class Input(Source):
    """Blobs by shape: whatever the caller passes, as float32."""

    TAKES: ClassVar[Takes] = {"input_param": frozenset({"shape"})}
    TOPS = range(1, 17)

    def set_up(self) -> tuple[Shape, ...]:
        shapes = [tuple(shape.dim) for shape in self.spec.input_param.shape]
        count = len(self.spec.top)
        if len(shapes) not in {1, count}:
            raise self.bad(f"expected 1 or {count} shapes for {count} tops, got {len(shapes)}")
        if any(size < 1 for shape in shapes for size in shape):
            raise self.bad(f"expected dimensions of at least 1, got {shapes}")
        return tuple(shapes * count if len(shapes) == 1 else shapes)

    def read(self, top: int, batch: Batch) -> AnyArray:
        column = self.column(top, batch)
        if column.shape[1:] != self.tops[top][1:]:
            raise self.bad(
                f"column {self.spec.top[top]}: expected shape (n, {_listed(self.tops[top][1:])}),"
                f" got {column.shape}"
            )
        x = self.work.take(f"x{top}", inward(column).shape)
        np.copyto(x, inward(column), casting="unsafe")
        return x


def _listed(sizes: Shape) -> str:
    return ", ".join(str(size) for size in sizes)
