"""Compiles a CUDA source into a shared library for the CPU, once for each version of its text.

g++ compiles the shim, the source and one line for each kernel that exports it. It inserts the calls
of two sanitizers; `kernel_runtime.cc` implements these, so no sanitizer is passed to the linker. A
library is cached in a folder under a hash of all its inputs.
"""

import ctypes
import os
import shutil
import subprocess
from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory

from cupy_kernels import sources

_BASE = ("-x", "c++", "-std=c++20", "-fPIC", "-w")
_RUNTIME = (*_BASE, "-O2", "-shared")
_KERNELS = (
    *_BASE,
    "-c",
    "-O1",
    "-g1",
    "-fno-exceptions",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-ftrivial-auto-var-init=pattern",
    # A large stack frame touches each of its pages, so that it cannot skip a fiber's guard page.
    "-fstack-clash-protection",
    "-fsanitize=thread",
    "-fsanitize=alignment,bounds,signed-integer-overflow,integer-divide-by-zero,shift",
    "-fno-sanitize-recover=all",
)


# One translation unit, in this order.
_PARTS = ("fibers.cc", "scheduler.cc", "checks.cc", "launch.cc", "kernel_runtime.cc")


class NoCompiler(RuntimeError):
    """This machine has no g++ that can build the emulator."""


@cache
def compiler() -> str:
    """The path of g++. Raises NoCompiler."""
    path = shutil.which("g++")
    if path is None:
        raise NoCompiler("g++ is not on PATH: the emulator needs it (apt-get install g++)")
    return path


def folder() -> Path:
    """The folder of the libraries: `downpour/emulator` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "downpour" / "emulator"


@cache
def runtime() -> ctypes.CDLL:
    """The scheduler, loaded so that kernels find its functions."""
    text = "".join(f'#line 1 "{name}"\n{_read(name)}' for name in _PARTS)
    library = _build("runtime", text, _RUNTIME, ("-ldl",))
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


@cache
def library(name: str) -> ctypes.CDLL:
    """The library with the kernels of one of our sources."""
    return load(sources.text(name), name)


def load(text: str, name: str) -> ctypes.CDLL:
    """The library with the kernels of an expanded source text."""
    runtime()
    doors = "\n".join(f"EMULATED_KERNEL({kernel})" for kernel in sources.kernel_names(text))
    whole = f'#line 1 "shim.h"\n{_read("shim.h")}\n{text}\n#line 1 "doors"\n{doors}\n'
    return ctypes.CDLL(str(_build(Path(name).stem, whole, _KERNELS, ())))


def line_of(library: ctypes.CDLL, offset: int) -> str | None:
    """`file:line` of an offset in a library's code, if binutils are installed."""
    tool = shutil.which("addr2line")
    if tool is None:
        return None
    command = [tool, "-e", library._name, hex(offset)]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    source_line = output.split(" ")[0].rsplit("/", 1)[-1]
    return None if not source_line or "?" in source_line else source_line


def _build(stem: str, text: str, flags: tuple[str, ...], links: tuple[str, ...]) -> Path:
    key = sha256("\0".join((stem, text, *flags, *links, _version())).encode()).hexdigest()[:24]
    target = folder() / f"{stem}-{key}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=target.parent) as scratch:
        source, built, whole = (Path(scratch) / name for name in (f"{stem}.cu", "made", "whole.so"))
        source.write_text(text, encoding="utf-8")
        _run(compiler(), *flags, "-o", str(built), str(source), *links)
        if "-c" in flags:
            _run(compiler(), "-shared", "-o", str(whole), str(built))
        (whole if whole.exists() else built).replace(target)  # atomic, for concurrent builds
    return target


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr)
        raise RuntimeError(f"g++ could not build a kernel source: {first}")


@cache
def _version() -> str:
    command = [compiler(), "-dumpfullversion", "-dumpmachine"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _read(name: str) -> str:
    return (files("cupy_kernels") / "emulator" / name).read_text(encoding="utf-8")
