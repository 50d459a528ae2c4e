"""`Embedding` and `EmbeddingBag` of `worker.torch`: as PyTorch's, with rows of sparse tables."""

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import ps
import worker
import worker.torch
from ps.session.session import Session
from shards.errors import BadInput

torch: Any = pytest.importorskip("torch", reason="needs the extra `torch`")

IDS = torch.tensor([7, -3, 2**62, 0, -(2**63), 99])
PADDING = 99
DIM, RATE = 4, 0.1


def settings(seed: int = 1, **options: Any) -> dict[str, Any]:
    return {"rate": RATE, "init": ps.Normal(0.5), "seed": seed, **options}


class Ratings(torch.nn.Module):  # type: ignore[misc]  # PyTorch is not checked
    """A user, a bag of items and a network over both; `plain` has PyTorch's own layers."""

    def __init__(self, *, mode: str = "sum", plain: bool = False, **options: Any) -> None:
        super().__init__()
        self.plain = plain
        if plain:
            rows, padding = len(IDS), len(IDS) - 1
            self.user: Any = torch.nn.Embedding(rows, DIM)
            self.items: Any = torch.nn.EmbeddingBag(rows, DIM, mode=mode, padding_idx=padding)
        else:
            self.user = worker.torch.Embedding("user", DIM, **settings(1, **options))
            self.items = worker.torch.EmbeddingBag(
                "item", DIM, mode=mode, padding_idx=PADDING, **settings(2, **options)
            )
        self.top = torch.nn.Linear(2 * DIM, 1)

    def forward(self, users: Any, items: Any, offsets: Any = None, weights: Any = None) -> Any:
        """Ratings (n,); users and items are indices of IDS."""
        if not self.plain:
            users, items = IDS[users], IDS[items]
        bags = self.items(items, offsets, weights)
        return self.top(torch.cat([self.user(users), bags], dim=1))[:, 0]


def indices(dice: Any, shape: tuple[int, ...]) -> Any:
    """Indices of IDS; the last is that of padding."""
    return torch.from_numpy(dice.integers(0, len(IDS), shape))


def twin(model: Ratings, reader: ps.Reader, mode: str) -> Ratings:
    """The same model with PyTorch's own layers, and the rows that the shards have."""
    plain = Ratings(mode=mode, plain=True)
    plain.top.load_state_dict(model.top.state_dict())
    with torch.no_grad():
        plain.user.weight.copy_(torch.from_numpy(reader.gather("user", IDS.numpy())))
        plain.items.weight.copy_(torch.from_numpy(reader.gather("item", IDS.numpy())))
        plain.items.weight[-1] = 0
    return plain


@pytest.mark.parametrize(
    ("mode", "flat"), [("sum", False), ("mean", False), ("max", False), ("sum", True)]
)
def test_one_worker_is_the_plain_loop(mode: str, flat: bool) -> None:
    """Losses and rows are those of PyTorch's layers with SGD, over bags of every form."""
    torch.manual_seed(3)
    model, dice = Ratings(mode=mode), np.random.default_rng(5)
    with (
        ps.local(worker.torch.tables(model, rate=RATE), shards=2) as job,
        job.reader() as reader,
        worker.torch.join(job, "w0", model) as opt,
    ):
        plain = twin(model, reader, mode)
        usual = torch.optim.SGD(plain.parameters(), lr=RATE)
        for _ in range(12):
            users, wanted = indices(dice, (6,)), torch.randn(6)
            bags = [indices(dice, (6, 3))]
            if flat:
                sizes = torch.tensor([0, 3, 0, 5, 2, 7])
                offsets = sizes.cumsum(0) - sizes
                bags = [indices(dice, (17,)), offsets, torch.rand(17)]
            losses = []
            opt.gather({"user": IDS[users], "item": IDS[bags[0]]})
            for net, optimizer in ((model, opt), (plain, usual)):
                loss = (net(users, *bags) - wanted).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
            assert losses[0] == pytest.approx(losses[1], abs=1e-6)
        opt.finish()
        for table, layer in (("user", plain.user), ("item", plain.items)):
            rows = torch.from_numpy(reader.gather(table, IDS.numpy()))
            assert torch.allclose(rows[:-1], layer.weight[:-1], atol=1e-6), table
        with pytest.raises(BadInput, match="1 of 1 ids without one, such as 99"):
            reader.gather("item", [PADDING], missing="error")
        net = reader.pull("net")
        assert torch.allclose(net["top.weight"], plain.top.weight, atol=1e-6)


def test_workers_train_rows_and_weights_together() -> None:
    """Two threads factorise a table of ratings, with a strategy of the shards'."""
    dice = np.random.default_rng(1)
    taste, kind = dice.standard_normal((20, 2)), dice.standard_normal((30, 2))
    tables = worker.torch.tables(Factors())
    assert list(tables) == ["user", "item"]
    with worker.start(tables, strategy="ssp", workers=2, staleness=2, on="threads") as job:

        def train(number: int) -> float:
            own, model = np.random.default_rng(number), Factors()
            with worker.torch.join(job, f"w{number}", model, strategy="ssp", workers=2) as opt:
                for _ in range(250):
                    users, items = own.integers(0, 20, 64), own.integers(0, 30, 64)
                    wanted = torch.from_numpy((taste[users] * kind[items]).sum(1))
                    opt.gather({"user": users, "item": items})
                    loss = (model(users, items) - wanted).square().mean()
                    loss.backward()
                    opt.step(loss=loss, samples=64)
                    opt.zero_grad()
            return float(loss.detach())

        with ThreadPoolExecutor(2) as pool:
            losses = list(pool.map(train, range(2)))
    assert max(losses) < 0.1 < np.square(taste @ kind.T).mean()


def test_a_step_takes_what_was_requested_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step has one request, two steps early; its rows lack the pushes made meanwhile.

    The rate is 1 and the loss a sum of rows, so each push takes 1 from every float.
    """
    clocks: list[int] = []
    real = Session.pull

    def pull(self: Session, clock: int, *rest: Any, **options: Any) -> Any:
        clocks.append(clock)
        return real(self, clock, *rest, **options)

    layer = worker.torch.Embedding("user", 1, rate=1.0, init=ps.Zeros())
    with (
        ps.local(worker.torch.tables(layer), transport="tcp") as job,
        worker.torch.join(job, "w0", layer) as opt,
    ):
        monkeypatch.setattr(Session, "pull", pull)
        for _ in range(2):
            opt.prefetch({"user": IDS})
        seen = []
        for _ in range(6):
            opt.gather({"user": IDS.flip(0)})
            opt.prefetch({"user": [IDS[:3], IDS[3:]]})
            rows = layer(IDS)
            seen.append(set(rows.flatten().tolist()))
            rows.sum().backward()
            opt.step()
            opt.client.flush()
        assert clocks == list(range(8))
    # The first two were requested before any push, the others at the beginning of a step.
    assert seen == [{0.0}, {0.0}, {0.0}, {-1.0}, {-2.0}, {-3.0}]


def learn_factors(args: Any, ctx: worker.Context) -> None:
    """Train on each batch while the rows of the next are on their way."""
    model = Factors()
    opt = worker.torch.wrap(model, None, ctx)
    batches = ctx.batches(20, epochs=args["epochs"])
    batch = next(batches, None)
    while batch is not None:
        following = next(batches, None)
        opt.gather({name: batch[name] for name in ("user", "item")})
        if following is not None:
            opt.prefetch({name: following[name] for name in ("user", "item")})
        scores = model(batch["user"], batch["item"])
        loss = (scores - torch.from_numpy(batch["score"])).square().mean()
        loss.backward()
        opt.step(loss=loss)
        opt.zero_grad()
        batch = following


def test_workers_of_spark_request_rows_early(spark: Any) -> None:
    """Two workers factorise a table of ratings with `prefetch`, and its rows come back."""
    dice = np.random.default_rng(1)
    taste, kind = dice.standard_normal((20, 2)), dice.standard_normal((30, 2))
    users, items = dice.integers(0, 20, 800), dice.integers(0, 30, 800)
    scores = (taste[users] * kind[items]).sum(1)
    rows = list(zip(users.tolist(), items.tolist(), scores.tolist(), strict=True))
    df = spark.createDataFrame(rows, "user long, item long, score float").repartition(2)
    tables = worker.torch.tables(Factors())
    trained = worker.run(
        df,
        learn_factors,
        {"epochs": 12},
        params=tables,
        workers=2,
        strategy="asp",
        shards_in="processes",
    )
    user, item = (trained.rows.gather(*pair) for pair in (("user", users), ("item", items)))
    assert np.square((user * item).sum(1) - scores).mean() < 0.2 * np.square(scores).mean()


class Factors(torch.nn.Module):  # type: ignore[misc]  # PyTorch is not checked
    """Matrix factorisation: a model without parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        rows: dict[str, Any] = {"rule": ps.Adagrad(), "rate": 0.3, "init": ps.Normal(0.5)}
        self.user = worker.torch.Embedding("user", 4, seed=1, **rows)
        self.item = worker.torch.Embedding("item", 4, seed=2, **rows)

    def forward(self, users: Any, items: Any) -> Any:
        return (self.user(torch.as_tensor(users)) * self.item(torch.as_tensor(items))).sum(1)


def test_layers_share_a_table_and_its_rows() -> None:
    """Several layers and calls read one tensor, whose gradients add up; its ids come as a list."""
    one = worker.torch.Embedding("item", DIM, **settings())
    bag = worker.torch.EmbeddingBag("item", DIM, mode="sum", **settings())
    model = torch.nn.ModuleDict({"one": one, "bag": bag})
    first, more = torch.tensor([[1, 2], [3, 1]]), torch.tensor([5])
    with ps.local(worker.torch.tables(model)) as job, job.reader() as reader:
        before = reader.gather("item", [1, 2, 3, 5])
        with worker.torch.join(job, "w0", model) as opt:
            opt.gather({"item": [first, more.numpy()]})
            assert one(first).shape == (2, 2, DIM)
            (one(first).sum() + bag(first).sum() + one(more).sum()).backward()
            opt.step()
        pushes = np.array([4, 2, 2, 1], np.float32)[:, None]
        assert np.allclose(reader.gather("item", [1, 2, 3, 5]), before - RATE * pushes, atol=1e-6)


def test_rows_of_no_forward_pass_stay_as_they_are() -> None:
    """A step pushes the rows of the tables that it used; without gradients it only ticks."""
    model = Ratings()
    with ps.local(worker.torch.tables(model)) as job, job.reader() as reader:
        with worker.torch.join(job, "w0", model) as opt:
            opt.gather({"user": [1], "item": [2]})
            with torch.no_grad():
                model.user(torch.tensor([1]))
            opt.step()
            opt.gather({})
            opt.step()
            assert opt.client.clock == 2
        for table in ("user", "item"):
            assert not reader.gather(table, [1, 2], missing="zero").any()


def test_evaluation_reads_through_a_reader() -> None:
    """Outside a step rows come through a reader, and nothing is pushed; no state_dict has rows."""
    model = Ratings()
    ids = torch.tensor([[1, 2], [2, PADDING]])
    with ps.local(worker.torch.tables(model)) as job, job.reader() as reader:
        assert sorted(model.state_dict()) == ["top.bias", "top.weight"]
        assert worker.torch.attach(model, reader) is model
        model.eval()
        with torch.no_grad():
            rows = model.items(ids)
        first = torch.from_numpy(reader.gather("item", [1, 2]))
        assert torch.equal(rows, torch.stack([first.sum(0), first[1]]))
        worker.torch.attach(model, reader, missing="zero")
        assert not model.items(ids).any()
        with worker.torch.join(job, "w0", model) as opt:
            opt.gather({"item": ids})
            assert torch.equal(model.items(ids), rows)
            model.items(ids).sum().backward()
            opt.step()
            trained = model.items(ids)
        assert torch.allclose(model.items(ids), trained)
        assert not torch.allclose(trained, rows)
        assert not model.user(torch.tensor([1])).any()


def test_a_worker_that_is_started_again_continues() -> None:
    """A higher incarnation begins after the last push; `steps` counts all of them."""
    model = Ratings()
    with ps.local(worker.torch.tables(model)) as job:
        for incarnation in range(2):
            with worker.torch.join(job, "w0", model, steps=4, incarnation=incarnation) as opt:
                for _ in range(2):
                    opt.gather({"user": [1]})
                    opt.step()
        assert opt.client.step == 4
        with (
            worker.torch.join(job, "w0", model, steps=4, incarnation=2) as opt,
            pytest.raises(BadInput, match="gather: worker w0 has taken its last step already"),
        ):
            opt.gather({"user": [1]})


def test_gradients_that_are_not_finite() -> None:
    """Gradients that are not finite are refused before a push, and the step can be taken again."""
    model = Ratings()
    with ps.local(worker.torch.tables(model)) as job, worker.torch.join(job, "w0", model) as opt:
        opt.gather({"user": [1], "item": [2]})
        (model.user(torch.tensor([1])).sum() * float("nan")).backward()
        with pytest.raises(BadInput, match="table user: expected finite gradients, got NaN"):
            opt.step()
        opt.zero_grad()
        model.user(torch.tensor([1])).sum().backward()
        opt.step()
        assert opt.client.clock == 1


@pytest.mark.parametrize("kind", ["Factors", "Towers"])
def test_the_example_learns_ratings(kind: str) -> None:
    """A worker rates pairs that it has not seen, by matrix factorisation and by two towers.

    One alone, and from a seed, takes the same steps each time.
    """
    from deploy.examples import ratings_torch

    torch.manual_seed(1)
    model, tested = getattr(ratings_torch, kind), ratings_torch.draw_ratings(500, 2)
    error = ratings_torch.fit(ratings_torch.draw_ratings(4000, 1), tested, model, workers=1)
    assert error < 0.7 * float(tested[2].std())


@pytest.fixture(scope="module")
def job() -> Any:
    with ps.local(worker.torch.tables(Ratings())) as job:
        yield job


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (
            {"user": torch.tensor([1.0])},
            "gather: user: expected int64 or uint64 of shape (n,), got",
        ),
        ({"user": torch.tensor([1], dtype=torch.int32)}, "gather: user: expected int64 or uint64"),
        ({"user": np.array([[1], [2]], object)}, "gather: user: expected int64 or uint64"),
        ({"user": "abc"}, "gather: user: expected int64 or uint64 of shape (n,), got"),
        ({"user": None}, "gather: user: expected int64 or uint64 of shape (n,), got"),
        ({"net": [1]}, "one of the sparse tables user, item, got"),
        ([1], "gather: expected a dict of ids by table, got"),
    ],
)
def test_ids_that_are_none(job: ps.Job, ids: Any, message: str) -> None:
    """One line names the table; the step has not begun, so the next one may."""
    with worker.torch.join(job, "w1", Ratings()) as opt:
        with pytest.raises(BadInput) as raised:
            opt.gather(ids)
        assert message in str(raised.value)
        opt.gather({})
        opt.step()


def test_uses_that_are_refused(job: ps.Job) -> None:
    """Forward passes without rows, or with other ids, and calls in another order."""
    model, ids = Ratings(), torch.tensor([1, 5])
    neither = r"Embedding user: expected the rows of a step, of gather\(\{...\}\)"
    with pytest.raises(BadInput, match=neither):
        model.user(ids)
    with worker.torch.join(job, "w2", model) as opt:
        with pytest.raises(BadInput, match="prefetch: expected a dict of ids by table, got 5"):
            opt.prefetch(5)  # type: ignore[arg-type]  # wrong on purpose
        with pytest.raises(BadInput, match="prefetch: user: expected int64 or uint64 of shape"):
            opt.prefetch({"user": ids.float()})
        with pytest.raises(BadInput, match="gather: expected one of the sparse tables user, item"):
            opt.prefetch({"nobody": ids})
        with pytest.raises(BadInput, match=r"step: worker w2: the step has no ids"):
            opt.step()
        opt.gather({"user": ids})
        with pytest.raises(BadInput, match="worker w2: the step of the last gather has not ended"):
            opt.gather({"user": ids})
        for wrong in (ids.int(), ids.float(), [1, 5]):
            with pytest.raises(BadInput, match="user: input: expected a tensor of int64 ids, got"):
                model.user(wrong)
        with pytest.raises(BadInput, match="was given, got 1 of 3 that it was not, such as 6"):
            model.user(torch.tensor([1, 6, 5]))
        with pytest.raises(BadInput, match="EmbeddingBag item: expected ids of table item in gat"):
            model.items(ids[None])
        with pytest.raises(BadInput, match="step: loss: expected a number, got 'low'"):
            opt.step(loss="low")
        with pytest.raises(BadInput, match="step: samples: expected 0 to"):
            opt.step(samples=-1)
        opt.step()
        with pytest.raises(BadInput, match=neither):
            model.user(ids)


def make(kind: str = "Embedding", table: Any = "user", dim: Any = DIM, **options: Any) -> Any:
    return getattr(worker.torch, kind)(table, dim, **options)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: make(dim=0), "dim: expected"),
        (lambda: make(table=""), "Embedding: table: expected"),
        (lambda: make(size=5), "Embedding: settings: expected"),
        (lambda: make(rule="none"), "rule: expected"),
        (lambda: make(padding_idx=1.5), "Embedding: padding_idx: expected"),
        (lambda: make(padding_idx=2**63), "Embedding: padding_idx: expected"),
        (lambda: make("EmbeddingBag", mode="min"), "EmbeddingBag: mode: expected one of sum, mean"),
        (lambda: make("EmbeddingBag", include_last_offset=3), "include_last_offset: expected"),
        (
            lambda: worker.torch.tables(torch.nn.ModuleList([make(), make(seed=2)])),
            "tables: Embedding user: expected the settings and padding_idx of the other layer",
        ),
        (
            lambda: worker.torch.tables(
                torch.nn.ModuleList([make(table="net"), torch.nn.Linear(1, 1)])
            ),
            "tables: Embedding net: expected another table, got net",
        ),
        (lambda: worker.torch.tables(make(), rate=0.1), "tables: expected no settings, for the"),
        (lambda: worker.torch.tables(5), "tables: model: expected a torch.nn.Module, got 5"),
        (
            lambda: worker.torch.attach(make(), None),
            "attach: reader: expected a ps.Reader, got None",
        ),
    ],
)
def test_layers_that_are_refused(act: Any, message: str) -> None:
    """One line names the layer and its setting, before a job is started."""
    with pytest.raises(BadInput, match=message):
        act()


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"user": make(table="people")}, {}, "Embedding people: expected a sparse table people in"),
        ({"user": make(dim=DIM + 1)}, {}, "Embedding user: expected rows of 4 floats, as the job"),
        ({"top": torch.nn.Linear(3, 1)}, {}, r"wrap: top.weight: expected shape \(1, 8\)"),
        ({}, {"strategy": "easgd"}, "table user: expected a strategy that works with rows"),
        ({}, {"strategy": "downpour:n_push=3"}, "strategy downpour: expected a push at each step"),
        ({}, {"steps": -1}, "join: steps: expected"),
        ({}, {"workers": 0}, "workers: expected"),
    ],
)
def test_models_that_do_not_fit_the_job(
    job: ps.Job, change: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    """One line names what is wrong, before the first step."""
    model = Ratings()
    for name, layer in change.items():
        setattr(model, name, layer)
    with (
        pytest.raises(BadInput, match=message),
        worker.torch.join(job, "w3", model, **options),
    ):
        pass


def test_an_optimizer_has_no_steps_to_take(job: ps.Job) -> None:
    """The shards update rows and weights by their rules; a dense model has no ids to gather."""
    model = Ratings()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(BadInput, match="optimizer: strategy downpour: expected None"),
        worker.torch.join(job, "w4", model, optimizer),
    ):
        pass
    dense = torch.nn.Linear(2, 1)
    with (
        ps.local(worker.torch.tables(dense)) as other,
        worker.torch.join(other, "w0", dense) as opt,
        pytest.raises(BadInput, match=r"gather: expected a model with worker\.torch\.Embedding"),
    ):
        opt.gather({"user": [1]})


def test_layers_are_copied_and_shown_with_their_settings() -> None:
    """A copy of a model has layers of the same tables, and `repr` names them."""
    model = copy.deepcopy(Ratings())
    assert list(worker.torch.tables(model)) == ["net", "user", "item"]
    assert repr(model.items) == "EmbeddingBag('item', 4, padding_idx=99)"
    assert isinstance(model.user, worker.torch.Embedding)
