"""The layers that provide a net's data: Data, ImageData, MemoryData, HDF5Data, CoSData and others.

None of them opens a file here. The batch arrives as columns, and a data layer's tops name the
columns that it reads; an image or a label may also be in the column `data` or `label`. What
`source` names is read by worker/data/sources.py. The transform of images is Caffe's
(worker/caffe/transform.py).
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, TypeVar

import numpy as np

from cupy_kernels.backends import as_host, copy
from cupy_kernels.types import AnyArray
from worker.caffe import fillers
from worker.caffe.caffe_pb2 import (
    CoSDataParameter,
    FillerParameter,
    TransformationParameter,
)
from worker.caffe.layer import Layer, Shape, SourceLayer, StepKey, SupportedFields, to_nhwc
from worker.caffe.transform import FIELDS, Image, Transform, transform_images
from worker.data.columns import ColumnKind, ColumnSpec
from worker.training.model import Batch

ENCODED = frozenset({CoSDataParameter.ENCODED_IMAGE, CoSDataParameter.ENCODED_IMAGE_WITH_DIM})
"""The types of a CoSData top that are images in a file format, such as JPEG."""
_IMAGES = ENCODED | {CoSDataParameter.RAW_IMAGE}
_SIZES = ("num", "channels", "height", "width")
_T = TypeVar("_T")


class _Source(SourceLayer):
    """A data layer with a batch size. Some of its tops are images, and have a transform."""

    TOPS = range(1, 17)

    def set_batch(self, size: int) -> None:
        """Keep the number of rows of a batch; called first."""
        if size < 1:
            raise self.bad(f"expected a batch_size of at least 1, got {size}")
        self.batch_size = size
        self.transforms: dict[int, Transform] = {}

    def add_images(self, top: int, param: TransformationParameter, image: Image) -> Shape:
        """Give a top the transform of images of this shape, and return the shape of a batch."""
        self.transforms[top] = Transform(
            param,
            image,
            training=self.training,
            key=f"{self.key}/{top}",
            read=self.read_blob,
            bad=self.bad,
        )
        return (self.batch_size, *self.transforms[top].shape)

    def rows(self, top: int) -> int:
        return self.batch_size

    def column_spec(self, top: int) -> ColumnSpec:
        if top in self.transforms:
            image = self.transforms[top].image
            return ColumnSpec(self.spec.top[top], image, ColumnKind.IMAGE, self.is_encoded(top))
        return super().column_spec(top)

    def is_encoded(self, top: int) -> bool | None:
        """Return whether a top's images are encoded by the prototxt; None if it does not say."""
        return None

    def check_selected(self, selected: Sequence[str]) -> None:
        """Raise BadInput unless these columns, if there are any, have all that the layer reads."""
        if selected:
            for top in range(len(self.spec.top)):
                self.column_spec(top).find(selected, f"{self.where}: dataframe_column_select")

    def prepare(self, top: int, column: AnyArray, step_key: StepKey) -> AnyArray:
        transform = self.transforms.get(top)
        if transform is None:
            return column
        return transform.on_host(self.fitting(top, column, transform.image), step_key)

    def read(self, top: int, batch: Batch, like: AnyArray, step_key: StepKey) -> AnyArray:
        if top not in self.transforms:
            return self.numbers(top, batch, like)
        column = self.fitting(top, self.column(top, batch), self.tops[top][1:])
        pixel = np.uint8 if column.dtype == np.uint8 else np.float32
        pixels = self.bring_to_device(column, f"pixels{top}", pixel, like)
        return transform_images(self.transforms[top], pixels, self.work, f"x{top}")


class _Images(_Source):
    """A top of images, and optionally a second one of labels."""

    TOPS = range(1, 3)

    def shapes(self, batch_size: int, image: Image) -> tuple[Shape, ...]:
        """Prepare the transform, and return the tops' shapes."""
        self.set_batch(batch_size)
        images = self.add_images(0, self.spec.transform_param, image)
        return (images, (batch_size,))[: len(self.spec.top)]

    def column_spec(self, top: int) -> ColumnSpec:
        if top:
            return ColumnSpec(self.spec.top[top], (), ColumnKind.LABEL)
        return super().column_spec(top)

    def read(self, top: int, batch: Batch, like: AnyArray, step_key: StepKey) -> AnyArray:
        if not top:
            return super().read(top, batch, like, step_key)
        column = self.fitting(top, self.column(top, batch), ())
        whole = column.dtype.kind in "bui"
        return self.bring_to_device(column, "labels", np.int64 if whole else np.float32, like)

    def require_shape(self) -> Image:
        """The (c, h, w) passed in with the prototxt, for layers that do not state it themselves."""
        if self.source_shape is None:
            raise self.bad("the prototxt states no image size; expected data_shape=(c, h, w)")
        return self.source_shape

    @property
    def source_shape(self) -> Image | None:
        """The (c, h, w) of the data: of this layer's own source, where the net has several."""
        row_shape = self.context.row_shapes.get(self.spec.top[0], ())
        return (
            (row_shape[0], row_shape[1], row_shape[2])
            if len(row_shape) == 3
            else self.context.data_shape
        )


class Data(_Images):
    """A database of images: LMDB or LevelDB."""

    SUPPORTED_FIELDS: ClassVar[SupportedFields] = {
        "transform_param": FIELDS,
        "data_param": frozenset(
            {"source", "backend", "batch_size", "prefetch", "force_encoded_color"}
        ),
    }

    def set_up(self) -> tuple[Shape, ...]:
        return self.shapes(self.spec.data_param.batch_size, self.require_shape())


class ImageData(_Images):
    """Image files that a list names, each with its label."""

    SUPPORTED_FIELDS: ClassVar[SupportedFields] = {
        "transform_param": FIELDS,
        "image_data_param": frozenset({
            "source", "batch_size", "shuffle", "new_height", "new_width", "is_color", "root_folder",
        }),
    }  # fmt: skip

    def set_up(self) -> tuple[Shape, ...]:
        return self.shapes(self.spec.image_data_param.batch_size, self.require_shape())


class MemoryData(_Images):
    """Rows in memory, such as a DataFrame; the prototxt states their size, or the data does.

    With a crop the size may be that before the crop, as in CaffeOnSpark, or after, as in Caffe.
    """

    SUPPORTED_FIELDS: ClassVar[SupportedFields] = {
        "transform_param": FIELDS,
        "source_class": frozenset(),
        "memory_data_param": frozenset({
            "batch_size", "channels", "height", "width", "source", "share_in_parallel",
            "dataframe_column_select", "dataframe_format", "image_encoded",
        }),
    }  # fmt: skip

    def set_up(self) -> tuple[Shape, ...]:
        shapes = self._shapes()
        self.check_selected(self.spec.memory_data_param.dataframe_column_select)
        return shapes

    def is_encoded(self, top: int) -> bool | None:
        param = self.spec.memory_data_param
        return param.image_encoded if param.HasField("image_encoded") else None

    def _shapes(self) -> tuple[Shape, ...]:
        param, data_shape = self.spec.memory_data_param, self.source_shape
        said = (param.channels, param.height, param.width)
        if not all(said):
            return self.shapes(param.batch_size, self.require_shape())
        crop = self.spec.transform_param.crop_size
        cropped = data_shape is not None and crop and said == (data_shape[0], crop, crop)
        if data_shape is not None and data_shape != said and not cropped:
            raise self.bad(f"expected images of shape {said}, the data has {data_shape}")
        return self.shapes(
            param.batch_size, data_shape if cropped and data_shape is not None else said
        )


class HDF5Data(_Source):
    """Datasets of HDF5 files, with the tops' names. As in Caffe, they have no transform."""

    SUPPORTED_FIELDS: ClassVar[SupportedFields] = {
        "hdf5_data_param": frozenset({"source", "batch_size", "shuffle"}),
    }

    def set_up(self) -> tuple[Shape, ...]:
        size, known = self.spec.hdf5_data_param.batch_size, self.context.row_shapes
        self.set_batch(size)
        for top in self.spec.top:
            if top not in known:
                raise self.bad(f"expected the shape of a row of {top} from the data, got none")
        return tuple((size, *known[top]) for top in self.spec.top)

    def column_spec(self, top: int) -> ColumnSpec:
        return ColumnSpec(self.spec.top[top], self.tops[top][1:])


class CoSData(_Source):
    """CoSData of CaffeOnSpark: columns of a DataFrame, each with a type, a shape, a transform."""

    SUPPORTED_FIELDS: ClassVar[SupportedFields] = {
        "source_class": frozenset(),
        "cos_data_param": frozenset({
            "source", "batch_size", "top", "dataframe_column_select", "dataframe_format",
        }),
    }  # fmt: skip

    def set_up(self) -> tuple[Shape, ...]:
        param = self.spec.cos_data_param
        self.set_batch(param.batch_size)
        names = [entry.name for entry in param.top]
        if names != list(self.spec.top):
            raise self.bad(
                f"expected tops with the names {', '.join(self.spec.top)}, as the layer, got"
                f" {', '.join(names) or 'none'}"
            )
        shapes = tuple(self._shape(top, entry) for top, entry in enumerate(param.top))
        self.check_selected(param.dataframe_column_select)
        return shapes

    def _shape(self, top: int, stated: CoSDataParameter.TopBlob) -> Shape:
        """The shape of a top; an image gets its transform."""
        whole = (stated.channels, stated.height, stated.width)
        if min(whole) < 1 or stated.sample_num_axes > 3:
            raise self.bad(
                f"top {stated.name}: expected channels, height and width of at least 1 and at most"
                f" 3 axes, got {whole} and {stated.sample_num_axes}"
            )
        if stated.type in _IMAGES:
            shape = self.add_images(top, stated.transform_param, whole)
            out = (stated.out_channels, stated.out_height, stated.out_width)
            if any(want not in {0, got} for want, got in zip(out, shape[1:], strict=True)):
                raise self.bad(f"top {stated.name}: expected an output of {shape[1:]}, got {out}")
            return shape
        row = whole[: stated.sample_num_axes]
        if not stated.transpose:
            return (self.batch_size, *row)
        if len(row) != 1:
            raise self.bad(f"top {stated.name}: transpose: expected 1 axis a row, got {len(row)}")
        return (*row, self.batch_size)

    def column_spec(self, top: int) -> ColumnSpec:
        if top in self.transforms:
            return super().column_spec(top)
        return ColumnSpec(self.spec.top[top], self._row(top))

    def is_encoded(self, top: int) -> bool | None:
        return self.spec.cos_data_param.top[top].type in ENCODED

    def prepare(self, top: int, column: AnyArray, step_key: StepKey) -> AnyArray:
        if top in self.transforms:
            return super().prepare(top, column, step_key)
        # A column of whole labels has no axes apart from its rows.
        rows = column.reshape(-1, *self._row(top)) if column.ndim == 1 else column
        rows = self.fitting(top, rows, self._row(top))
        transposed = self.spec.cos_data_param.top[top].transpose
        return np.ascontiguousarray(as_host(rows).T) if transposed else rows

    def read(self, top: int, batch: Batch, like: AnyArray, step_key: StepKey) -> AnyArray:
        if not self.spec.cos_data_param.top[top].transpose:
            return super().read(top, batch, like, step_key)
        device_array = self.bring_to_device(
            self.column(top, batch), f"column{top}", np.float32, like
        )
        x = self.work.take(f"x{top}", device_array.shape, like)
        copy(device_array, x)
        return x

    def _row(self, top: int) -> Shape:
        stated = self.spec.cos_data_param.top[top]
        return (stated.channels, stated.height, stated.width)[: stated.sample_num_axes]


class Input(SourceLayer):
    """Blobs of given shapes: the caller's columns, as float32."""

    SUPPORTED_FIELDS: ClassVar[SupportedFields] = {"input_param": frozenset({"shape"})}
    TOPS = range(1, 17)

    def set_up(self) -> tuple[Shape, ...]:
        shapes = [tuple(shape.dim) for shape in self.spec.input_param.shape]
        count = len(self.spec.top)
        if len(shapes) not in {1, count}:
            raise self.bad(f"expected 1 or {count} shapes for {count} tops, got {len(shapes)}")
        if any(size < 1 for shape in shapes for size in shape):
            raise self.bad(f"expected dimensions of at least 1, got {shapes}")
        return tuple(shapes * count if len(shapes) == 1 else shapes)

    def read(self, top: int, batch: Batch, like: AnyArray, step_key: StepKey) -> AnyArray:
        return self.numbers(top, batch, like)


class DummyData(SourceLayer):
    """Blobs of given shapes, drawn by fillers, again for each step."""

    SUPPORTED_FIELDS: ClassVar[SupportedFields] = {
        "dummy_data_param": frozenset({
            "data_filler", "shape", "num", "channels", "height", "width",
        })
    }  # fmt: skip
    TOPS = range(1, 1025)
    COLUMNS = False
    captures = False

    def set_up(self) -> tuple[Shape, ...]:
        param = self.spec.dummy_data_param
        data_fillers = list(param.data_filler) or [FillerParameter()]
        shapes = [tuple(shape.dim) for shape in param.shape]
        sizes = (param.num, param.channels, param.height, param.width)
        if any(sizes):  # the older form
            if shapes:
                raise self.bad("expected shapes, or num, channels, height and width, got both")
            numbers = [self._each(field, size) for field, size in zip(_SIZES, sizes, strict=True)]
            shapes = list(zip(*numbers, strict=True))
        shapes, data_fillers = self._each("shape", shapes), self._each("data_filler", data_fillers)
        if any(size < 1 for shape in shapes for size in shape):
            raise self.bad(f"expected dimensions of at least 1, got {shapes}")
        for filler, shape in zip(data_fillers, shapes, strict=True):
            fillers.check(filler, shape, self.where)
        self._fillers = data_fillers
        return tuple(shapes)

    def _each(self, field: str, values: Sequence[_T]) -> list[_T]:
        """One value for each top, from as many or from one for all."""
        count = len(self.spec.top)
        if len(values) not in {1, count}:
            expected = "1" if count == 1 else f"1 or {count}"
            raise self.bad(f"{field}: expected {expected} for {count} tops, got {len(values)}")
        return list(values) * count if len(values) == 1 else list(values)

    def read(self, top: int, batch: Batch, like: AnyArray, step_key: StepKey) -> AnyArray:
        values = np.empty(self.tops[top], np.float32)
        fillers.fill(
            values, f"{self.key}/{top}/{step_key.number}", self._fillers[top], step_key.seed
        )
        x = self.work.take(f"x{top}", to_nhwc(values).shape, like)
        copy(np.ascontiguousarray(to_nhwc(values)), x)
        return x


ROWS: Mapping[str, type[Layer]] = {
    "Data": Data,
    "ImageData": ImageData,
    "MemoryData": MemoryData,
    "HDF5Data": HDF5Data,
    "CoSData": CoSData,
    "Input": Input,
    "DummyData": DummyData,
}
