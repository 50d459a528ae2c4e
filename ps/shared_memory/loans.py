"""Tracks memory that is lent across a process boundary. Pure bookkeeping.

The lender numbers its loans to one borrower from 1, and keeps a reference to the lent memory so
that it is not recycled meanwhile (shards/versions.py). With its next message the borrower reports
the highest number that it has seen, and the loans that it still holds. All other loans up to that
number are thereby returned, also those of lost messages, so no message has to arrive exactly once.
If a later message overtakes an earlier one, the earlier loan is returned already. The borrower must
then not read that memory; it repeats the request as for any lost message.
"""

from collections.abc import Collection

from shards.errors import BadMessage


class Loans:
    """The lender's side: what one borrower holds, at most `limit` loans at a time."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.count = 0
        self._lent: dict[int, object] = {}

    def __len__(self) -> int:
        return len(self._lent)

    def lend(self, thing: object) -> int | None:
        """Keep `thing` until it is returned; returns the loan's number, or None at the limit."""
        if len(self._lent) >= self.limit:
            return None
        self.count += 1
        self._lent[self.count] = thing
        return self.count

    @property
    def lent(self) -> list[int]:
        """The numbers of the loans that are not returned."""
        return list(self._lent)

    def withdraw(self, loan: int) -> None:
        """Cancel a loan that was never sent."""
        self._lent.pop(loan, None)

    def settle(self, seen: int, held: Collection[int]) -> None:
        """Return all loans up to `seen` except those in `held`; raises BadMessage if impossible."""
        if seen > self.count:
            raise BadMessage(f"loans: {seen} seen, but only {self.count} were made")
        for loan in [loan for loan in self._lent if loan <= seen and loan not in held]:
            del self._lent[loan]


class Borrowed:
    """The borrower's side: what it holds of one lender."""

    def __init__(self) -> None:
        self.seen = 0
        self._held: set[int] = set()

    def borrow(self, loan: int) -> bool:
        """Record a loan; returns whether it may be used: not if a later one came first."""
        if loan <= self.seen:
            return False
        self.seen = loan
        self._held.add(loan)
        return True

    def give_back(self, loan: int) -> None:
        """Record that nothing refers to a loan any more; may be called from any thread."""
        self._held.discard(loan)

    @property
    def held(self) -> list[int]:
        return sorted(self._held.copy())
