"""Compiles a kernel source for a GPU that need not be present, and reads its resource use.

NVRTC is the compiler that CuPy uses; through `cuda-core` it runs without a driver. The resources
that it reports for each kernel (registers, shared memory, spills) determine how many threads a
multiprocessor can hold.
"""

import re
from io import StringIO
from typing import NamedTuple

from cupy_kernels import sources


class Resources(NamedTuple):
    """The resources of a kernel: registers and spills of a thread, shared bytes of a block."""

    kernel: str
    arch: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int


def compile_source(name: str, arch: str) -> list[Resources]:
    """Compile a source of ours for `arch` ("sm_90"); returns the resources of each kernel.

    Raises ImportError without cuda-core, and its own error with NVRTC's log for bad source.
    """
    return compile_text(sources.text(name), arch)


def compile_text(text: str, arch: str) -> list[Resources]:
    """Compile an expanded source text."""
    from cuda.core import Program, ProgramOptions

    # The same as sources.NVRTC_OPTIONS, and the flushed denormals that CuPy adds to them.
    options = ProgramOptions(
        arch=arch, std=sources.STANDARD, fma=False, ftz=True, ptxas_options=["-v"], no_cache=True
    )
    log = StringIO()
    Program(text, "c++", options).compile("cubin", logs=log)
    return _read(log.getvalue(), arch)


_NUMBERS = {
    "registers": r"Used (\d+) registers",
    "shared_bytes": r"(\d+) bytes smem",
    "stack_bytes": r"(\d+) bytes stack frame",
    "stores": r"(\d+) bytes spill stores",
    "loads": r"(\d+) bytes spill loads",
}


def _read(log: str, arch: str) -> list[Resources]:
    rows = []
    for part in re.split(r"Compiling entry function ", log)[1:]:
        matches = {name: re.search(pattern, part) for name, pattern in _NUMBERS.items()}
        value = {name: int(match[1]) if match else 0 for name, match in matches.items()}
        rows.append(
            Resources(
                part.split("'")[1],
                arch,
                value["registers"],
                value["shared_bytes"],
                value["stack_bytes"],
                value["stores"] + value["loads"],
            )
        )
    return rows
