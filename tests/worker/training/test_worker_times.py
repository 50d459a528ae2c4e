"""Where workers' time goes: useful steps, waiting, and work that has to be done again."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shards.update_records import RECORD
from worker.training.worker_times import TimesTally, WorkerTimes, goodput


def pushes(*rows: dict[str, Any]) -> NDArray[np.void]:
    """Records of pushes; each computed for 2 s unless it says otherwise."""
    records = np.zeros(len(rows), RECORD)
    records["compute_s"], records["worker"] = 2.0, b"w0"
    for record, changes in zip(records, rows, strict=True):
        for name, value in changes.items():
            record[name] = value
    return records


def test_goodput_is_the_share_of_useful_steps() -> None:
    """Steps, data, the gate and the network make up the whole."""
    tally = TimesTally()
    tally.add([pushes({"wait_s": 1.0, "data_s": 0.5}, {"network_s": 0.5})], {}, 9.0)
    assert tally.times_s == {"w0": WorkerTimes(compute=4.0, data=0.5, wait=1.0, network=0.5)}
    assert goodput([*tally.times_s.values()]) == pytest.approx(4 / 6)
    assert goodput([]) is None


@pytest.mark.parametrize("first", [0, 1])
def test_steps_of_a_dropped_push_are_lost(first: int) -> None:
    """Once, though two shards have dropped it, and whichever reports it first."""
    dropped = pushes({"seq": 1}, {"seq": 2, "dropped": 1})
    looks = [[dropped, pushes()], [pushes(), dropped]]
    tally = TimesTally()
    for look in (looks[first], looks[1 - first]):
        tally.add(look, {}, 9.0)
    assert tally.times_s == {"w0": WorkerTimes(compute=2.0, lost=2.0)}


def test_what_a_death_costs_is_lost() -> None:
    """From the last push of a life to the start of the next one's first step; not after a worker
    that left, and never more than the run has lasted."""
    life = pushes({"time": 10.0}), pushes({"time": 19.0, "incarnation": 1, "wait_s": 1.0})
    for restarts, elapsed_s, lost in ((1, 60.0, 6.0), (1, 5.0, 5.0), (0, 60.0, 0.0)):
        tally = TimesTally()
        tally.add([life[0]], {"w0": 0}, elapsed_s)
        tally.add([life[1]], {"w0": restarts}, elapsed_s)
        assert tally.times_s["w0"].lost == lost
