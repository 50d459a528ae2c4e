"""`worker.jax` and `worker.keras`: loops in JAX and Keras; skipped without them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

import ps
import worker
import worker.jax
import worker.keras
from shards.errors import BadInput
from worker.strategies import STRATEGIES

jax: Any = pytest.importorskip("jax", reason="needs the extra `jax`")

WANTED = np.array([1.0, -2.0, 3.0], np.float32)
ROWS = 16


def line() -> Any:
    """A linear model that begins at zero."""
    return {"dense": [jax.numpy.zeros(3)], "bias": jax.numpy.zeros(())}


def _gradient(params: Any, x: Any) -> Any:
    """The loss of a linear model on points on the plane through WANTED and 5, and its gradient."""

    def loss(params: Any) -> Any:
        error = x @ params["dense"][0] + params["bias"] - x @ WANTED - 5
        return (error**2).mean() / 2

    return jax.value_and_grad(loss)(params)


gradient: Any = jax.jit(_gradient)


def batches(number: int, count: int) -> list[Any]:
    dice = np.random.default_rng(number)
    return [dice.standard_normal((ROWS, 3)).astype(np.float32) for _ in range(count)]


def distance(params: Any) -> float:
    off = np.abs(params["dense.0"] - WANTED).max() + abs(params["bias"] - 5)
    return float(off)


SHORT = {
    "diloco": "diloco:h=10",
    "async_diloco": "async_diloco:h=10,inner_lr=0.05,momentum=0.5,weight_decay=0",
    "mla": "mla:h=10,inner_lr=0.05,momentum=0.5,weight_decay=0",
    "heloco": "heloco:h=10,inner_lr=0.05,momentum=0.5,weight_decay=0",
    "streaming_diloco": "streaming_diloco:h=10,inner_lr=0.05,momentum=0.5,weight_decay=0",
    "decoupled_diloco": "decoupled_diloco:h=10,inner_lr=0.05,momentum=0.5,weight_decay=0",
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_trains(name: str) -> None:
    """Two loops in JAX come near the solution with any strategy."""
    strategy = SHORT.get(name, name)
    table = worker.jax.params(line(), rate=0.1)
    options: dict[str, Any] = {"staleness": 4} if name == "ssp" else {}
    with worker.start(table, strategy=strategy, workers=2, on="threads", **options) as job:

        def train(number: int) -> int:
            with worker.jax.join(job, f"w{number}", line(), strategy=strategy, workers=2) as opt:
                for x in batches(number, 155):  # ends within a window of ten
                    loss, grads = gradient(opt.params, x)
                    opt.step(grads, loss=loss, samples=ROWS)
                opt.finish()
                return int(opt.client.step)

        with ThreadPoolExecutor(2) as pool:
            taken = list(pool.map(train, range(2)))
        found = job.read()
    assert taken == [155, 155]
    start = {"dense.0": np.zeros(3), "bias": np.zeros(())}
    assert distance(found) < distance(start) / 2


def momentum(rate: float) -> Any:
    """SGD with momentum, as Optax's optimisers are: `init` and `update`."""

    def init(params: Any) -> Any:
        return jax.tree_util.tree_map(jax.numpy.zeros_like, params)

    def update(grads: Any, state: Any, _params: Any) -> tuple[Any, Any]:
        state = jax.tree_util.tree_map(lambda m, g: 0.9 * m + g, state, grads)
        return jax.tree_util.tree_map(lambda m: -rate * m, state), state

    return SimpleNamespace(init=init, update=update)


@pytest.mark.parametrize("optimizer", [None, momentum])
def test_one_worker_is_the_plain_loop(optimizer: Callable[[float], Any] | None) -> None:
    """With the shards' rule, and with an optimiser of the user's own in windows of three."""
    own = momentum(0.05)
    plain, state = line(), own.init(line())
    for x in batches(5, 12):
        changes, state = own.update(gradient(plain, x)[1], state, plain)
        plain = jax.tree_util.tree_map(lambda one, change: one + change, plain, changes)
    table = worker.jax.params(line(), rule=ps.Momentum(0.9), rate=0.05)
    given = None if optimizer is None else optimizer(0.05)
    strategy = "downpour" if optimizer is None else "local_sgd:h=3"
    with worker.start(table, strategy=strategy, on="threads", shards=2) as job:
        with worker.jax.join(job, "w0", line(), given, strategy=strategy) as opt:
            for x in batches(5, 12):
                opt.step(gradient(opt.params, x)[1])
        found = worker.jax.load(line(), job.read())
    assert np.allclose(found["dense"][0], plain["dense"][0], atol=1e-5)
    assert np.allclose(found["bias"], plain["bias"], atol=1e-5)


def test_an_optimizer_continues_where_its_last_life_ended(tmp_path: Path) -> None:
    """Its state is saved with the worker's: two lives are the plain loop. One that does not fit is
    named, and a fresh one begins."""
    own = momentum(0.05)
    plain, state = line(), own.init(line())
    for x in batches(5, 12):
        changes, state = own.update(gradient(plain, x)[1], state, plain)
        plain = jax.tree_util.tree_map(lambda one, change: one + change, plain, changes)
    how: dict[str, Any] = {"strategy": "local_sgd:h=3", "keep": tmp_path}
    with worker.start(worker.jax.params(line()), strategy="local_sgd:h=3", on="threads") as job:
        for life in range(2):
            given = momentum(0.05)
            with worker.jax.join(job, "w0", line(), given, incarnation=life, **how) as opt:
                for x in batches(5, 12)[6 * life : 6 * (life + 1)]:
                    opt.step(gradient(opt.params, x)[1])
            assert opt.lost == ""
        found = worker.jax.load(line(), job.read())
        other = SimpleNamespace(init=lambda _: {"mean": jax.numpy.zeros(2)}, update=own.update)
        with worker.jax.join(job, "w0", line(), other, incarnation=2, **how) as opt:
            pass
    assert np.allclose(found["dense"][0], plain["dense"][0], atol=1e-5)
    assert np.allclose(found["bias"], plain["bias"], atol=1e-5)
    why = "its state: expected no ['bias'], got ['bias'] float32[]"
    assert opt.lost == f"w0 began without the state of its optimizer: {why}"


@pytest.mark.parametrize("optimizer", [None, momentum])
def test_learners_train_fragments(optimizer: Callable[[float], Any] | None) -> None:
    """A pytree in two tables, each exchanged by itself: two learners come near the solution."""
    tables = worker.jax.fragments(line(), 2, embeddings=["dense.0"], rate=0.05)
    assert list(tables) == ["fragment0", "embeddings"]
    strategy = "decoupled_diloco:h=10,inner_lr=0.05,momentum=0.5,weight_decay=0"
    with worker.start(tables, strategy=strategy, workers=2, on="threads", shards=2) as job:

        def train(number: int) -> int:
            own = None if optimizer is None else optimizer(0.05)
            with worker.jax.join(
                job, f"w{number}", line(), own, strategy=strategy, workers=2
            ) as opt:
                for x in batches(number, 155):
                    opt.step(gradient(opt.params, x)[1], samples=ROWS)
                opt.finish()
                return int(opt.client.step)

        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(train, range(2))) == [155, 155]
        values = job.read()
    trained = worker.jax.load(line(), values)
    assert distance({"dense.0": trained["dense"][0], "bias": trained["bias"]}) < 1


def test_fragments_that_cannot_be_are_refused() -> None:
    """One line names what is wrong, before anything starts."""
    for embeddings, count, message in (
        ((), 3, "fragments: count: expected at most 2 for a model of 2 tensors, got 3"),
        (["dense"], 2, "fragments: embeddings: expected tensors of the model, got dense"),
        ("bias", 2, "fragments: embeddings: expected names of arrays, got 'bias'"),
        ((), 0, "fragments: count: expected at least 1, got 0"),
    ):
        with pytest.raises(BadInput, match=message):
            worker.jax.fragments(line(), count, embeddings=embeddings)
    tables = worker.jax.fragments(line(), 2)
    with (
        worker.start(tables, strategy="downpour", on="threads") as job,
        pytest.raises(BadInput, match="join: expected a job with one dense table, got fragment0"),
        worker.jax.join(job, "w0", line()),
    ):
        raise AssertionError("it was refused")


def test_parameters_that_are_kept_do_not_change() -> None:
    """They are the memory in which weights arrived, which is not used again while they are kept."""
    with (
        worker.start(worker.jax.params(line(), rate=0.1), on="threads") as job,
        worker.jax.join(job, "w0", line()) as opt,
    ):
        kept, copies = [], []
        for x in batches(5, 12):
            kept.append(opt.params["dense"][0])
            copies.append(np.array(kept[-1]))
            opt.step(gradient(opt.params, x)[1])
    assert len({one.tobytes() for one in copies}) == 12
    assert [one.tobytes() for one in map(np.asarray, kept)] == [one.tobytes() for one in copies]


@pytest.mark.parametrize(
    ("tree", "optimizer", "message"),
    [
        ({"bias": np.zeros((), np.float32)}, None, "expected arrays of the tree, got dense.0"),
        ({"bias": 1.0}, None, "wrap: bias: expected an array of float32, got float"),
        ({"bias": np.zeros(2)}, None, "wrap: bias: expected an array of float32, got one of float"),
        ({}, None, "wrap: expected a pytree of arrays, got none"),
        (None, momentum(0.1), "strategy downpour: expected None"),
        (None, 0.1, "wrap: optimizer: expected None, or one with Optax's init and update, got 0.1"),
    ],
)
def test_what_does_not_fit_is_refused(tree: Any, optimizer: Any, message: str) -> None:
    """One line names what is wrong, before the first step."""
    given = line() if tree is None else tree
    with (
        ps.start(worker.jax.params(line()), on="threads") as job,
        pytest.raises(BadInput, match=message),
        worker.jax.join(job, "w0", given, optimizer),
    ):
        pass


def test_values_that_do_not_fit_are_refused() -> None:
    values = {"dense.0": np.ones(3, np.float32), "bias": np.ones((), np.float32)}
    with pytest.raises(BadInput, match=r"load: dense.0: expected shape \(3,\), got \(2,\)"):
        worker.jax.load(line(), values | {"dense.0": np.ones(2)})
    with pytest.raises(BadInput, match=r"load: expected the array bias of the tree, got none"):
        worker.jax.load(line(), {"dense.0": np.ones(3)})
    with (
        ps.start(worker.jax.params(line()), on="threads") as job,
        worker.jax.join(job, "w0", line()) as opt,
        pytest.raises(BadInput, match="step: gradients: expected a pytree with the structure"),
    ):
        opt.step({"bias": np.zeros(())})


def test_mnist_from_a_dataframe(spark: Any) -> None:
    """Two workers train a network on Spark, in windows and asynchronously."""
    from deploy.examples.mnist_spark_jax import accuracy, fit, net, rows

    trained = fit(spark, "easgd:tau=4", 2000)
    assert sum(report.samples for report in trained.outcome.reports) == 3 * 2000
    assert accuracy(worker.jax.load(net(), trained.params), rows("t10k", 1000)) > 0.8


def compiled() -> Any:
    """A small network in Keras for points on a plane, with BatchNorm."""
    import keras

    keras.utils.set_random_seed(1)
    layers = [keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def with_keras(args: Any, ctx: worker.Context) -> None:
    model = compiled()
    pairs = ((batch["x"], batch["y"]) for batch in ctx.batches(10, epochs=args["epochs"]))
    model.fit(pairs, callbacks=[worker.keras.callback(ctx)], verbose=0)


@pytest.mark.parametrize("strategy", ["local_sgd:h=4", "streaming_diloco:h=6"])
def test_keras_trains_from_a_dataframe(spark: Any, strategy: str) -> None:
    """`fit` takes the steps; the model that is loaded predicts the plane, in fragments too."""
    pytest.importorskip("keras", reason="needs the extra `keras`")
    x = np.random.default_rng(3).standard_normal((240, 3)).astype(np.float32)
    y = x @ WANTED + 5
    rows = [(point.tolist(), float(value)) for point, value in zip(x, y, strict=True)]
    df = spark.createDataFrame(rows, "x array<float>, y float").repartition(2)
    whole = strategy == "local_sgd:h=4"
    params = worker.keras.params(compiled()) if whole else worker.keras.fragments(compiled(), 2)
    options: dict[str, Any] = {"params": params, "shards_in": "processes"}
    trained = worker.run(df, with_keras, {"epochs": 6}, strategy=strategy, **options)
    assert sum(report.steps for report in trained.outcome.reports) >= 6 * 24
    model = worker.keras.load(compiled(), trained.params)
    error = model.predict(x, verbose=0)[:, 0] - y
    assert np.abs(error).mean() < 1.5
    with pytest.raises(BadInput, match="load: expected the variable"):
        worker.keras.load(compiled(), {})


def test_the_optimizer_of_a_keras_model_continues() -> None:
    """Its variables are saved and assigned by name; of another worker's all but the rate."""
    keras = pytest.importorskip("keras", reason="needs the extra `keras`")
    x = np.random.default_rng(3).standard_normal((40, 3)).astype(np.float32)

    def begun(rate: float) -> tuple[Any, Any]:
        model = compiled()
        model.compile(keras.optimizers.Adam(rate), "mse")
        variables = SimpleNamespace(sync=model.jax_state_sync)
        return model, worker.keras._FitOptimizer(model, variables)  # type: ignore[arg-type]

    model, trained = begun(0.1)
    trained.begin(None)
    model.fit(x, x.sum(1), verbose=0)
    saved = trained.save()
    for name, rate in (("", 0.1), ("w1", 0.5)):
        again, optimizer = begun(0.5)
        optimizer.begin(msgspec.structs.replace(saved, worker=name))
        assert float(again.optimizer.learning_rate) == pytest.approx(rate)
        got = optimizer.save()
        assert [
            n for n in saved.arrays if got.arrays[n].tobytes() != saved.arrays[n].tobytes()
        ] == (["1"] if name else [])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    with pytest.raises(BadInput, match="its state: expected SGD, got Adam"):
        trained.begin(saved)


def test_the_embeddings_of_a_keras_model_are_apart() -> None:
    """Each variable is in one table, and buffers stay buffers."""
    keras = pytest.importorskip("keras", reason="needs the extra `keras`")
    layers = [keras.layers.Embedding(11, 4), keras.layers.BatchNormalization()]
    model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(2)])
    tables = worker.keras.fragments(model, 3)
    names = {name: [spec.name for spec in dense.tensors] for name, dense in tables.dense.items()}
    assert names["embeddings"] == ["0.embeddings"]
    assert sorted(name for of_table in names.values() for name in of_table) == sorted(
        spec.name for spec in worker.keras.params(model).tensors
    )
    buffers = {s.name for dense in tables.dense.values() for s in dense.tensors if s.buffer}
    assert buffers == {"3.moving_mean", "4.moving_variance"}
