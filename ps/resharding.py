"""A job moves to other shards, more or fewer, while its workers train.

The shards come to a standstill at one cut (shards/standstill.py); their state is cut anew and given
to the new ones; then the old ones send every worker on. A worker says hello to the new shards,
which know its last applied push, and repeats what was not acknowledged: nothing is lost and nothing
applied twice. Until the old ones have been told, whatever goes wrong leaves them to go on.
"""

from ps.console import Console
from shards.errors import BadInput
from shards.recut import recut

_STANDSTILL_S = 60.0


def move(old: Console, new: Console) -> None:
    """Move the state of `old`'s shards to `new`'s, which are fresh, and the workers with it.

    Both are of one job and table; the new map's epoch is higher. Workers wait meanwhile: for as
    long as the state takes to travel twice. Keep the old shards until the job ends: a worker that
    starts late may ask there. Raises what either console raises; then the job goes on where it was,
    unless the error came while workers were being told, and BadInput for replicated shards.
    """
    if old.cluster.coordinator is not None or new.cluster.coordinator is not None:
        raise BadInput("move: expected shards with one copy each, got replicated ones")
    cut = old.stand_still(_STANDSTILL_S)
    try:
        states = recut(old.export(), old.cluster.map, new.cluster.map)
        for shard, state in enumerate(states):
            new.restore(shard, state, goes_on=True)
    except BaseException:
        old.go_on()
        raise
    old.retire(new.cluster, cut)
