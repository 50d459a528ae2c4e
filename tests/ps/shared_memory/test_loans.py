"""Loans are returned exactly when the borrower says so, whatever is lost or overtaken."""

import random
import sys

import pytest

from ps.shared_memory.references import Borrowed, Loans
from shards.errors import BadMessage

SEED = 4


def test_a_loan_is_kept_until_returned() -> None:
    """The lender refers to what it lent while the borrower has it, and not longer."""
    loans, thing = Loans(2), object()
    before = sys.getrefcount(thing)
    assert loans.lend(thing) == 1
    loans.settle(0, [])  # not seen yet: it may be on its way
    loans.settle(1, [1])
    assert (len(loans), sys.getrefcount(thing)) == (1, before + 1)
    loans.settle(1, [])
    loans.settle(1, [1])  # said earlier, heard later
    assert (len(loans), sys.getrefcount(thing)) == (0, before)


def test_what_was_lost_comes_back() -> None:
    """A loan in a message that never arrived is returned by a report after a later one."""
    loans = Loans(4)
    for _ in range(3):
        loans.lend("weights")
    loans.settle(3, [3])
    assert len(loans) == 1


def test_nobody_takes_more_than_the_limit() -> None:
    """At the limit nothing is lent; a message that could not be sent does not count."""
    loans = Loans(2)
    assert [loans.lend(n) for n in "abc"] == [1, 2, None]
    loans.withdraw(2)
    assert loans.lend("d") == 3


def test_loans_that_were_never_made() -> None:
    """A borrower that reports more loans than were made is refused."""
    loans = Loans(2)
    loans.lend("a")
    with pytest.raises(BadMessage, match="loans: 5 seen, but only 1 were made"):
        loans.settle(5, [])


def test_what_is_in_use_is_never_recycled() -> None:
    """Messages are lost and overtaken at random: the lender keeps all that is being read."""
    dice = random.Random(SEED)
    for _ in range(200):
        loans, borrowed = Loans(3), Borrowed()
        to_borrower: list[int] = []
        to_lender: list[tuple[int, list[int]]] = []
        using: set[int] = set()
        for _ in range(60):
            match dice.randrange(4):
                case 0:
                    loan = loans.lend("weights")
                    if loan is not None:
                        to_borrower.append(loan)
                case 1 if to_borrower:
                    loan = to_borrower.pop(dice.randrange(len(to_borrower)))
                    if dice.random() > 0.2 and borrowed.borrow(loan):
                        using.add(loan)
                case 2 if using:
                    loan = dice.choice(sorted(using))
                    using.discard(loan)
                    borrowed.give_back(loan)
                case _:
                    to_lender.append((borrowed.seen, borrowed.loans))
            if to_lender and dice.random() < 0.7:
                said = to_lender.pop(dice.randrange(len(to_lender)))
                if dice.random() > 0.2:
                    loans.settle(*said)
            assert using <= set(loans.open_loans), f"seed {SEED}"
        borrowed.borrow(loans.count) if loans.count > borrowed.seen else None
        for loan in borrowed.loans:
            borrowed.give_back(loan)
        loans.settle(borrowed.seen, borrowed.loans)
        assert not len(loans)
