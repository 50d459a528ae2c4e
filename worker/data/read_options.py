"""The options for reading data, which a net's prototxt gives before any data is opened."""

import re
from typing import Literal

import msgspec

from worker.data.columns import Shape

Split = Literal["train", "test"]

VALIDATION = re.compile(r"(^|[^a-z])val(id(ation)?)?([^a-z]|$)")
"""The name, in lower case, of a part that is the test part where a train part but no test is."""

MAX_SKIPPED = 100
"""The number of images that one reader skips because they cannot be decoded."""


class ReadOptions(msgspec.Struct, frozen=True):
    """The options of reading the data of a net.

    `split` is the part of divided data. Labels must be in [0, classes). `shape` is the (channels,
    height, width) that the net states, used if the data does not state its own; `image` is whether
    the net needs images. Encoded images are decoded to 3 channels or 1 by `colour` (None: as they
    are), and then resized to (height, width) `resize`. `shuffle` is whether a list is read in a
    random order, which depends on `seed`. `root` precedes the names in a list of files. `tops` are
    the columns that the net reads by name, and `encoded` those of them that hold encoded images.
    `image_encoded` is whether the images of other nets are encoded (None: the rows show it). A
    reader skips up to `max_skipped` images that cannot be decoded.
    """

    split: Split = "train"
    classes: int | None = None
    shape: Shape | None = None
    image: bool = False
    colour: bool | None = None
    resize: tuple[int, int] | None = None
    shuffle: bool = False
    seed: int = 0
    root: str = ""
    tops: tuple[str, ...] = ()
    encoded: tuple[str, ...] = ()
    image_encoded: bool | None = None
    max_skipped: int = MAX_SKIPPED
