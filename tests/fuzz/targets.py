"""What is fuzzed without a socket: every byte that a peer can send, up to the shard's own state."""

import math
import random
from typing import NamedTuple

import ps
from ps.job_spec import shard_specs
from ps.security import enrolment
from ps.security.authorization import Admission, Invitation, KeyRegistry
from ps.shared_memory import handshake
from ps.shared_memory.shard_side import ShardSide
from ps.transport.striping import Gatherer
from shards import wire_format
from shards.errors import DownpourError
from shards.messages import PROTOCOL, Hello, Join, Message, Probe
from shards.schema_digest import SCHEMA
from shards.shard import Shard
from shards.shard_state import SavedProgress
from shards.shard_status import ShardStatus
from tests.fuzz.mutate import Frames, spoiled, valid
from tests.support.shard_dsl import blank

TABLE = ps.DenseTable("net", (ps.TensorSpec("w", (64,)),))
_ANEW = 2_000  # messages after which a shard is made anew, for some spoil it lawfully


class Tally(NamedTuple):
    """How many messages were tried, and how many the shard understood well enough to answer."""

    tried: int
    heard: int


def a_shard() -> Shard:
    """One that has weights, and a worker "w" that has joined."""
    (spec,) = shard_specs(TABLE)
    shard = Shard(spec, 1)
    shard.restore(blank(spec=spec))
    for message in (
        Hello(1, spec.job, "w", 0, PROTOCOL, SCHEMA),
        Join(2, spec.job, "w", 0, 1, 0),
    ):
        shard.handle(b"peer", message, (), 0.0)
    return shard


def decoders(frames: Frames) -> None:
    """Each decoder that a peer's bytes can reach; raises what is not an error of ours."""
    for frame in frames[:2]:
        for decode in (
            wire_format.decode_client_message,
            wire_format.decode_reply,
            handshake.decode_from_worker,
            handshake.decode_from_shard,
            lambda frame: wire_format.decode_state(frame, SavedProgress),
            lambda frame: wire_format.decode_state(frame, ShardStatus),
        ):
            try:
                decode(frame)
            except DownpourError:
                continue


class Reception:
    """A shard's way from frames to answers, as in ps/server/frontend.py but without sockets."""

    def __init__(self) -> None:
        self.shard = a_shard()
        self._gatherer = Gatherer(1 << 20)
        self._sharing = ShardSide(self.shard.spec.job, enabled=False)
        self._register = KeyRegistry(Admission("0" * 64, Invitation("1" * 64, 10)), 0.0)

    def hear(self, frames: Frames, now: float) -> int:
        """How many messages were understood; raises what is not an error of ours."""
        enrolment.answer(self._register, frames, now)
        try:
            whole = self._gatherer.take(b"peer", list(frames))
            parts = None if whole is None else self._sharing.open(*whole)
            if not parts:
                return 0
            heard = [
                (wire_format.decode_client_message(header), own)
                for header, own in wire_format.disclose(parts[0], parts[1:])
            ]
        except DownpourError:
            return 0
        for message, own in heard:
            self._answer(message, [bytes(frame) for frame in own], now)
        return len(heard)

    def _answer(self, message: Message, frames: Frames, now: float) -> None:
        before = self.shard.version
        if isinstance(message, Probe):
            answers = [self.shard.answer_probe(b"peer", message, frames, unix_s=0.0, cpu_s=0.0)]
        else:
            answers = self.shard.handle(b"peer", message, frames, now)  # type: ignore[arg-type]
        for answer in answers:
            wire_format.enclose([(answer.message, answer.frames)])
        weights = self.shard.parameters.weights()
        assert math.isfinite(float(weights.sum())), f"{message} spoiled the weights"
        assert self.shard.version - before <= 1 or type(message).__name__ == "Install"


def run(executions: int, seed: int) -> Tally:
    """Try so many messages; raises with the seed and the message at the first that crashes."""
    tried = heard = 0
    while tried < executions:
        reception, dice = Reception(), random.Random(f"{seed}/{tried}")
        messages = spoiled(valid(reception.shard), dice.randrange(2**62))
        for number in range(min(_ANEW, executions - tried)):
            frames = next(messages)
            try:
                decoders(frames)
                heard += reception.hear(frames, now=0.001 * number)
            except Exception as error:
                short = [frame[:300] for frame in frames]
                raise AssertionError(f"seed {seed}, message {tried + number}: {short}") from error
        reception.shard.tick(now=1e6)
        tried += min(_ANEW, executions - tried)
    return Tally(tried, heard)
