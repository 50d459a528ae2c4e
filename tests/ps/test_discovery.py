"""Connecting to a job by the address of a shard and the job's token."""

import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq

import ps
from ps import errors
from ps.job_spec import make_cluster, shard_specs
from ps.launch.threads import local_shards
from ps.security.keys import address_of, pin_key
from shards import wire_format
from shards.messages import PROTOCOL, Refusal, Remedy
from shards.schema_digest import SCHEMA
from tests.support.ports import free_port

ROOT = Path(ps.__file__).parents[1]
NESTED = {"fc": ({"w": np.ones((2, 3)), 0: np.zeros(3, np.float16)}, [np.float32(4)])}
TABLES = ps.Tables(
    net=ps.Dense.like(NESTED, rule=ps.Adam(), rate=0.5, decay=0.1, compression="bf16"),
    head=ps.Dense.zeros({"b": 3}, rate=ps.Step(base_rate=1.0, gamma=0.5, step_size=9)),
)
TABLE = ps.DenseTable("net", (ps.TensorSpec("w", (512,)),))
OTHER_KEY = "ab" * 32
PATIENCE_S = 60.0
NO_KEY = "token: expected the id of a job, got one "


@pytest.fixture
def job() -> Iterator[Any]:
    with ps.local(TABLES, shards=2, staleness=3) as job:
        yield job


def test_the_shard_describes_the_job(job: Any) -> None:
    """Another process needs an address and the token: structure, rates, decay, bound follow."""
    other = ps.connect(job.address, token=job.token)
    net = other.read()["net"]["fc"]
    assert isinstance(net, tuple)
    assert net[0]["w"].dtype == np.float64
    np.testing.assert_array_equal(net[0]["w"], np.ones((2, 3)))
    assert (net[0][0].dtype, net[1][0]) == (np.float16, 4)
    for name, table in TABLES.items():
        assert other.tables[name].form == table.form
    assert (other.cluster.bound, other.cluster.name) == (3, "job")
    with other.worker("w0") as me:
        with me.step() as step:
            step.push("head", {"b": np.ones(3)})
        step.ack.result()
    np.testing.assert_array_equal(job.read()["head"]["b"], -np.ones(3))


def test_another_shard_answers_for_a_dead_one(job: Any) -> None:
    """An address of a job names several shards; one that is alive is enough."""
    assert job.address == ",".join(job.cluster.endpoints)
    dead = f"tcp://127.0.0.1:{free_port()}"
    for endpoint in job.cluster.endpoints:
        assert ps.connect(f"{dead},{endpoint}", token=job.token).cluster == job.cluster
    with pytest.raises(errors.Unreachable, match=f"^job at {dead}: expected a shard"):
        ps.connect(f"{dead},{dead}", token=job.token)


def test_the_description_follows_the_job(job: Any) -> None:
    """After a reshard the former shards name the present ones, and so does a worker's file."""
    former = job.address
    job.reshard(3)
    for address in (former, job.address):
        assert ps.connect(address, token=job.token).cluster.map == job.cluster.map


@pytest.mark.parametrize(
    ("address", "token", "error", "text"),
    [
        (
            "{address}",
            "job-77",
            errors.Denied,
            "expected the token of its job, got another",
        ),
        ("{address}", None, errors.BadInput, "token: expected `job.token` of the job at"),
        (
            "{address}",
            "",
            errors.BadInput,
            NO_KEY + "without a key",
        ),
        (
            "{address}",
            "{token}:12",
            errors.BadInput,
            NO_KEY + "with a key",
        ),
        ("{address}", 7, errors.BadInput, "token: expected the id of a job, got 7"),
        ("tcp://127.0.0.1", "{token}", errors.BadInput, "address: expected tcp://HOST:PORT or"),
        ("tcp://127.0.0.1:65536", "{token}", errors.BadInput, "got 'tcp://127.0.0.1:65536'"),
        ("tcp://127.0.0.1:0", "{token}", errors.BadInput, "got 'tcp://127.0.0.1:0'"),
        ("tcp://u:secret@a:1", "{token}", errors.BadInput, "got 'tcp://...@a:1'"),
        ("s3://u:secret@a/b?k=secret", "{token}", errors.BadInput, "got 's3://...@a/b?...'"),
        ("http://a:1", "{token}", errors.BadInput, "address: expected tcp://HOST:PORT or curve://"),
        ("no.json", "{token}", errors.BadInput, "token: expected none with a cluster file"),
        ("no.json", None, errors.BadInput, "cluster file no.json: No such file or directory"),
    ],
)
def test_wrong_addresses_and_tokens(
    job: Any, address: str, token: Any, error: type[Exception], text: str
) -> None:
    """One line names what is wrong, what was expected, and what was found."""
    known = {"address": job.address, "token": job.token}
    token = token.format(**known) if isinstance(token, str) else token
    with pytest.raises(error) as caught:
        ps.connect(address.format(**known), token=token)
    assert text.format(**known) in one_line(caught.value)
    assert job.token not in str(caught.value), "the id of a job is a secret"


def test_an_address_where_nothing_listens() -> None:
    """The error may be retried, and names the address and the reason."""
    address = f"tcp://127.0.0.1:{free_port()}"
    with pytest.raises(errors.Unreachable) as caught:
        ps.connect(address, token="job-1")
    assert caught.value.retryable
    expected = "expected a shard that accepts connections, got: Connection refused"
    assert one_line(caught.value) == f"job at {address}: {expected}"


def test_keys_and_tokens_of_other_jobs() -> None:
    """Where shards speak CURVE, the token proves itself in the handshake and is never sent."""
    specs = shard_specs(TABLE, shards=2)
    with local_shards(specs, transport="tcp", secure=True) as cluster:
        assert cluster.access is not None
        found = ps.connect(cluster.address, token=cluster.token)
        assert found.cluster == cluster.for_workers()
        with found.worker("w0") as me, me.step() as step:
            step.push({"w": np.ones(512)})
        assert found.read()["w"][0] == np.float32(-0.01)
        plain, key = address_of(cluster.endpoints[0])
        id_, _, _ = cluster.token.partition(":")
        for address, token, text in (
            (cluster.address, f"{id_}:{OTHER_KEY}", "turned away: it does not know our key"),
            (cluster.address, f"other:{cluster.access.token}", "serves another job than"),
            (
                pin_key(plain, OTHER_KEY),
                cluster.token,
                "the server key does not match the endpoint",
            ),
            (
                plain,
                id_,
                "expected plain text, as the endpoint says, got a server that speaks CURVE",
            ),
        ):
            with pytest.raises(errors.Denied) as caught:
                ps.connect(address, token=token)
            assert text in one_line(caught.value)
        for address, token, text in (
            (
                cluster.address,
                id_,
                "token: expected JOB:KEY, for an address that pins a",
            ),
            (cluster.address, f"{id_}:12", "token: key: expected 64 hexadecimal digits, got 2"),
            (plain, cluster.token, "the address of that job begins with curve://"),
        ):
            with pytest.raises(errors.BadInput) as refused:
                ps.connect(address, token=token)
            assert text in one_line(refused.value)
        assert key not in cluster.token


# --- other releases -------------------------------------------------------------------------------


def test_a_shard_answers_an_older_client(job: Any) -> None:
    """A Hello of an earlier protocol has other fields; the refusal names both protocols."""
    hello = {"t": "hello", "request": 4, "job": "j", "worker": "w", "incarnation": 0}
    header = msgpack.packb(hello | {"protocol": 2, "build": "0123456789abcdef"})
    with zmq.Context() as context, context.socket(zmq.DEALER) as old:
        old.setsockopt(zmq.LINGER, 0)
        old.setsockopt(zmq.RCVTIMEO, int(1000 * PATIENCE_S))
        old.connect(job.cluster.endpoints[0])
        old.send(struct.pack("<HH", len(header), 0) + header)
        reply = old.recv_multipart()
    assert f"hello: expected protocol {PROTOCOL}, got protocol 2".encode() in b"".join(reply)


def by_describe(endpoint: str) -> None:
    ps.connect(endpoint, token="job-1")


def by_hello(endpoint: str) -> None:
    ps.connect(make_cluster(shard_specs(TABLE), [endpoint])).worker("w0")


@pytest.mark.parametrize("greet", [by_describe, by_hello])
def test_an_older_shard_is_named(greet: Callable[[str], None]) -> None:
    """It cannot read the greeting, and says so; the client raises Mismatch with both sides."""
    text = "header: Object contains unknown field `schema`"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")

        def serve() -> None:
            while router.poll(int(1000 * PATIENCE_S)):
                sender, *_ = router.recv_multipart()
                if ended.is_set():
                    return
                refusal = Refusal(0, 0, 1, Remedy.BAD_MESSAGE, text)
                router.send_multipart([sender, *wire_format.enclose([(refusal, ())])])

        ended, serving = Event(), Thread(target=serve)
        serving.start()
        endpoint = f"tcp://127.0.0.1:{port}"
        try:
            with pytest.raises(errors.Mismatch) as caught:
                greet(endpoint)
        finally:
            ended.set()
            with context.socket(zmq.DEALER) as last:
                last.connect(endpoint)
                last.send(b"end")
                serving.join()
    assert f"speaks protocol {PROTOCOL}, got one that cannot read" in one_line(caught.value)
    assert text in str(caught.value)


SCRIPT = """
import sys, numpy as np, ps
where, token = sys.argv[1:]
try:
    job = ps.connect(where, token=token or None)
    with job.worker("other") as me, me.step() as step:
        step.push("head", {"b": np.ones(3)})
    print(ps.build_id(), step.ack.result().seq)
except ps.DownpourError as error:
    print(type(error).__name__, error)
"""


def run_other_release(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        env={"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
    )
    return done.stdout.strip()


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """A copy of the packages that a client imports, to be changed."""
    for package in ("cupy_kernels", "shards", "ps"):
        ignored = shutil.ignore_patterns("__pycache__", "*.cu", "*.cuh")
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignored)
    (tmp_path / "worker").mkdir()  # it counts in the build id
    return tmp_path


def test_a_client_of_a_patch_release_is_accepted(job: Any, release: Path) -> None:
    """Its code differs, its messages do not."""
    messages = release / "shards" / "messages.py"
    repaired = messages.read_text().replace('"""The worker is alive', '"""It is alive')
    messages.write_text(repaired + "\n# repaired\n")
    build, seq = run_other_release(release, job.address, job.token).split()
    assert (build != ps.build_id(), seq) == (True, "1")


def test_a_client_with_other_messages_is_refused(job: Any, release: Path, tmp_path: Path) -> None:
    """By its schema, whether it connects by address or by file."""
    messages = release / "shards" / "messages.py"
    changed = messages.read_text().replace(
        "    dropped: bool = False\n", "    late: bool = False\n"
    )
    messages.write_text(changed)
    for path in (release / "shards").glob("*.py"):
        path.write_text(path.read_text().replace("dropped=", "late="))
    job.save(tmp_path / "job.json")
    expected = f"expected schema {SCHEMA} of protocol {PROTOCOL}, got schema "
    for where, token in ((job.address, job.token), (str(tmp_path / "job.json"), "")):
        said = run_other_release(release, where, token)
        assert said.startswith("Mismatch "), said
        assert expected in said
    assert [status.workers for status in job.status()] == [(), ()]


def one_line(error: Exception) -> str:
    text = str(error)
    assert "\n" not in text
    assert text
    return text
