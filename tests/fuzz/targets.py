"""What is fuzzed without a socket: every byte that a peer can send, up to the shard's own state."""

import math
import random
from typing import NamedTuple

import numpy as np

import ps
from ps.job_spec import shard_specs
from ps.security import enrolment
from ps.security.authorization import Admission, Invitation, KeyRegistry
from ps.shared_memory import handshake
from ps.shared_memory.shard_side import ShardSide
from ps.transport.striping import Gatherer
from shards import row_codecs, wire_format
from shards.errors import DownpourError
from shards.first_values import Uniform
from shards.messages import PROTOCOL, Ack, Hello, Join, Message, Probe, Refusal, Weights
from shards.rules import Adagrad
from shards.schema_digest import SCHEMA
from shards.shard import Shard
from shards.shard_state import IDS, ROWS, Arrays, SavedProgress, of_table
from shards.shard_status import ShardStatus
from shards.spec import TableSpec
from shards.tables import SparseTable
from tests.fuzz.mutate import (
    Frames,
    draw_rows,
    row_pull,
    row_push,
    spoil_rows,
    spoiled,
    valid,
)
from tests.support.shard_dsl import blank

_GUARD = ps.Guard(quarantine_after=2**40)  # all messages are one worker's
TABLES = (
    TableSpec(ps.DenseTable("net", (ps.TensorSpec("w", (64,)),)), guard=_GUARD),
    TableSpec(SparseTable("user", 2, Uniform(0.1), rows=500), Adagrad(), guard=_GUARD),
)
_ROWS_ANEW = 250  # pushes after which a shard is made anew: its table is full by then
_ANEW = 2_000  # messages after which a shard is made anew, for some spoil it lawfully


class Tally(NamedTuple):
    """How many messages were tried, and how many the shard understood well enough to answer."""

    tried: int
    heard: int


def a_shard() -> Shard:
    """One that has weights, and a worker "w" that has joined."""
    (spec,) = shard_specs(TABLES)
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
        if self.shard.version != before:
            self._check_rows(message)
        assert self.shard.version - before <= 1 or type(message).__name__ == "Install"

    def _check_rows(self, message: Message) -> None:
        """Assert that the rows after a message are those of a state that a shard would take."""
        arrays = self.shard.parameters.copy()
        self.shard.parameters.check_state(arrays)
        rows = of_table(arrays, "user").get(ROWS)
        assert rows is None or np.isfinite(rows).all(), f"{message} spoiled the rows"


def run_rows(executions: int, seed: int) -> Tally:
    """Try this number of pushes and pulls with spoiled frames of ids and rows.

    Each push is applied whole, or refused and changes nothing; a pull changes nothing. Raises with
    the seed and the frames at the first for which this does not hold.
    """
    dice, applied = random.Random(seed), 0
    for number in range(executions):
        if number % _ROWS_ANEW == 0:
            shard, seq = a_shard(), 0
        kind, asked = dice.choice(row_codecs.PUSHED), dice.choice(row_codecs.PULLED)
        frames = spoil_rows(draw_rows(dice, kind), dice)
        before = shard.parameters.copy()
        try:
            (pulled,) = shard.handle(b"peer", row_pull(shard, asked), frames[:1], 0.0)
            assert isinstance(pulled.message, Weights | Refusal)
            assert shard.parameters.is_at(before), "a pull changed the state"
            (pushed,) = shard.handle(b"peer", row_push(shard, seq + 1, kind), frames, 0.0)
            after = shard.parameters.copy()
            if isinstance(pushed.message, Ack):
                seq += 1
                applied += 1
                shard.parameters.check_state(after)
                stored = {*_ids_in(before), *np.frombuffer(frames[0], np.uint64).tolist()}
                assert {*_ids_in(after)} == stored, "other rows than those pushed"
                assert np.isfinite(of_table(after, "user").get(ROWS, 0.0)).all()
            else:
                assert isinstance(pushed.message, Refusal)
                assert shard.parameters.is_at(before), "a refused push changed the state"
        except Exception as error:
            raise AssertionError(f"seed {seed}, push {number}: {frames}") from error
    return Tally(executions, applied)


def _ids_in(arrays: Arrays) -> list[int]:
    ids: list[int] = of_table(arrays, "user")[IDS].tolist()
    return ids


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
