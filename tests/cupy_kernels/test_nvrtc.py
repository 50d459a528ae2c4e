"""Every kernel compiles for the GPUs in use, with CuPy's compiler, and without spills."""

import pytest

from cupy_kernels import nvrtc, sources
from cupy_kernels.nvrtc import Resources
from cupy_kernels.ops.convolution.spec import SHAPE
from cupy_kernels.registry import KERNELS
from tests.support.probe_kernel import BF16, HEADERS, MMA, TF32, source_of

pytest.importorskip("cuda.core", reason="cuda-core is not installed: kernels are not compiled")
pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed: kernels not compiled")

ARCHITECTURES = ("sm_80", "sm_90")


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("source", sources.names())
def test_a_source_compiles_without_spills(source: str, arch: str) -> None:
    """NVRTC takes it, finds each of its kernels, keeps all values in registers, fits its block."""
    rows = nvrtc.compile_source(source, arch)
    print("\n" + table(rows))
    assert sorted(r.kernel for r in rows) == sorted(sources.kernel_names(sources.text(source)))
    for row in rows:
        assert row.spill_bytes == 0, row
        assert resident(row) >= KERNELS[row.kernel].resident, row
        assert row.shared_bytes <= 48 * 1024, row


def resident(row: Resources) -> int:
    """Threads that a multiprocessor's 65,536 registers hold, in whole blocks.

    Registers are given out to warps in units of 256.
    """
    x, y, z = KERNELS[row.kernel].geometry.block
    warps = -(-x * y * z // 32)
    blocks = 65536 // (warps * -(-row.registers * 32 // 256) * 256)
    return min(blocks * warps * 32, 2048)


@pytest.mark.parametrize("side", [128, 64, 32])
def test_two_blocks_of_a_product_share_a_multiprocessor(side: int) -> None:
    """Their stages fit into the 227 KB of an sm_90, with the 1 KB kept by the system for each."""
    sizes = dict.fromkeys((*SHAPE, "relu", "packed"), 1) | {"side": side}
    assert 2 * (KERNELS["conv_forward_tf32"].geometry.shared_bytes(sizes) + 1024) <= 227 * 1024


def test_what_only_nvcc_would_take_is_refused() -> None:
    """A source that needs a host header fails here, as it would in CuPy."""
    source = 'extern "C" __global__ void wants(float* y) { y[0] = INFINITY; }'
    with pytest.raises(Exception, match="INFINITY"):
        nvrtc.compile_text(sources.expand(source), "sm_90")


def test_spills_are_seen() -> None:
    """The report's numbers are the compiler's: a kernel held to few registers spills."""
    source = """
        extern "C" __global__ void __launch_bounds__(1024, 2) wide(const float* x, float* y) {
          float v[64];
          for (int i = 0; i < 64; ++i) v[i] = x[i * 1024 + threadIdx.x];
          for (int i = 0; i < 64; ++i)
            for (int j = 0; j < 64; ++j) v[j] = v[j] * v[i] + v[(i + j) % 64];
          for (int i = 0; i < 64; ++i) y[i * 1024 + threadIdx.x] = v[i];
        }"""
    (row,) = nvrtc.compile_text(sources.expand(source), "sm_90")
    assert row.kernel == "wide"
    assert row.registers <= 32
    assert row.spill_bytes > 0 or row.stack_bytes > 0


@pytest.mark.parametrize("fragments", [BF16, TF32])
def test_the_tensor_cores_words_compile(fragments: str) -> None:
    """What the emulator's test multiplies compiles for a GPU too, PTX included."""
    body = MMA.replace("{fragments}", fragments) + "\nCOPY_ASYNC_WAIT(0);"
    text = sources.expand(HEADERS + source_of("float", body))
    (row,) = nvrtc.compile_text(text, "sm_80")
    assert row.spill_bytes == 0


def table(rows: list[Resources]) -> str:
    """Fixed columns: kernel, architecture, registers, shared bytes, stack bytes, spilt bytes."""
    lines = [f"{'kernel':32}{'arch':8}{'regs':>6}{'shared':>8}{'stack':>7}{'spills':>8}"]
    lines += [
        f"{r.kernel:32}{r.arch:8}{r.registers:6}{r.shared_bytes:8}{r.stack_bytes:7}{r.spill_bytes:8}"
        for r in rows
    ]
    return "\n".join(lines)
