"""The curves of the strategies are repeatable to the bit, and their workers differ in speed."""

from tests.bench.strategy_curves import TURNS_OF, WORKERS, Mnist, course


def test_a_course_is_repeatable_to_the_bit() -> None:
    """The same gradients in the same order make the same tests; unequal speeds make old pushes."""
    data = Mnist()
    first, second = (course(data, "easgd:tau=2", 80, TURNS_OF) for _ in range(2))
    assert first == second
    assert first.looks[-1].loss < first.looks[0].loss
    assert course(data, "asp", 80, TURNS_OF).most > WORKERS, "older than one round of them all"
