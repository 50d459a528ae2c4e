"""The schedule: a seed says it all, and it draws only what may be drawn."""

from itertools import islice

from tests.chaos.schedule import KILLS, Fault, Kind, Mix, Round, rounds

WORKERS = ("w0", "w1", "w2")
MIX = Mix(
    weights={Kind.KILL_WORKER: 3.0, Kind.KILL_SHARD: 1.0, Kind.STOP_SHARD: 1.0, Kind.LOSS: 9.0},
    targets={Kind.KILL_WORKER: WORKERS, Kind.KILL_SHARD: ("a", "b"), Kind.STOP_SHARD: ("a", "b")},
    shortest_s=0.2,
    longest_s=10.0,
    together=1,
)


def drawn(seed: int, count: int = 400) -> list[Round]:
    return list(islice(rounds(seed, MIX), count))


def test_a_seed_is_a_schedule() -> None:
    """The same seed gives the same rounds, another one others."""
    assert drawn(1) == drawn(1) != drawn(2)


def test_the_first_round_of_a_seed() -> None:
    """What a seed means does not change unnoticed, or reports could not be reproduced."""
    assert [fault[:2] for fault in drawn(5)[0].faults] == [(Kind.KILL_SHARD, "b")]


def test_only_what_may_be_drawn() -> None:
    """Every fault has a target of its kind's, within the lengths; none without targets is drawn."""
    faults = [fault for one in drawn(3) for fault in one.faults]
    assert {fault.kind for fault in faults} == {Kind.KILL_WORKER, Kind.KILL_SHARD, Kind.STOP_SHARD}
    assert all(fault.target in MIX.targets[fault.kind] for fault in faults)
    lasting = [fault.for_s for fault in faults if fault.kind not in KILLS]
    assert all(0.2 <= for_s <= 10.0 for for_s in lasting)
    assert all(fault.for_s == 0 for fault in faults if fault.kind in KILLS)


def test_no_more_shards_die_together_than_the_level_survives() -> None:
    """Workers die by the roomful, shards by as many as `together` says, nobody twice in a round."""
    sizes: dict[Kind, set[int]] = {}
    for one in drawn(4):
        assert len({fault.target for fault in one.faults}) == len(one.faults)
        sizes.setdefault(one.faults[0].kind, set()).add(len(one.faults))
    assert sizes == {Kind.KILL_WORKER: {1, 2, 3}, Kind.KILL_SHARD: {1}, Kind.STOP_SHARD: {1}}


def test_a_tour_begins_with_one_of_each() -> None:
    """Each kind that has targets, in some order, and then what the weights say."""
    tour = [*islice(rounds(6, MIX._replace(tour=True, weights={Kind.STOP_SHARD: 1.0})), 9)]
    kinds = [one.faults[0].kind for one in tour]
    assert {*kinds[:3]} == {Kind.KILL_WORKER, Kind.KILL_SHARD, Kind.STOP_SHARD}
    assert {*kinds[3:]} == {Kind.STOP_SHARD}


def test_a_fault_in_words() -> None:
    """As rounds.log has it."""
    assert str(Fault(Kind.STOP_SHARD, "shard 1", 0.1, 1.234)) == (
        "SIGSTOP of a shard (shard 1) for 1.23 s"
    )
    assert str(Fault(Kind.KILL_WORKER, "w3")) == "kill -9 of a worker (w3)"
