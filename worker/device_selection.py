"""Which device a worker computes on: what the user asked for, what Spark assigned, what is there.

One worker takes one GPU. Where Spark schedules GPUs, its task has been assigned one, by its number
on that host. Where it does not, as in local mode, the workers of a host take turns by partition.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from cupy_kernels.backends import GPU, copied
from cupy_kernels.types import AnyArray
from shards import arguments
from shards.errors import BadInput
from shards.versions import Allocator, heap_allocator
from worker.device import Gpu, gpu_count
from worker.model import Ahead, Model, Movable


class DeviceRequest(msgspec.Struct, frozen=True):
    """`gpu`: whether a GPU must (True), may (None) or must not (False) be used; which, or any."""

    gpu: bool | None = None
    index: int | None = None

    def __str__(self) -> str:
        kind = {None: "auto", True: "gpu", False: "cpu"}[self.gpu]
        return kind if self.index is None else f"{kind}:{self.index}"


ANY = DeviceRequest()


def parse_device(text: str) -> DeviceRequest:
    """`auto` (a GPU where one answers), `cpu`, `gpu` or `gpu:N`; raises BadInput."""
    text = arguments.text("device", text, "auto, cpu, gpu or gpu:N")
    match re.fullmatch(r"(auto|cpu|gpu)|gpu:(\d+)", text, re.ASCII):
        case None:
            raise BadInput(f"device: expected auto, cpu, gpu or gpu:N, got {text!r}")
        case found if found[2] is not None:
            return DeviceRequest(True, int(found[2]))
        case found:
            return DeviceRequest({"auto": None, "cpu": False, "gpu": True}[found[1]])


def placed(
    model: Model, wanted: DeviceRequest, *, partition: int, assigned: Sequence[str] = ()
) -> Model:
    """The model where it is to compute: itself, or its like on the GPU that is this worker's.

    `assigned` are the addresses that Spark gave the task. Raises BadInput where a GPU is wanted and
    none answers, or the model cannot compute on one.
    """
    check(model, wanted)
    if wanted.gpu is False or not isinstance(model, Movable):
        return model
    count = gpu_count()
    if not count and wanted.gpu is None:
        return model
    return model.on(Gpu(_index(wanted, partition, assigned, max(count, 1))))


def allocator(model: Model) -> Allocator:
    """What a client's arrays are to be allocated by, so that they suit the model's device."""
    return model.allocate if isinstance(model, Ahead) else heap_allocator


@contextmanager
def lent(weights: AnyArray, wanted: DeviceRequest) -> Iterator[AnyArray]:
    """Weights of the host where inference with them is to run, in this process; see `placed`.

    A network runs where its weights live.
    """
    if wanted.gpu is False or (wanted.gpu is None and not gpu_count()):
        yield weights
        return
    with Gpu(wanted.index or 0).use():
        yield copied(weights, GPU)


def check(model: Model, wanted: DeviceRequest) -> None:
    """Raise BadInput when a GPU is wanted for a model that cannot compute on one."""
    if wanted.gpu and not isinstance(model, Movable):
        raise BadInput(f"device {wanted}: expected a model with `on`, got {type(model).__name__}")


def check_here(wanted: DeviceRequest) -> None:
    """Raise BadInput when a GPU is wanted and this machine, where the workers run, has it not."""
    if wanted.gpu:
        Gpu(wanted.index or 0)


def _index(wanted: DeviceRequest, partition: int, assigned: Sequence[str], count: int) -> int:
    if wanted.index is not None:
        return wanted.index
    if not assigned:
        return partition % count
    if not assigned[0].isdecimal():
        raise BadInput(
            "device: expected Spark's GPU addresses to be numbers, as of nvidia-smi's index,"
            f" got {assigned[0]!r}"
        )
    return int(assigned[0])
