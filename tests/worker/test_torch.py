"""`worker.torch`: loops in PyTorch with every strategy; skipped without PyTorch."""

import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import ps
import worker
import worker.torch
from shards.errors import BadInput
from worker.strategies import STRATEGIES

torch: Any = pytest.importorskip("torch", reason="needs the extra `torch`")

WANTED = torch.tensor([1.0, -2.0, 3.0])
ROWS = 16


def line() -> Any:
    """A linear model that begins at zero."""
    model = torch.nn.Linear(3, 1)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    return model


def normed() -> Any:
    """A model with BatchNorm, from a seed."""
    torch.manual_seed(4)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 4, bias=False), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
    )


def loss_of(model: Any, dice: Any) -> Any:
    """The loss for random points on the plane through WANTED and 5."""
    x = torch.from_numpy(dice.standard_normal((ROWS, 3)).astype(np.float32))
    return (model(x)[:, 0] - x @ WANTED - 5).square().mean() / 2


def distance(model: Any) -> float:
    """How far a linear model is from WANTED and 5."""
    off = (model.weight[0] - WANTED).abs().max() + (model.bias - 5).abs().max()
    return float(off.detach())


def steps_of(model: Any, opt: Any, number: int, steps: int) -> None:
    """An ordinary loop over random points."""
    dice = np.random.default_rng(number)
    for _ in range(steps):
        loss = loss_of(model, dice)
        loss.backward()
        opt.step()
        opt.zero_grad()


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
    """Two loops in PyTorch come near the solution with any strategy."""
    strategy = SHORT.get(name, name)
    table = worker.torch.params(line(), rate=0.1)
    options: dict[str, Any] = {"staleness": 4} if name == "ssp" else {}
    with worker.start(table, strategy=strategy, workers=2, on="threads", **options) as job:

        def train(number: int) -> int:
            model = line()
            with worker.torch.join(job, f"w{number}", model, strategy=strategy, workers=2) as opt:
                steps_of(model, opt, number, 155)  # ends within a window of ten
                opt.finish()
                return opt.client.step

        with ThreadPoolExecutor(2) as pool:
            taken = list(pool.map(train, range(2)))
        model = worker.torch.load(line(), job.read())
    assert taken == [155, 155]
    assert distance(model) < distance(line()) / 2


def batches(count: int) -> list[Any]:
    """Random inputs of one seed, a new list at each call."""
    dice = torch.Generator().manual_seed(5)
    return [torch.randn(ROWS, 3, generator=dice) for _ in range(count)]


def backward(model: Any, x: Any, pieces: int = 1) -> None:
    """The gradient of the loss, accumulated over a number of pieces, and clipped."""
    for piece in x.chunk(pieces):
        ((model(piece)[:, 0] - piece @ WANTED - 5).square().mean() / (2 * pieces)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def assert_same(model: Any, other: Any, values: Any) -> None:
    """Two models, and the trained values by name, are equal but for rounding."""
    for name, one in other.state_dict().items():
        assert torch.allclose(model.state_dict()[name].float(), one.float(), atol=1e-5), name
        if name in values:
            assert torch.allclose(torch.as_tensor(values[name]), one, atol=1e-5), name


def test_one_worker_is_the_plain_loop_with_the_shards_rule() -> None:
    """Accumulation, clipping, running statistics and frozen parameters are as without shards."""
    plain, model = normed(), normed()
    for one in (plain, model):
        one[2].bias.requires_grad_(False)
    usual = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for x in batches(20):
        backward(plain, x, pieces=2)
        usual.step()
        usual.zero_grad()
    table = worker.torch.params(model, rule=ps.Momentum(0.9), rate=0.1, decay=0.01)
    with ps.start(table, on="threads", shards=2) as job:
        with worker.torch.join(job, "w0", model) as opt:
            for x in batches(20):
                backward(model, x, pieces=2)
                opt.step(samples=ROWS)
                opt.zero_grad()
        values = job.read()
    assert_same(model, plain, values)
    assert values["2.bias"] == plain[2].bias
    assert "1.num_batches_tracked" not in values


@pytest.mark.parametrize("strategy", ["local_sgd:h=3", "easgd:tau=20"])
def test_an_optimizer_takes_the_local_steps(strategy: str) -> None:
    """One worker with AdamW and two parameter groups is the plain loop, whatever the window.

    The centre of EASGD is elsewhere, but its worker is not, until they exchange."""

    def adam(model: Any) -> Any:
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.02}]
        return torch.optim.AdamW(groups, lr=0.05, weight_decay=0.1)

    plain, model = normed(), normed()
    usual = adam(plain)
    schedule = torch.optim.lr_scheduler.StepLR(usual, 5)
    own = adam(model)
    own_schedule = torch.optim.lr_scheduler.StepLR(own, 5)
    with worker.start(worker.torch.params(model), strategy=strategy, on="threads") as job:
        with worker.torch.join(job, "w0", model, own, strategy=strategy) as opt:
            for x in batches(11):
                backward(plain, x)
                usual.step()
                plain.zero_grad()
                schedule.step()
                backward(model, x)
                opt.step()
                opt.zero_grad()
                own_schedule.step()
        assert_same(model, plain, job.read() if strategy == "local_sgd:h=3" else {})


def test_a_window_that_was_cut_short_is_pushed_at_its_end() -> None:
    """The state of an optimizer is all that a restarted worker lacks, and it says so."""
    model, strategy = line(), "local_sgd:h=10"
    with worker.start(worker.torch.params(model), strategy=strategy, on="threads") as job:
        for incarnation in range(2):
            own = torch.optim.SGD(model.parameters(), lr=0.1)
            with worker.torch.join(
                job, "w0", model, own, strategy=strategy, incarnation=incarnation
            ) as opt:
                steps_of(model, opt, incarnation, 13)
                lost = opt.lost
            read = worker.torch.load(line(), job.read())
            assert torch.equal(read.weight, model.weight)
            assert opt.client.step == 13 * (incarnation + 1)
            with pytest.raises(BadInput, match="step: worker w0 has taken its last step already"):
                opt.step()
    assert lost == "w0 continued without the state of its optimizer"


class Counting(torch.nn.Module):  # type: ignore[misc]  # PyTorch is not checked
    """Keeps a mean by assigning a new tensor to a buffer."""

    mean: Any

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: Any) -> Any:
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        return x * self.scale


def test_a_buffer_that_is_assigned_is_shared() -> None:
    """It need not be changed in place; those that no state_dict has stay with the worker."""
    model = Counting()
    table = worker.torch.params(model)
    assert [(one.name, one.buffer) for one in table.tensors] == [("scale", False), ("mean", True)]
    with ps.start(table, on="threads") as job:
        with worker.torch.join(job, "w0", model) as opt:
            for _ in range(3):
                model(torch.ones(4, 3)).sum().backward()
                opt.step()
                opt.zero_grad()
        assert torch.allclose(job.read()["mean"], torch.full((3,), 0.875))


def two_tables() -> ps.Tables:
    return ps.Tables(a=worker.torch.params(line()), b=worker.torch.params(line()))


@pytest.mark.parametrize(
    ("table", "model", "optimizer", "message"),
    [
        (
            line,
            line,
            lambda own: torch.optim.SGD(own.parameters()),
            "strategy downpour: expected N",
        ),
        (
            line,
            line,
            lambda _own: 0.1,
            "optimizer: expected a torch.optim.Optimizer or None, got 0.1",
        ),
        (line, lambda: 5, None, "wrap: model: expected a torch.nn.Module, got 5"),
        (
            line,
            lambda: torch.nn.Linear(4, 1),
            None,
            r"weight: expected shape \(1, 4\)|got \(1, 4\)",
        ),
        (line, normed, None, "expected the parameter 0.weight of the model, got none"),
        (lambda: torch.nn.Bilinear(3, 3, 1, bias=False), line, None, "the parameter bias"),
        (line, lambda: line().double(), None, "weight: expected a parameter of float32, got torch"),
        (two_tables, line, None, "join: expected a job with one dense table, got a, b"),
    ],
)
def test_what_does_not_fit_is_refused(table: Any, model: Any, optimizer: Any, message: str) -> None:
    """One line names what is wrong, before the first step."""
    described = table()
    if not isinstance(described, ps.Tables):
        described = worker.torch.params(described)
    own = model()
    given = None if optimizer is None else optimizer(own)
    with (
        ps.start(described, on="threads") as job,
        pytest.raises(BadInput, match=message),
        worker.torch.join(job, "w0", own, given),
    ):
        pass


def test_an_optimizer_of_another_model_is_refused() -> None:
    other = torch.optim.SGD(line().parameters(), lr=0.1)
    with (
        worker.start(worker.torch.params(line()), strategy="adag", on="threads") as job,
        pytest.raises(BadInput, match="wrap: optimizer: expected parameters of the model, got oth"),
        worker.torch.join(job, "w0", line(), other, strategy="adag"),
    ):
        pass


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"weight": np.zeros((2, 3), np.float32)},
            r"weight: expected shape \(1, 3\), got \(2, 3\)",
        ),
        ({"more": np.zeros(1, np.float32)}, "load: expected tensors of the model, got more"),
        ({"bias": None}, "load: expected the parameter bias of the model, got none"),
    ],
)
def test_values_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    values = {"weight": np.ones((1, 3), np.float32), "bias": np.ones(1, np.float32), **change}
    given = {name: value for name, value in values.items() if value is not None}
    with pytest.raises(BadInput, match=message):
        worker.torch.load(line(), given)


@pytest.mark.parametrize("strategy", ["downpour", "local_sgd:h=4"])
def test_autocast_clipping_and_accumulation_in_a_job(spark: Any, strategy: str) -> None:
    """A job in bfloat16, with clipped gradients of two passes a step, finds the plane."""
    dice = np.random.default_rng(1)
    points = dice.standard_normal((400, 3)).astype(np.float32)
    values = points @ WANTED.numpy() + 5
    rows = list(zip(points.tolist(), values.tolist(), strict=True))
    df = spark.createDataFrame(rows, "x array<float>, y float").repartition(2)

    def train(args: Any, ctx: worker.Context) -> None:
        model = line()
        opt = worker.torch.wrap(model, None, ctx)
        for batch in ctx.batches(20, epochs=20):
            x, y = torch.from_numpy(batch["x"]), torch.from_numpy(batch["y"])
            for half, wanted in zip(x.chunk(2), y.chunk(2), strict=True):
                with torch.autocast("cpu", torch.bfloat16):
                    found = model(half)[:, 0]
                assert found.dtype == torch.bfloat16
                loss = (found.float() - wanted).square().mean() / 4
                loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            assert model.weight.grad.norm() <= 1.001 or norm <= 1
            opt.step(loss=loss)
            opt.zero_grad()

    params = worker.torch.params(line(), rate=0.2)
    trained = worker.run(df, train, params=params, strategy=strategy, shards_in="processes")
    model = worker.torch.load(line(), trained.params)
    assert distance(model) < 0.3
    assert sum(report.samples for report in trained.outcome.reports) == 20 * 400


def test_a_loss_may_be_any_scalar() -> None:
    """A tensor with a gradient is read without a warning of PyTorch's; no number is refused."""
    with ps.start(worker.torch.params(line()), on="threads") as job:
        with warnings.catch_warnings(), worker.torch.join(job, "w0", line()) as opt:
            warnings.simplefilter("error")
            loss = opt.model(torch.ones(2, 3)).mean()
            loss.backward()
            opt.step(loss=loss)
            with pytest.raises(BadInput, match="step: loss: expected a number, got 'low'"):
                opt.step(loss="low")
        params = ps.Dense.like({"w": torch.ones(3, requires_grad=True)})
        with warnings.catch_warnings(), ps.local(params) as plain, plain.worker("w0") as me:
            warnings.simplefilter("error")
            with me.step() as step:
                step.loss = torch.ones((), requires_grad=True) * 2
                step.push(step.pull())


@pytest.mark.parametrize("strategy", ["downpour", "easgd:tau=4"])
def test_mnist_from_a_dataframe(spark: Any, strategy: str, tmp_path: Path) -> None:
    """Two workers train a CNN with BatchNorm on Spark, and its file loads in PyTorch."""
    from deploy.examples.mnist_spark_torch import accuracy, fit, net, rows

    trained = fit(spark, strategy, 4000)
    assert sum(report.samples for report in trained.outcome.reports) == 3 * 4000
    saved = load_file(trained.save(tmp_path / "mnist.safetensors"))
    model = worker.torch.load(net(), saved)
    assert torch.equal(model[1].running_var, trained.params["1.running_var"])
    assert accuracy(model, rows("t10k", 2000)) > 0.8
