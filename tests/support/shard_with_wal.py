"""A shard with a WAL, without a network: each context is one process of it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from deploy.simulation.disk import SimulatedDisk
from ps.durability import Durability
from ps.wal.writer import LoggedShard, WriteAheadLog
from shards.messages import Ack, Install
from shards.rules import Momentum
from shards.shard import Shard
from shards.transition_io import Arrival, Outgoing
from tests.support.shard_dsl import SIZE, fresh, hello, join, push, spec


class Life:
    """One process of a shard with a WAL."""

    def __init__(
        self,
        folder: Path | SimulatedDisk,
        durability: Durability = Durability.PROCESS,
        min_bytes: int = 1 << 20,
    ) -> None:
        self.log = WriteAheadLog(folder, durability, min_bytes)
        self.shard = Shard(spec(rule=Momentum(0.5), bound=None), boot=int(os.urandom(6).hex(), 16))
        try:
            self.log.recover(self.shard, 1.0)
        except BaseException:
            self.log.close()
            raise
        self.acts = LoggedShard(self.shard, self.log)
        self.seq = 0

    def say(self, message: Any, frames: Any = ()) -> list[Outgoing]:
        return self.acts.handle_together([Arrival(b"w", message, frames)], 2.0)

    def enter(self) -> None:
        """Install zeros in an empty shard, and act as a worker of this process."""
        if self.shard.version == 0:
            self.say(Install(1, "job"), fresh())
        self.say(hello("w"))
        self.say(msgspec.structs.replace(join("w"), boot=self.shard.boot))
        self.seq = self.shard.ledger.entries["w"].seq

    def push(self, count: int = 1) -> None:
        for _ in range(count):
            self.seq += 1
            message = msgspec.structs.replace(push("w", self.seq), boot=self.shard.boot)
            gradient = np.random.default_rng(self.seq).standard_normal(SIZE).astype(np.float32)
            (answer,) = self.say(message, [gradient.tobytes()])
            assert isinstance(answer.message, Ack), answer

    def held(self) -> list[bytes]:
        return [array.tobytes() for array in self.shard.copy().arrays.values()]


@contextmanager
def life(folder: Path, *options: Any) -> Iterator[Life]:
    one = Life(folder, *options)
    try:
        yield one
    finally:
        one.log.close()


def written(folder: Path, pushes: int = 5) -> list[bytes]:
    """A WAL with this number of pushes, and the shard's state at the end."""
    with life(folder) as one:
        one.enter()
        one.push(pushes)
        return one.held()
