"""Tensors by name in a .safetensors file."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from shards.errors import BadInput


def save_tensors(path: Path, tensors: Mapping[str, NDArray[np.float32]]) -> None:
    """Write tensors by name; raises BadInput for another suffix than .safetensors."""
    if path.suffix != ".safetensors":
        raise BadInput(f"{path}: expected .safetensors, got {path.suffix!r}")
    save_file({name: tensor.copy() for name, tensor in tensors.items()}, path)
