"""TFRecord's framing once more, bit by bit from its specification, as a reference for tests."""

from struct import pack


def crc32c(data: bytes) -> int:
    """The CRC-32C of the Castagnoli polynomial, a bit at a time."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> bytes:
    """The checksum of `data` as a file holds it."""
    crc = crc32c(data)
    turned = crc >> 15 | crc << 17 & 0xFFFFFFFF
    return pack("<I", (turned + 0xA282EAD8) % 2**32)


def framed(*records: bytes) -> bytes:
    """A file of records."""
    lengths = [pack("<Q", len(record)) for record in records]
    return b"".join(
        length + masked(length) + record + masked(record)
        for length, record in zip(lengths, records, strict=True)
    )
