"""Image files: those that a list names, as in Caffe, and those of a folder for each class."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from shards.errors import BadInput, quoted
from worker.data import image_decoding
from worker.data.image_decoding import Undecodable
from worker.data.read_options import ReadOptions
from worker.data.source import Sample, Source

_MAX_BYTES = 1 << 28  # of one image file, and of a list


class ImageListSource(Source):
    """Image files with labels, in a given order, or in a random one."""

    def __init__(
        self,
        path: Path,
        files: list[str],
        labels: list[int],
        options: ReadOptions,
        *,
        shuffle: bool,
    ) -> None:
        super().__init__(path, options)
        places = range(len(files))
        order = np.random.default_rng(options.seed).permutation(len(files)) if shuffle else places
        self._files = [files[place] for place in order]
        self._labels = [labels[place] for place in order]

    @property
    def rows(self) -> int:
        return len(self._files)

    def read(self, start: int, stop: int) -> Iterator[Sample]:
        for file, label in zip(self._files[start:stop], self._labels[start:stop], strict=True):
            yield Sample(label, _contents(file), file)

    def labels(self) -> Iterator[tuple[str, int]]:
        return zip(self._files, self._labels, strict=True)


def open_list(path: Path, options: ReadOptions) -> ImageListSource:
    """The images that the file at `path` lists: on each line a name, a space and a label."""
    try:
        text = path.read_bytes()[: _MAX_BYTES + 1].decode()
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise BadInput(
            f"{path}: expected UTF-8 text, got byte {error.object[error.start]:#04x}"
        ) from None
    files, labels = list[str](), list[int]()
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        name, _, label = line.rstrip().rpartition(" ")
        if not name or not label.lstrip("-").isdecimal():
            raise BadInput(
                f"{path}:{number}: expected the name of a file, a space and a whole label, got"
                f" {quoted(line)}"
            )
        # As in Caffe the root precedes the name, so it ends in a slash; or else it is a folder.
        root = Path(options.root) if options.root else path.parent
        files.append(str(root / name.strip()) if options.root or not _there(name) else name)
        labels.append(int(label))
    if not files:
        raise BadInput(f"{path}: expected lines with a file and a label, got none")
    return ImageListSource(path, files, labels, options, shuffle=options.shuffle)


def open_folder(path: Path, options: ReadOptions) -> ImageListSource:
    """The images in the subfolders of `path`, one for each class, in a random order.

    Labels count the subfolders, sorted by name, from 0.
    """
    files, labels = list[str](), list[int]()
    for label, folder in enumerate(class_folders(path)):
        found = sorted(str(file) for file in folder.rglob("*") if _is_image(file))
        files += found
        labels += [label] * len(found)
    return ImageListSource(path, files, labels, options, shuffle=True)


def is_image_folder(path: Path) -> bool:
    """Whether `path` is a folder with subfolders of images."""
    return bool(class_folders(path))


def class_folders(path: Path) -> list[Path]:
    """The subfolders that directly hold image files, sorted by name; one for each class."""
    if not path.is_dir():
        return []
    folders = sorted(entry for entry in path.iterdir() if entry.is_dir())
    return [folder for folder in folders if any(map(_is_image, folder.iterdir()))]


def is_list(path: Path) -> bool:
    """Whether a file is a list of images and labels, by its first line."""
    if not path.is_file() or path.suffix not in {".txt", ".list", ".lst"}:
        return False
    with path.open("rb") as file:
        name, _, label = file.readline(1 << 16).rstrip().rpartition(b" ")
    return bool(name) and label.lstrip(b"-").isdigit()


def _is_image(file: Path) -> bool:
    return file.suffix.lower() in image_decoding.SUFFIXES


def _there(name: str) -> bool:
    return Path(name).is_absolute() or Path(name).is_file()


def _contents(file: str) -> bytes | Undecodable:
    try:
        with Path(file).open("rb") as opened:
            data = opened.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        return Undecodable(f"cannot be read: {getattr(error, 'strerror', None) or error}")
    if len(data) > _MAX_BYTES:
        return Undecodable(f"expected at most {_MAX_BYTES} bytes, got more")
    return data
