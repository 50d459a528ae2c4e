"""How a simulated shard that has moved tells where the job is now."""

from shards.errors import BadMessage


def address_of(generation: int) -> bytes:
    """As the description of a real cluster, none of it is another one when it is cut short."""
    return f"generation {generation}.".encode()


def generation_of(address: bytes) -> int:
    """What `address_of` was given; raises BadMessage."""
    number = address.removeprefix(b"generation ").removesuffix(b".")
    if not number.isdigit() or address != address_of(int(number)):
        raise BadMessage(f"successors: expected an address, got {address!r}")
    return int(number)
