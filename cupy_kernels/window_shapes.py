"""The shapes of operations with a sliding window over an image: convolution, pooling, LRN.

Each pair is (vertical, horizontal).
"""

from dataclasses import dataclass

from cupy_kernels.types import Precision


@dataclass(frozen=True)
class Convolution:
    """The shape of a convolution, without its weights."""

    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    pad: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    group: int = 1
    precision: Precision = Precision.FP32

    def output(self, height: int, width: int) -> tuple[int, int]:
        """The output's size, rounded down; below 1 where the kernel does not fit."""
        rows, columns = (
            (size + 2 * pad - (dilation * (kernel - 1) + 1)) // stride + 1
            for size, kernel, stride, pad, dilation in zip(
                (height, width), self.kernel, self.stride, self.pad, self.dilation, strict=True
            )
        )
        return rows, columns


@dataclass(frozen=True)
class Pooling:
    """The shape of a pooling, with Caffe's rules for the border; see `pooling`."""

    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    pad: tuple[int, int] = (0, 0)
    round_up: bool = True

    def output(self, height: int, width: int) -> tuple[int, int]:
        """The output's size; below 1 where the kernel does not fit."""
        return self._along(0, height), self._along(1, width)

    def _along(self, axis: int, size: int) -> int:
        stride, pad = self.stride[axis], self.pad[axis]
        span = size + 2 * pad - self.kernel[axis]
        count = (-(-span // stride) if self.round_up else span // stride) + 1
        # As in Caffe: padding on either axis is enough to check both.
        if any(self.pad) and (count - 1) * stride >= size + pad:
            count -= 1
        return count


@dataclass(frozen=True)
class Lrn:
    """A local response normalisation over `size` (odd) channels, or size x size pixels."""

    size: int = 5
    alpha: float = 1.0
    beta: float = 0.75
    k: float = 1.0
