"""Shards whose weights and slots live on the GPU: every rule against the same shard on the host."""

from cupy_kernels.backends import GPU, HOST
from shards.aggregation import EACH, ROUND
from shards.rules import RULES, Decay
from tests.bench.report import Goal
from tests.support.shard_conversation import converse


def run() -> list[Goal]:
    """Pushes, pulls, rounds and exports of each rule; a goal that counts those that differ."""
    differ = [
        f"{name} ({merge})"
        for name, rule in RULES.items()
        for merge in (EACH, ROUND)
        if converse(GPU, rule(), Decay(0.02), merge)[0]
        != converse(HOST, rule(), Decay(0.02), merge)[0]
    ]
    print(f"{len(RULES)} rules on a GPU's shard; other bits than on the host: {differ or 'none'}")
    return [Goal("rules with other bits on a GPU's shard", len(differ), 0)]
