"""Moves weights, batches and gradients through a device, and orders every copy on it.

            host, page-locked            device, staged             device, fixed
    pull    the client's array  --up-->  weights     --compute-->  weights   \
    batch   the packet's own    --up-->  packet      --compute-->  packet     >  the step
    push    the client's array  <-down-  gradient    <-compute--   gradient  /
    losses  a float each        <-down-  losses      <-compute--   losses   /

A pull is one copy over the bus, and so is a push: the client receives into and sends from the host
arrays directly. Three streams run in parallel: `up` and `down`, one for each direction of the bus,
and `compute`. A captured step needs addresses that never change, so it works on the fixed arrays.
The staged arrays let the next step's weights arrive, and the previous step's gradient leave, while
a step computes. A copy within the device is cheap compared with both.

A stream runs its work in order. These rules order work between streams, and between a stream and
the host; for each, one side sets a mark and the other waits for it:

1. up -> compute. A step reads the staged arrays after they have arrived.
2. compute -> up. The staged arrays are overwritten after the previous step has copied them.
3. compute -> down. A gradient is downloaded after the step has written it to the staged array.
4. down -> compute. The next gradient is written there after this one has been downloaded.
5. up -> host. A packet's page-locked memory is rewritten after it has been uploaded. Until then a
   reference to the pulled weights is held here, too: the client reuses no array that is referenced.
6. down -> host. The gradient and the losses are read after they have been downloaded. Until then a
   reference to their host array is held here.

`begin` queues a step and returns; `finish` waits for the oldest step begun. At most two steps may
be under way: a step then begins while the previous one computes, and no host memory is overwritten
too early.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.types import AnyArray, Array
from worker.training.device import Device, Mark

UNDER_WAY = 2

Layout = Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]
"""Shape and dtype of arrays by name."""

_ALIGNMENT = 256  # bytes, the alignment of CUDA's allocations


class Packet:
    """Some small arrays that are uploaded as one block: a batch, and the step number.

    `layout` gives each array's shape and dtype by name. `fixed` holds the device arrays that the
    step reads, at addresses that never change.
    """

    def __init__(self, device: Device, layout: Layout) -> None:
        self._slices: dict[str, slice] = {}
        start = 0
        for name, (shape, dtype) in layout.items():
            stop = start + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            self._slices[name] = slice(start, stop)
            start = -(-stop // _ALIGNMENT) * _ALIGNMENT
        self.pinned = device.allocate_pinned((start,), np.uint8)
        self.staged = device.zeros((start,), np.uint8)
        self.block = device.zeros((start,), np.uint8)
        self._written = self._views(self.pinned, layout)
        self.fixed: dict[str, AnyArray] = self._views(self.block, layout)

    def write(self, arrays: Mapping[str, AnyArray]) -> None:
        """Fill the page-locked block; each array must have the shape and dtype of the layout."""
        for name, view in self._written.items():
            np.copyto(view, arrays[name], casting="no")

    def _views(self, block: AnyArray, layout: Layout) -> dict[str, AnyArray]:
        return {
            name: block[self._slices[name]].view(dtype).reshape(shape)
            for name, (shape, dtype) in layout.items()
        }


@dataclass(frozen=True)
class _Leaving:
    """A step's results on their way to the host."""

    downloaded: Mark
    gradient: Array
    losses: Array


class DevicePipeline:
    """A table's parameters and gradient on a device, and the streams that copy them.

    It serves one thread. A step reads `weights` and writes `gradient`, both of shape (size,), and
    `losses`, of shape (losses,); all are float32.
    """

    def __init__(self, device: Device, size: int, losses: int = 1) -> None:
        self.device = device
        with device.use():
            self._up, self._compute, self._down = (device.stream() for _ in range(3))
            self.weights, self._staged_weights = self._floats(size), self._floats(size)
            self.gradient, self._leaving_gradient = self._floats(size), self._floats(size)
            self.losses, self._leaving_losses = self._floats(losses), self._floats(losses)
            self._read = deque(
                device.allocate_pinned((losses,), np.float32) for _ in range(UNDER_WAY)
            )
        self._under_way: deque[_Leaving] = deque()
        self._uploads: list[NDArray[Any]] = []
        self._arrived: Mark | None = None
        self._staging_free: Mark | None = None
        self._leaving_free: Mark | None = None

    def begin(
        self,
        weights: Array,
        packet: Packet,
        arrays: Mapping[str, AnyArray],
        step: Callable[[], None],
        out: Array,
    ) -> None:
        """Queue a step at `weights` on the packet's `arrays`; its gradient is written to `out`.

        `step` queues the computation on the stream in use, from the fixed arrays to `gradient` and
        `losses`. `weights` and `out` are host arrays. If they are page-locked, this does not wait
        for their copies. They must not change until `finish` has returned for this step.
        """
        assert len(self._under_way) < UNDER_WAY, "begin was called more often than finish"
        with self.device.use(self._compute):
            self._bring(weights, packet, arrays)
            self._run(packet, step)
            self._send(out)

    def finish(self) -> Array:
        """Wait for the oldest step under way, until its gradient is in its `out`.

        Returns a copy of its losses, float32 of shape (losses,).
        """
        leaving = self._under_way.popleft()
        with self.device.use():
            self.device.join(leaving.downloaded)
        self._read.append(leaving.losses)
        return leaving.losses.copy()

    def drain(self) -> None:
        """Wait for all steps under way and discard their results."""
        while self._under_way:
            self.finish()

    def _bring(self, weights: Array, packet: Packet, arrays: Mapping[str, AnyArray]) -> None:
        if self._arrived is not None:
            self.device.join(self._arrived)  # rule 5
        packet.write(arrays)
        if self._staging_free is not None:
            self.device.wait(self._up, self._staging_free)  # rule 2
        self.device.upload(weights, self._staged_weights, self._up)
        self.device.upload(packet.pinned, packet.staged, self._up)
        self._uploads = [weights, packet.pinned]
        self._arrived = self.device.mark(self._up)

    def _run(self, packet: Packet, step: Callable[[], None]) -> None:
        self.device.wait(self._compute, self._arrived)  # rule 1
        self.device.copy(self._staged_weights, self.weights, self._compute)
        self.device.copy(packet.staged, packet.block, self._compute)
        self._staging_free = self.device.mark(self._compute)
        step()
        if self._leaving_free is not None:
            self.device.wait(self._compute, self._leaving_free)  # rule 4
        self.device.copy(self.gradient, self._leaving_gradient, self._compute)
        self.device.copy(self.losses, self._leaving_losses, self._compute)

    def _send(self, out: Array) -> None:
        self.device.wait(self._down, self.device.mark(self._compute))  # rule 3
        losses = self._read.popleft()
        self.device.download(self._leaving_gradient, out, self._down)
        self.device.download(self._leaving_losses, losses, self._down)
        self._leaving_free = self.device.mark(self._down)
        self._under_way.append(_Leaving(self._leaving_free, out, losses))

    def _floats(self, size: int) -> AnyArray:
        return self.device.zeros((size,), np.float32)
