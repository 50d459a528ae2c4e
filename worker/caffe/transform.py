"""Caffe's transform of images: (pixel - mean) * scale, after a crop and a mirror.

The mean is a value for each channel, or an image from a file. A mean image has the size of the
images before the crop, and each pixel is subtracted from the one at its own place. In the TRAIN
phase the crop is at a random place, else in the centre. The mirror is random in both phases.

The crop, the mirror and a mean image are computed on the host, wherever the network runs, and the
other steps by the network's backend. Random numbers depend on the seed, the step and the layer's
name alone.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.backends import as_host, backend_of, copy_to
from cupy_kernels.ops import image_layout
from cupy_kernels.types import AnyArray, Array
from cupy_kernels.workspace import Workspace
from shards.errors import BadInput
from worker.caffe import fillers
from worker.caffe.caffe_pb2 import TransformationParameter
from worker.caffe.layer import StepKey

FIELDS = frozenset(
    {"scale", "mirror", "crop_size", "mean_file", "mean_value", "force_color", "force_gray"}
)
"""The fields of `transform_param` that are honoured; the last two apply to encoded images."""

Image = tuple[int, int, int]


class Transform:
    """The transform of images of shape `image`, (channels, height, width), for one top of a layer.

    `key` separates its random numbers from those of other layers. `read` returns the array in a
    file of one blob, and `bad` makes an error that names the layer.
    """

    def __init__(
        self,
        param: TransformationParameter,
        image: Image,
        *,
        training: bool,
        key: str,
        read: Callable[[str], NDArray[np.float32]],
        bad: Callable[[str], BadInput],
    ) -> None:
        self.image = image
        self._param = param
        self._training = training
        self._key = key
        self._bad = bad
        channels, height, width = image
        crop = param.crop_size
        if crop > min(height, width):
            raise bad(f"expected a crop_size of at most {min(height, width)}, got {crop}")
        self.shape: Image = (channels, crop, crop) if crop else image
        if param.mean_file and param.mean_value:
            raise bad("expected a mean_file or mean_value entries, got both")
        self._means = self._values()
        self._mean_image = self._from_file(read) if param.mean_file else None

    def on_host(self, pixels: AnyArray, step_key: StepKey) -> AnyArray:
        """Crop and mirror the images (n, c, h, w), and subtract a mean image, in a new array.

        The images themselves are returned if nothing of this is wanted.
        """
        if not self._param.crop_size and not self._param.mirror and self._mean_image is None:
            return pixels
        pixels = as_host(pixels)
        tops, lefts, flips = self._places(len(pixels), step_key)
        _, height, width = self.shape
        kind = pixels.dtype if self._mean_image is None else np.dtype(np.float32)
        out = np.empty((len(pixels), *self.shape), kind)
        for row, (top, left_edge, flip) in enumerate(zip(tops, lefts, flips, strict=True)):
            part = (slice(None), slice(top, top + height), slice(left_edge, left_edge + width))
            image = pixels[row][part]
            if self._mean_image is not None:
                image = image - self._mean_image[part]
            out[row] = image[:, :, ::-1] if flip else image
        return out

    def in_backend(self, pixels: AnyArray, out: Array) -> None:
        """Subtract the channels' means from (n, c, h, w) and scale, into `out` (n, h, w, c)."""
        if self._means is not None and backend_of(self._means) != backend_of(out):
            self._means = copy_to(self._means, backend_of(out))
        image_layout.images(pixels, self._means, self._param.scale, out)

    def _places(self, rows: int, step_key: StepKey) -> tuple[list[int], list[int], list[bool]]:
        """For each row where its crop begins, from the top and from the left; whether it flips."""
        spare = (self.image[1] - self.shape[1], self.image[2] - self.shape[2])
        starts = [[room // 2] * rows for room in spare]
        flips = [False] * rows
        random_crop = self._training and self._param.crop_size
        if random_crop or self._param.mirror:
            dice = fillers.generator(step_key.seed, f"{self._key}/{step_key.number}")
            if random_crop:
                starts = [dice.integers(0, room + 1, rows).tolist() for room in spare]
            if self._param.mirror:
                flips = (dice.integers(0, 2, rows) == 1).tolist()
        return starts[0], starts[1], flips

    def _values(self) -> Array | None:
        """A mean for each channel, or None."""
        means, channels = list(self._param.mean_value), self.image[0]
        if len(means) not in {0, 1, channels}:
            raise self._bad(
                f"expected 1 or {channels} mean_value entries, one per channel, got {len(means)}"
            )
        if not means:
            return None
        return np.array(means if len(means) == channels else means * channels, np.float32)

    def _from_file(self, read: Callable[[str], NDArray[np.float32]]) -> NDArray[np.float32]:
        """The mean image, in the shape of the images before the crop."""
        mean = read(self._param.mean_file)
        shape = (1,) * (4 - mean.ndim) + mean.shape
        if shape != (1, *self.image):
            raise self._bad(
                f"mean_file {self._param.mean_file}: expected a mean of {_times(self.image)}, as"
                f" the images before the crop, got {_times(mean.shape)}"
            )
        if not np.isfinite(mean).all():
            raise self._bad(f"mean_file {self._param.mean_file}: expected finite numbers")
        return mean.reshape(self.image)


def transform_images(transform: Transform, pixels: AnyArray, work: Workspace, role: str) -> Array:
    """The images (n, h, w, c) float32 in `work`, on the device of `pixels`."""
    n, c, h, w = pixels.shape
    x = work.take(role, (n, h, w, c), pixels)
    transform.in_backend(pixels, x)
    return x


def _times(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "no axes"
