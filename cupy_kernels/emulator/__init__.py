"""Runs the CUDA sources on the CPU and finds faults that a GPU would not report.

`launch(..., engine=Emulator(Schedule.REVERSED))` executes a kernel on NumPy arrays. Each argument
is copied between guard pages, aligned no better than its row promises; outputs start as NaN. The
result is what the kernel wrote, or a KernelFault with one line: kernel, block, thread, source line
and what it did. `fibers.cc` says which faults are found and which cannot be.
"""

import ctypes
from enum import IntEnum
from threading import Lock
from typing import Any

from cupy_kernels.emulator import build
from cupy_kernels.kernel_spec import Dim3, Kernel, Parameter, Role

__all__ = ["Emulator", "KernelFault", "Schedule"]

_TURN = Lock()  # the runtime knows one launch, and takes any call into a kernel's library for its


class KernelFault(RuntimeError):
    """A kernel did something illegal; the message says what and where."""


class Schedule(IntEnum):
    """The order in which threads and blocks run."""

    FORWARD = 0
    REVERSED = 1
    RANDOM = 2


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("begin", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
        ("item_bytes", ctypes.c_size_t),
        ("map", ctypes.c_void_p),
        ("map_bytes", ctypes.c_size_t),
        ("writable", ctypes.c_int),
        ("cells", ctypes.c_void_p),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("call", ctypes.c_void_p),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("dynamic_bytes", ctypes.c_size_t),
        ("schedule", ctypes.c_int),
        ("seed", ctypes.c_uint64),
        ("buffers", ctypes.POINTER(_Buffer)),
        ("buffer_count", ctypes.c_uint),
        ("shared", ctypes.c_void_p),
        ("shared_end", ctypes.c_void_p),
        ("fault_block", ctypes.c_uint * 3),
        ("fault_thread", ctypes.c_uint * 3),
        ("fault_in_thread", ctypes.c_int),
        ("fault_buffer", ctypes.c_int),
        ("fault_code", ctypes.c_size_t),
        ("text", ctypes.c_char * 256),
    )


class Emulator:
    """An engine for `launch`. `seed` orders the threads of a random schedule.

    `source` is an expanded text that replaces the kernel's file, for kernels without a file.
    """

    def __init__(
        self, schedule: Schedule = Schedule.FORWARD, *, seed: int = 1, source: str | None = None
    ) -> None:
        self._schedule = schedule
        self._seed = seed
        self._source = source

    def run(
        self, kernel: Kernel, grid: Dim3, block: Dim3, shared_bytes: int, arguments: list[Any]
    ) -> None:
        """Run a checked launch to its end; raises KernelFault, and NoCompiler without g++."""
        with _TURN:
            self._run(kernel, grid, block, shared_bytes, arguments)

    def _run(
        self, kernel: Kernel, grid: Dim3, block: Dim3, shared_bytes: int, arguments: list[Any]
    ) -> None:
        library = self._library(kernel)
        check_signature(kernel, library)
        placed = _Placed(kernel.parameters, arguments, self._schedule is Schedule.REVERSED)
        try:
            launch = _Launch(
                call=ctypes.cast(library[f"emulated_call_{kernel.name}"], ctypes.c_void_p),
                arguments=placed.pointers,
                grid=grid,
                block=block,
                dynamic_bytes=shared_bytes,
                schedule=self._schedule,
                seed=self._seed,
                buffers=placed.buffers,
                buffer_count=len(placed.owners),
            )
            edges = (ctypes.c_void_p * 2)()
            library.emulated_shared_range(edges)
            launch.shared, launch.shared_end = edges
            through = build.runtime().emulated_launch(ctypes.byref(launch))
            if not through:
                raise KernelFault(_report(kernel, library, launch, placed))
            placed.bring_back(kernel.name)
        finally:
            placed.free()

    def _library(self, kernel: Kernel) -> ctypes.CDLL:
        if self._source is None:
            return build.library(kernel.source)
        return build.load(self._source, kernel.source)


def check_signature(kernel: Kernel, library: ctypes.CDLL) -> None:
    """Raise KernelFault unless the compiled kernel has exactly the parameters of its row."""
    if signature(kernel.name, library) != kernel.signature:
        raise KernelFault(
            f"{kernel.name}: the source takes ({signature(kernel.name, library)}),"
            f" its row says ({kernel.signature})"
        )


def signature(name: str, library: ctypes.CDLL) -> str:
    """A compiled kernel's C types in order, as `Kernel.signature` spells them."""
    text = ctypes.create_string_buffer(1024)
    library[f"emulated_describe_{name}"](text)
    return text.value.decode().strip()


class _Placed:
    """A launch's arguments in the emulator's memory."""

    def __init__(
        self, parameters: tuple[Parameter, ...], arguments: list[Any], at_start: bool
    ) -> None:
        pairs = list(zip(parameters, arguments, strict=True))
        arrays = [(p, a) for p, a in pairs if p.role is not Role.SCALAR and a is not None]
        self.owners: list[tuple[Parameter, Any]] = []
        self.buffers = (_Buffer * max(len(arrays), 1))()
        self._handles = [self._hold(p, a, at_start) for p, a in pairs]
        addresses = (ctypes.addressof(handle) for handle in self._handles)
        self.pointers = (ctypes.c_void_p * len(pairs))(*addresses)

    def _hold(self, parameter: Parameter, value: Any, at_start: bool) -> Any:
        """The bytes to pass for a parameter: a scalar's value, or an address of an array's copy."""
        if parameter.role is Role.SCALAR:
            return ctypes.create_string_buffer(value.tobytes(), value.nbytes)
        if value is None:
            return ctypes.c_void_p(0)
        for index, (_, other) in enumerate(self.owners):
            same = other.ctypes.data == value.ctypes.data and other.nbytes == value.nbytes
            if same and value.nbytes and parameter.role is not Role.READ:
                self.owners[index] = (parameter, other)
                self.buffers[index].writable = True
            if same and value.nbytes:
                return ctypes.c_void_p(self.buffers[index].begin)
        return ctypes.c_void_p(self._place(parameter, value, at_start))

    def _place(self, parameter: Parameter, value: Any, at_start: bool) -> int:
        buffer = self.buffers[len(self.owners)]
        buffer.bytes = value.nbytes
        buffer.item_bytes = (
            parameter.dtype.alignment if parameter.dtype.names else parameter.dtype.itemsize
        )
        buffer.writable = parameter.role is not Role.READ
        allocate = build.runtime().emulated_allocate
        align = ctypes.c_size_t(parameter.alignment)
        if not allocate(ctypes.byref(buffer), align, int(at_start)):
            raise MemoryError(f"{parameter.name}: no memory for {value.nbytes} bytes")
        if parameter.role is not Role.WRITTEN:
            ctypes.memmove(buffer.begin, value.ctypes.data, value.nbytes)
        self.owners.append((parameter, value))
        begin: int = buffer.begin
        return begin

    def bring_back(self, kernel: str) -> None:
        """Copy back the arrays that the kernel may write, after checking the memory around them."""
        for buffer, (parameter, value) in zip(self.buffers, self.owners, strict=False):
            if not build.runtime().emulated_intact(ctypes.byref(buffer)):
                raise KernelFault(f"{kernel}: wrote just outside argument `{parameter.name}`")
            if buffer.writable:
                ctypes.memmove(value.ctypes.data, buffer.begin, value.nbytes)

    def free(self) -> None:
        for buffer, _ in zip(self.buffers, self.owners, strict=False):
            build.runtime().emulated_free(ctypes.byref(buffer))


def _report(kernel: Kernel, library: ctypes.CDLL, launch: _Launch, placed: _Placed) -> str:
    text = launch.text.decode()
    if launch.fault_buffer >= 0:
        parameter, value = placed.owners[launch.fault_buffer]
        text = text.replace("@", f"`{parameter.name}` ({value.dtype}[{value.size}])")
    parts = [kernel.name, "block ({},{},{})".format(*launch.fault_block)]
    if launch.fault_in_thread:
        parts.append("thread ({},{},{})".format(*launch.fault_thread))
    if launch.fault_code and launch.fault_in_thread:
        source_line = build.line_of(library, _offset(library, launch))
        parts += [source_line] if source_line else []
    return f"{', '.join(parts)}: {text}"


def _offset(library: ctypes.CDLL, launch: _Launch) -> int:
    """The offset of the reported code in the library's file, minus one to be within the call."""
    library.emulated_base.restype = ctypes.c_uint64
    return int(launch.fault_code - library.emulated_base() - 1)
