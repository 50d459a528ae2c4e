"""Images in file formats: decoded to the arrays that Caffe made of them.

Caffe decodes with OpenCV: the channels are blue, green, red, and a resized pixel is interpolated
linearly between four neighbours, in fixed-point arithmetic. Pillow decodes here, so that only the
formats below are read, and the size is known before memory is allocated.
"""

import io
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]

FORMATS = ("PNG", "JPEG", "BMP", "PPM", "WEBP")
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".ppm", ".pgm", ".webp")
MAX_PIXELS = 1 << 26
"""The largest image that is decoded: a small file may state a much larger one."""
_GREY = {"1", "L", "I", "I;16", "F", "LA"}
_ONE = 2048  # 1.0 in the arithmetic of a resize


class Undecodable(Exception):
    """An image that cannot be decoded; the text says why."""


def decode(data: bytes, colour: bool | None = None) -> Pixels:
    """An image file as (channels, height, width): 3 channels in the order BGR, or 1.

    With `colour` true there are always 3 channels, with false always 1. Raises Undecodable.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                width, height = image.size
                if width * height > MAX_PIXELS:
                    raise Undecodable(f"expected at most {MAX_PIXELS} pixels, got {width}x{height}")
                grey = image.mode in _GREY if colour is None else not colour
                array = np.asarray(image.convert("L" if grey else "RGB"))
    except Undecodable:
        raise
    except UnidentifiedImageError:
        raise Undecodable(
            f"expected an image ({', '.join(FORMATS)}), got {len(data)} other bytes"
        ) from None
    except Exception as error:  # noqa: BLE001  # a decoder raises anything for a damaged file
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Undecodable(f"cannot be decoded: {reason}") from None
    if grey:
        return array[None]
    return np.ascontiguousarray(array[:, :, ::-1].transpose(2, 0, 1))


def encode(pixels: Pixels, suffix: str = "PNG") -> bytes:
    """The file of an image (channels, height, width) with 1 channel, or 3 in the order BGR."""
    from PIL import Image

    file = io.BytesIO()
    array = pixels[0] if len(pixels) == 1 else pixels[::-1].transpose(1, 2, 0)
    Image.fromarray(np.ascontiguousarray(array)).save(file, suffix)
    return file.getvalue()


def resize(pixels: Pixels, height: int, width: int) -> Pixels:
    """An image (channels, h, w) as (channels, height, width), as OpenCV's INTER_LINEAR has it."""
    if pixels.shape[1:] == (height, width):
        return pixels
    before, right, across = _neighbours(pixels.shape[2], width)
    above, below, down = _neighbours(pixels.shape[1], height)
    lines = pixels.astype(np.int64)
    lines = lines[:, :, before] * (_ONE - across) + lines[:, :, right] * across
    upper, lower = (lines[:, above] >> 4), (lines[:, below] >> 4)
    down = down[:, None]
    mixed = ((upper * (_ONE - down)) >> 16) + ((lower * down) >> 16)
    resized: Pixels = np.clip((mixed + 2) >> 2, 0, 255).astype(np.uint8)
    return resized


def looks_encoded(data: bytes) -> bool:
    """Return whether bytes begin as an image file does, and not as raw pixels."""
    return data.startswith((b"\x89PNG\r\n", b"\xff\xd8\xff", b"RIFF"))


def _neighbours(size: int, new_size: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """For each new place the two old ones around it, and the weight of the second."""
    centres = (np.arange(new_size) + 0.5) * (size / new_size) - 0.5
    first = np.floor(centres).astype(np.int64)
    share = centres - first
    share[(first < 0) | (first >= size - 1)] = 0.0
    first = np.clip(first, 0, size - 1)
    return first, np.minimum(first + 1, size - 1), np.rint(share * _ONE).astype(np.int64)
