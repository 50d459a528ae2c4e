"""One seeded conversation with a shard, for arrays on any backend; needs no pytest."""

from functools import partial
from typing import Any

import numpy as np

from cupy_kernels.backends import Backend
from shards import shard_state
from shards.aggregation import ROUND, Merge
from shards.buffer_pool import Buffers, staging
from shards.messages import Export, Install, Read
from shards.rules import Decay, Rule
from shards.schedules import Inv
from shards.shard import Shard
from shards.tables import DenseTable, KeyRange, ShardMap, TensorSpec
from tests.support.shard_dsl import Said, Talk, as_bytes, blank, pull, push, spec

SEED = 6021

TENSORS = DenseTable(
    "net",
    (
        TensorSpec("conv", (13, 20), lr_mult=2.0),
        TensorSpec("bias", (13,), decay_mult=0.0),
        TensorSpec("still", (70,), lr_mult=0.0),
        TensorSpec("ip", (256, 2), lr_mult=0.5, decay_mult=3.0),
    ),
)


def converse(place: Backend, rule: Rule, decay: Decay, merge: Merge) -> tuple[list[Any], Shard]:
    """Hold a seeded conversation with a shard of one section; return its answers as bytes."""
    dice = np.random.default_rng(SEED)
    # A section that begins within a tensor, if the rule allows that.
    keys = KeyRange(TENSORS.offsets[1] if rule.whole_tensors else 128, TENSORS.size)
    talk = Talk(installed=False)
    talk.shard = Shard(
        spec(
            table=TENSORS,
            map=ShardMap(1, (keys,)),
            rule=rule,
            decay=decay,
            merge=merge,
            bound=0 if merge == ROUND else None,
            schedule=Inv(base_rate=0.1, gamma=0.1, power=0.75),
        ),
        1,
        partial(Buffers, allocate=staging(place)),
        place,
    )
    size = talk.shard.size

    def values() -> np.ndarray[Any, np.dtype[np.float32]]:
        arena = TENSORS.empty()
        for view in TENSORS.views(arena).values():
            view[...] = dice.standard_normal(view.shape, np.float32)
        return arena[keys.start : keys.stop]

    heard: list[Any] = []

    def say(message: Any, frames: Any = ()) -> None:
        said: Said = talk.say(message, frames)
        heard.append((said, as_bytes(talk.frames)))

    state = blank(spec=talk.shard.spec)
    state.arrays["net/weights"] = values()
    say(Install(1, "job"), as_bytes(shard_state.encode(state)))
    talk.enter("a", "b", "c")
    for seq in range(1, 7):
        for worker in "abc":
            say(push(worker, seq, start=keys.start, stop=keys.stop), [values().tobytes()])
        say(pull("b", seq))
    say(Read(2, "job"))
    say(Export(3, "job"))
    assert talk.shard.version == (6 if merge == ROUND else 18)
    assert len(talk.frames[1]) == size
    return heard, talk.shard
