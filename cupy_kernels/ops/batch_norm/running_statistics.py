"""The running statistics of a batch normalisation."""

from typing import NamedTuple

from cupy_kernels.types import Array


class RunningStatistics(NamedTuple):
    """Caffe's three blobs: sums of means and variances (channels,), and of their weights (1,).

    For each batch all three are multiplied by `fraction`, and the batch is added with weight 1.
    """

    mean: Array
    variance: Array
    factor: Array
    fraction: float = 0.999
