"""How long the launcher waits for a restarted shard. No processes."""

import threading
import time
from collections.abc import Callable

import pytest

from ps import DenseTable, TensorSpec
from ps.durability import Durability
from ps.job_spec import shard_specs
from ps.launch.child_protocol import RefusalLaunch, ShardLaunch
from ps.launch.launch_plan import ShardDevice, recovery_s
from ps.launch.process_handle import ExitReason, ProcessHandle
from ps.launch.single_copies import Start, serving
from ps.transport.transports import Transport
from shards.errors import BadInput, GiveUp
from shards.messages import LONGEST_TEXT
from shards.rules import SGD, Momentum
from tests.support.eventually import eventually

ADVICE = "the job has ended: continue from a snapshot"


def _refuse(_: RefusalLaunch, last: ProcessHandle) -> Callable[[], None]:
    raise AssertionError(f"{last.name} has not died for good")


class Child(ProcessHandle):
    """A process that serves, and ends when asked to."""

    name = "shard 0"
    pid = 7
    alive = True  # nobody asks

    def __init__(self) -> None:
        self.given_s = 0.0
        self.ended = threading.Event()
        self.cause = "died: its process was ended by signal 9 (Killed)"

    def endpoint(self, until: float) -> str:
        self.given_s = until - time.monotonic()
        return "tcp://127.0.0.1:9"

    def wait(self) -> ExitReason:
        self.ended.wait()
        return ExitReason(self.cause, reported=False)

    def ask_to_end(self) -> None:
        self.ended.set()

    def stop(self) -> None:
        self.ended.set()

    def close(self) -> None: ...


def test_time_to_read_the_log() -> None:
    """A shard may be silent for a start, and longer the more state it has to read."""
    assert recovery_s(180_000_000, [SGD()]) == 192.0
    assert recovery_s(90_000_000, [SGD(), Momentum(0.9)]) == 192.0


def test_a_large_shard_is_given_time() -> None:
    """A restarted process has a WAL to read: 16 GB may take half an hour."""
    table = DenseTable("net", (TensorSpec("w", (1_000_000, 2_000)),))
    (spec,) = shard_specs(table, rule=Momentum(0.9))
    order = ShardLaunch(
        spec, "tcp://127.0.0.1:*", Transport.TCP, ShardDevice.CPU, durability=Durability.PROCESS
    )
    made: list[Child] = []
    again = threading.Event()

    def start(_: ShardLaunch, former: ProcessHandle | None) -> Child:
        made.append(Child())
        if former is not None:
            again.set()
        return made[-1]

    with serving([order], start, _refuse, ADVICE):
        made[0].ended.set()
        assert again.wait(30)
        eventually(lambda: made[1].given_s, because="its endpoint is awaited")
    assert made[0].given_s <= 120
    assert made[1].given_s > 1000


def test_some_shards_with_weights_and_some_without() -> None:
    """The error names every shard; all with weights serve, and so do all without."""
    specs = shard_specs(DenseTable("net", (TensorSpec("w", (1000,)),)), shards=3)
    orders = [
        ShardLaunch(
            spec,
            *("tcp://127.0.0.1:*", Transport.TCP, ShardDevice.CPU),
            durability=Durability.PROCESS,
            log_folder=f"/logs/shard-{spec.shard}",
        )
        for spec in specs
    ]

    def start_with(empty: str) -> Start:
        def start(order: ShardLaunch, _: ProcessHandle | None) -> Child:
            child = Child()
            child.name, child.empty = f"shard {order.spec.shard}", empty[order.spec.shard] == "-"
            return child

        return start

    for empty, found in (
        ("-##", "those of shard 1, shard 2 and none of shard 0"),
        ("#-#", "those of shard 0, shard 2 and none of shard 1"),
        ("--#", "those of shard 2 and none of shard 0, shard 1"),
    ):
        with pytest.raises(BadInput) as caught, serving(orders, start_with(empty), _refuse, ADVICE):
            pass
        assert str(caught.value) == (
            f"logs /logs: expected weights of every shard or of none, got {found}: put back the"
            " missing logs, or remove /logs to start without them"
        )
    for empty in ("---", "###"):
        with serving(orders, start_with(empty), _refuse, ADVICE):
            pass


def test_a_dead_shard_is_answered_for_once_its_port_is_free() -> None:
    """The first attempts may find the port taken by the dying process. The advice is never cut."""
    (spec,) = shard_specs(DenseTable("net", (TensorSpec("w", (1000,)),)))
    order = ShardLaunch(spec, "tcp://127.0.0.1:*", Transport.TCP, ShardDevice.CPU)
    attempts: list[RefusalLaunch] = []
    ends: list[str] = []

    def refuse(refusal: RefusalLaunch, _: ProcessHandle) -> Callable[[], None]:
        attempts.append(refusal)
        if len(attempts) < 3:
            raise BadInput("cannot listen")
        return lambda: ends.append("ended")

    child = Child()
    child.cause = "died: " + "x" * 2 * LONGEST_TEXT
    with serving([order], lambda _order, _former: child, refuse, ADVICE) as (_, (shard,)):
        child.ended.set()
        eventually(lambda: len(attempts) == 3, because="the port is free at the third attempt")
        with pytest.raises(GiveUp, match=r"^shard 0 has died: xxx"):
            shard.check()
    assert ends == ["ended"]
    assert {attempt.shard.bind for attempt in attempts} == {"tcp://127.0.0.1:9"}
    (reason,) = {attempt.reason for attempt in attempts}
    assert (len(reason), reason.endswith(f"xxx; {ADVICE}")) == (LONGEST_TEXT, True)
