"""The shape of a pooling's window; each pair is (vertical, horizontal)."""

from dataclasses import dataclass


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
