"""The shape of a convolution's window; each pair is (vertical, horizontal)."""

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
