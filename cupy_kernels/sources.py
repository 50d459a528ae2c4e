"""The CUDA C sources, each as one string, the same for every compiler.

CuPy's cache of compiled modules hashes the source text but not the included files, so it would not
notice a changed header. So `text` inserts each of our included files into the string, once. `#line`
directives keep a compiler's messages pointing at the files.
"""

import re
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$')
_KERNEL = re.compile(
    r'extern "C" __global__ void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\s*\(', re.MULTILINE
)

# Every compiler rounds a * b before it adds c; CuPy adds -ftz=true and divides and takes roots
# with IEEE rounding. So a kernel without transcendental functions gives the emulator's bits.
STANDARD = "c++17"
NVRTC_OPTIONS = (f"--std={STANDARD}", "--fmad=false")


def names() -> tuple[str, ...]:
    """The kernel sources, in order."""
    return tuple(sorted(name for name in _files() if name.endswith(".cu")))


@cache
def text(name: str) -> str:
    """The source `name`, of an operation's folder, with its headers inserted."""
    return expand(_read(name), name)


def expand(source: str, name: str = "kernel.cu") -> str:
    """`source` with each of our headers inserted where it is first included."""
    return "\n".join(_expand(source, name, set())) + "\n"


def kernel_names(source: str) -> tuple[str, ...]:
    """The `extern "C" __global__` functions of a source text, in order."""
    return tuple(_KERNEL.findall(source))


def _expand(source: str, name: str, seen: set[str]) -> list[str]:
    lines = [f'#line 1 "{name}"']
    for number, line in enumerate(source.splitlines(), 1):
        included = _INCLUDE.match(line)
        if included is None:
            lines.append("" if line == "#pragma once" else line)
            continue
        header = included[1]
        if header not in seen:
            seen.add(header)
            lines += _expand(_read(header), header, seen)
        lines.append(f'#line {number + 1} "{name}"')
    return lines


def _read(name: str) -> str:
    return _files()[name].read_text(encoding="utf-8")


@cache
def _files() -> dict[str, Traversable]:
    """The sources of all operations and the shared headers, by file name."""
    package = files("cupy_kernels")
    operations = [folder for folder in (package / "ops").iterdir() if folder.is_dir()]
    texts = [file for folder in (package / "headers", *operations) for file in folder.iterdir()]
    return {file.name: file for file in texts if file.name.endswith((".cu", ".cuh"))}
