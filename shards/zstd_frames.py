"""zstd around a payload: the one door to the library, which a base install does not have.

A packed frame says how much it unpacks to. That is held against what the payload's kind allows
before a byte is unpacked, and nothing beyond it is ever written: a bomb is refused by its label.
"""

from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shards.errors import BadInput, BadMessage

LEVEL = 1  # gradients are noise; what can be won, the fastest level wins
MAX_WINDOW_BYTES = 8 << 20


def _zstandard() -> ModuleType:
    try:
        import zstandard
    except ImportError:
        raise BadInput(
            "payload with zstd: expected the package zstandard"
            " (pip install 'downpour-sgd[zstd]'), got none"
        ) from None
    return zstandard


def require() -> None:
    """Raise BadInput where the library is missing, before anything is packed."""
    _zstandard()


def pack(payload: NDArray[Any]) -> NDArray[np.uint8]:
    """The payload's bytes, packed."""
    packed = _zstandard().ZstdCompressor(level=LEVEL).compress(payload.view(np.uint8).data)
    return np.frombuffer(packed, np.uint8)


def unpack(what: str, frame: memoryview, most_bytes: int) -> memoryview:
    """What was packed, at most `most_bytes`; raises BadMessage."""
    library = _zstandard()
    try:
        told = library.get_frame_parameters(frame)
        if told.content_size > most_bytes or told.window_size > MAX_WINDOW_BYTES:
            raise BadMessage(
                f"{what}: expected at most {most_bytes} bytes in a frame of zstd, with a window of"
                f" up to {MAX_WINDOW_BYTES}; got {told.content_size} and {told.window_size}"
            )
        payload = library.ZstdDecompressor().decompress(
            frame, max_output_size=told.content_size, allow_extra_data=False
        )
    except library.ZstdError as error:
        detail = " ".join(str(error).split())[:80]
        raise BadMessage(f"{what}: expected one frame of zstd, got {detail}") from None
    return memoryview(payload)
