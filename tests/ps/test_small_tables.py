"""Tables of a few floats on several shards are ordinary input to every operation."""

from pathlib import Path

import numpy as np
import pytest

import ps
from ps.client import Client
from ps.job_spec import expect_compression, reshard_specs, shard_specs
from ps.launch.processes import process_replicas
from ps.launch.threads import local_shards
from ps.resharding import reshard
from ps.snapshots.manifest import load_snapshot, save_snapshot
from shards.rules import Adam, Momentum, Rule

SIZES = (1, 3, 109)
SHARDS = (1, 2, 3, 4)
RATE = 0.5


def small(size: int) -> ps.DenseTable:
    return ps.DenseTable("small", (ps.TensorSpec("w", (size,)),))


def gradient(table: ps.DenseTable, seed: int) -> np.ndarray:
    arena = table.empty()
    dice = np.random.default_rng(seed)
    table.views(arena)["w"][:] = dice.standard_normal(table.tensors[0].shape, np.float32)
    return arena


def train(cluster: ps.Cluster, steps: int, incarnation: int = 0, **options: object) -> np.ndarray:
    """Push the gradients of `steps` steps; returns the weights after the last."""
    with Client(cluster, worker="w", incarnation=incarnation, **options) as client:  # type: ignore[arg-type]
        for _ in range(steps):
            client.pull()
            client.push(gradient(cluster.layout.tables[0], client.seq))
        client.flush()
        return client.pull(copy=True).weights


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rule", [Momentum(), Adam()], ids=["momentum", "adam"])
def test_the_number_of_shards_changes_no_weight(size: int, rule: Rule) -> None:
    """A small table on several shards learns what it learns on one, to the bit."""
    learned = []
    for shards in SHARDS:
        specs = shard_specs(small(size), shards=shards, rule=rule, schedule=RATE)
        with local_shards(specs) as cluster:
            learned.append(train(cluster, 5))
        np.testing.assert_array_equal(learned[0], learned[-1])
        assert not learned[-1][size:].any(), "the padding stays zero"


CODECS = ("fp16", "bf16", "int8", "4bit", "1bit", "topk:0.01", "threshold:0.5", "int8,zstd")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("push", "pull"),
    [*((push, "none") for push in CODECS), *(("int8", pull) for pull in ("bf16", "topk:0.1"))],
)
def test_small_parts_are_compressed(size: int, push: str, pull: str) -> None:
    """Every codec handles a shard's few floats, in either direction."""
    table = small(size)
    kind = ps.Compression.parse(push, pull)
    specs = expect_compression(shard_specs(table, shards=4, schedule=RATE), kind)
    with local_shards(specs) as cluster:
        train(cluster, 4, compression=kind)
        with ps.AdminClient(cluster) as console:
            weights = console.read()
    assert np.isfinite(weights).all()
    assert not weights[size:].any(), "the padding stays zero"


@pytest.mark.parametrize("size", SIZES)
def test_a_snapshot_and_a_move(size: int, tmp_path: Path) -> None:
    """Two shards of a small table go into a snapshot, back into two, and are resharded to three and
    one.
    """
    table = small(size)
    specs = shard_specs(table, shards=2, rule="adam", schedule=RATE)
    with local_shards(specs) as cluster, ps.AdminClient(cluster) as console:
        before = train(cluster, 3)
        states = console.export()
    save_snapshot(
        tmp_path / "3",
        states,
        layout=cluster.layout,
        shard_map=cluster.map,
        rules=("adam",),
        workers=1,
    )
    _, states = load_snapshot(tmp_path / "3")
    with (
        local_shards(specs) as two,
        local_shards(reshard_specs(specs, 3)) as three,
        ps.AdminClient(two) as old,
        ps.AdminClient(three) as new,
    ):
        for shard, state in enumerate(states):
            old.restore(shard, state)
        with Client(two, worker="w", incarnation=1) as client:
            np.testing.assert_array_equal(client.pull().weights, before)
            reshard(old, new)
            client.push(gradient(table, client.seq))
            client.flush()
        np.testing.assert_array_equal(train(three, 1, incarnation=2), _serial(table, 5))


def _serial(table: ps.DenseTable, steps: int) -> np.ndarray:
    """The same steps on one shard."""
    with local_shards(shard_specs(table, rule="adam", schedule=RATE)) as cluster:
        return train(cluster, steps)


@pytest.mark.slow
def test_replicated_shards_of_three_floats() -> None:
    """Two copies each of two shards; a norm above the guard's cap goes to neither."""
    table = small(3)
    specs = shard_specs(table, shards=2, schedule=RATE, guard=ps.Guard(max_norm=10.0))
    with process_replicas(specs) as hosts, ps.AdminClient(hosts.cluster) as console:
        console.install(table.empty())
        learned = train(hosts.cluster, 3)
        with Client(hosts.cluster, worker="other") as client:
            client.pull()
            with pytest.raises(ps.BadInput, match="norm"):
                client.push(np.full(table.size, 100, np.float32))
            client.abort()
        np.testing.assert_array_equal(console.read(), learned)
