"""Who holds what: pure bookkeeping of memory that is lent across a process boundary.

The lender numbers its loans to one borrower from 1 and keeps a reference to what each one lends, so
that it is not recycled meanwhile (shards/versions.py). The borrower tells, on whatever it says
next, the highest number it has seen and which loans it still holds. Every other one up to there is
thereby returned: also one whose message was lost on its way, and nothing has to arrive exactly
once. A message that is overtaken by a later one finds its loan returned already; its borrower must
not look at it, and asks again as it does for any message that is lost.
"""

from collections.abc import Collection

from shards.errors import BadMessage


class Loans:
    """What one borrower has of ours; at most `limit` things at a time."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.count = 0
        self._lent: dict[int, object] = {}

    def __len__(self) -> int:
        return len(self._lent)

    def lend(self, thing: object) -> int | None:
        """Keep `thing` until it is returned: the loan's number, or None when it has too many."""
        if len(self._lent) >= self.limit:
            return None
        self.count += 1
        self._lent[self.count] = thing
        return self.count

    @property
    def lent(self) -> list[int]:
        """The loans that are out, by number."""
        return list(self._lent)

    def withdraw(self, loan: int) -> None:
        """It was never sent."""
        self._lent.pop(loan, None)

    def settle(self, seen: int, held: Collection[int]) -> None:
        """The borrower has seen loans up to `seen`, and of those still holds `held`."""
        if seen > self.count:
            raise BadMessage(f"loans: {seen} seen, but only {self.count} were made")
        for loan in [loan for loan in self._lent if loan <= seen and loan not in held]:
            del self._lent[loan]


class Borrowed:
    """What we have of one lender's."""

    def __init__(self) -> None:
        self.seen = 0
        self._held: set[int] = set()

    def borrow(self, loan: int) -> bool:
        """Whether loan `loan` may be used: not if a later one came first."""
        if loan <= self.seen:
            return False
        self.seen = loan
        self._held.add(loan)
        return True

    def give_back(self, loan: int) -> None:
        """Nothing here refers to it any more; called from whatever thread dropped it."""
        self._held.discard(loan)

    @property
    def held(self) -> list[int]:
        return sorted(self._held.copy())
