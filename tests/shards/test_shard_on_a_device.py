"""A shard with weights and slots on a device: the emulator, which runs the CUDA kernels.

Its arrays refuse NumPy's arithmetic, so no part of the shard can compute on the host unnoticed.
"""

from typing import Any

import numpy as np
import pytest

from cupy_kernels import cupy_device
from cupy_kernels.backends import GPU, HOST, EmulatorBackend
from cupy_kernels.emulator import Emulator
from cupy_kernels.emulator.array import Emulated
from shards.aggregation import EACH, ROUND, Merge
from shards.buffer_pool import Buffers
from shards.errors import BadInput
from shards.messages import Ack, Export, Install, Read, Remedy
from shards.rules import RULES, SGD, Adam, Decay, DecayKind, Rule
from shards.shard import Shard
from shards.update_records import RECORD
from tests.gpu import shards as shards_on_gpu
from tests.support.shard_conversation import converse
from tests.support.shard_dsl import SIZE, Talk, as_bytes, fresh, gradient, pull, push, refusal, spec

pytestmark = pytest.mark.usefixtures("emulated")

EMULATOR = EmulatorBackend(Emulator())


@pytest.mark.parametrize("merge", [EACH, ROUND])
@pytest.mark.parametrize("decay", [Decay(), Decay(0.02), Decay(0.02, DecayKind.L1)], ids=str)
@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.__name__)
def test_a_device_and_the_host_answer_alike(rule: type[Rule], decay: Decay, merge: Merge) -> None:
    """Weights, slots, acknowledgements, ledger: not a bit differs, over every rule and decay.

    The records agree too, except for the last bits of the norms, which are summed differently.
    """
    on_host, host = converse(HOST, rule(), decay, merge)
    on_device, shard = converse(EMULATOR, rule(), decay, merge)
    assert on_device == on_host
    (_, ours), (_, theirs) = shard.metrics.since(0), host.metrics.since(0)
    np.testing.assert_allclose(ours["gradient_norm"], theirs["gradient_norm"], rtol=1e-6)
    for name in set(RECORD.names or ()) - {"gradient_norm"}:
        np.testing.assert_array_equal(ours[name], theirs[name], name)


@pytest.mark.gpu
@pytest.mark.skipif(cupy_device.gpu() is None, reason="no GPU answers here")
def test_every_rule_on_this_machines_gpu() -> None:
    """On this machine's GPU, if there is one, not a bit differs from the host."""
    (goal,) = shards_on_gpu.run()
    assert goal.met


def test_a_gpu_and_the_host_answer_alike(cupy: Any) -> None:
    """The same holds through CuPy's own calls, here on a stand-in; weights are sent from pinned
    memory. `make gpu` runs the same on a real GPU.
    """
    on_gpu, shard = converse(GPU, Adam(), Decay(0.02), EACH)
    assert on_gpu == converse(HOST, Adam(), Decay(0.02), EACH)[0]
    assert isinstance(shard.parameters._weights, cupy.ndarray)
    assert set(cupy.pinned_bytes) == {4 * shard.size}
    assert all(goal.met for goal in shards_on_gpu.run())


# --- copies between host and device ---------------------------------------------------------------


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The copies between host and device, as they happen."""
    moves: list[str] = []
    for name in ("load", "store", "as_host"):
        real = getattr(EmulatorBackend, name)

        def move(*args: Any, name: str = name, real: Any = real) -> Any:
            if args[1].size == SIZE:  # and not an update's numbers
                moves.append(name)
            return real(*args)

        monkeypatch.setattr(EmulatorBackend, name, move)
    return moves


def test_a_push_is_one_copy_in_and_a_version_at_most_one_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many pull a version, it is copied once; one that nobody pulls is never copied."""
    monkeypatch.setattr(Talk, "place", EMULATOR)
    talk = Talk(bound=None)
    talk.enter("a", "b")
    moves = counted(monkeypatch)
    for seq in range(1, 4):
        talk.say(push("a", seq), gradient(1))
    assert moves == ["load"] * 3
    for worker in ("a", "b", "a"):
        talk.say(pull(worker, 3))
    assert moves == ["load"] * 3 + ["store", "as_host"], "an emulated store is made of as_host"
    talk.say(Read(1, "job"))
    assert len(moves) == 5


def test_sent_weights_are_in_the_memory_of_the_given_buffers() -> None:
    """The host copies come from the given buffers, the versions do not."""
    made = []

    def pinned(size: int) -> Any:
        made.append(size)
        return np.zeros(size, np.float32)

    talk = Talk(installed=False)
    talk.shard = Shard(spec(), 1, lambda size: Buffers(size, pinned), EMULATOR)
    talk.say(Install(1, "job"), fresh())
    talk.enter("w")
    for seq in range(1, 5):
        talk.say(push("w", seq), gradient(1))
    assert made == []
    talk.say(pull("w", 4))
    assert made == [SIZE]
    assert isinstance(talk.shard.parameters._weights, Emulated)
    assert len(talk.shard.parameters._buffers) == 2, "one that is read, one that is written"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e38])
def test_a_poisoned_push_changes_nothing(bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One value that is not finite, or has no finite square, is refused as on the host."""
    monkeypatch.setattr(Talk, "place", EMULATOR)
    for position in (0, 97, SIZE - 1):
        talk = Talk(rule=Adam())
        talk.enter("w")
        poisoned = np.zeros(SIZE, np.float32)
        poisoned[position] = bad
        said = refusal(talk.say(push("w", 1), [poisoned.tobytes()]))
        assert said.remedy is Remedy.BAD_INPUT
        what = "has a norm beyond 1.8e+19" if np.isfinite(bad) else "holds NaN or infinity"
        assert said.text.startswith(f"push 1 of worker w: table net {what}")
        talk.say(Export(1, "job"))
        assert not any(np.frombuffer(frame, np.uint8).any() for frame in as_bytes(talk.frames)[1:])
        assert talk.say(push("w", 1), gradient(1)) == [("w", Ack(101, 0, 1, 1, 1, 0, False))]


def test_a_rule_without_a_kernel() -> None:
    """A rule without a kernel is refused before anything is served; our own rules have one."""

    class Own(SGD, frozen=True, tag="own"):
        """A rule without a CUDA kernel."""

    with pytest.raises(BadInput, match="update rule own: expected one with a CUDA kernel"):
        Own().prepare(EMULATOR)
    for rule in RULES.values():
        rule().prepare(EMULATOR)
