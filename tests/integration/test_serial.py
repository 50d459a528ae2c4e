"""The system against serial training: the same bits where it promises them, the bound where not.

The oracle is a loop of plain NumPy over each tensor by itself, with Caffe's formulas in float32. It
shares the gradients with the system, and neither its rules nor its arenas, shards and messages.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from cupy_kernels import compilation
from ps import AdminClient, Cluster
from ps.client import Client
from ps.job_spec import shard_specs
from ps.launch.threads import local_shards
from shards.aggregation import ROUND
from shards.rules import SGD, Adagrad, Momentum, Rule
from tests.support.eventually import eventually
from tests.support.ones_job import Ones, ones_job
from worker.caffe.job import caffe_job
from worker.caffe.model import CaffeModel
from worker.caffe.solver import Solver, read_solver
from worker.data.batches import Batches
from worker.data.image_spool import ImageSpool
from worker.data.sources import open_source
from worker.job.options import TrainOptions
from worker.job.runner import run_job
from worker.strategies import BSP, Downpour, Strategy
from worker.training.model import Batch
from worker.training.training_loop import Plan, train_worker

Floats = NDArray[np.float32]

DEMO = Path(__file__).parents[2] / "deploy" / "demo"
STEPS, BATCH, SEED = 8, 64, 3
RULES = (SGD(), Momentum(0.9), Adagrad(1e-8))


@pytest.fixture(autouse=True)
def one_blas_thread() -> Iterator[None]:
    """As in a worker; a product summed by several threads would round otherwise."""
    with threadpool_limits(1):
        yield


@pytest.fixture(scope="module")
def solver() -> Solver:
    """The demo's LeNet and its schedule, with a decay that the first steps can feel."""
    read = read_solver(DEMO / "lenet_solver.prototxt")
    return msgspec.structs.replace(read, decay=msgspec.structs.replace(read.decay, weight=0.01))


@pytest.fixture(scope="module")
def rows() -> Any:
    """The first batches' digits, as Arrow."""
    return next(open_source(DEMO / "mnist", "train").batches(STEPS * BATCH))


def batches_of(rows: Any, worker: str) -> Batches:
    """What `worker` trains on."""
    return Batches(iter([rows]), ImageSpool("rows"), BATCH, SEED, worker, shuffle=False)


def serial(
    model: CaffeModel, solver: Solver, rule: Rule, rounds: Iterable[Sequence[Batch]]
) -> Floats:
    """Weights after a step for each of `rounds`, along the mean gradient of a round's batches."""
    table, arena = model.table, model.initial(SEED)
    weights = {name: view.copy() for name, view in table.views(arena).items()}
    history = {name: np.zeros_like(view) for name, view in weights.items()}
    for step, batches in enumerate(rounds):
        gradients = [table.empty() for _ in batches]
        for batch, gradient in zip(batches, gradients, strict=True):
            model.gradient(arena, batch, gradient, step=step, seed=SEED)
        mean = sum(gradients[1:], start=gradients[0]) / np.float32(len(gradients))
        slopes = table.views(mean)
        for tensor in table.tensors:
            w, h = weights[tensor.name], history[tensor.name]
            rate = np.float32(solver.schedule.rate(step)) * np.float32(tensor.lr_mult)
            decay = np.float32(solver.decay.weight) * np.float32(tensor.decay_mult)
            g = slopes[tensor.name] + decay * w
            match rule:
                case SGD():
                    w -= rate * g
                case Momentum():
                    h[...] = np.float32(rule.momentum) * h + rate * g
                    w -= h
                case Adagrad():
                    h += g * g
                    w -= rate * (g / (np.sqrt(h) + np.float32(rule.delta)))
        for name, view in table.views(arena).items():
            view[...] = weights[name]
    return arena


def train(cluster: Cluster, solver: Solver, rows: dict[str, Any], strategy: Strategy) -> Floats:
    """The shards' weights after each worker, a thread each, has taken its steps."""
    plan = Plan(steps=STEPS, seed=SEED, strategy=strategy, schedule=solver.schedule)

    def live(client: Client) -> None:
        with client, batches_of(rows[client.worker], client.worker) as batches:
            train_worker(client, CaffeModel(solver.train), batches, plan)

    in_threads(live, [Client(cluster, worker=name) for name in rows])
    with AdminClient(cluster) as console:
        return console.read()


def in_threads(live: Callable[[Client], None], clients: Sequence[Client]) -> None:
    """Run `live` for each client in a thread; raises what any of them raised."""
    failures: list[BaseException] = []

    def guarded(client: Client) -> None:
        try:
            live(client)
        except BaseException as error:  # noqa: BLE001  # raised below, in the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for failure in failures:
        raise failure


def assert_same_bits(found: Floats, expected: Floats) -> None:
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_one_worker_equals_serial_training(solver: Solver, rows: Any, rule: Rule) -> None:
    """One worker with bound 0, over two shards and real sockets: the weights of LeNet are those of
    a serial loop, bit for bit."""
    model = CaffeModel(solver.train)
    expected = serial(model, solver, rule, ([batch] for batch in first(batches_of(rows, "w0"))))
    specs = shard_specs(
        model.table, shards=2, rule=rule, schedule=solver.schedule, decay=solver.decay, bound=0
    )
    with local_shards(specs, model.initial(SEED)) as cluster:
        found = train(cluster, solver, {"w0": rows}, Downpour())
    assert_same_bits(found, expected)
    assert np.abs(found - model.initial(SEED)).max() > 1e-3, "it has learned something"


@pytest.mark.usefixtures("ray_local")
def test_one_worker_over_spark_and_ray(
    spark: Any, solver: Solver, rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same through a Spark task, Ray's actors and the shipped code."""
    import pyarrow as pa

    # Tasks of the tests have no numba, and NumPy adds in another order than the compiled loops.
    monkeypatch.setattr(compilation, "COMPILED", False)
    model = CaffeModel(solver.train)
    found = run_job(
        spark.createDataFrame(pa.Table.from_batches([rows])).coalesce(1),
        caffe_job(
            msgspec.structs.replace(solver, rule=Momentum(0.9)),
            TrainOptions(shards=2, staleness=0, seed=SEED, max_iter=STEPS, shuffle=False),
            workers=1,
        ),
    )
    expected = serial(
        model, solver, Momentum(0.9), ([batch] for batch in first(batches_of(rows, "w0")))
    )
    assert_same_bits(found.weights, expected)


def test_rounds_equal_serial_training_on_the_mean(solver: Solver, rows: Any) -> None:
    """bsp with two workers takes the steps of a serial loop over the mean of both gradients."""
    model = CaffeModel(solver.train)
    halves = {"w0": rows.slice(0, rows.num_rows // 2), "w1": rows.slice(rows.num_rows // 2)}
    pairs = zip(*(first(batches_of(half, name)) for name, half in halves.items()), strict=True)
    expected = serial(model, solver, SGD(), pairs)
    specs = shard_specs(
        model.table,
        shards=2,
        schedule=solver.schedule,
        decay=solver.decay,
        bound=0,
        workers=2,
        merge=ROUND,
    )
    with local_shards(specs, model.initial(SEED)) as cluster:
        found = train(cluster, solver, halves, BSP())
    assert_same_bits(found, expected)


@pytest.mark.parametrize(
    ("bound", "strategy", "reached"),
    [
        (0, Downpour(), 1),
        (1, Downpour(), 2),
        (3, Downpour(), 4),
        (3, Downpour(n_fetch=3), 3),
        (5, Downpour(n_push=2, n_fetch=4), 4),
    ],
)
def test_no_gap_beyond_the_bound(bound: int, strategy: Strategy, reached: int) -> None:
    """Four workers, one of which stops in its first step until the others wait at the bound: they
    come as far as the bound lets them, and no update's clock gap ever exceeds bound + 1."""
    job = ones_job(steps=12, workers=4, strategy=strategy)
    specs = shard_specs(Ones().table, shards=2, bound=bound, workers=4, schedule=job.schedule)
    go_on, waiting_at = threading.Event(), list[int]()
    with local_shards(specs) as cluster, AdminClient(cluster) as console:

        def live(client: Client) -> None:
            slow = client.worker == "w3"
            with client:
                train_worker(client, Halting(go_on) if slow else Ones(), no_data(), job.plan)

        def release() -> None:
            everyone_waits(console)
            waiting_at.extend(status.max_clock_gap for status in console.status())
            go_on.set()

        clients = [Client(cluster, worker=f"w{number}") for number in range(4)]
        releasing = threading.Thread(target=release)
        releasing.start()
        in_threads(live, clients)
        releasing.join()
        gaps = [shard["clock_gap"] for shard in console.records()]
        assert max(status.max_clock_gap for status in console.status()) <= bound + 1
        assert {float(view.max()) for view in Ones().table.views(console.read()).values()} == {-48}
    assert waiting_at == [reached] * 2
    for of_shard in gaps:
        assert len(of_shard) == 4 * 12 / strategy.push_period
        assert reached <= of_shard.max() <= bound + 1


class Halting(Ones):
    """Waits in its first step for `go_on`."""

    def __init__(self, go_on: threading.Event) -> None:
        super().__init__()
        self._go_on = go_on

    def gradient(
        self, weights: Floats, batch: Batch, out: Floats, *, step: int, seed: int
    ) -> float:
        assert self._go_on.wait(60), "the others never came to wait at the bound"
        return super().gradient(weights, batch, out, step=step, seed=seed)


def everyone_waits(console: AdminClient) -> None:
    """Return when three workers wait at every shard's gate."""
    eventually(
        lambda: [sum(w.waiting for w in status.workers) for status in console.status()] == [3, 3],
        because="three workers wait at every gate",
    )


def no_data() -> Iterator[Batch]:
    return repeat({"data": np.zeros((1, 1), np.float32)})


def first(batches: Batches) -> list[Batch]:
    """The batches of a plan's steps."""
    with batches:
        return list(islice(batches, STEPS))
