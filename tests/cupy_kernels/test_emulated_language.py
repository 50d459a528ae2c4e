"""CUDA's words mean on the CPU what they mean on a GPU: warps, barriers, atomics, tensor cores."""

from typing import Any

import numpy as np
import pytest

from cupy_kernels import sources
from cupy_kernels.emulator import Emulator, Schedule
from cupy_kernels.kernel_spec import Geometry, Kernel, changes, reads
from cupy_kernels.launch import launch
from cupy_kernels.types import Array
from tests.support.probe_kernel import BF16, HEADERS, MMA, TF32, source_of

pytestmark = [
    pytest.mark.usefixtures("emulated"),
    pytest.mark.parametrize("schedule", Schedule, ids=lambda schedule: schedule.name.lower()),
]


def run(
    body: str,
    schedule: Schedule,
    out: Any,
    *given: Any,
    threads: int = 32,
    blocks: int = 1,
    n: int = 0,
) -> Any:
    """Run a kernel of this body with `out`, float inputs `a` and `b`, and a number `n`."""
    a, b = (*given, np.zeros(1, np.float32), np.zeros(1, np.float32))[:2]
    kind = {"f": "float", "u": "u32", "i": "int"}[out.dtype.kind]
    row = Kernel(
        "probe",
        "probe.cu",
        (changes("out", "1", out.dtype), reads("a", "1", align=16), reads("b", "1", align=16)),
        Geometry((threads, 1, 1), lambda _: (blocks, 1, 1)),
        lambda **_: {},
        bytes_each=1,
    )
    engine = Emulator(schedule, seed=3, source=sources.expand(HEADERS + source_of(kind, body)))
    launch(row, engine=engine, out=out, a=a, b=b)
    return out


def test_shuffles_read_the_lane_they_name(schedule: Schedule) -> None:
    """Down, up, xor and by index, in whole warps and in parts of 8 lanes."""
    lanes = np.arange(32)
    body = """
        int lane = threadIdx.x;
        out[lane] = __shfl_down_sync(ALL_LANES, lane, 3);
        out[32 + lane] = __shfl_up_sync(ALL_LANES, lane, 5, 8);
        out[64 + lane] = __shfl_xor_sync(ALL_LANES, lane, 9);
        out[96 + lane] = __shfl_sync(ALL_LANES, lane, 2, 8);
        out[128 + lane] = __shfl_sync(ALL_LANES, lane, lane / 2);"""
    got = run(body, schedule, np.full(160, -1, np.int32)).reshape(5, 32)
    assert got[0].tolist() == np.where(lanes + 3 < 32, lanes + 3, lanes).tolist()
    assert got[1].tolist() == np.where(lanes % 8 >= 5, lanes - 5, lanes).tolist()
    assert got[2].tolist() == (lanes ^ 9).tolist()
    assert got[3].tolist() == (lanes // 8 * 8 + 2).tolist()
    assert got[4].tolist() == (lanes // 2).tolist()


def test_votes_count_those_who_take_part(schedule: Schedule) -> None:
    """Ballot, any and all in half a warp, and the counting barrier of a block."""
    body = """
        int lane = threadIdx.x % 32;
        if (threadIdx.x < 16) {
          out[3 * lane] = __ballot_sync(0xffffu, lane % 3 == 0);
          out[3 * lane + 1] = __any_sync(0xffffu, lane == 20);
          out[3 * lane + 2] = __all_sync(0xffffu, lane < 16);
        }
        out[48 + threadIdx.x] = __syncthreads_count(threadIdx.x % 4 == 1);"""
    got = run(body, schedule, np.zeros(48 + 64, np.uint32), threads=64)
    assert set(got[0:48:3]) == {0b1001001001001001}
    assert set(got[1:48:3]) == {0}
    assert set(got[2:48:3]) == {1}
    assert set(got[48:]) == {16}


def test_a_block_sum_is_the_same_on_every_run(schedule: Schedule) -> None:
    """The helpers of device.cuh: every thread gets the sum and the maximum, to the last bit."""
    a = np.random.default_rng(1).standard_normal(96).astype(np.float32)
    body = """
        __shared__ float scratch[WARP];
        float sum = block_sum(a[threadIdx.x], scratch);
        out[threadIdx.x] = sum;
        out[96 + threadIdx.x] = block_max(a[threadIdx.x], scratch);"""
    got = run(body, schedule, np.zeros(192, np.float32), a, threads=96)
    assert len(set(got[:96].tolist())) == 1
    assert got[0] == pytest.approx(a.astype(np.float64).sum(), rel=1e-5)
    assert set(got[96:].tolist()) == {float(a.max())}
    tree = a.reshape(3, 32)
    while tree.shape[1] > 1:  # pairs at distance 16, 8, ...: addition commutes, so all lanes agree
        half = tree.shape[1] // 2
        tree = tree[:, :half] + tree[:, half:]
    assert got[0] == (tree[0, 0] + tree[2, 0]) + (tree[1, 0] + np.float32(0))


def test_the_last_block_may_read_what_the_others_fenced(schedule: Schedule) -> None:
    """A fence and an atomic counter order blocks; atomics of integers lose nothing."""
    body = """
        __shared__ u32 last;
        if (threadIdx.x == 0) {
          out[4 + blockIdx.x] = blockIdx.x + 1;
          __threadfence();
          last = atomicAdd(&out[0], 1u) == gridDim.x - 1;
        }
        __syncthreads();
        if (last && threadIdx.x == 0)
          for (int k = 0; k < gridDim.x; ++k) out[1] += out[4 + k];
        atomicMax(&out[2], blockIdx.x * 100 + threadIdx.x);
        atomicOr(&out[3], 1u << threadIdx.x);"""
    got = run(body, schedule, np.zeros(9, np.uint32), blocks=5)
    assert got[:4].tolist() == [5, 15, 431, 2**32 - 1]


def rounded(values: Array, bits: int, *, ties_to_even: bool) -> Array:
    """The nearest floats with `bits` fewer mantissa bits."""
    raw = values.view(np.uint32).astype(np.uint64)
    half = np.uint64(1 << (bits - 1))
    odd = (raw >> np.uint64(bits)) & np.uint64(1)
    raw += half - (np.uint64(1) - odd) if ties_to_even else half
    return (raw >> np.uint64(bits) << np.uint64(bits)).astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("kind", ["tf32", "bf16"])
def test_a_warp_multiplies_matrices(kind: str, schedule: Schedule) -> None:
    """One mma of 16 x 8 by 8 x 8 (bf16: 16 x 16 by 16 x 8) on operands rounded to its type."""
    depth, fragments, bits = (8, TF32, 13) if kind == "tf32" else (16, BF16, 16)
    generator = np.random.default_rng(8)
    a = generator.standard_normal((16, depth), np.float32)
    b = generator.standard_normal((depth, 8), np.float32)
    got = run(MMA.replace("{fragments}", fragments), schedule, np.zeros(128, np.float32), a, b)
    left, right = (rounded(m, bits, ties_to_even=kind == "bf16").astype(np.float64) for m in (a, b))
    np.testing.assert_array_equal(got.reshape(16, 8), (left @ right).astype(np.float32))
    assert not np.array_equal(left, a)


def test_an_asynchronous_copy_lands_when_it_is_waited_for(schedule: Schedule) -> None:
    """Two groups in flight, one waited for at a time; reads past the end become zeros."""
    body = """
        __shared__ __align__(16) float first[128], second[128];
        int t = threadIdx.x;
        copy_async16(&first[4 * t], &a[4 * t], 16);
        copy_async_commit();
        copy_async16(&second[4 * t], &b[4 * t], t == 31 ? 4 : 16);
        copy_async_commit();
        COPY_ASYNC_WAIT(1);
        __syncthreads();
        for (int k = 0; k < 4; ++k) out[32 * k + t] = first[127 - (32 * k + t)];
        COPY_ASYNC_WAIT(0);
        __syncthreads();
        for (int k = 0; k < 4; ++k) out[128 + 32 * k + t] = second[127 - (32 * k + t)];"""
    a, b = np.random.default_rng(4).standard_normal((2, 128), np.float32)
    got = run(body, schedule, np.zeros(256, np.float32), a, b)
    b[125:] = 0
    assert got.tolist() == [*a[::-1], *b[::-1]]


def test_denormals_are_flushed_and_conversions_saturate(schedule: Schedule) -> None:
    """As on a GPU with -ftz=true, and never undefined."""
    a = np.array([1e-39, 3e9, -3e9, np.nan, 2.5, -1.0, 1.5e-38], np.float32)
    body = """
        if (threadIdx.x > 0) return;
        out[0] = a[0] * 1.0f == 0.0f;
        out[1] = __float2int_rn(a[1]); out[2] = __float2int_rz(a[2]); out[3] = __float2int_rn(a[3]);
        out[4] = __float2int_rn(a[4]); out[5] = (int)__float2uint_rn(a[5]);
        out[6] = a[6] * 0.5f == 0.0f;"""
    got = run(body, schedule, np.zeros(7, np.int32), a)
    assert got.tolist() == [1, 2**31 - 1, -(2**31), 0, 2, 0, 1]
