"""Addresses with which a shard that was resharded redirects its workers to the new shards."""

from shards.errors import BadMessage


def address_of(generation: int) -> bytes:
    """The address of a generation of shards.

    It ends in a full stop, so that a truncated address is never another valid one. The description
    of a real cluster has the same property.
    """
    return f"generation {generation}.".encode()


def generation_of(address: bytes) -> int:
    """The generation of an address made by `address_of`; raises BadMessage."""
    number = address.removeprefix(b"generation ").removesuffix(b".")
    if not number.isdigit() or address != address_of(int(number)):
        raise BadMessage(f"successors: expected an address, got {address!r}")
    return int(number)
