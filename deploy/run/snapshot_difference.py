"""The differences between two snapshots, which `downpour snapshots diff` prints as JSON.

The service answers with them, and loads nothing that can read snapshots whole.
"""

import msgspec


class TensorChange(msgspec.Struct, frozen=True):
    """The change of one tensor: L2 norm and maximum of the differences, and its norm before."""

    name: str
    l2: float
    largest: float
    norm: float


class LedgerChange(msgspec.Struct, frozen=True):
    """One field of a worker's ledger entry that differs between two snapshots."""

    worker: str
    field: str
    before: str
    after: str


class Difference(msgspec.Struct, frozen=True):
    """All differences between two snapshots; each slot counts as a tensor of its own."""

    first: str
    second: str
    steps: tuple[int, int]
    tensors: tuple[TensorChange, ...]
    ledger: tuple[LedgerChange, ...]
