"""Compressed links end to end: real sockets, real shards, the SDK's client."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ps import AdminClient, Cluster, Compression, Guard
from ps.client import Client
from ps.job_spec import shard_specs
from ps.launch.processes import process_shards
from ps.launch.threads import local_shards
from ps.pytree import Structure
from ps.table_views import TableViews
from ps.worker import Worker
from shards.errors import BadInput
from tests.support.two_shards import TABLE, UNIT, everywhere

SIZE = TABLE.size
BYTES = {"none": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 260 / 256, "4bit": 132 / 256}
BYTES |= {"1bit": 36 / 256, "topk:0.01": 8 * 0.0097, "threshold:2": 8 * 0.14}


@contextmanager
def served(weights: Any = None) -> Iterator[tuple[Cluster, AdminClient]]:
    specs = shard_specs(TABLE, shards=2, schedule=UNIT)
    with local_shards(specs, weights) as cluster, AdminClient(cluster) as console:
        yield cluster, console


def noise(count: int) -> Any:
    """Random gradients that are zero in the padding, as they must be."""
    gradients = np.zeros((count, SIZE), np.float32)
    for gradient, dice in zip(gradients, map(np.random.default_rng, range(count)), strict=True):
        for view in TABLE.views(gradient).values():
            view[...] = dice.standard_normal(view.shape)
    return gradients


def compressed(cluster: Cluster, push: str, pull: str = "none", **options: Any) -> Client:
    # A repetition, as on a busy machine, would be counted twice; and the first push of a kind that
    # was not announced to the shard makes it compile for a while.
    told: dict[str, Any] = {"retry_s": 30.0, "patience_s": 120.0} | options
    return Client(cluster, worker="w", compression=Compression.parse(push, pull), **told)


@pytest.mark.parametrize("push", BYTES)
def test_weights_and_residual_are_the_gradients(push: str) -> None:
    """After 20 pushes the shards' weights and the client's residual add up; the bytes are few."""
    gradients = noise(20)
    with served() as (cluster, console):
        with compressed(cluster, push) as client:
            client.pull()
            for gradient in gradients:
                client.push(gradient)
            client.flush()
            feedback = client._current.session.encoder.feedback
            left = 0 if feedback is None else feedback.state()[f"{TABLE.name}/error"].copy()
        arrived = -console.read()
        sent = sum(status.bytes_in for status in console.status())
        assert [row["bytes"].sum() for row in console.records()] == [
            status.bytes_in for status in console.status()
        ]
    # The shard skips the signs in the padding when it applies a push.
    whole, real = gradients.sum(0, dtype=np.float64), TABLE.empty()
    for view in TABLE.views(real).values():
        view[...] = 1
    np.testing.assert_allclose(((arrived + left) - whole) * real, 0, atol=2e-4)
    assert sent / (20 * SIZE) <= BYTES[push] * 1.01


@pytest.mark.parametrize("zstd", ["", ",zstd"])
@pytest.mark.parametrize(("pull", "share"), [("none", 1), ("fp16", 0.5), ("bf16", 0.5)])
def test_weights_come_as_halves(pull: str, share: float, zstd: str) -> None:
    """Pulled weights are the shards', rounded, in half the bytes; zstd changes no value."""
    weights = noise(1)[0]
    with served(weights) as (cluster, console):
        with compressed(cluster, f"none{zstd}", pull) as client:
            pulled = client.pull().weights
        assert np.abs(pulled - weights).max() <= {"none": 0, "fp16": 2**-9, "bf16": 2**-6}[pull]
        out = sum(status.bytes_out for status in console.status())
        assert out == 4 * SIZE * share if not zstd else out < 4 * SIZE * share


@pytest.mark.parametrize(("pull", "share"), [("int8", 0.26), ("4bit", 0.14), ("topk:0.02", 0.05)])
def test_changes_alone_are_pulled(pull: str, share: float) -> None:
    """After a first full pull, few bytes per pull; while the weights rest, the view approaches
    them.
    """
    weights = noise(1)[0]
    with served(weights) as (cluster, console):
        with compressed(cluster, "none", pull) as client:
            first = client.pull().weights.copy()
            for gradient in noise(4) / np.float32(100):
                client.push(gradient)
                client.flush()
                view = client.pull().weights
            after = client.pull().weights
        assert first.tobytes() == weights.tobytes()
        assert not np.array_equal(view, first)
        rest = console.read()
        assert np.abs(after - rest).max() < np.abs(first - rest).max()
        out = sum(status.bytes_out for status in console.status()) - 2 * 4 * SIZE
        assert out / (5 * 4 * SIZE) < share


def test_a_shard_in_a_process_serves_every_form() -> None:
    """Its boot number is as large as a clock reading, unlike those in the test's own process: each
    worker gets whole weights, then its own encoding, close to the shard's weights.
    """
    gradients = noise(3)
    with (
        process_shards(shard_specs(TABLE, schedule=UNIT)) as hosts,
        AdminClient(hosts.cluster) as console,
    ):
        console.install(noise(1)[0])
        for pull in ("fp16", "bf16", "int8", "4bit", "topk:0.5"):
            with compressed(hosts.cluster, "none", pull) as client:
                client.pull()
                for gradient in gradients:
                    client.push(gradient)
                    client.flush()
                    view = client.pull().weights
                assert 0 < np.abs(view - console.read()).max() < 1, pull


def worker_of(client: Client) -> Worker:
    """The worker of the SDK over a client."""
    views = TABLE.views(TABLE.empty())
    return Worker(client, TableViews({TABLE.name: (TABLE, Structure("weights", views))}), 0)


def save(client: Client, path: Path) -> None:
    """Save the residual as a worker does."""
    worker_of(client).save(path)


def restore(client: Client, path: Path) -> None:
    """Restore the residual as a worker does."""
    worker_of(client).restore(path)


@pytest.mark.parametrize("push", ["int8", "1bit", "topk:0.05,momentum=0.9", "threshold:3,zstd"])
def test_a_restored_worker_goes_on_to_the_bit(push: str, tmp_path: Path) -> None:
    """Saved, killed, restored: the weights are those of a worker that was never interrupted."""
    gradients, read = noise(12), []
    for interrupted in (False, True):
        with served() as (cluster, console):
            client = compressed(cluster, push)
            client.pull()
            for number, gradient in enumerate(gradients):
                if interrupted and number == 7:
                    save(client, tmp_path / "w.safetensors")
                    client.abort()
                    client = compressed(cluster, push, incarnation=1)
                    restore(client, tmp_path / "w.safetensors")
                    client.pull()
                client.push(gradient)
            client.close()
            read.append(console.read())
    assert read[0].tobytes() == read[1].tobytes()
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]


def test_a_residual_is_of_one_push(tmp_path: Path) -> None:
    """A state with a residual that has been sent since is refused; the worker can do without."""
    path = tmp_path / "state"
    with served() as (cluster, _):
        client = compressed(cluster, "int8")
        client.pull()
        client.push(everywhere(1.0))
        save(client, path)
        client.push(everywhere(1.0))
        client.flush()
        client.abort()
        with (
            compressed(cluster, "int8", incarnation=1) as client,
            pytest.raises(BadInput, match=r"expected one after push 2, .* got one after push 1"),
        ):
            restore(client, path)
        with compressed(cluster, "int8", incarnation=2) as client:
            assert client.seq == 2


def test_a_state_that_is_not_this_workers(tmp_path: Path) -> None:
    """Another worker's, another codec's, no state, no compression: one line each."""
    path = tmp_path / "state"
    with served() as (cluster, _):
        with compressed(cluster, "int8") as client:
            save(client, path)
        refused = [
            ("4bit", path, "push: expected .*int4.*, got .*int8"),
            ("none", path, "restore: expected compressed pushes"),
            ("int8", tmp_path / "none", "worker state .*none: "),
            ("int8", Path(__file__), "expected a file of `save`, got"),
        ]
        for push, file, complaint in refused:
            with (
                compressed(cluster, push, incarnation=1) as client,
                pytest.raises(BadInput, match=complaint),
            ):
                restore(client, file)
        with (
            Client(cluster, worker="v", compression=Compression.parse("int8")) as other,
            pytest.raises(BadInput, match="worker: expected v, got w"),
        ):
            restore(other, path)
        with (
            Client(cluster, worker="u") as plain,
            pytest.raises(BadInput, match="save: expected compressed pushes"),
        ):
            save(plain, path)


def test_nan_is_refused_before_it_is_sent() -> None:
    """The user can correct the error, and the next push is as if it had not been."""
    with served() as (cluster, console):
        with compressed(cluster, "int8") as client:
            client.pull()
            with pytest.raises(BadInput, match="push 1: table net holds NaN or infinity"):
                client.push(everywhere(float("nan")))
            client.push(everywhere(1.0))
        assert [status.pushes for status in console.status()] == [1, 1]


@pytest.mark.parametrize("push", ["int8", "topk:0.01", "threshold:2"])
def test_what_a_shard_would_refuse_changes_no_residual(push: str) -> None:
    """The cap is on what a shard decodes. A push above it is as if it had not been."""
    large = noise(3)
    large[1, SIZE - 100 :] *= 1e6  # at the second shard only
    ends = []
    for pushes in (large, large[::2]):
        specs = shard_specs(TABLE, shards=2, schedule=UNIT, guard=Guard(max_norm=1e4))
        with local_shards(specs) as cluster, AdminClient(cluster) as console:
            with compressed(cluster, push) as client:
                client.pull()
                for gradient in pushes:
                    if np.abs(gradient).max() > 100:
                        with pytest.raises(BadInput, match=r"push 2: table net has norm .*at most"):
                            client.push(gradient)
                    else:
                        client.push(gradient)
                client.flush()
                feedback = client._current.session.encoder.feedback
                assert feedback is not None
                left = {what: array.copy() for what, array in feedback.state().items()}
            ends.append((console.read(), left))
            assert [status.pushes for status in console.status()] == [2, 2]
    (with_it, left_with), (without, left_without) = ends
    np.testing.assert_array_equal(with_it, without)
    for what, array in left_with.items():
        np.testing.assert_array_equal(array, left_without[what])
