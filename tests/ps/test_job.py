"""The SDK's jobs, workers, steps and readers, on threads and processes."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest

import ps
from ps import errors
from ps.transport.shard_sockets import Links

PARAMS: dict[str, Any] = {"w": np.arange(5, dtype=np.float32), "b": np.float32(1)}
ONES = {"w": np.ones(5), "b": 1.0}


@pytest.fixture
def job() -> Iterator[Any]:
    with ps.local(PARAMS, shards=2, staleness=1) as job:
        yield job


def test_a_step_is_one_push(job: Any) -> None:
    """A step pulls the values given at the start, and pushes once; the ack says what became of it.

    Plain SGD at rate 0.01 subtracts a hundredth of the gradient.
    """
    with job.worker("w0") as me:
        with me.step(samples=8) as step:
            params = step.pull()
            np.testing.assert_array_equal(params["w"], PARAMS["w"])
            step.push(ONES)
            step.loss = 0.5
        ack = step.ack.result()
        assert (ack.seq, ack.versions, ack.staleness, ack.duplicate) == (1, (1, 1), 0, False)
        assert me.clock == 1
        np.testing.assert_allclose(me.pull()["w"], PARAMS["w"] - 0.01)
    status = job.status()
    assert [one.samples for one in status] == [8, 8]
    assert status[0].workers[0].loss == 0.5


def test_a_step_that_raises_pushes_nothing(job: Any) -> None:
    """What a failed step was given to push is dropped, and the clock stays."""
    with job.worker("w0") as me:
        with suppress(ZeroDivisionError), me.step() as step:
            step.push(ONES)
            raise ZeroDivisionError
        assert me.clock == 0
        with me.step() as step:
            pass
        assert step.ack.result().seq == 1
    np.testing.assert_array_equal(job.read()["w"], PARAMS["w"])


def test_gradients_are_filled_in_place(job: Any) -> None:
    """Arrays from `gradients` are pushed as they are; what is added later counts, too."""
    with job.worker("w0") as me:
        with me.step() as step:
            step.gradients()["w"][:] = 2
        with me.step() as step:
            step.push(ONES)
            step.gradients()["w"][:] += 4
        step.ack.result()
    np.testing.assert_allclose(job.read()["w"], PARAMS["w"] - 0.07, rtol=1e-6)


def test_a_second_push_to_a_table_in_a_step_is_refused(job: Any) -> None:
    """The first is neither dropped nor changed: a step that continues sends it, and a refused
    gradient is none."""
    refused = r"worker w0: table \w+ already has a gradient in this step; expected one push"
    with job.worker("w0") as me:
        with me.step() as step:
            step.push(ONES)
            with pytest.raises(errors.BadInput, match=refused):
                step.push(ONES)
        with me.step() as step:
            step.gradients()["w"][:] = 2
            with pytest.raises(errors.BadInput, match=refused):
                step.push(ONES)
        with me.step() as step:
            with pytest.raises(errors.BadInput, match="shape"):
                step.push({"w": np.ones(4), "b": 1.0})
            step.push(ONES)
        assert step.ack.result().seq == 3
    np.testing.assert_allclose(job.read()["w"], PARAMS["w"] - 0.04, rtol=1e-6)


@pytest.mark.parametrize("names", [("net", "head"), ("head",)])
def test_a_second_push_is_refused_for_each_of_several_tables(names: tuple[str, ...]) -> None:
    """With asyncio as well; the other tables of the step may still be pushed to."""
    tables = ps.Tables(net=ps.Dense.zeros({"w": 3}, rate=1.0), head=ps.Dense.zeros({"w": 2}))

    async def train(job: Any) -> int:
        async with ps.aio.worker(job, "w0") as me:
            async with me.step() as step:
                for name in names:
                    step.push(name, {"w": np.ones(3 if name == "net" else 2)})
                for name in names:
                    with pytest.raises(errors.BadInput, match=f"table {name} already has"):
                        step.push(name, {"w": np.ones(3 if name == "net" else 2)})
            return (await step.ack).seq

    with ps.local(tables, shards=2) as job:
        assert asyncio.run(train(job)) == 1
        assert job.read()["net"]["w"].tolist() == [-1.0 * ("net" in names)] * 3
        np.testing.assert_allclose(job.read()["head"]["w"], -0.01)


def test_a_step_waits_at_the_bound_for_as_long_as_asked(job: Any) -> None:
    """A pull that waits too long raises ClockTimeout, which may be retried, with the clock."""
    with job.worker("slow") as slow, job.worker("fast") as fast:
        for _ in range(2):
            with fast.step():
                pass
        with pytest.raises(errors.ClockTimeout) as caught, fast.step() as step:
            step.pull(timeout_s=1.5)
        assert caught.value.retryable
        assert caught.value.slowest == 0
        assert caught.value.worker == "fast"
        with slow.step():
            pass
        with fast.step() as step:
            step.pull()


def test_steps_do_not_nest(job: Any) -> None:
    """A second step before the first has ended is refused; the first can go on."""
    with job.worker("w0") as me:
        with me.step() as step:
            with pytest.raises(errors.BadInput, match="a step is open"), me.step():
                pass
            step.push(ONES)
        assert step.ack.result().seq == 1
        with me.step() as step, pytest.raises(errors.BadInput, match="not been pushed yet"):
            step.ack.result()


def test_wrong_gradients_are_refused_before_anything_is_sent(job: Any) -> None:
    """An error names table, array, expected and found, has the worker, and the step is dropped."""
    with job.worker("w0") as me:
        for wrong, message in (
            ({"w": np.ones(4), "b": 1.0}, r"table weights: w: expected shape \(5,\), got \(4,\)"),
            ({"w": np.ones(5)}, "table weights: the value: expected the keys w, b, got the keys w"),
        ):
            with pytest.raises(errors.BadInput, match=message) as caught, me.step() as step:
                step.push(wrong)
            assert (caught.value.table, caught.value.worker) == ("weights", "w0")
        wanted = "table: expected one of weights, got 'x'"
        with pytest.raises(errors.BadInput, match=wanted), me.step() as step:
            step.push("x", ONES)
        assert me.clock == 0


def test_a_refused_gradient_is_reported_and_training_continues(job: Any) -> None:
    """NaN is refused before any shard applies a part of the step; later pushes count."""
    with job.worker("w0") as me:
        nan = {"w": np.full(5, np.nan), "b": 0.0}
        with (
            pytest.raises(errors.BadInput, match="w: expected finite") as caught,
            me.step() as step,
        ):
            step.push(nan)
        assert (caught.value.table, caught.value.worker) == ("weights", "w0")
        with me.step() as step:
            step.push(ONES)
        me.flush()
    np.testing.assert_allclose(job.read()["w"], PARAMS["w"] - 0.01)


def test_misused_workers(job: Any) -> None:
    """One line names the worker and the remedy: closed, ended, used by two threads, no number."""
    with job.worker("slow"), job.worker("w0") as me:
        with me.step() as step:
            step.push(ONES)
        for use in (step.pull, step.gradients, lambda: step.push(ONES)):
            with pytest.raises(
                errors.BadInput, match="worker w0: the step has ended; expected"
            ) as caught:
                use()
            assert caught.value.worker == "w0"
        with pytest.raises(errors.BadInput, match="samples: expected 0 to 4294967296") as caught:
            me.step(samples=-1)
        assert caught.value.worker == "w0"
        for loss, shown in (("low", "'low'"), ("1", "'1'"), (b"1", "b'1'"), (10**400, "a whole")):
            text = f"step: loss: expected a number, got {shown}"
            with pytest.raises(errors.BadInput, match=text), me.step() as step:
                step.loss = loss
        early = me.step()
        for use in (early.pull, early.gradients, lambda: early.push(ONES)):
            text = "worker w0: the step has not begun; expected `with me.step"
            with pytest.raises(errors.BadInput, match=text):
                use()
        inside, ended = Event(), Event()

        def until() -> bool:
            inside.set()
            return ended.is_set()

        other = Thread(target=me.client.wait, args=(until, 60.0))
        other.start()
        inside.wait()
        try:
            used = "worker w0: it is in use by another thread; make one for each thread"
            for use in (me.pull, me.flush):
                with pytest.raises(errors.BadInput, match=used) as caught:
                    use()
                assert caught.value.worker == "w0"
        finally:
            ended.set()
            other.join()
    for use in (me.pull, me.flush, lambda: push_and_flush(me), me.step().__enter__):
        with pytest.raises(errors.BadInput, match="worker w0: it is closed") as caught:
            use()
        assert caught.value.worker == "w0"


def test_misused_readers_and_admin_clients(job: Any) -> None:
    """A second thread is refused, for both would wait for ever; so is a call after `close`."""
    with job.reader() as reader, ps.AdminClient(job.cluster) as admin:
        inside, ended = Event(), Event()

        def use_both() -> None:
            with reader._user, admin._user:
                inside.set()
                ended.wait()

        other = Thread(target=use_both)
        other.start()
        inside.wait()
        try:
            for name, use in (("reader", reader.pull), ("admin client", admin.status)):
                text = f"{name}: it is in use by another thread; make one for each thread"
                with pytest.raises(errors.BadInput, match=text):
                    use()
        finally:
            ended.set()
            other.join()
        np.testing.assert_array_equal(reader.pull()["w"], PARAMS["w"])
        assert len(admin.status()) == 2
    for use in (reader.pull, lambda: reader.gather("user", []), admin.status, admin.resume):
        with pytest.raises(errors.BadInput, match="it is closed"):
            use()


def test_two_workers_of_one_name(job: Any) -> None:
    """A later incarnation takes over, and an equal one is noticed when both have pushed; the older
    one gets Fenced, and the weights hold each push once.
    """
    former, later = job.worker("w0"), job.worker("w0", incarnation=1)
    with later.step() as step:
        step.push(ONES)
    later.flush()
    with pytest.raises(errors.Fenced, match="worker w0: incarnation 1 has taken over from 0"):
        push_and_flush(former)
    with pytest.raises(errors.Fenced, match="incarnation 1 has taken over from 0"):
        job.worker("w0")
    twin = job.worker("w0", incarnation=1)
    push_and_flush(twin)
    with pytest.raises(errors.Fenced, match="give each client its own worker name"):
        push_and_flush(later)
    for worker in (former, later, twin):
        worker.abort()
    np.testing.assert_allclose(job.read()["w"], PARAMS["w"] - 0.02, rtol=1e-6)


def push_and_flush(worker: ps.Worker) -> None:
    with worker.step() as step:
        step.push(ONES)
    worker.flush()


def test_readers_register_nothing(job: Any) -> None:
    """A reader sees the present weights at any clock, and no shard knows it as a worker."""
    with job.worker("w0") as me, ps.reader(job) as reader:
        for _ in range(3):
            with me.step() as step:
                step.push(ONES)
        me.flush()
        np.testing.assert_allclose(reader.pull()["w"], PARAMS["w"] - 0.03, rtol=1e-6)
        assert reader.versions == (3, 3)
        assert [worker.worker for worker in job.status()[0].workers] == ["w0"]
    with pytest.raises(errors.BadInput, match="it is closed"):
        reader.pull()


def test_readers_follow_a_reshard(job: Any) -> None:
    """What a reader gets after a reshard is from the present shards, not the former ones."""

    async def read(reader: ps.aio.AsyncReader) -> list[float]:
        return [float(one["b"]) for one in await asyncio.gather(*(reader.pull() for _ in range(9)))]

    async def read_before_and_after() -> None:
        async with ps.aio.reader(job) as reader:
            assert set(await read(reader)) == {1.0}
            job.reshard(1)
            with job.worker("w0") as me, me.step() as step:
                step.push({"w": None, "b": 100.0})
            assert set(await read(reader)) == {0.0}

    with ps.reader(job) as reader, ps.AdminClient(job.cluster) as former:
        assert reader.pull()["b"] == 1
        asyncio.run(read_before_and_after())
        assert reader.pull()["b"] == 0
        assert reader.versions == (1,)
        with pytest.raises(errors.Resynchronise, match="has handed over its part"):
            former.read()


def test_coroutines_share_a_reader(job: Any) -> None:
    """Concurrent reads all see weights that are no older than their call; arrays are read-only."""

    async def read() -> list[float]:
        async with ps.aio.reader(job) as reader:
            first = [await reader.pull() for _ in range(3)]
            with job.worker("w0") as me:
                with me.step() as step:
                    step.push(ONES)
                me.flush()
            later = await asyncio.gather(*(reader.pull() for _ in range(100)))
            assert not first[0]["w"].flags.writeable
            return [float(one["b"]) for one in (*first, *later)]

    values = asyncio.run(read())
    np.testing.assert_allclose(values, [1.0] * 3 + [0.99] * 100)


def test_a_reader_of_another_event_loop_is_refused(job: Any) -> None:
    """What arrives is handled in the loop that opened it: a read elsewhere would wait for ever."""
    reader = ps.aio.reader(job)

    async def enter() -> None:
        await reader.__aenter__()

    asyncio.run(enter())
    for read in (reader.pull, lambda: reader.gather("user", [1])):
        with pytest.raises(errors.BadInput, match="reader: it was opened in another event loop"):
            asyncio.run(read())
    asyncio.run(reader.close())


def test_a_coroutines_reader_whose_links_fail(job: Any, monkeypatch: Any) -> None:
    """The error reaches the read under way and every later one; none waits for ever."""

    def fail(_links: Links, _timeout_s: float) -> Any:
        raise errors.BadMessage("not a reply")

    async def read() -> None:
        async with ps.aio.reader(job) as reader:
            await reader.pull()
            monkeypatch.setattr(Links, "receive", fail)
            for _ in range(2):
                with pytest.raises(errors.BadMessage, match="not a reply"):
                    await asyncio.wait_for(reader.pull(), 60)

    asyncio.run(read())


def test_another_process_connects_by_file(tmp_path: Path) -> None:
    """A saved description leads to the job, in the structure that it was started with."""
    nested = {"fc": [np.ones((2, 3)), np.zeros(3)]}
    with ps.start(nested, on="processes", shards=2) as job:
        job.save(tmp_path / "job.json")
        assert [one.shape for one in ps.connect(tmp_path / "job.json").read()["fc"]] == [
            (2, 3),
            (3,),
        ]
        same = ps.connect(tmp_path / "job.json", tables=nested)
        with same.worker("w0") as me, me.step() as step:
            weights, bias = step.pull()["fc"]
            assert weights.dtype == np.float64
            step.push({"fc": [weights, bias]})
        np.testing.assert_allclose(same.read()["fc"][0], 0.99, rtol=1e-6)
        with pytest.raises(errors.BadInput, match=r"expected those of job job, weights\(fc.0"):
            ps.connect(tmp_path / "job.json", tables={"fc": np.ones(2)})


def test_a_job_is_resharded_under_its_workers(tmp_path: Path) -> None:
    """Workers continue on the new shards, and every push counts once."""
    with ps.start(PARAMS, on="processes", shards=1) as job, job.worker("w0") as me:
        for turn in range(6):
            if turn == 3:
                job.reshard(2)
            with me.step() as step:
                step.push(ONES)
        me.flush()
        assert len(job.status()) == 2
        np.testing.assert_allclose(job.read()["w"], PARAMS["w"] - 0.06, rtol=1e-5, atol=1e-6)
        with pytest.raises(errors.BadInput, match="the job already has 2 shards"):
            job.reshard(2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shards": 0}, "shards: expected"),
        ({"on": "moon"}, "on: expected threads or processes or ray, got 'moon'"),
        ({"staleness": -1}, "staleness: expected"),
        ({"colour": "red"}, "start: options: expected host, port, .*, got 'colour'"),
        ({"logs": "x"}, "logs: expected a folder for logs only with durability process or logged"),
        ({"on": "threads", "logs": "x"}, "start: options on threads: expected .*, got 'logs'"),
        ({"start": {"weights": {"w": np.full(5, np.nan), "b": 1}}}, "weights: w: expected finite"),
        ({"resume": "none", "start": {}}, "start: expected none with `resume`, got both"),
        ({"resume": "none"}, "snapshot none/manifest.json: No such file"),
        ({"start": {"x": PARAMS}}, "start: expected names of tables, weights, got 'x'"),
        ({"start": {"weights": {"w": np.ones(5)}}}, "table weights: the value: expected the keys"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    """A wrong option is refused before anything starts, in one line that names it."""
    with pytest.raises(errors.BadInput, match=message), ps.start(PARAMS, **options):
        pass


def test_wrong_settings_and_options_of_workers(job: Any) -> None:
    """They are refused by name, before a connection is opened."""
    with pytest.raises(errors.BadInput, match=r"Dense: settings: expected rule, .*, got 'ruel'"):
        ps.Dense.like(PARAMS, ruel="adam")
    with pytest.raises(errors.BadInput, match="decay: expected a number of at least 0, or a Decay"):
        ps.Dense.like(PARAMS, decay=-1)
    with pytest.raises(
        errors.BadInput, match="decay: weight: expected a number of at least 0, got"
    ):
        ps.Decay(-0.1)
    with pytest.raises(errors.BadInput, match=r"worker: options: expected .*, got 'colour'"):
        job.worker("w0", colour="red")
    with pytest.raises(errors.BadInput, match=r"connect: expected the address of a shard,.* got 3"):
        ps.connect(3)  # type: ignore[arg-type]


def test_a_job_begins_with_the_state_of_another(tmp_path: Path) -> None:
    """Weights and workers' pushes come from a snapshot, however many shards there are."""
    with ps.local(PARAMS) as job:
        with job.worker("w0") as me, me.step() as step:
            step.push(ONES)
        with ps.AdminClient(job.cluster) as admin:
            ps.save_snapshot(
                tmp_path / "1",
                admin.export(),
                layout=job.cluster.layout,
                shard_map=job.cluster.map,
                rules=("sgd",),
                workers=1,
            )
    with ps.local(PARAMS, shards=2, resume=tmp_path / "1") as job:
        np.testing.assert_allclose(job.read()["w"], PARAMS["w"] - 0.01)
        assert ps.connect(job.address, token=job.token).cluster.map.shards == 2
        with job.worker("w0", incarnation=1) as me:
            assert me.seq == 1
    for other, text in (
        (ps.Dense.like({"w": np.zeros(5)}), "expected tables weights"),
        (ps.Dense.like(PARAMS, rule="adam"), "expected rules adam, got sgd"),
    ):
        with pytest.raises(errors.BadInput, match=text), ps.local(other, resume=tmp_path / "1"):
            pass


def test_workers_of_asyncio(job: Any) -> None:
    """Workers in one event loop wait for one another at the bound, and every push counts once."""

    async def train(number: int) -> list[int]:
        stale = []
        async with ps.aio.worker(job, f"w{number}") as me:
            for _ in range(20):
                async with me.step() as step:
                    await step.pull()
                    step.push(ONES)
                stale.append((await step.ack).staleness)
                assert step.ack.done()
            assert (await me.pull())["w"].shape == PARAMS["w"].shape
            assert (me.name, me.seq) == (f"w{number}", 20)
            assert me.clock >= 20  # one that joins late starts at the slowest worker's clock
        return stale

    async def all_of_them() -> list[list[int]]:
        return await asyncio.gather(*(train(number) for number in range(3)))

    stale = asyncio.run(all_of_them())
    # From a pull to its push, each of two others may go from a step behind to two steps ahead.
    assert max(map(max, stale)) <= 2 * 3
    np.testing.assert_allclose(job.read()["w"], PARAMS["w"] - 0.6, rtol=1e-4, atol=1e-5)


def test_an_asynchronous_pull_that_waits_too_long(job: Any) -> None:
    """It raises ClockTimeout, and the event loop serves others meanwhile."""

    async def fast() -> int:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0.01)
                turns += 1

        counting = asyncio.create_task(count())
        async with ps.aio.worker(job, "fast") as me:
            for _ in range(2):
                async with me.step():
                    pass
            with pytest.raises(errors.ClockTimeout, match=r"has waited 1 s at the") as caught:
                async with me.step() as step:
                    await step.pull(timeout_s=1.0)
            assert caught.value.worker == "fast"
            with pytest.raises(errors.BadInput, match=r"pull: timeout_s: expected 0 s or more"):
                await me.pull(timeout_s=-1.0)
        counting.cancel()
        return turns

    with job.worker("slow"):
        assert asyncio.run(fast()) > 0


def test_tables_are_pushed_as_one() -> None:
    """A step changes the tables that it pushes to, each by its own rule and rate, and no other."""
    tables = ps.Tables(
        net=ps.Dense.like({"w": np.zeros(300)}, rule="momentum"),
        head=ps.Dense.like([np.ones(3)], rate=0.1),
        rest=ps.Dense.zeros({"b": 2}),
    )
    with ps.local(tables, shards=2) as job, job.worker("w0") as me:
        with me.step() as step:
            step.push("net", {"w": np.ones(300)})
        with me.step() as step:
            step.push("head", [np.ones(3)])
            step.push("net", {"w": np.zeros(300)})
            assert step.pull("net")["w"].dtype == np.float64
            assert step.pull().keys() == {"net", "head", "rest"}
            assert step.pull()["rest"]["b"].tolist() == [0, 0]
        assert step.ack.result().versions == (2, 2)
        found = job.read()
        np.testing.assert_allclose(found["net"]["w"], -0.01 - 0.009, rtol=1e-6)
        np.testing.assert_allclose(found["head"][0], 0.9, rtol=1e-6)
        assert found["rest"]["b"].tolist() == [0, 0]
        unnamed = "table: expected one of net, head, rest, got None"
        with pytest.raises(errors.BadInput, match=unnamed), me.step() as step:
            step.push({"w": np.ones(300)})
