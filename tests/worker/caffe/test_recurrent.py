"""The state of recurrent layers goes from batch to batch, as in Caffe, and `cont` ends it."""

import numpy as np
import pytest

from cupy_kernels.types import AnyArray
from worker.caffe.caffe_pb2 import LayerParameter
from worker.caffe.model import CaffeModel
from worker.caffe.net import Network
from worker.caffe.python_nets import LSTM, RNN, EuclideanLoss, Input, Net, Reshape

TIME, BATCH, SIZE, OUTPUTS = 6, 2, 3, 4
FILLER = {"weight_filler": {"type": "uniform", "min": -0.5, "max": 0.5}}
KINDS = {"RNN": RNN, "LSTM": LSTM}
STATES = {"RNN": 1, "LSTM": 2}


def layers(kind: str, time: int, *, exposed: bool = False) -> list[LayerParameter]:
    states = [f"s{number}" for number in range(STATES[kind] * exposed)]
    settings = {"num_output": OUTPUTS, "expose_hidden": exposed} | FILLER
    tops = ["y", *(f"{name}_T" for name in states)]
    return [
        Input("x", shape=(time, BATCH, SIZE)),
        Input("cont", shape=(time, BATCH)),
        *(Input(name, shape=(1, BATCH, OUTPUTS)) for name in states),
        KINDS[kind]("y", ["x", "cont", *states], top=tops, **settings),
    ]


def network(kind: str, time: int, *, exposed: bool = False) -> Network:
    return Network(Net(kind, layers(kind, time, exposed=exposed)).description())


def rows() -> dict[str, AnyArray]:
    rng = np.random.default_rng(3)
    cont = np.ones((TIME, BATCH), np.float32)
    cont[0], cont[4, 1] = 0, 0
    return {"x": rng.standard_normal((TIME, BATCH, SIZE), np.float32), "cont": cont}


def outputs(net: Network, weights: AnyArray, batch: dict[str, AnyArray], cuts: int) -> AnyArray:
    """The top over all steps, computed in equal parts."""
    parts = [dict(zip(batch, part, strict=True)) for part in _parts(batch, cuts)]
    found = []
    for part in parts:
        net.forward(weights, part)
        found.append(net.blob("y"))
    return np.concatenate(found)


def _parts(batch: dict[str, AnyArray], cuts: int) -> list[tuple[AnyArray, ...]]:
    return list(zip(*(np.split(column, cuts) for column in batch.values()), strict=True))


@pytest.mark.parametrize("kind", STATES)
def test_a_sequence_may_be_longer_than_a_batch(kind: str) -> None:
    """Three batches of two steps compute what one batch of six computes."""
    whole, short = network(kind, TIME), network(kind, TIME // 3)
    weights, batch = whole.initial(1), rows()
    expected = outputs(whole, weights, batch, 1)
    np.testing.assert_allclose(outputs(short, weights, batch, 3), expected, rtol=1e-5, atol=1e-6)
    # The next pass begins with cont 0, so what is kept has no effect.
    np.testing.assert_allclose(outputs(short, weights, batch, 3), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", STATES)
def test_what_is_kept_is_forgotten(kind: str) -> None:
    """By `reset`, as before an evaluation."""
    net = network(kind, TIME)
    weights, batch = net.initial(1), rows()
    batch["cont"] = np.ones_like(batch["cont"])
    fresh = outputs(net, weights, batch, 1)
    assert not np.allclose(outputs(net, weights, batch, 1), fresh)
    net.reset()
    np.testing.assert_array_equal(outputs(net, weights, batch, 1), fresh)


def test_a_batch_of_another_size_starts_from_zeros() -> None:
    """The rows of two batches are different sequences if their numbers differ."""
    parts = [
        Input("rows", shape=(12, SIZE)),
        Input("conts", shape=(12,)),
        Reshape("x", "rows", shape=(6, -1, SIZE)),
        Reshape("cont", "conts", shape=(6, -1)),
        LSTM("y", ["x", "cont"], num_output=OUTPUTS, **FILLER),
    ]
    net = Network(Net("sizes", parts).description())
    weights, batch = net.initial(1), rows()
    columns = {"rows": batch["x"].reshape(12, SIZE), "conts": np.ones(12, np.float32)}
    alone = {name: column[:6] for name, column in columns.items()}
    net.forward(weights, alone)
    expected = net.blob("y")
    for part in (columns, alone):
        net.forward(weights, part)
    np.testing.assert_array_equal(net.blob("y"), expected)


@pytest.mark.parametrize("kind", STATES)
def test_the_kept_state_is_a_constant_of_the_gradient(kind: str) -> None:
    """The second batch has the gradient of a net that gets the same state as bottoms."""
    kept, given = network(kind, 3), network(kind, 3, exposed=True)
    weights, batch = kept.initial(1), rows()
    halves = [dict(zip(batch, part, strict=True)) for part in _parts(batch, 2)]
    states = {f"s{n}": np.zeros((1, BATCH, OUTPUTS), np.float32) for n in range(STATES[kind])}
    given.forward(weights, halves[0] | states)
    states = {name: given.blob(f"{name}_T") for name in states}
    given.forward(weights, halves[1] | states)
    for half in halves:
        kept.forward(weights, half)
    np.testing.assert_array_equal(kept.blob("y"), given.blob("y"))
    found = []
    for net in (kept, given):
        found.append(net.table.empty())
        net.backward(weights, found[-1], {"y": np.ones((3, BATCH, OUTPUTS), np.float32)})
    np.testing.assert_array_equal(found[0], found[1])
    assert found[0].any()


def test_each_model_has_a_state_of_its_own() -> None:
    """Two workers' models do not share it, and training continues where the batch before ended."""
    ends = [Input("aim", shape=(2, BATCH, OUTPUTS)), EuclideanLoss("loss", ["y", "aim"])]
    description = Net("two", [*layers("LSTM", 2), *ends]).description()
    one, other = CaffeModel(description), CaffeModel(description)
    weights, out = one.initial(1), one.table.empty()
    batch = {name: column[1:3] for name, column in rows().items()}
    batch["aim"] = np.zeros((2, BATCH, OUTPUTS), np.float32)
    first = one.gradient(weights, batch, out, step=0, seed=0)
    assert one.gradient(weights, batch, out, step=1, seed=0) != first
    assert other.gradient(weights, batch, out, step=0, seed=0) == first
