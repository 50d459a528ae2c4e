"""The one door to CuPy: is there a GPU that works, and the module if there is.

`import cupy` succeeds without a driver and fails at the first device call, so the only honest
question is a device call. It is asked once, when somebody first wants to know; importing this
package imports no CuPy.
"""

from functools import cache
from importlib import import_module
from types import ModuleType


@cache
def gpu() -> ModuleType | None:
    """The `cupy` module if it is installed and its first device answers, else None."""
    try:
        cupy = import_module("cupy")
        usable = cupy.cuda.runtime.getDeviceCount() > 0
    except Exception:  # noqa: BLE001  CuPy raises its own runtime errors, an absent one ImportError
        return None
    return cupy if usable else None
