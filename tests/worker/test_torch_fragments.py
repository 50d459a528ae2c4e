"""A PyTorch model as several tables, each exchanged by itself."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import ps
import worker
from shards.errors import BadInput
from worker.training.model_cut import cut_model, pack

CHARACTERS, WIDTH = 11, 8
H = "h=10,overlap=2,inner_lr=0.03,momentum=0.5,weight_decay=0"


def test_fragments_are_balanced_and_the_same() -> None:
    """The largest first, into the emptiest; no tensor is cut, and their order is the model's."""
    sizes = {"a": 10, "b": 70, "c": 40, "d": 30, "e": 10, "f": 1}
    assert pack(sizes, 3) == [["b"], ["c", "e"], ["a", "d", "f"]]
    assert pack({"zero": 0, "nil": 0, "one": 1}, 3) == [["one"], ["zero"], ["nil"]]
    assert cut_model(sizes, ["c"], 3) == {
        "fragment0": ["b"],
        "fragment1": ["a", "d", "e", "f"],
        "embeddings": ["c"],
    }
    assert cut_model(sizes, ["c"], 1) == {"fragment0": list(sizes)}
    with pytest.raises(BadInput, match="count: expected at most 6 for a model of 6 tensors, got 7"):
        cut_model(sizes, ["c"], 7)


def net() -> Any:
    """A next-character model: an embedding, a hidden layer, and a head tied to the embedding."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(4)

    class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(WIDTH, CHARACTERS, bias=False)
            self.embed = torch.nn.Embedding(CHARACTERS, WIDTH)
            self.embed.weight = self.head.weight
            self.hidden = torch.nn.Linear(WIDTH, 16)
            self.norm = torch.nn.BatchNorm1d(16)
            self.out = torch.nn.Linear(16, WIDTH)

        def forward(self, x: Any) -> Any:
            return self.head(self.out(torch.relu(self.norm(self.hidden(self.embed(x))))))

    return Net()


def loss_of(model: Any, dice: Any) -> Any:
    """The loss of guessing the next of the characters that follow each other in a ring."""
    import torch

    x = torch.from_numpy(dice.integers(0, CHARACTERS, 32))
    return torch.nn.functional.cross_entropy(model(x), (x + 1) % CHARACTERS)


def steps_of(model: Any, opt: Any, number: int, steps: int) -> None:
    dice = np.random.default_rng(number)
    for _ in range(steps):
        loss = loss_of(model, dice)
        loss.backward()
        opt.step(loss=loss, samples=32)
        opt.zero_grad()


def test_embeddings_and_the_tied_head_are_apart() -> None:
    """The tied parameter is once in the job, in the table of embeddings; buffers stay buffers."""
    tables = worker.torch.fragments(net(), 3, rate=0.1)
    names = {
        table: [spec.name for spec in dense.table(table).tensors]
        for table, dense in tables.dense.items()
    }
    assert list(names) == ["fragment0", "fragment1", "embeddings"]
    assert names["embeddings"] == ["head.weight"]
    specs = [spec for table, dense in tables.dense.items() for spec in dense.table(table).tensors]
    assert {spec.name for spec in specs if spec.buffer} == {"norm.running_mean", "norm.running_var"}
    assert len(specs) == len({spec.name for spec in specs}) == 9
    sizes = [dense.table(table).parameters for table, dense in tables.dense.items()]
    assert abs(sizes[0] - sizes[1]) <= 16


@pytest.mark.parametrize("optimizer", [False, True])
@pytest.mark.parametrize("name", ["streaming_diloco", "decoupled_diloco:k=1"])
def test_learners_train_fragments(name: str, optimizer: bool) -> None:
    """Two learners on two shards come near the solution, by the strategy's steps or their own."""
    torch = pytest.importorskip("torch")
    strategy = f"{name}{',' if ':' in name else ':'}{H}"
    tables = worker.torch.fragments(net(), 3, rate=0.03)
    how: dict[str, Any] = {"strategy": strategy, "workers": 2}
    with worker.start(tables, on="threads", shards=2, **how) as job:

        def train(number: int) -> int:
            model = net()
            own = torch.optim.AdamW(model.parameters(), lr=0.03) if optimizer else None
            with worker.torch.join(job, f"w{number}", model, own, **how) as opt:
                steps_of(model, opt, number, 155)  # ends between two exchanges
                opt.finish()
                return int(opt.client.step)

        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(train, range(2))) == [155, 155]
        values = job.read()
    assert list(values) == ["fragment0", "fragment1", "embeddings"]
    trained = worker.torch.load(net(), values)
    trained.eval()
    dice = np.random.default_rng(9)
    assert loss_of(trained, dice) < 0.5
    assert loss_of(net().eval(), dice) > 2


def test_what_fragments_cannot_be_is_refused_before_a_start() -> None:
    """More fragments than steps or tensors, a rate of its own, and a strategy for one table."""
    model = net()
    with pytest.raises(BadInput, match="fragments: count: expected at least 1, got 0"):
        worker.torch.fragments(model, 0)
    with pytest.raises(BadInput, match=r"fragments: count: expected at most 9 .*, got 10"):
        worker.torch.fragments(model, 10)
    with pytest.raises(BadInput, match="fragments: multipliers: expected tensors of the model"):
        worker.torch.fragments(model, 2, multipliers={"nope": (1.0, 1.0)})
    tables = worker.torch.fragments(model, 4)
    line = (
        "strategy streaming_diloco: h: expected at least 1 step for each of 4 dense tables, got 3"
    )
    with pytest.raises(BadInput, match=line):
        worker.start(tables, strategy="streaming_diloco:h=3", on="threads")
    with (
        worker.start(tables, strategy="downpour", on="threads") as job,
        pytest.raises(BadInput, match="join: expected a job with one dense table, got fragment0"),
        worker.torch.join(job, "w0", model),
    ):
        raise AssertionError("it was refused")


def test_a_gradient_for_each_of_several_tables() -> None:
    """`worker.loop` gives a function all tables by name, and takes the gradients so."""
    tables = ps.Tables(
        slope=ps.Dense.like(np.zeros(3), rate=0.1), offset=ps.Dense.like(0.0, rate=0.1)
    )
    how: dict[str, Any] = {"strategy": f"streaming_diloco:{H}", "workers": 1}

    def gradient(params: Any, batch: Any) -> tuple[float, Any]:
        error = batch["x"] @ (params["slope"] - [1, -2, 3]) + params["offset"] - 5
        return error @ error / 32, {"slope": batch["x"].T @ error / 16, "offset": error.mean()}

    dice = np.random.default_rng(1)
    batches = ({"x": dice.standard_normal((16, 3))} for _ in range(400))
    with worker.start(tables, on="threads", **how) as job:
        report = worker.loop(job, "w0", gradient, batches, steps=1000, **how)
        values = job.read()
    assert (report.steps, report.samples, report.dropped) == (400, 6400, 0)
    np.testing.assert_allclose(values["slope"], [1, -2, 3], atol=0.2)
    np.testing.assert_allclose(values["offset"], 5, atol=0.5)
    with (
        worker.start(tables, on="threads", **how) as job,
        pytest.raises(BadInput, match="gradient: expected a dict of slope, offset"),
    ):
        worker.loop(
            job, "w0", lambda *_: (0.0, np.zeros(3)), [{"x": np.zeros((2, 3))}], steps=1, **how
        )
