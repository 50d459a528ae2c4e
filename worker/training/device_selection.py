"""Selects a worker's device: by the user's request, Spark's assignment and the devices present.

One worker uses one GPU. If Spark schedules GPUs, it has assigned one to the worker's task, by its
index on that host. If not, as in local mode, the workers of a host take its GPUs in turn, by
partition.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from cupy_kernels.backends import GPU, copy_to
from cupy_kernels.types import AnyArray
from shards import argument_checks
from shards.buffer_pool import Allocator, heap_allocator
from shards.errors import BadInput
from worker.training.device import Gpu, gpu_count
from worker.training.model import Ahead, Model, Movable


class DeviceRequest(msgspec.Struct, frozen=True):
    """The device of a job: a GPU if `gpu` is true, one if there is any if None, else the CPU.

    `index` None means any GPU.
    """

    gpu: bool | None = None
    index: int | None = None

    def __str__(self) -> str:
        kind = {None: "auto", True: "gpu", False: "cpu"}[self.gpu]
        return kind if self.index is None else f"{kind}:{self.index}"


ANY = DeviceRequest()


def parse_device(text: str) -> DeviceRequest:
    """Parse `auto` (a GPU if one answers), `cpu`, `gpu` or `gpu:N`; raises BadInput."""
    text = argument_checks.text("device", text, "auto, cpu, gpu or gpu:N")
    match re.fullmatch(r"(auto|cpu|gpu)|gpu:(\d+)", text, re.ASCII):
        case None:
            raise BadInput("device", expected="auto, cpu, gpu or gpu:N", got=f"{text!r}")
        case found if found[2] is not None:
            return DeviceRequest(True, int(found[2]))
        case found:
            return DeviceRequest({"auto": None, "cpu": False, "gpu": True}[found[1]])


def place_model(
    model: Model, request: DeviceRequest, *, partition: int, assigned: Sequence[str] = ()
) -> Model:
    """The model itself, or an equal model on this worker's GPU.

    `assigned` are the GPU addresses that Spark gave the task. Raises BadInput if a GPU is required
    and none answers, or the model cannot compute on one.
    """
    check(model, request)
    if request.gpu is False or not isinstance(model, Movable):
        return model
    count = gpu_count()
    if not count and request.gpu is None:
        return model
    return model.on(Gpu(_index(request, partition, assigned, max(count, 1))))


def allocator(model: Model) -> Allocator:
    """The allocator for a client's arrays that suits the model's device."""
    return model.allocate if isinstance(model, Ahead) else heap_allocator


@contextmanager
def lend_weights(
    weights: AnyArray, request: DeviceRequest, *, partition: int = 0, assigned: Sequence[str] = ()
) -> Iterator[AnyArray]:
    """A context with the host's weights on the device for inference, in this process.

    A network runs on the device that holds its weights. See `placed` for the choice of device.
    """
    count = 0 if request.gpu is False else gpu_count()
    if not (count or request.gpu):
        yield weights
        return
    with Gpu(_index(request, partition, assigned, max(count, 1))).use():
        yield copy_to(weights, GPU)


def check(model: Model, request: DeviceRequest) -> None:
    """Raise BadInput if a GPU is required for a model that cannot compute on one."""
    if request.gpu and not isinstance(model, Movable):
        raise BadInput(f"device {request}", expected="a model with `on`", got=type(model).__name__)


def check_here(request: DeviceRequest) -> None:
    """Raise BadInput if a GPU is required and this machine, where the workers run, lacks it."""
    if request.gpu:
        Gpu(request.index or 0)


def _index(request: DeviceRequest, partition: int, assigned: Sequence[str], count: int) -> int:
    if request.index is not None:
        return request.index
    if not assigned:
        return partition % count
    if not assigned[0].isdecimal():
        raise BadInput(
            "device",
            expected="Spark's GPU addresses to be numbers, as of nvidia-smi's index",
            got=f"{assigned[0]!r}",
        )
    return int(assigned[0])
