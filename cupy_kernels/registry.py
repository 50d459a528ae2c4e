"""Every kernel, by name.

An operation's rows are in its `spec.py`, next to the float64 references that they name, and its
CUDA source is in the same folder. A test compares the rows with the sources: each kernel has a row,
each row has a kernel, and their C types are the same.
"""

from importlib import import_module
from pkgutil import iter_modules

from cupy_kernels import ops
from cupy_kernels.kernel_spec import Kernel


def _rows() -> list[Kernel]:
    """The rows of every module `spec` or `..._spec` in an operation's folder."""
    rows: list[Kernel] = []
    for folder in iter_modules(ops.__path__, f"{ops.__name__}."):
        package = import_module(folder.name)
        for module in iter_modules(package.__path__, f"{folder.name}."):
            if module.name.endswith("spec"):
                rows += import_module(module.name).ROWS
    return rows


KERNELS: dict[str, Kernel] = {row.name: row for row in _rows()}
