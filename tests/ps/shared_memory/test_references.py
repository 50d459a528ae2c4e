"""Sharing below the protocol: admission, loans, and what dead processes leave."""

import contextlib
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

import ps
from ps import AdminClient, Cluster
from ps.client import Client
from ps.job_spec import make_cluster, shard_specs
from ps.launch.processes import process_shards
from ps.server.server import ShardServer
from ps.shared_memory import handshake, shm_files
from ps.shared_memory.handshake import Accept, Decline, Lent, Offer, SharedFrames
from ps.shared_memory.references import Parts
from ps.shared_memory.segment import REFERENCE_BYTES
from ps.shared_memory.shard_side import LOANS, ShardSide
from ps.shared_memory.worker_side import WorkerSide
from ps.transport.transports import Transport
from shards import wire_format
from shards.buffer_pool import Buffers
from shards.errors import BadMessage, GiveUp
from shards.messages import (
    PROTOCOL,
    Ack,
    Hello,
    Kind,
    Leave,
    PulledPart,
    Renew,
    Weights,
    Welcome,
)
from shards.schedules import Fixed
from tests.support.eventually import eventually

# The job's names in shared memory are nobody else's.
JOB, SIZE, SEED = f"shared-{secrets.token_hex(8)}", 1024, 31
TABLE = ps.DenseTable("net", (ps.TensorSpec("w", (SIZE,)),))
HELLO = Hello(1, JOB, "w", 0, PROTOCOL, "build")
WELCOME = Welcome(1, 0, 1, 1, 0, 0, 0, 10.0)
PULL = Renew(2, JOB, "w", 0, 1)
ACK = Ack(3, 0, 1, 1, 1, 0, False)
WEIGHTS = Weights(2, 0, 1, 1, 5, [PulledPart("net", Kind.F4, 0, SIZE)], 0.0)


class Pair:
    """A worker's and a shard's side; the test passes messages between them."""

    def __init__(self, job: str = JOB) -> None:
        self.shard, self.worker = ShardSide(job), WorkerSide(job, SIZE, 4)
        self.versions: Buffers = self.shard.buffers(SIZE)

    def greet(self) -> None:
        """Exchange Hello and Welcome."""
        assert self.shard.open(b"a", self.worker.seal(0, [(HELLO, ())])) is not None
        parts, loan = self.shard.seal(b"a", [(WELCOME, ())])
        assert loan is None
        assert self.worker.open(0, parts) is not None

    def ask(self) -> None:
        assert self.shard.open(b"a", self.worker.seal(0, [(PULL, ())])) is not None

    def lend(self, value: float) -> tuple[Parts, int | None]:
        """A version in transit to the worker."""
        version = self.versions.take()
        version[:] = value
        return self.shard.seal(b"a", [(WEIGHTS, (version,))])

    def close(self) -> None:
        self.worker.close()
        self.shard.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def floats(part: wire_format.Buffer) -> set[float]:
    return set(np.frombuffer(part, np.float32).tolist())


# --- the proof ------------------------------------------------------------------------------------


def test_nothing_is_lent_before_both_have_proved_it(pair: Pair) -> None:
    """A stranger, and a worker that has not shown both numbers, get plain weights."""
    version = pair.versions.take()
    for _ in range(2):
        parts, loan = pair.shard.seal(b"a", [(WEIGHTS, (version,))])
        assert (memoryview(parts[1]).nbytes, loan) == (4 * SIZE, None)
        pair.greet()
    assert pair.worker.shares_with(0)
    pair.ask()
    parts, loan = pair.shard.seal(b"a", [(WEIGHTS, (version,))])
    assert ([len(part) for part in parts[2:]], loan) == ([32], 1)
    assert pair.shard.seal(b"b", [(WEIGHTS, (version,))])[1] is None, "another's address"


def test_an_offer_is_looked_at_only_with_a_welcome(pair: Pair, tmp_path: Path) -> None:
    """The shard opens nothing until it has welcomed the worker; then it explains a refusal."""
    offer = handshake.encode(Offer("../../etc/passwd"))
    assert pair.shard.open(b"s", [offer, *wire_format.enclose([(HELLO, ())])]) is not None
    parts, _ = pair.shard.seal(b"s", [(ACK, ())])
    assert not handshake.is_note(parts[0])
    parts, _ = pair.shard.seal(b"s", [(WELCOME, ())])
    decline = handshake.decode_from_shard(parts[0])
    assert isinstance(decline, Decline)
    assert "expected a name of this job's" in decline.reason
    pair.worker.open(0, parts)
    assert not pair.worker.shares_with(0)
    assert "expected a name of this job's" in pair.worker.reasons[0]


def test_offers_that_come_together(pair: Pair) -> None:
    """Each Welcome answers its own offer, though the shard reads several before it answers any.

    Offers of workers that are never welcomed do not accumulate.
    """
    workers = {b"a": pair.worker, b"b": WorkerSide(JOB, SIZE, 1)}
    for address, worker in workers.items():
        pair.shard.open(address, worker.seal(0, [(HELLO, ())]))
    pair.shard.open(b"c", wire_format.enclose([(PULL, ())]))
    for address, worker in workers.items():
        worker.open(0, pair.shard.seal(address, [(WELCOME, ())])[0])
        assert worker.shares_with(0)
    for number in range(1000):
        pair.shard.open(b"%d" % number, pair.worker.seal(0, [(HELLO, ())]))
    assert len(pair.shard.offers) <= 256
    workers[b"b"].close()


def test_a_wrong_number_is_no_proof(pair: Pair) -> None:
    """A worker or shard that receives another number than its own shares nothing."""
    other = WorkerSide(JOB, SIZE, 1)
    pair.worker.open(0, [handshake.encode(Accept("f" * 32, other._segment.name)), b"x"])
    assert not pair.worker.shares_with(0)
    pair.greet()
    mine = pair.worker._segment.nonce
    lie = handshake.encode(SharedFrames(mine, "f" * 32, False, 0, []))
    assert pair.shard.open(b"a", [lie, *wire_format.enclose([(PULL, ())])]) is not None
    assert pair.lend(1)[1] is None
    other.close()


def test_a_shard_in_its_next_life(pair: Pair) -> None:
    """A restarted shard cannot see references meant for the earlier process.

    It gets the headers and empty frames, asks for a new greeting, and after that they share again.
    """
    pair.greet()
    gradient = pair.worker.buffers.take()
    pair.shard.close()
    pair.shard = ShardSide(JOB)
    pair.versions = pair.shard.buffers(SIZE)
    sent = pair.worker.seal(0, [(PULL, (gradient,)), (PULL, ())])
    parts = pair.shard.open(b"a", sent)
    assert parts is not None
    assert parts[1:] == [b""]
    assert len(list(wire_format.disclose(parts[0], parts[1:]))) == 2
    pair.greet()
    pair.ask()
    parts, loan = pair.lend(3)
    opened = pair.worker.open(0, parts)
    assert (opened is not None and floats(opened[1]), loan) == ({3.0}, 1)


def test_lives_that_are_over_are_let_go(pair: Pair) -> None:
    """Of a shard that restarts repeatedly one segment is held open, plus what is being read."""
    pair.greet()
    pair.ask()
    opened = pair.worker.open(0, pair.lend(1)[0])
    assert opened is not None
    view = np.frombuffer(opened[1], np.float32)
    del opened
    for _ in range(5):
        pair.shard.close()
        pair.shard = ShardSide(JOB)
        pair.versions = pair.shard.buffers(SIZE)
        pair.greet()
    # Of two files, this worker's and the shard's, the owner's descriptor and the peer's; a mapping
    # has a descriptor of its own.
    assert len(open_files()) == 2 * 4 + 1
    assert set(view) == {1.0}
    del view
    assert len(open_files()) == 2 * 4


def test_a_worker_that_is_dropped_leaves_nothing_open() -> None:
    """This includes its view of the peer's segment."""
    pair = Pair()
    pair.greet()
    pair.shard.close()
    del pair
    assert open_files() == []


def open_files() -> list[str]:
    """The job's shared memory files that this process has open, once for each descriptor."""
    found = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(str(path.readlink()))
    return [name for name in found if shm_files.job_prefix(JOB) in name]


# --- what is kept ---------------------------------------------------------------------------------


def test_a_version_is_kept_for_who_reads_it(pair: Pair) -> None:
    """No apply writes there while a view of it exists, or before the worker has returned it."""
    pair.greet()
    pair.ask()
    parts, _ = pair.lend(1)
    opened = pair.worker.open(0, parts)
    assert opened is not None
    view = np.frombuffer(opened[1], np.float32)[100:200]
    del opened
    for value in range(2, 9):
        pair.ask()
        version = pair.versions.take()
        version[:] = value
        del version
        assert set(view) == {1.0}
    before = len(pair.versions)
    del view
    version = pair.versions.take()
    assert len(pair.versions) == before
    pair.ask()
    again = [pair.versions.take() for _ in range(before - 1)]
    assert len(pair.versions) == before, "the one that was read is free"
    del again, version


def test_what_is_lost_or_late_is_not_read(pair: Pair) -> None:
    """An overtaken loan is not read, and a lost one is returned.

    A gradient's reference that is older than its slot's current use is dropped with its message.
    """
    pair.greet()
    pair.ask()
    (late, _), (seen, _) = pair.lend(1), pair.lend(2)
    opened = pair.worker.open(0, seen)
    assert opened is not None
    assert pair.worker.open(0, late) is None
    pair.ask()
    assert [len(t.loans) for t in pair.shard._workers.values()] == [1]
    gradient = pair.worker.buffers.take()
    gradient[:] = 7
    push = pair.worker.seal(0, [(PULL, (gradient,))])
    for _ in range(2):
        arrived = pair.shard.open(b"a", push)
        assert arrived is not None
        assert floats(arrived[1]) == {7.0}
    del gradient, arrived
    pair.worker.buffers.take()
    assert pair.shard.open(b"a", push) is None


def test_frames_elsewhere_travel_beside_references(pair: Pair) -> None:
    """What is not in the segment arrives in its place; one frame too few or too many is refused."""
    pair.greet()
    gradient, small = pair.worker.buffers.take(), np.arange(5, dtype=np.float32)
    gradient[:] = 7
    messages = [(PULL, (small, gradient)), (PULL, ()), (PULL, (gradient[:8], small[:0], small[1:]))]
    parts = pair.worker.seal(0, messages)
    opened = pair.shard.open(b"a", parts)
    assert opened is not None
    disclosed = [frames for _, frames in wire_format.disclose(opened[0], opened[1:])]
    for (_, frames), came in zip(messages, disclosed, strict=True):
        assert [bytes(frame) for frame in came] == [frame.tobytes() for frame in frames]
    for wrong in (parts[:-1], [*parts, b"more"], parts[:2], [*parts[:2], bytes(parts[2])[:-1]]):
        with pytest.raises(BadMessage, match="references: expected"):
            pair.shard.open(b"a", list(wrong))


def test_what_could_not_be_sent_is_not_lent(pair: Pair) -> None:
    """A worker holds at most the limit, and messages that never left do not count."""
    pair.greet()
    pair.ask()
    for _ in range(3 * LOANS):
        _, loan = pair.lend(1)
        assert loan is not None
        pair.shard.withdraw(b"a", loan)
    assert [pair.lend(1)[1] is None for _ in range(LOANS + 1)] == [False] * LOANS + [True]


def test_addresses_that_a_worker_had(pair: Pair) -> None:
    """After many reconnections the shard knows the last few addresses, and lends to those."""
    pair.greet()
    for number in range(100):
        parts = pair.worker.seal(0, [(PULL, ())])
        assert pair.shard.open(b"%d" % number, parts) is not None
    assert len(pair.shard.addresses) == 16
    version = pair.versions.take()
    assert pair.shard.seal(b"99", [(WEIGHTS, (version,))])[1] == 1
    assert pair.shard.seal(b"0", [(WEIGHTS, (version,))])[1] is None


def test_no_bytes_harm(pair: Pair) -> None:
    """Mutated notes, envelopes and references are refused, dropped, or name bytes of a slot."""
    pair.greet()
    gradient = pair.worker.buffers.take()
    frames = gradient, np.ones(9, np.float32), gradient[:64]
    good = [bytes(part) for part in pair.worker.seal(0, [(PULL, frames)])]
    assert [len(part) for part in good[2:]] == [3 * REFERENCE_BYTES, 36]
    carried = handshake.decode_from_worker(good[0])
    dice = random.Random(SEED)
    outcomes = set()
    for _ in range(4000):
        parts = list(good)
        for _ in range(dice.randint(1, 3)):
            at = dice.randrange(len(parts))
            part = bytearray(parts[at])
            if part and dice.random() < 0.8:
                part[dice.randrange(len(part))] = dice.randrange(256)
            else:
                del part[dice.randint(0, len(part)) :]
            parts[at] = bytes(part)
        if dice.random() < 0.1:
            del parts[dice.randrange(1, len(parts)) :]
        try:
            opened = pair.shard.open(b"a", list(parts))
        except BadMessage:
            outcomes.add("refused")
            continue
        outcomes.add("dropped" if opened is None else "opened")
        for frame in (opened or [])[1:]:
            assert memoryview(frame).nbytes <= 4 * SIZE, f"seed {SEED}"
            bytes(frame)
    assert outcomes >= {"refused", "opened"}
    assert isinstance(carried, SharedFrames)
    for note in (
        SharedFrames(carried.mine, carried.yours, False, 99, []),
        Lent(1),
        Accept("a", "b"),
    ):
        with pytest.raises(BadMessage):
            pair.shard.open(b"a", [handshake.encode(note), *wire_format.enclose([(PULL, ())])])


def test_a_hostile_peer_over_the_socket() -> None:
    """Forged notes are answered or dropped, and the shard continues to serve all workers."""
    (spec,) = shard_specs(TABLE, schedule=Fixed(base_rate=1.0))
    dice = random.Random(SEED)
    context = zmq.Context()
    try:
        with ShardServer(spec, boot=1) as server:
            cluster = installed(server)
            with Client(cluster, worker="neighbour") as client:
                peer = context.socket(zmq.DEALER)
                peer.setsockopt(zmq.LINGER, 0)
                peer.connect(server.endpoint)
                leave = wire_format.enclose([(Leave(1, spec.job, "neighbour", 0, 1), ())])
                hello = wire_format.enclose([(Hello(1, spec.job, "x", 0, PROTOCOL, "b"), ())])
                for number in range(300):
                    match number % 4:
                        case 0:
                            note = handshake.encode(Offer(shm_files.memory_path(spec.job).name))
                        case 1:
                            note = handshake.encode(
                                SharedFrames("0" * 32, "0" * 32, True, 5, [1, 2])
                            )
                        case 2:
                            note = b"\xff\xff" + dice.randbytes(dice.randint(0, 300))
                        case _:
                            note = b"\xff\xff"
                    peer.send_multipart([note, *dice.choice([hello, leave[:0]]), b"x" * 32])
                before = client.pull().versions[0]
                client.push(np.ones(SIZE, np.float32))
                assert client.pull().versions == (before + 1,)
                assert client.transports == ("shm",)
            server.check()
            assert server._shard_endpoint.sharing.sharing_workers <= 1
    finally:
        context.destroy(linger=0)


# --- death ----------------------------------------------------------------------------------------

_READER = """
import sys, time
from pathlib import Path
import ps
from ps.client import Client
client = Client(ps.Cluster.load(Path(sys.argv[1])), worker="reader", transport="shm")
held = [client.pull() for _ in range(3)]
print("holds", flush=True)
sys.stdin.readline()
print(*({float(x) for x in set(one.weights)} == {-float(one.versions[0])} for one in held))
"""


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[tuple[ShardServer, Cluster, "subprocess.Popen[str]"]]:
    """A shard with a short lease, and a process that holds three of its versions."""
    (spec,) = shard_specs(TABLE, schedule=Fixed(base_rate=1.0), lease_s=1.0)
    with ShardServer(spec, boot=1) as server:
        cluster = installed(server)
        cluster.save(tmp_path / "cluster.json")
        process = subprocess.Popen(
            [sys.executable, "-c", _READER, str(tmp_path / "cluster.json")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "holds\n"
            yield server, cluster, process
        finally:
            process.kill()
            process.communicate()


def installed(server: ShardServer) -> Cluster:
    cluster = make_cluster([server.shard.spec], [server.endpoint])
    with AdminClient(cluster) as console:
        console.install(TABLE.empty())
    return cluster


def push_many(cluster: Cluster, times: int) -> None:
    with Client(cluster, worker="pusher") as client:
        for _ in range(times):
            replica = client.pull()
            assert set(replica.weights) == {-float(replica.versions[0])}
            gradient = client.new_gradient()
            gradient[:] = 1
            client.push(gradient)


def left(cluster: Cluster) -> int:
    """The segments of the job that still exist."""
    return len(list(shm_files.ROOT.glob(f"{shm_files.job_prefix(cluster.job)}memory-*")))


def test_a_stopped_reader_sees_nothing_change(
    reader: tuple[ShardServer, Cluster, "subprocess.Popen[str]"],
) -> None:
    """A suspended reader's lease expires many times, hundreds of versions pass, and what it holds
    stays.
    """
    server, cluster, process = reader
    (its,) = server._shard_endpoint.sharing._workers
    process.send_signal(signal.SIGSTOP)
    for _ in range(3):
        push_many(cluster, 100)
        time.sleep(0.5)
    assert its in server._shard_endpoint.sharing._workers
    process.send_signal(signal.SIGCONT)
    said, _ = process.communicate("\n", timeout=120)
    assert said == "True True True\n"


def test_a_killed_reader_leaves_nothing(
    reader: tuple[ShardServer, Cluster, "subprocess.Popen[str]"],
) -> None:
    """The shard takes back its loans and removes its segment; other workers continue."""
    server, cluster, process = reader
    assert left(cluster) == 2
    process.kill()
    process.wait()
    push_many(cluster, 20)
    eventually(
        lambda: (server._shard_endpoint.sharing.sharing_workers, left(cluster)) == (0, 1),
        because="the reader's loans are taken back, and its segment is removed",
    )
    push_many(cluster, 20)


def test_a_killed_shard_leaves_nothing() -> None:
    """Weights pulled from it stay as they were, and its names go with their last user.

    What answers in its place until the job ends has names of its own.
    """

    def names() -> set[str]:
        prefix = shm_files.job_prefix(hosts.cluster.job)
        return {path.name for path in shm_files.ROOT.glob(f"{prefix}*")}

    specs = shard_specs(TABLE, schedule=Fixed(base_rate=1.0))
    with process_shards(specs, rollback_s=0.0) as hosts:
        with AdminClient(hosts.cluster) as console:
            console.install(TABLE.empty())
        client = Client(hosts.cluster, worker="w", transport=Transport.SHM)
        client.pull()
        client.push(np.ones(SIZE, np.float32))
        held = client.pull().weights
        segments = {name for name in names() if "-memory-" in name}
        assert len(segments) == 2
        subprocess.run(["kill", "-9", str(hosts.pids[0])], check=True)
        with pytest.raises(GiveUp):  # then any other job's process may sweep what it left, too
            eventually(hosts.check, because="the shard's death is noticed")
        assert set(held) == {-1.0}
        client.abort()
        assert not segments & names()
    assert not names()
    assert set(held) == {-1.0}
