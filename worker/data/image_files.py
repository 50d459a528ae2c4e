"""Image files: those that a list names, as in Caffe, and those of a folder for each class."""

import re
from collections.abc import Iterator
from pathlib import Path, PureWindowsPath

import numpy as np

from shards.errors import BadInput, quote
from worker.data import image_decoding
from worker.data.image_decoding import Undecodable
from worker.data.read_options import ReadOptions
from worker.data.source import Sample, Source
from worker.data.text_files import first_line, read_lines

_MAX_BYTES = 1 << 28  # of one image file, and of a list

# As in Caffe, the name ends at the last space, and a name may have spaces.
_ENTRY = re.compile(r"(?P<name>.*\S)[ \t]+(?P<label>[+-]?\d+)(?:\.0*)?", re.ASCII)
_NUMBER = re.compile(r"\S.*\s[+-]?[\d.][\d.eE+-]*", re.ASCII)
_IMAGE = "|".join(re.escape(suffix) for suffix in image_decoding.SUFFIXES)
_SEVERAL = re.compile(rf".*(?:{_IMAGE})(?:\s+[+-]?[\d.]+){{2,}}", re.ASCII | re.IGNORECASE)
_NAMES_IMAGE = re.compile(rf".*(?:{_IMAGE})\b", re.IGNORECASE)
_LIST_SUFFIXES = {".txt", ".list", ".lst", ""}


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
        indices = range(len(files))
        order = np.random.default_rng(options.seed).permutation(len(files)) if shuffle else indices
        self._files = [files[index] for index in order]
        self._labels = [labels[index] for index in order]

    @property
    def rows(self) -> int:
        return len(self._files)

    def read(self, start: int, stop: int) -> Iterator[Sample]:
        for file, label in zip(self._files[start:stop], self._labels[start:stop], strict=True):
            yield Sample(label, _contents(file), file)

    def labels(self) -> Iterator[tuple[str, int]]:
        return zip(self._files, self._labels, strict=True)


def open_list(path: Path, options: ReadOptions) -> ImageListSource:
    """The images that the file at `path` lists: on each line a name, a space and a label.

    Empty lines are left out, and so are lines that begin with # and name no file.
    """
    files, labels, root = list[str](), list[int](), _root_folder(options.root, path.parent)
    for number, line in enumerate(read_lines(path, _MAX_BYTES), 1):
        entry = line.strip()
        match = _ENTRY.fullmatch(entry)
        file = None if match is None else _locate(match["name"], path.parent, root)
        if not entry or (entry.startswith("#") and not (file and Path(file).is_file())):
            continue
        several = _SEVERAL.fullmatch(entry) is not None
        if match is None or file is None or (several and not Path(file).is_file()):
            expected = "the name of a file, a space and a whole label"
            more = " (one label: HDF5 files hold several)" if several else ""
            raise BadInput(f"{path}:{number}", expected=f"{expected}{more}", got=quote(entry))
        files.append(file)
        labels.append(int(match["label"]))
    if not files:
        raise BadInput(path, expected="lines with a file and a label", got="none")
    return ImageListSource(path, files, labels, options, shuffle=options.shuffle)


def open_folder(path: Path, options: ReadOptions) -> ImageListSource:
    """The images in the subfolders of `path`, one for each class, in a random order.

    Labels count the subfolders, sorted by name, from 0.
    """
    files, labels = list[str](), list[int]()
    for label, folder in enumerate(class_folders(path)):
        images = sorted(str(file) for file in folder.rglob("*") if _is_image(file))
        files += images
        labels += [label] * len(images)
    return ImageListSource(path, files, labels, options, shuffle=True)


def is_image_folder(path: Path) -> bool:
    """Return whether `path` is a folder with subfolders of images."""
    return bool(class_folders(path))


def class_folders(path: Path) -> list[Path]:
    """The subfolders that directly hold image files, sorted by name; one for each class."""
    if not path.is_dir():
        return []
    folders = sorted(entry for entry in path.iterdir() if entry.is_dir())
    return [folder for folder in folders if any(map(_is_image, folder.iterdir()))]


def is_list(path: Path) -> bool:
    """Return whether a file is meant as a list of images and labels, by its first line.

    That line may have a fault, which `open_list` names.
    """
    if not path.is_file():
        return False
    line, listed = first_line(path), path.suffix.lower() in _LIST_SUFFIXES
    if _NAMES_IMAGE.match(line):
        return listed or _ENTRY.fullmatch(line) is not None
    empty = not line and path.suffix != ""
    return listed and (empty or _NUMBER.fullmatch(line) is not None)


def _is_image(file: Path) -> bool:
    return file.suffix.lower() in image_decoding.SUFFIXES


def _root_folder(root: str, folder: Path) -> Path | None:
    """The folder that precedes the names in a list in `folder`: from here, or from the list."""
    if not root:
        return None
    near = folder.absolute() / root
    return near if near.is_dir() and not Path(root).is_dir() else Path(root).absolute()


def _locate(name: str, folder: Path, root: Path | None) -> str:
    """The file that a list in `folder` names, which need not be there.

    Without a root the name is a path from the working directory, or else from the list. A root
    precedes every name, as in Caffe, unless only the absolute path itself is a file.
    """
    tries = [name, str(folder / name)]
    if root is not None:
        tries = [str(root / name.lstrip("/"))] + [name] * name.startswith("/")
    if "\\" in name:  # written on Windows
        tries.append(_locate(PureWindowsPath(name).as_posix(), folder, root))
    return next((file for file in tries[:-1] if Path(file).is_file()), tries[-1])


def _contents(file: str) -> bytes | Undecodable:
    try:
        with Path(file).open("rb") as opened:
            data = opened.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        return Undecodable(f"cannot be read: {getattr(error, 'strerror', None) or error}")
    if len(data) > _MAX_BYTES:
        return Undecodable(f"expected at most {_MAX_BYTES} bytes, got more")
    return data
