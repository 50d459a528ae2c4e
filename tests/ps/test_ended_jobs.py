"""Jobs that have ended or cannot continue: their clients and operators learn the reason at once."""

import asyncio
import os
import re
import signal
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest

import ps
from ps import errors
from tests.support.eventually import eventually
from tests.support.small_disk import small_disk

PARAMS = {"w": np.ones(5, np.float32)}
ENDED = "job job has ended with the block that started it"


def test_a_job_of_this_process_is_known_to_have_ended(tmp_path: Path) -> None:
    """After its block a job has no worker, reader, status or further shards, and says so without
    waiting; so does a file that it writes then.
    """
    with ps.local(PARAMS) as job, job.reader() as reader, job.worker("w0") as me:
        reader.pull()
        with me.step():
            pass
    with pytest.raises(errors.JobEnded, match=ENDED) as caught:
        job.read()
    assert not caught.value.retryable
    for use in (
        job.status,
        lambda: job.worker("w1"),
        lambda: ps.aio.reader(job),
        lambda: job.reshard(2),
    ):
        with pytest.raises(errors.JobEnded, match=ENDED):
            use()
    job.save(tmp_path / "late.json")
    with pytest.raises(errors.JobEnded, match=r"late\.json: job job has ended"):
        ps.connect(tmp_path / "late.json")


@pytest.mark.parametrize("on", ["threads", "processes"])
def test_a_reader_and_a_worker_that_wait_learn_that_the_job_has_ended(on: str) -> None:
    """A request under way when the job ends is given up when its answer is late, not after its
    patience, which here is endless."""
    over = Event()
    found: dict[str, BaseException] = {}

    def keep(name: str, use: Any) -> None:
        try:
            use()
        except errors.DownpourError as error:
            found[name] = error

    def read() -> None:
        with job.reader(patience_s=float("inf")) as reader:
            reader.pull()
            answered.append(1)
            over.wait()
            reader.pull()

    def train() -> None:
        me = job.worker("w0", patience_s=float("inf"))
        me.pull()
        answered.append(1)
        over.wait()
        try:
            with me.step():
                pass
            me.flush()
        finally:
            me.abort()

    async def read_asynchronously() -> None:
        async with ps.aio.reader(job, patience_s=float("inf")) as reader:
            await reader.pull()
            answered.append(1)
            await asyncio.to_thread(over.wait)
            await reader.pull()

    answered: list[int] = []
    uses = {"reader": read, "worker": train, "aio": lambda: asyncio.run(read_asynchronously())}
    threads = [Thread(target=keep, args=pair, daemon=True) for pair in uses.items()]
    try:
        with ps.start(PARAMS, on=on) as job:
            for thread in threads:
                thread.start()
            eventually(lambda: len(answered) == len(uses), because="each has had an answer")
    finally:
        over.set()
    for thread in threads:
        thread.join()
    assert {name: type(error) for name, error in found.items()} == dict.fromkeys(
        uses, errors.JobEnded
    )


def test_a_cluster_file_says_that_its_job_has_ended(tmp_path: Path) -> None:
    """Another process that has connected by the file, or does so later, learns it there.

    A file of another job, or one that is gone, stays as it is.
    """
    paths = [tmp_path / name for name in ("job.json", "later.json", "gone.json")]
    with ps.local(PARAMS) as other, ps.local(PARAMS) as job:
        for path in paths:
            job.save(path)
        connected = ps.connect(paths[0])
        reader = connected.reader(patience_s=float("inf"))
        reader.pull()
        other.save(paths[1])
        paths[2].unlink()
    with pytest.raises(errors.JobEnded, match=rf"cluster file {paths[0]}: job job has ended"):
        reader.pull()
    reader.close()
    for use in (connected.read, lambda: ps.connect(paths[0]), lambda: ps.AdminClient(paths[0])):
        with pytest.raises(errors.JobEnded, match=r"job\.json: job job has ended"):
            use()
    assert not paths[2].exists()
    assert paths[0].stat().st_mode & 0o777 == 0o600
    assert job.cluster.job not in paths[0].read_text(), "its id is a secret"


def test_a_cluster_file_of_another_job_is_not_marked(tmp_path: Path) -> None:
    """A job that ends leaves alone a file that describes another one since."""
    path = tmp_path / "job.json"
    with ps.local(PARAMS) as other:
        with ps.local(PARAMS) as job:
            job.save(path)
            other.save(path)
        assert ps.connect(path).read()["w"].shape == (5,)


@pytest.mark.parametrize("durability", ["process", "logged"])
def test_a_full_disk_is_named_at_the_start(tmp_path: Path, durability: str) -> None:
    """Shards that have no room for their first log end the start with the disk and the folder.

    The weights are larger than the disk, and the folder's first files are not.
    """
    weights = {"w": np.ones(500_000, np.float32)}
    with small_disk(tmp_path / "small", "256k") as disk:
        with (
            pytest.raises(errors.GiveUp) as caught,
            ps.start(weights, on="processes", durability=durability, logs=disk / "logs"),
        ):
            pass
        text = str(caught.value)
        assert re.search(
            rf"shard 0 has failed: log {disk}/logs/.*/log-00000000: No space left on device"
            rf" \(the disk of {disk}/logs/.*/shard-0 has 0\.\d of 0\.3 MB free\)",
            text,
        )


def test_shards_that_a_failed_reshard_leaves_behind_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The job stays on its own shards, so a later death of the others is no error of the job."""

    def fail(_old: ps.AdminClient, new: ps.AdminClient) -> None:
        started.append(new.cluster)
        raise errors.Retry("another operator has quiesced the shards")

    started: list[ps.Cluster] = []
    monkeypatch.setattr("ps.start_job.reshard", fail)
    with ps.start(PARAMS, on="processes") as job:
        with pytest.raises(errors.Retry):
            job.reshard(2)
        hosts = job._hosts[-1]
        assert hosts.cluster.endpoints == started[0].endpoints
        os.kill(hosts.pids[0], signal.SIGKILL)  # type: ignore[attr-defined]  # of SingleCopies

        def dead() -> bool:
            try:
                hosts.check()
            except errors.GiveUp:
                return True
            return False

        eventually(dead, because="the death of a new shard is noticed")
        job.check()
        with job.worker("w0") as me, me.step() as step:
            step.push({"w": np.ones(5)})
        np.testing.assert_allclose(job.read()["w"], 0.99)


def test_a_full_disk_is_named_to_a_worker(tmp_path: Path) -> None:
    """A worker of this process learns from its first late answer why a shard no longer answers."""
    weights = {"w": np.zeros(20_000, np.float32)}

    def train(worker: ps.Worker) -> None:
        for _ in range(100):  # of 80 KB each
            with worker.step() as step:
                step.push({"w": np.ones(20_000)})
        worker.flush()

    with (
        small_disk(tmp_path / "small", "1m") as disk,
        ps.start(weights, on="processes", durability="process", logs=disk / "logs") as job,
    ):
        me = job.worker("w0", patience_s=float("inf"))
        with pytest.raises(errors.GiveUp, match=rf"shard 0 has failed: log {disk}/.*No space left"):
            train(me)
        me.abort()


def test_a_job_of_processes_survives_a_death_by_default() -> None:
    """Without further options a killed shard continues from an autosave, and its worker with it."""
    with ps.start(PARAMS, shards=2) as job, job.worker("w0") as me:
        with me.step() as step:
            step.push({"w": np.ones(5)})
        me.flush()
        os.kill(job._hosts[0].pids[1], signal.SIGKILL)  # type: ignore[attr-defined]  # of SingleCopies
        with me.step() as step:
            step.push({"w": np.ones(5)})
        me.flush()
        job.check()
        (lost,) = job.lost_updates()
        assert lost.startswith("shard 1 has died: its process was ended by signal 9 (Killed);")


def test_a_final_death_names_its_remedy() -> None:
    """A worker of this process learns from its first late answer that the job is over, and why."""
    with ps.start(PARAMS, rollback_s=0) as job:
        me = job.worker("w0", patience_s=float("inf"))
        me.pull()
        os.kill(job._hosts[0].pids[0], signal.SIGKILL)  # type: ignore[attr-defined]  # of SingleCopies
        with pytest.raises(errors.GiveUp) as caught:
            me.pull()
        assert str(caught.value) == (
            "shard 0 has died: its process was ended by signal 9 (Killed); the job has ended: with"
            ' rollback_s=10 such a shard continues from an autosave, with durability="process"'
            " without a loss"
        )
        assert repr(job).startswith("<job job: failed, 1 shard at tcp://127.0.0.1:")
        me.abort()


@pytest.mark.parametrize("secure", [False, True])
def test_a_final_death_is_answered_to_workers_of_other_processes(secure: bool) -> None:
    """Whoever asks at the dead shard's place learns the cause and the remedy, not after patience.

    The connected job knows of no file and no process: only of the address. Under CURVE the answer
    comes under the dead shard's key, also to a worker that only the dead shard had enrolled.
    """
    text = (
        "shard 1 has died: its process was ended by signal 9 (Killed); the job has ended: with"
        ' rollback_s=10 such a shard continues from an autosave, with durability="process"'
        " without a loss"
    )
    with ps.start(PARAMS, shards=2, rollback_s=0, secure=secure) as job:
        endless = {"patience_s": float("inf")}
        with ps.connect(job.address, token=job.token) as other:
            me, reader = other.worker("w0", **endless), other.reader(**endless)  # type: ignore[arg-type]
            me.pull()
            os.kill(job._hosts[0].pids[1], signal.SIGKILL)  # type: ignore[attr-defined]  # of SingleCopies
            uses: list[Any] = [me.pull, reader.pull, lambda: other.worker("w1")]
            for use in uses if secure else [*uses, other.status]:  # which needs the operator's key
                with pytest.raises(errors.GiveUp) as caught:
                    use()
                assert type(caught.value) is errors.GiveUp
                assert str(caught.value).endswith(text)
            address_of_dead = job.address.split(",")[1]
            with pytest.raises(errors.GiveUp) as caught:
                ps.connect(address_of_dead, token=job.token)
            assert str(caught.value).endswith(text)
            me.abort()


@pytest.mark.timeout(400)
def test_the_loss_of_both_copies_is_answered_to_workers_of_other_processes() -> None:
    """Clients of a replicated job under CURVE learn from the coordinator that no copy is left.

    Also those that come later, and after the coordinator itself was restarted.
    """
    with ps.start(PARAMS, durability="replicated", secure=True) as job:
        hosts = job._hosts[0]
        endless = {"patience_s": float("inf")}
        with ps.connect(job.cluster.for_workers()) as other:
            me, reader = other.worker("w0", **endless), other.reader(**endless)  # type: ignore[arg-type]
            me.pull()
            for copy in ("shard 0 primary", "shard 0 backup"):
                os.kill(hosts.pids[copy], signal.SIGKILL)  # type: ignore[attr-defined]  # of ReplicatedShards
            lost = "shard 0 has no copy left that holds its pushes: shard 0 has died: .*; "
            remedy = "the job has ended: continue from a snapshot, if there is one, with resume=..."
            uses: list[Any] = [me.pull, reader.pull, lambda: other.worker("w1", **endless)]  # type: ignore[arg-type]
            for use in uses:
                with pytest.raises(errors.GiveUp, match=lost + re.escape(remedy)):
                    use()
            os.kill(hosts.pids["coordinator"], signal.SIGKILL)  # type: ignore[attr-defined]
            with pytest.raises(errors.GiveUp, match=lost + re.escape(remedy)):
                other.worker("w2", **endless)  # type: ignore[arg-type]
            me.abort()
