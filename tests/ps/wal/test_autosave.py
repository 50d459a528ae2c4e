"""Restarting a shard without a WAL: from its last complete autosave, never another's or a partial.

Shards without a network; a death is a folder that the next shard opens.
"""

import errno
import os
import random
import time
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import ps
from deploy.simulation.disk import Died, SimulatedDisk
from ps.client import Client
from ps.job_spec import make_cluster, shard_specs
from ps.launch.child_main import make_shard
from ps.launch.child_protocol import ShardLaunch
from ps.launch.launch_plan import ShardDevice
from ps.transport.transports import Transport
from ps.wal.autosave import Autosaves, AutosavingShard
from ps.wal.writer import BackgroundTask
from shards.errors import BadInput, GiveUp
from shards.messages import Ack, ChangeSettings, Install, LiveSettings, Quiesce
from shards.rules import SGD, Momentum
from shards.shard import Shard
from shards.transition_io import Arrival, Outgoing
from tests.support.eventually import eventually
from tests.support.shard_dsl import SIZE, fresh, hello, join, push, spec

EVERY_S = 10.0


class Done:
    """Background work that is done at once."""

    def __init__(self, work: Callable[[], None]) -> None:
        work()

    def is_alive(self) -> bool:
        return False

    def join(self) -> None:
        pass


class Later:
    """Background work that is done when the test says so."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []

    def __call__(self, work: Callable[[], None]) -> BackgroundTask:
        self.work.append(work)
        return self

    def is_alive(self) -> bool:
        return bool(self.work)

    def join(self) -> None:
        while self.work:
            self.work.pop(0)()


class Life:
    """One process of a shard that saves its state; an autosave costs `cost_s` of CPU time."""

    def __init__(
        self,
        folder: Path | SimulatedDisk,
        background: Callable[[Callable[[], None]], BackgroundTask] = Done,
        **more: Any,
    ) -> None:
        self.cost_s, self.spent_s = 0.0, 0.0
        self.saves = Autosaves(folder, EVERY_S, background, self._clock)
        told = {"rule": Momentum(0.5), "bound": None} | more
        self.shard = Shard(spec(**told), boot=int(os.urandom(6).hex(), 16))
        try:
            self.saves.recover(self.shard, 0.0)
        except BaseException:
            self.saves.close()
            raise
        self.acts = AutosavingShard(self.shard, self.saves)
        self.seq = 0

    def _clock(self) -> float:
        self.spent_s += self.cost_s
        return self.spent_s

    def say(self, message: Any, frames: Any = (), now: float = 0.0) -> list[Outgoing]:
        return self.acts.handle_together([Arrival(b"w", message, frames)], now)

    def install(self, value: float = 0.0, now: float = 0.0) -> None:
        saved, _ = fresh()
        weights = np.full(SIZE, value, np.float32)
        self.say(Install(1, "job"), [saved, weights.tobytes()], now)
        self.saves.save_if_due(self.shard, now)

    def enter(self, now: float = 0.0) -> None:
        self.say(hello("w"), now=now)
        self.say(msgspec.structs.replace(join("w"), boot=self.shard.boot), now=now)
        self.seq = self.shard.ledger.entries["w"].seq

    def push(self, now: float = 0.0) -> None:
        self.seq += 1
        message = msgspec.structs.replace(push("w", self.seq), boot=self.shard.boot)
        gradient = np.random.default_rng(self.seq).standard_normal(SIZE).astype(np.float32)
        (answer,) = self.say(message, [gradient.tobytes()], now)
        assert isinstance(answer.message, Ack), answer
        self.saves.save_if_due(self.shard, now)

    def held(self) -> list[bytes]:
        return [array.tobytes() for array in self.shard.copy().arrays.values()]


def ended(life: Life) -> Path:
    """The folder of a shard, and what it saved there."""
    life.saves.close()
    return life.saves.where


def with_pushes(folder: Path, pushes: int = 3) -> Life:
    """A shard with this number of pushes in its last autosave."""
    one = Life(folder)
    one.install()
    one.enter()
    for number in range(pushes):
        one.push(EVERY_S * (1 + number))
    return one


@pytest.mark.parametrize("seed", range(20))
def test_a_death_takes_back_no_more_than_the_interval(seed: int, tmp_path: Path) -> None:
    """A restart loses no more than the interval, in a series of processes with pushes at any times.

    Each starts with what the one before it held at a moment within the interval, bit for bit, with
    its worker and counters as of then.
    """
    chance = random.Random(seed)
    folder = tmp_path / "job" / "shard-0"
    history: list[tuple[float, int, list[bytes], int]] = []
    for lives in range(4):
        one = Life(folder)
        assert one.shard.part.rolled_back is (lives > 0)
        if lives:
            died_at = history[-1][0]
            version = one.shard.version
            # What was held at that time, and so whatever came after it may be lost, no more.
            known = [entry for entry in history if entry[0] <= died_at - EVERY_S]
            least = known[-1][1] if known else 0
            assert least <= version <= history[-1][1], f"seed {seed}"
            (held, seq), *_ = [entry[2:] for entry in history if entry[1] == version]
            assert one.held() == held, f"seed {seed}"
            entry = one.shard.ledger.entries.get("w")  # it may have come since the first save
            assert (entry.seq if entry else 0) == seq, f"seed {seed}"
            assert one.shard.metrics.pushes == version, f"seed {seed}"
        else:
            one.install()
        one.enter()
        now = 0.0
        history = [(now, one.shard.version, one.held(), one.seq)]
        for _ in range(chance.randint(1, 15)):
            now += chance.choice((0.0, 0.5, 3.0, 12.0)) * chance.random()
            one.push(now)
            history.append((now, one.shard.version, one.held(), one.seq))
        ended(one)
    assert folder.stat().st_mode & 0o777 == folder.parent.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_when_a_save_is_due(tmp_path: Path) -> None:
    """At once after an install; then after the interval, if anything has changed.

    Autosaves take no more than a fiftieth of the time. There are never two at once, and none during
    resharding.
    """
    later = Later()
    one = Life(tmp_path, later)
    one.saves.save_if_due(one.shard, 100.0)
    assert (later.work, one.saves.next_due(one.shard)) == ([], np.inf), "it holds nothing"
    one.install(now=0.0)
    assert len(later.work) == 1
    one.enter()
    one.push(EVERY_S)
    assert len(later.work) == 1, "the first is still being written"
    assert one.saves.next_due(one.shard) == np.inf, "nobody knows how long"
    later.join()
    assert one.saves.next_due(one.shard) == EVERY_S
    one.saves.save_if_due(one.shard, 9.9)
    assert later.work == []
    one.saves.save_if_due(one.shard, EVERY_S)
    assert len(later.work) == 1
    one.cost_s = 1.0
    later.join()
    one.saves.save_if_due(one.shard, 100.0)
    assert (later.work, one.saves.next_due(one.shard)) == ([], np.inf), "nothing is new"
    one.push(59.9)
    assert (later.work, one.saves.next_due(one.shard)) == ([], 60.0)
    one.say(Quiesce(1, "job", 20.0, 1), now=59.9)
    one.saves.save_if_due(one.shard, 60.0)
    assert (later.work, one.saves.next_due(one.shard)) == ([], 61.0)
    one.saves.save_if_due(one.shard, 81.0)
    assert len(later.work) == 1, "the standstill has run out"
    ended(one)


def test_a_pause_makes_no_save_rarer(tmp_path: Path) -> None:
    """A process that stands still while it saves costs nothing: the next save is due at once."""
    later = Later()
    one = Life(tmp_path, later)
    one.install(now=0.0)
    one.enter()
    one.push(7.5)
    one.cost_s = 0.01
    later.join()
    one.saves.save_if_due(one.shard, 7.5 + EVERY_S)
    assert len(later.work) == 1
    later.join()
    one.push(8.0 + EVERY_S)
    assert one.saves.next_due(one.shard) == 7.5 + 2 * EVERY_S
    assert signature(Autosaves).parameters["clock"].default is time.thread_time
    ended(one)


def test_nobody_goes_on_with_what_was_replaced(tmp_path: Path) -> None:
    """Once an install is acknowledged, a restart never resumes an older state.

    This holds even if another autosave was being written. If the shard dies before the new state is
    saved, it is not restarted.
    """
    later = Later()
    one = Life(tmp_path, later)
    one.saves.close()
    Life(tmp_path, later).saves.close()  # it was given nothing: an empty one follows
    one = Life(tmp_path, later)
    one.install(1.0)
    one.install(2.0)
    assert len(later.work) == 1
    one.saves._disk.close()
    with pytest.raises(GiveUp) as caught:
        Life(tmp_path)
    assert str(caught.value) == (
        f"saves {tmp_path}: expected an autosave of shard 0, got none: its last process died"
        " before the first one was complete"
    )
    later.join()
    again = Life(tmp_path)
    assert set(again.shard.parameters.weights()) == {2.0}
    assert ended(again) == tmp_path


def test_a_rollback_keeps_what_an_operator_has_set(tmp_path: Path) -> None:
    """A bound and a rate are in force again after a death, however long the last autosave is ago.

    A state that is installed later is saved with them. A damaged file is named.
    """
    life = Life(tmp_path, bound=4)
    life.install(1.0)
    first, second = LiveSettings(8, 0.5, 1, 3), LiveSettings(2, 0.25, 2, 3)
    for number, settings in enumerate((first, second, first)):
        life.say(ChangeSettings(number + 2, "job", settings))
    life.saves.close()
    again = Life(tmp_path, bound=4)
    assert again.shard.part.settings == second
    assert (again.shard.gate.bound, again.shard.part.rolled_back) == (2, True)
    again.install(2.0, now=EVERY_S)
    again.saves.close()
    file = tmp_path / "settings"
    assert not file.exists()
    last = Life(tmp_path, bound=4)
    assert last.shard.part.settings == second
    last.say(ChangeSettings(9, "job", LiveSettings(5, 1.0, 3, 3)))
    last.saves.close()
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(BadInput) as caught:
        Life(tmp_path, bound=4)
    assert str(caught.value) == (
        f"save {file}: expected settings with their checksum, got damaged ones"
    )


def test_what_is_no_save(tmp_path: Path) -> None:
    """For an autosave cut off anywhere, or with a flipped bit, the error names the file.

    One that was being written does not count.
    """
    one = with_pushes(tmp_path)
    held, path = one.held(), ended(one) / "save"
    content = path.read_bytes()
    (tmp_path / "save.partial").write_bytes(content[:-1])
    again = Life(tmp_path)
    assert again.held() == held
    ended(again)
    seed = time.time_ns()
    chance = random.Random(seed)
    damaged = [content[: chance.randrange(len(content))] for _ in range(30)]
    damaged += [b"", content[:-1], os.urandom(len(content))]
    for place in (*range(8), 30, len(content) - 100):
        damaged.append(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    for bad in damaged:
        path.write_bytes(bad)
        print(f"seed {seed}: {len(bad)} bytes")
        with pytest.raises(BadInput, match=f"^save {path}: "):
            Life(tmp_path)


@pytest.mark.parametrize(
    ("other", "line"),
    [
        ({"job": "another"}, "expected job another, got job"),
        ({"build": "newer"}, "expected build newer, got build"),
        ({"rule": SGD()}, "expected the same configuration, got another rule, map or setting"),
    ],
)
def test_anothers_save(other: dict[str, Any], line: str, tmp_path: Path) -> None:
    """It is refused, and the error names its shard."""
    ended(with_pushes(tmp_path))
    with pytest.raises(BadInput) as caught:
        Life(tmp_path, **other)
    assert str(caught.value) == f"save {tmp_path}/save: {line}"


@pytest.mark.parametrize("seed", range(5))
def test_a_full_disk(seed: int) -> None:
    """The shard keeps its last autosave, and leaves no partial file.

    It tries again when the next one is due, even if no push has come meanwhile. The status says why
    the last one failed.
    """
    disk = SimulatedDisk("disk", random.Random(seed))
    one = Life(disk)
    one.install()
    one.enter()
    one.push(10.0)
    held = one.held()
    disk.full = True
    one.push(20.0)
    one.saves.save_if_due(one.shard, 20.1)
    assert one.shard.status().trouble.startswith("autosave disk: ")
    assert disk.names() == ["save"]
    assert Life(disk).held() == held
    disk.full = False
    one.saves.save_if_due(one.shard, 29.9)
    assert Life(disk).held() == held
    one.saves.save_if_due(one.shard, 30.0)
    assert Life(disk).held() == one.held() != held
    one.saves.save_if_due(one.shard, 30.1)
    assert one.shard.status().trouble == ""


def test_no_descriptors_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a file cannot be opened, a folder cannot be listed either: the shard reports why the
    autosave failed, and makes the next one when it is due.
    """

    def refuse(*_: object) -> list[str]:
        raise OSError(errno.EMFILE, "Too many open files")

    disk = SimulatedDisk("disk", random.Random(0))
    one = Life(disk)
    one.install()
    one.enter()
    with monkeypatch.context() as patch:
        patch.setattr(disk, "create", refuse)
        patch.setattr(disk, "names", refuse)
        one.push(10.0)
    one.saves.save_if_due(one.shard, 10.1)
    assert one.shard.status().trouble.startswith("autosave disk: Too many open files; ")
    one.push(20.0)
    assert Life(disk).held() == one.held()


@pytest.mark.parametrize("fuse", range(4))
def test_a_death_in_the_midst_of_a_save(fuse: int) -> None:
    """At any step the restarted shard has the autosave before, or this one once it is complete."""
    disk = SimulatedDisk("disk", random.Random(fuse))
    one = Life(disk)
    one.install()
    one.enter()
    before = one.held()
    disk.fuse = fuse
    if fuse < 3:
        with pytest.raises(Died):
            one.push(10.0)
    else:
        one.push(10.0)
    disk.fuse = None
    assert Life(disk).held() == (before if fuse < 3 else one.held())


def test_what_nobody_goes_on_from_goes(tmp_path: Path) -> None:
    """The job's folder is removed with the autosaves of its last shard."""
    folders = [tmp_path / "job" / f"shard-{shard}" for shard in range(2)]
    first, second = map(with_pushes, folders)
    first.saves.close(forget=True)
    assert [path.name for path in tmp_path.rglob("*") if path.is_dir()] == ["job", "shard-1"]
    second.saves.close(forget=True)
    assert list(tmp_path.iterdir()) == []


def test_a_server_saves_though_nothing_comes(tmp_path: Path) -> None:
    """The last push before a silence is saved when due, however long the lease is.

    A server that is stopped for good removes its autosaves; after another stop a restart resumes
    from them.
    """
    table = ps.DenseTable("net", (ps.TensorSpec("w", (8,)),))
    (told,) = shard_specs(table, lease_s=600.0)
    folder, transport = tmp_path / "shard-0", Transport.TCP

    def life(bind: str) -> Any:
        order = ShardLaunch(
            told, bind, transport, ShardDevice.CPU, saves=str(folder), rollback_s=0.5
        )
        return make_shard(order).start()

    server = life("tcp://127.0.0.1:*")
    with ps.AdminClient(make_cluster([told], [server.endpoint])) as console:
        console.install(table.empty())
    client = Client(make_cluster([told], [server.endpoint]), worker="w")
    client.pull()
    client.push(np.ones(table.size, np.float32))
    client.flush()
    client.abort()
    eventually(
        lambda: server._saves._due < np.inf and server._saves._version == 1,
        because="version 1 is saved",
    )
    server.forgets = False
    server.stop()
    server = life(server.endpoint)
    assert (server.shard.version, server.shard.part.rolled_back) == (1, True)
    server.stop()
    assert not folder.exists()
