"""Kernels with one defect each, and what the emulator says of them.

All reverse, sum or copy something simple; `x` and `y` are float32, `n` counts elements. `finding`
is a part of the fault's line (or several, one of which is), or None for a wrong result.
"""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupy_kernels.kernel_spec import Geometry, Kernel, Parameter, reads, scalar, writes


@dataclass(frozen=True)
class Defect:
    """The body of a kernel of x, y and n, with `threads` threads a block and `blocks` blocks."""

    body: str
    finding: str | None
    n: int = 64
    blocks: int = 1
    threads: int = 64
    parameters: tuple[Parameter, ...] = (reads("x", "n"), writes("y", "n"), scalar("n"))
    signature: str = "const float* x, float* y, i64 n"
    x_missing: bool = False

    def row(self, name: str) -> Kernel:
        shape = Geometry((self.threads, 1, 1), lambda _: (self.blocks, 1, 1))
        return Kernel(name, "planted.cu", self.parameters, shape, reverse, bytes_each=8)

    def arguments(self) -> dict[str, Any]:
        x = np.arange(1, self.n + 1, dtype=np.float32)
        return {"x": None if self.x_missing else x, "y": x, "n": self.n}


def reverse(x: Any, n: int, **_: Any) -> dict[str, Any]:
    """What all but a few of them would compute without their defect: x backwards."""
    return {"y": np.arange(n, 0, -1) if x is None else x[::-1]}


_SHARED = "__shared__ float tile[64]; int t = threadIdx.x; "

DEFECTS = {
    "nothing wrong": Defect(
        _SHARED + "tile[t] = x[t]; __syncthreads(); y[t] = tile[63 - t];",
        "",
    ),
    "missing barrier": Defect(
        _SHARED + "tile[t] = x[t]; y[t] = tile[63 - t];",
        "race: ",
    ),
    "missing second barrier in a loop": Defect(
        _SHARED + "for (int turn = 0; turn < 2; ++turn) {"
        " tile[t] = x[t]; __syncthreads(); y[t] = tile[63 - t]; }",
        "race: ",
    ),
    "race between warps": Defect(
        _SHARED + "tile[t] = x[t]; __syncwarp(); y[t] = tile[63 - t];",
        "race: ",
    ),
    "race between blocks": Defect(
        "int t = threadIdx.x; y[63 - t] = x[t];",
        "race: writes element",
        blocks=2,
    ),
    "off by one": Defect(
        "for (GRID_STRIDE(i, n)) y[i] = x[n - i];",
        "reads 4 bytes of `x` (float32[64]), 0 bytes past its end",
    ),
    "read before the start": Defect(
        "for (GRID_STRIDE(i, n)) y[i] = x[n - 2 - i];",
        "reads 4 bytes of `x` (float32[64]), 4 bytes before its start",
    ),
    "write out of bounds": Defect(
        "for (GRID_STRIDE(i, n + 1)) y[n - i] = i < n ? x[i] : 0;",
        "writes 4 bytes of `y` (float32[64]), 0 bytes past its end",
    ),
    "no bounds check, and a grid of 0": Defect(
        "i64 i = first_index(); y[i] = 0;",
        "writes 4 bytes of `y` (float32[0]), ",
        n=0,
        blocks=0,
    ),
    "uninitialised shared memory": Defect(
        _SHARED + "if (t > 0) tile[t] = x[t]; __syncthreads(); y[t] = tile[63 - t];",
        None,
    ),
    "uninitialised variable": Defect(
        "float sum; for (GRID_STRIDE(i, n)) { sum += x[n - 1 - i]; y[i] = sum; }",
        None,
        n=1,
    ),
    "output left out": Defect(
        "for (GRID_STRIDE(i, n)) if (i != 5) y[i] = x[n - 1 - i];",
        None,
    ),
    "output read before it is written": Defect(
        "for (GRID_STRIDE(i, n)) y[i] += x[n - 1 - i];",
        None,
    ),
    "misaligned float4": Defect(
        "for (GRID_STRIDE(i, n / 4)) ((float4*)y)[i] = ((const float4*)(x + 1))[i];",
        "goes through a misaligned pointer",
        parameters=(reads("x", "n", align=16), writes("y", "n", align=16), scalar("n")),
    ),
    "float4 on what is aligned to 4 bytes": Defect(
        "for (GRID_STRIDE(i, n / 4)) ((float4*)y)[i] = ((const float4*)x)[i];",
        "goes through a misaligned pointer",
    ),
    "32-bit index": Defect(
        "int row = threadIdx.x, columns = 100000000; y[row] = x[(row * columns) % 64];",
        "a signed product overflows",
    ),
    "index past a shared array": Defect(
        _SHARED + "tile[t + 1] = x[t]; __syncthreads(); y[t] = tile[64 - t];",
        "indexes an array out of its bounds, at 64",
    ),
    "divergent barrier": Defect(
        _SHARED + "tile[t] = x[t]; if (t < 32) __syncthreads(); y[t] = x[63 - t];",
        "divergent barrier: thread (0,0,0) waits at the barrier of line 4,"
        " thread (32,0,0) has returned",
    ),
    "two barriers for one": Defect(
        _SHARED + "tile[t] = x[t];\nif (t < 32) __syncthreads();\nelse __syncthreads();\n"
        "y[t] = tile[63 - t];",
        "divergent barrier: thread (0,0,0) waits at the barrier of line 5,"
        " thread (32,0,0) waits at the barrier of line 6",
    ),
    "collective in a branch": Defect(
        "int t = threadIdx.x; float v = x[63 - t];\n"
        "if (t % 32 < 16) v = __shfl_sync(ALL_LANES, v, t);\n__syncthreads(); y[t] = v;",
        "waits in the warp collective of line 5",
    ),
    "collective that leaves its caller out": Defect(
        "int t = threadIdx.x; y[t] = __shfl_sync(0xffffu, x[63 - t], t);",
        "with mask 0000ffff, which leaves it out",
    ),
    "shuffle from a lane that has returned": Defect(
        "int t = threadIdx.x; if (t % 32 == 31) return;"
        " y[t] = __shfl_sync(ALL_LANES, x[63 - t], 31);",
        None,
    ),
    "write through a pointer to const": Defect(
        "int t = threadIdx.x; y[t] = x[63 - t]; ((float*)x)[t] = 0;",
        "writes `x` (float32[64]), which is read only",
    ),
    "null pointer": Defect(
        "int t = threadIdx.x; y[t] = x[63 - t];",
        "reads 4 bytes at a null pointer",
        parameters=(reads("x", "n", optional=True), writes("y", "n"), scalar("n")),
        x_missing=True,
    ),
    "wild pointer": Defect(
        "int t = threadIdx.x; y[t] = x[t + (1ll << 40)];",
        "at an address outside every argument",
    ),
    "asynchronous copy not waited for": Defect(
        _SHARED + "copy_async4(&tile[t], &x[t], 4); copy_async_commit(); __syncthreads();"
        " y[t] = tile[63 - t]; COPY_ASYNC_WAIT(0);",
        "race: ",
    ),
    "asynchronous copy never waited for": Defect(
        _SHARED + "copy_async4(&tile[t], &x[t], 4); y[t] = x[63 - t];",
        "returns before its asynchronous copies have landed",
    ),
    "loop that waits for another thread": Defect(
        "__shared__ volatile int ready; int t = threadIdx.x; if (t == 0) ready = 0;"
        " __syncthreads(); while (ready != 63 - t) {} y[t] = x[63 - t]; ready = 64 - t;",
        "runs without end, while no other thread gets a turn | race: reads shared memory",
    ),
    "stack overflow": Defect(
        "float deep[100000]; for (GRID_STRIDE(i, n)) deep[i * 1000 % 100000] = x[i];"
        " for (GRID_STRIDE(i, n)) y[i] = deep[i * 1000 % 100000];",
        "overflows its stack",
    ),
    "a double in the row for a float in the source": Defect(
        "for (GRID_STRIDE(i, n)) y[i] = scale * x[n - 1 - i];",
        "the source takes (?f4 *f4 f4 i8), its row says (?f4 *f4 f8 i8)",
        parameters=(reads("x", "n"), writes("y", "n"), scalar("scale", "f8"), scalar("n")),
        signature="const float* x, float* y, float scale, i64 n",
    ),
    "an int in the source for a long long in the row": Defect(
        "for (GRID_STRIDE(i, n)) y[i] = x[n - 1 - i];",
        "the source takes (?f4 *f4 i4), its row says (?f4 *f4 i8)",
        signature="const float* x, float* y, int n",
    ),
}


def kernel_name(name: str) -> str:
    """A defect's name as C has it."""
    return "planted_" + re.sub(r"\W+", "_", name)


def planted(name: str) -> str:
    """The source of one defect's kernel; its body starts in line 4."""
    defect = DEFECTS[name]
    head = f'extern "C" __global__ void {kernel_name(name)}({defect.signature}) {{'
    return f'#line 3 "planted.cu"\n{head}\n{defect.body}\n}}\n'


# All of them in one text: g++ takes a second for thirty and a fifth of one for each alone.
SOURCE = '#include "device.cuh"\n#include "tensor_core.cuh"\n' + "".join(map(planted, DEFECTS))
