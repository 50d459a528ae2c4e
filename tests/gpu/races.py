"""The races that KERNELS' goals speak of, each against PyTorch where it is installed.

Sizes: LeNet has 431,080 parameters, CaffeNet 60.97 M, ResNet-50 25.56 M. A function yields its
races one by one, so that the memory of one is free before the next takes its own.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from cupy_kernels.ops import convolution, pooling
from cupy_kernels.ops.convolution.window import Convolution
from cupy_kernels.ops.pooling.window import Pooling
from cupy_kernels.ops.updates.spec import CHUNK, HYPER, MULTIPLIERS, VERDICT
from cupy_kernels.types import Precision
from cupy_kernels.workspace import Workspace
from tests.bench.report import Goal
from tests.gpu.ground import GpuGround, Ground, Run
from tests.gpu.race import Ceilings, Entry, Race, Times, both, faster, share_of_bandwidth

CAFFENET, RESNET50, LENET = 60_965_888, 25_557_056, 431_104  # padded to whole chunks
UPDATES = {
    "update_sgd": ((), 12),
    "update_adagrad": (("square_sum",), 20),
    "update_adam": (("mean", "square_mean"), 28),
    "update_dc_asgd": (("backup",), 20),
}
MICRO = 1e6
PRECISIONS = (Precision.TF32, Precision.BF16)


def updates(ground: Ground) -> Iterator[Race]:
    """Fused update rules over CaffeNet's arena; Adagrad against PyTorch's foreach one."""
    n = ground.size(CAFFENET, 1024)
    for name, (slots, bytes_each) in UPDATES.items():
        entries = [Entry(name, update(ground, name, slots, n))]
        goal = share_of_bandwidth(name, n * bytes_each, 0.92)
        if name == "update_adagrad" and isinstance(ground, GpuGround) and ground.torch is not None:
            entries.append(Entry("torch foreach Adagrad", torch_adagrad(ground, n), graph=None))
        yield Race(name, entries, both(goal, faster(name, "torch foreach Adagrad", 2.3)))


def update(ground: Ground, name: str, slots: tuple[str, ...], n: int) -> Run:
    """One rule's kernel over `n` parameters, gradients small enough to train with for ever."""
    hyper = ground.struct(
        HYPER, rate=1e-4, keep=0.9, take=0.1, keep2=0.99, take2=0.01, delta=1e-6, strength=0.04
    )
    return ground.kernel(
        name,
        w=ground.normal(n),
        g=ground.normal(n),
        **{slot: ground.put(np.ones(n, np.float32)) for slot in slots},
        groups=ground.put(np.zeros(n // CHUNK, np.uint16)),
        multipliers=ground.struct(MULTIPLIERS, rate=1.0, decay=1.0),
        hyper=hyper,
        verdict=None,
        n=n,
    )


def torch_adagrad(ground: GpuGround, n: int) -> Run:
    """CaffeNet as a few tensors under torch.optim.Adagrad(foreach=True)."""
    torch: Any = ground.torch
    sizes = [n // 2, n // 4, n // 8, n // 8]
    tensors = [torch.randn(size, device="cuda").requires_grad_() for size in sizes]
    for tensor in tensors:
        tensor.grad = torch.randn_like(tensor)
    optimiser = torch.optim.Adagrad(tensors, lr=1e-4, foreach=True)
    return optimiser.step  # type: ignore[no-any-return]


def small_update(ground: Ground) -> Iterator[Race]:
    """LeNet's arena: what a launch costs, its data staying in the cache as it does in training."""
    run = update(ground, "update_momentum", ("history",), ground.size(LENET, 1024))
    entry = Entry("LeNet arena update", run, repeats=20)

    def judge(times: dict[str, Times], _: Ceilings) -> list[Goal]:
        return [Goal("LeNet arena update", MICRO * times[entry.name].median, 4.0, "us")]

    yield Race("small update", [entry], judge, flush=False)


def pushes(ground: Ground) -> Iterator[Race]:
    """A push of CaffeNet: encoded with error feedback in one pass, and copied to pinned memory."""
    n = ground.size(CAFFENET, 1024)
    blocks = -(-n // 256)
    for name, per_block, target in (
        ("quantise_int8", 256, 1.25),
        ("quantise_sign", 32, 0.40),
    ):
        codes, scales = ground.empty((blocks * per_block,), np.uint8), ground.empty((blocks,))
        run = ground.kernel(
            name,
            g=ground.normal(n),
            error=ground.put(np.zeros(n, np.float32)),
            q=codes,
            scales=scales,
            verdict=ground.struct(VERDICT, scale=1.0),
            n=n,
        )
        entries = [Entry(f"{name} and copy out", _then_out(ground, run, [codes, scales]))]
        if isinstance(ground, GpuGround) and name == "quantise_int8":
            whole = ground.empty((n,))
            entries.append(
                Entry("plain float32 copy out", _then_out(ground, lambda: None, [whole]))
            )

        def judge(
            times: dict[str, Times], _: Ceilings, name: str = name, target: float = target
        ) -> list[Goal]:
            took = times[f"{name} and copy out"].median
            return [Goal(f"push of CaffeNet, {name}", 1e3 * took, target, "ms")]

        yield Race(f"push {name}", entries, judge)


def _then_out(ground: Ground, run: Run, arrays: list[Any]) -> Run:
    """Encode, then copy what came of it to the host, on one stream."""
    if not isinstance(ground, GpuGround):
        return run
    stream = ground.main
    import cupyx

    pinned = [cupyx.empty_pinned(array.shape, array.dtype) for array in arrays]

    def both() -> None:
        run()
        for array, out in zip(arrays, pinned, strict=True):
            array.get(stream=stream, out=out, blocking=False)

    return both


def sparse_push(ground: Ground) -> Iterator[Race]:
    """Deep gradient compression of CaffeNet: about one value in a thousand is sent."""
    n = ground.size(CAFFENET, 4096)
    blocks, capacity = -(-n // 256), max(n // 200, 64)
    u, v = ground.put(np.zeros(n, np.float32)), ground.put(np.zeros(n, np.float32))
    counts, starts = ground.empty((blocks,), np.uint32), ground.empty((blocks + 1,), np.uint32)
    tau = 3.3  # of a unit normal, 0.1 % lie beyond it
    indices, values = ground.empty((capacity,), np.uint32), ground.empty((capacity,))
    runs = [
        ground.kernel(
            "sparse_count",
            g=ground.normal(n),
            u=u,
            v=v,
            counts=counts,
            verdict=None,
            mu=0.0,
            tau=tau,
            n=n,
        ),
        ground.kernel("sparse_starts", counts=counts, starts=starts, blocks=blocks),
        ground.kernel(
            "sparse_send",
            u=u,
            v=v,
            starts=starts,
            indices=indices,
            values=values,
            tau=tau,
            capacity=capacity,
            n=n,
        ),
    ]

    def all_three() -> None:
        for run in runs:
            run()

    entry = Entry("sparse push and copy out", _then_out(ground, all_three, [indices, values]))

    def judge(times: dict[str, Times], _: Ceilings) -> list[Goal]:
        took = 1e3 * times[entry.name].median
        return [Goal("push of CaffeNet, the largest 0.1 %", took, 0.40, "ms")]

    yield Race("push sparse", [entry], judge)


def lrn(ground: Ground) -> Iterator[Race]:
    """AlexNet's first normalisation at batch 256, channels-last."""
    pixels, channels = ground.size(256 * 55 * 55, 30), ground.size(96, 12)
    x = ground.normal(pixels, channels)
    ours = ground.kernel(
        "lrn_across_forward",
        x=x,
        pixels=pixels,
        channels=channels,
        size=5,
        share=1e-4 / 5,
        beta=0.75,
        k=1.0,
    )
    entries = [Entry("LRN forward", ours)]
    if isinstance(ground, GpuGround) and ground.torch is not None:
        layer = ground.torch.nn.LocalResponseNorm(5)
        images = ground.tensor(x).reshape(256, 55, 55, channels).permute(0, 3, 1, 2).contiguous()
        entries.append(Entry("torch LRN forward", lambda: layer(images), graph="torch"))
    goal = share_of_bandwidth("LRN forward", 8 * pixels * channels, 0.80)
    race = faster("LRN forward", "torch LRN forward", 5.0)
    yield Race("LRN", entries, both(goal, race))


def max_pool(ground: Ground) -> Iterator[Race]:
    """AlexNet's first pooling at batch 256, 3x3 windows two apart, each way."""
    n, size, c = ground.size(256, 2), ground.size(55, 9), ground.size(96, 8)
    shape = Pooling((3, 3), (2, 2))
    out = shape.output(size, size)
    x, work = ground.normal(n, size, size, c), Workspace()
    y, where = pooling.max_forward(x, shape, work)
    dy = ground.normal(*y.shape)
    forward_bytes = 4 * n * size * size * c + 5 * n * out[0] * out[1] * c
    entries = [
        Entry("max pool forward", lambda: pooling.max_forward(x, shape, work)),
        Entry("max pool backward", lambda: pooling.max_backward(dy, where, x.shape, shape, work)),
    ]
    if isinstance(ground, GpuGround) and ground.torch is not None:
        entries += _torch_pool(ground, x, dy)
    goals = [share_of_bandwidth(entry.name, forward_bytes, 0.80) for entry in entries[:2]]
    races = [faster(entry.name, f"torch {entry.name}", 1.3) for entry in entries[:2]]

    def judge(times: dict[str, Times], top: Ceilings) -> list[Goal]:
        return [goal(times, top) for goal in goals] + [row for race in races for row in race(times)]

    yield Race("max pool", entries, judge)


def _torch_pool(ground: GpuGround, x: Any, dy: Any) -> list[Entry]:
    """PyTorch's, in the memory format that suits it: channels-last."""
    torch: Any = ground.torch
    images = ground.tensor(x).permute(0, 3, 1, 2)
    gradient = ground.tensor(dy).permute(0, 3, 1, 2)
    pool = torch.nn.functional.max_pool2d
    _, where = pool(images, 3, 2, ceil_mode=True, return_indices=True)
    back = torch.ops.aten.max_pool2d_with_indices_backward
    return [
        Entry("torch max pool forward", lambda: pool(images, 3, 2, ceil_mode=True), "torch"),
        Entry(
            "torch max pool backward",
            lambda: back(gradient, images, [3, 3], [2, 2], [0, 0], [1, 1], True, where),
            "torch",
        ),
    ]


def softmax(ground: Ground) -> Iterator[Race]:
    """Cross-entropy over 50,000 classes for 8192 rows, forward and backward."""
    rows, k = ground.size(8192, 6), ground.size(50_000, 70)
    x = ground.normal(rows, k)
    labels = ground.put(ground.dice.integers(0, k, rows))
    name = "softmax_loss_wide" if k > 1024 else "softmax_loss"
    ours = ground.kernel(
        name,
        x=x,
        labels=labels,
        scale=ground.put(np.full(1, 1 / rows, np.float32)),
        ignored=-1,
        rows=rows,
        k=k,
    )
    entries = [Entry("softmax cross-entropy", ours)]
    if isinstance(ground, GpuGround) and ground.torch is not None:
        torch: Any = ground.torch
        logits = ground.tensor(x).detach().clone().requires_grad_()
        wanted = ground.tensor(labels)

        def theirs() -> None:
            logits.grad = None
            torch.nn.functional.cross_entropy(logits, wanted).backward()

        entries.append(Entry("torch cross-entropy", theirs, graph=None))

    def judge(times: dict[str, Times], _: Ceilings) -> list[Goal]:
        took = 1e3 * times["softmax cross-entropy"].median
        return [Goal("softmax cross-entropy 8192 x 50k, both ways", took, 1.2, "ms")]

    yield Race("softmax", entries, judge)


# name: batch, size, channels, outputs, kernel, pad, groups
CONVOLUTIONS = {
    "AlexNet conv3": (256, 13, 256, 384, 3, 1, 1),
    "AlexNet conv4": (256, 13, 384, 384, 3, 1, 2),
    "AlexNet conv5": (256, 13, 384, 256, 3, 1, 2),
    "ResNet 3x3, 64": (256, 56, 64, 64, 3, 1, 1),
    "ResNet 3x3, 256": (256, 14, 256, 256, 3, 1, 1),
}


def convolutions(ground: Ground) -> Iterator[Race]:
    """Forward convolutions in TF32 and bf16 operands, against cuDNN with the same rounding."""
    for name, (n, size, c, o, k, pad, groups) in CONVOLUTIONS.items():
        if ground.dry:
            n, size, c, o = 1, 5, 4 * groups, 4 * groups
        x = ground.normal(n, size, size, c)
        weight, bias = ground.normal(o, c // groups, k, k), ground.normal(o)
        for precision in PRECISIONS:
            shape = Convolution((k, k), pad=(pad, pad), group=groups, precision=precision)
            work = Workspace()
            ours = partial(convolution.forward, x, weight, bias, shape, work)
            label = f"{name}, {precision}"
            entries = [Entry(label, ours)]
            if isinstance(ground, GpuGround) and ground.torch is not None:
                run = _cudnn(ground, x, weight, bias, pad, groups, precision)
                entries.append(Entry(f"cuDNN {label}", run, "torch"))
            race = faster(label, f"cuDNN {label}", 0.55)
            yield Race(label, entries, both(None, race))


def _cudnn(
    ground: GpuGround, x: Any, weight: Any, bias: Any, pad: int, groups: int, precision: str
) -> Run:
    torch: Any = ground.torch
    torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    last = torch.channels_last
    images = ground.tensor(x).permute(0, 3, 1, 2).to(kind)
    filters = ground.tensor(weight).to(kind).contiguous(memory_format=last)
    shift = ground.tensor(bias).to(kind)
    convolve = torch.nn.functional.conv2d
    return lambda: convolve(images, filters, shift, padding=pad, groups=groups)


ALL = (updates, small_update, pushes, sparse_push, lrn, max_pool, softmax, convolutions)
