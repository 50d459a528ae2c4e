"""zstd compression of payloads: the only use of the library, which a base install does not have.

A compressed frame states its decompressed size. That size is compared with the limit of the
payload's kind before anything is decompressed, and nothing beyond it is ever written, so a
decompression bomb is refused by its header.
"""

from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shards.errors import BadMessage
from shards.extras import missing

LEVEL = 1  # gradients are mostly noise; higher levels gain nothing over the fastest
MAX_WINDOW_BYTES = 8 << 20


def _zstandard() -> ModuleType:
    try:
        import zstandard
    except ImportError:
        raise missing("payload with zstd", "the package zstandard", "zstd") from None
    return zstandard


def require() -> None:
    """Raise BadInput if the library is not installed."""
    _zstandard()


def pack(payload: NDArray[Any]) -> NDArray[np.uint8]:
    """The payload's bytes, compressed into one zstd frame."""
    packed = _zstandard().ZstdCompressor(level=LEVEL).compress(payload.view(np.uint8).data)
    return np.frombuffer(packed, np.uint8)


def unpack(label: str, frame: memoryview, max_bytes: int) -> memoryview:
    """Decompress one frame to at most `max_bytes`; raises BadMessage, naming it by its `label`."""
    library = _zstandard()
    try:
        header = library.get_frame_parameters(frame)
        # A frame that does not state its size counts as too large: the library then reports 2**64 -
        # 1.
        if header.content_size > max_bytes or header.window_size > MAX_WINDOW_BYTES:
            raise BadMessage(
                f"{label}: expected at most {max_bytes} bytes in a frame of zstd, with a window of"
                f" up to {MAX_WINDOW_BYTES}; got {header.content_size} and {header.window_size}"
            )
        payload = library.ZstdDecompressor().decompress(
            frame, max_output_size=header.content_size, allow_extra_data=False
        )
    except library.ZstdError as error:
        detail = " ".join(str(error).split())[:80]
        raise BadMessage(f"{label}: expected one frame of zstd, got {detail}") from None
    return memoryview(payload)
