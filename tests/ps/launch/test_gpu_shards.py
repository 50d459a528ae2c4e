"""Shards on a GPU behind real sockets; the GPU is CuPy's stand-in over the emulator."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import ps
from ps.client import Client
from ps.job_spec import shard_specs
from ps.launch import launch_plan
from ps.launch.threads import local_shards
from ps.snapshots.manifest import load_snapshot, save_snapshot
from shards.errors import BadInput
from shards.rules import Momentum
from shards.schedules import Fixed

pytestmark = pytest.mark.usefixtures("emulated")

TABLE = ps.DenseTable("net", (ps.TensorSpec("a", (700,)), ps.TensorSpec("b", (3, 100))))
SEED = 77


def train(client: Client, steps: int, seed: int) -> NDArray[np.float32]:
    """Push random gradients of the tensors; returns the weights after the last."""
    dice = np.random.default_rng(seed)
    for _ in range(steps):
        client.pull()
        gradient = TABLE.empty()
        for view in TABLE.views(gradient).values():
            view[...] = dice.standard_normal(view.shape, np.float32)
        client.push(gradient)
    client.flush()
    return client.pull().weights.copy()


def specs() -> list[Any]:
    return shard_specs(TABLE, shards=2, rule=Momentum(), schedule=Fixed(base_rate=0.1))


def test_a_job_moves_between_a_gpu_and_the_host(cupy: Any, tmp_path: Path) -> None:
    """A job that starts on the GPU and resumes on the host ends as one that never moved."""
    with local_shards(specs()) as cluster, Client(cluster, worker="w") as client:
        first, second = train(client, 5, SEED), train(client, 5, SEED + 1)
    ours = specs()
    with (
        local_shards(ours, device=ps.ShardDevice.GPU) as cluster,
        ps.AdminClient(cluster) as console,
    ):
        with Client(cluster, worker="w") as client:
            assert train(client, 5, SEED).tobytes() == first.tobytes()
        save_snapshot(
            tmp_path / "5",
            console.export(),
            layout=cluster.layout,
            shard_map=cluster.map,
            rules=("momentum",),
            workers=1,
        )
    assert sum(name == "update_momentum" for name, *_ in cupy.calls) == 2 * (1 + 5)
    _, states = load_snapshot(tmp_path / "5")
    with local_shards(ours) as cluster, ps.AdminClient(cluster) as console:
        for shard, state in enumerate(states):
            console.restore(shard, state)
        with Client(cluster, worker="w", incarnation=1) as client:
            assert train(client, 5, SEED + 1).tobytes() == second.tobytes()


def test_where_no_gpu_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing GPU is reported before a shard is made."""
    monkeypatch.setattr(launch_plan, "gpu", lambda: None)
    with pytest.raises(BadInput, match=r"^shard device gpu: expected a GPU that answers"):
        local_shards(specs(), device=ps.ShardDevice.GPU).__enter__()
