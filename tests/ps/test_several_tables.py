"""Jobs with two tables over real links: subsets, compression by table, resharding, a kill -9.

Table `body` has plain SGD at rate 1, table `head` momentum at rate 1: pushes of ones take whole
numbers off the weights, which show how many there were.
"""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ps
from ps.client import Client
from ps.job_spec import expect_compression, reshard_specs, shard_specs
from ps.launch.processes import process_shards
from ps.launch.threads import local_shards
from ps.resharding import reshard
from ps.session.flow_control import PullKey
from ps.snapshots.manifest import load_snapshot, save_snapshot
from shards.spec import TableSpec

BODY = ps.DenseTable("body", (ps.TensorSpec("w", (3000,)),))
HEAD = ps.DenseTable("head", (ps.TensorSpec("w", (3,)), ps.TensorSpec("b", (2, 2))))
RATE = ps.Fixed(base_rate=1.0)
PATIENCE_S = 120.0


def specs_of(shards: int, **options: Any) -> list[Any]:
    head = TableSpec(HEAD, options.pop("rule", ps.SGD()), RATE)
    return shard_specs([TableSpec(BODY, schedule=RATE), head], shards=shards, **options)


def ones(table: ps.DenseTable) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A gradient of one in each tensor and zero in the padding."""
    flat = table.empty()
    for view in table.views(flat).values():
        view[...] = 1
    return flat


BOTH = {"body": ones(BODY), "head": ones(HEAD)}


def taken(weights: ps.PulledWeights) -> dict[str, list[float]]:
    """The values in the tensors of each table, without those in the padding."""
    return {
        table: sorted({float(value) for view in views.values() for value in view.reshape(-1)})
        for table, views in weights.layout.views(weights.weights).items()
    }


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_push_and_a_pull_may_name_any_of_the_tables(shards: int, transport: str) -> None:
    """An arena, a mapping of both, of one and of none; what is pulled has a layout of its own."""
    with local_shards(specs_of(shards), transport=transport) as cluster:
        with Client(cluster, worker="w", transport=transport) as client:
            assert taken(client.pull()) == {"body": [0], "head": [0]}
            arena = client.new_gradient()
            for name, part in client.layout.split(arena).items():
                part[:] = BOTH[name]
            client.push(arena)
            client.push(BOTH)
            client.push({"head": BOTH["head"]})
            client.push({})
            client.flush()
            assert client.clock == 4
            assert taken(client.pull()) == {"body": [-2], "head": [-3]}
            head = client.pull(tables=["head"])
            assert (head.layout.names, head.weights.size) == (("head",), HEAD.size)
            assert taken(head) == {"head": [-3]}
            client.prefetch(client.clock, ["body"])
            assert taken(client.pull(tables=["body"])) == {"body": [-2]}
        with ps.AdminClient(cluster) as admin:
            views = cluster.layout.views(admin.read())
            assert set(views["head"]["b"].reshape(-1).tolist()) == {-3}
            assert {status.version for status in admin.status()} == {4}


def test_tables_are_taken_each_at_its_own_time() -> None:
    """Requested with pushes at different clocks, each is taken when it has come, in any order."""
    with local_shards(specs_of(2)) as cluster, Client(cluster, worker="w") as client:
        first = client.pull()
        for name in ("body", "head"):
            client.push(
                {name: BOTH[name]},
                read_versions=first.versions,
                prefetch=client.clock + 1,
                prefetch_tables=(name,),
            )
        head = client.take(2, ("head",), wait=True)
        assert head is not None
        assert taken(head) == {"head": [-1]}
        came = client.wait(lambda: client._prefetched.has(PullKey(1, ("body",))), PATIENCE_S)
        assert came, "the pull for an earlier clock was cancelled"
        body = client.take(1, ("body",), wait=False)
        assert body is not None
        assert taken(body) == {"body": [-1]}
        again = client.take(2, ("body",), wait=True)  # requested by this call, as after a restart
        assert again is not None
        assert taken(again) == {"body": [-1]}


def test_what_does_not_fit_is_refused() -> None:
    """Before anything is sent, naming the table."""
    tables = ps.Tables(
        body=ps.Dense.like({"w": np.zeros(3000)}),
        head=ps.Dense.like({"w": np.zeros(3), "b": np.zeros((2, 2))}),
    )
    with ps.local(tables, shards=2) as job, job.worker("w") as me:
        for table, gradient, text in (
            ("tail", BOTH["head"], "table: expected one of body, head, got 'tail'"),
            ("head", BOTH["body"], "table head: the value: expected the keys w, b, got an array"),
            (None, BOTH["body"], "table: expected one of body, head, got None"),
        ):
            with pytest.raises(ps.BadInput, match=text), me.step() as step:
                step.push(table, gradient)
        text = "table: expected one of body, head, got 'tail'"
        with pytest.raises(ps.BadInput, match=text), me.step() as step:
            step.pull("tail")
        assert me.seq == 0


@pytest.mark.parametrize("compression", ["int8", {"body": "topk:0.1"}, {"head": "int8,zstd"}])
def test_each_table_is_compressed_as_configured(compression: Any) -> None:
    """What arrived and what is kept back add up to the gradients, in each table."""
    with (
        local_shards(expect_compression(specs_of(2), compression)) as cluster,
        Client(cluster, worker="w", compression=compression) as client,
    ):
        client.pull()
        for _ in range(3):
            client.push(BOTH)
        client.push({"head": BOTH["head"]})
        client.flush()
        pulled = client.pull(copy=True)
        feedback = client._current.session.encoder.feedback
        assert feedback is not None
        compressed = set(compression) if isinstance(compression, dict) else set(BOTH)
        assert set(feedback.tables) == compressed
        weights = pulled.layout.split(pulled.weights)
        for name, pushes in (("body", 3), ("head", 4)):
            kept = feedback.state().get(f"{name}/error", np.float32(0))
            np.testing.assert_allclose(kept - weights[name], pushes * BOTH[name], atol=1e-4)


def test_a_snapshot_and_a_reshard_move_both_tables(tmp_path: Path) -> None:
    """From two shards through a snapshot to two others, and from there to three."""
    specs = specs_of(2, rule=ps.Momentum(0.5))
    with local_shards(specs) as cluster, ps.AdminClient(cluster) as admin:
        with Client(cluster, worker="w") as client:
            client.pull()
            client.push(BOTH)
            client.flush()
        rules = ("sgd", "momentum")
        about = {"layout": cluster.layout, "shard_map": cluster.map, "rules": rules, "workers": 1}
        save_snapshot(tmp_path / "1", admin.export(), **about)  # type: ignore[arg-type]
    manifest, states = load_snapshot(tmp_path / "1")
    assert (manifest.layout, manifest.rules) == (cluster.layout, rules)
    with (
        local_shards(specs) as two,
        local_shards(reshard_specs(specs, 3)) as three,
        ps.AdminClient(two) as old,
        ps.AdminClient(three) as new,
    ):
        for shard, state in enumerate(states):
            old.restore(shard, state)
        with Client(two, worker="w", incarnation=1) as client:
            client.pull()
            client.push(BOTH)
            client.flush()
            reshard(old, new)
            client.push({"head": BOTH["head"]})
            client.flush()
            # Momentum of a half: 1, then 1.5, then 1.75.
            assert taken(client.pull()) == {"body": [-2], "head": [-4.25]}
            assert client.cluster.map.shards == 3


@pytest.mark.timeout(300)
def test_a_shard_that_is_killed_has_both_tables_of_every_push(tmp_path: Path) -> None:
    """At `logged`, with a log for each shard: the sums prove that each push of both tables, and of
    one, was applied once, before and after the kill."""
    options = {"durability": ps.Durability.LOGGED, "logs": tmp_path}
    with process_shards(specs_of(2), **options) as hosts:  # type: ignore[arg-type]
        with ps.AdminClient(hosts.cluster, patience_s=PATIENCE_S) as admin:
            admin.install(hosts.cluster.layout.empty())
            with Client(hosts.cluster, worker="w", patience_s=PATIENCE_S) as client:
                client.pull()
                for number in range(60):
                    client.push(BOTH if number % 3 else {"head": BOTH["head"]})
                    if number in (20, 40):
                        os.kill(hosts.pids[number // 40], signal.SIGKILL)
                client.flush()
                assert taken(client.pull()) == {"body": [-40], "head": [-60]}
            assert [status.version for status in admin.status()] == [60, 60]
            counts = [state.saved.updates for state in admin.export()]
            assert counts == [{"body": 40}, {"body": 40, "head": 60}]
        assert hosts.deaths == 2
