"""Image files: those that a list names, as in Caffe, and those of a folder for each class."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PureWindowsPath

import numpy as np

from ps.logs import logger
from shards.errors import BadInput, quote
from worker.data import image_decoding
from worker.data.image_decoding import Undecodable
from worker.data.read_options import ReadOptions
from worker.data.source import Sample, Source
from worker.data.text_files import first_lines, read_lines

_LOG = logger("worker.data")
_MAX_BYTES = 1 << 28  # of one image file, and of a list
_MAX_LABEL = 2**31 - 1  # as in Caffe

# As in Caffe, the name ends at the last space, and a name may have spaces.
_ENTRY = re.compile(r"(?P<name>.*\S)[ \t]+(?P<label>[+-]?\d{1,19})(?:\.0*)?", re.ASCII)
_NUMBER = re.compile(r"\S.*\s[+-]?[\d.][\d.eE+-]*", re.ASCII)
_IMAGE = "|".join(re.escape(suffix) for suffix in image_decoding.SUFFIXES)
_SEVERAL = re.compile(rf".*(?:{_IMAGE})(?:\s+[+-]?[\d.]+){{2,}}", re.ASCII | re.IGNORECASE)
_NAMES_IMAGE = re.compile(rf".*(?:{_IMAGE})\b", re.IGNORECASE)
_STATED_LABEL = re.compile(r"label=(?P<label>\d+)", re.ASCII)
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
        label = int(match["label"])
        if abs(label) > _MAX_LABEL:
            raise BadInput(f"{path}:{number}", expected="a label of 32 bits", got=label)
        files.append(file)
        labels.append(label)
    if not files:
        raise BadInput(path, expected="lines with a file and a label", got="none")
    return ImageListSource(path, files, labels, options, shuffle=options.shuffle)


def open_folder(path: Path, options: ReadOptions) -> ImageListSource:
    """The images in the subfolders of `path`, one for each class, in a random order.

    Labels count the subfolders, sorted by name, from 0, those without images too. Where the names
    of all are such as `label=3`, as Spark writes them, they state the labels.
    """
    files, labels, empty = list[str](), list[int](), list[str]()
    for folder, label in _labels_of_folders(_class_folders(path)):
        images = sorted(str(file) for file in folder.rglob("*") if _is_image(file))
        if not images:
            empty.append(folder.name)
        files += images
        labels += [label] * len(images)
    if empty:
        _LOG.warning("%s: no images of the classes %s", path, ", ".join(map(quote, empty)))
    return ImageListSource(path, files, labels, options, shuffle=True)


def check_classes(parts: Iterable[Path]) -> None:
    """Raise BadInput unless all parts of data have folders for the same classes.

    Labels that are places among the folders would differ from part to part.
    """
    folders = {path: _class_folders(path) for path in parts}
    if all(_STATED_LABEL.fullmatch(folder.name) for each in folders.values() for folder in each):
        return
    names = {path: {folder.name for folder in each} for path, each in folders.items()}
    for path, own in names.items():
        if missing := sorted(set().union(*names.values()) - own):
            raise BadInput(
                path,
                expected="a folder for each class of the other part",
                got=f"none for {', '.join(map(quote, missing))}",
                hint="make empty ones if it has no images of these",
            )


def is_image_folder(path: Path) -> bool:
    """Return whether `path` is a folder with a subfolder that directly holds images."""
    return path.is_dir() and any(any(map(_is_image, f.iterdir())) for f in _class_folders(path))


def is_list(path: Path) -> bool:
    """Return whether a file is meant as a list of images and labels, by its first lines.

    They may have a fault, which `open_list` names, such as the names of columns.
    """
    if not path.is_file():
        return False
    lines, listed = first_lines(path, 2), path.suffix.lower() in _LIST_SUFFIXES
    if not lines:
        return listed and path.suffix != ""
    if any(map(_NAMES_IMAGE.match, lines)):
        return listed or _ENTRY.fullmatch(lines[0]) is not None
    return listed and _NUMBER.fullmatch(lines[0]) is not None


def _class_folders(path: Path) -> list[Path]:
    """The subfolders, one for each class, sorted by name.

    By Spark's convention, names that begin with `_` or `.` are not data.
    """
    return sorted(entry for entry in path.iterdir() if entry.is_dir() and entry.name[0] not in "_.")


def _labels_of_folders(folders: list[Path]) -> list[tuple[Path, int]]:
    stated = [_STATED_LABEL.fullmatch(folder.name) for folder in folders]
    labels = [int(match["label"]) for match in stated if match is not None]
    if len(labels) < len(folders):
        labels = list(range(len(folders)))
    return list(zip(folders, labels, strict=True))


def _is_image(file: Path) -> bool:
    return file.suffix.lower() in image_decoding.SUFFIXES and not file.name.startswith(".")


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
