"""A job's description: how it is made, how it travels, and what its build id identifies."""

import os
import stat
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

import ps
from ps import Cluster
from ps.job_spec import make_cluster, shard_specs
from shards.aggregation import ROUND
from shards.errors import BadInput
from shards.rules import Adam
from shards.schedules import Inv
from shards.spec import ShardSpec

ROOT = Path(__file__).parents[2]
PACKAGES = ("cupy_kernels", "shards", "ps", "worker")
TABLE = ps.DenseTable("net", (ps.TensorSpec("w", (600,), lr_mult=2.0),))
ENDPOINTS = ["tcp://127.0.0.1:5001", "tcp://127.0.0.1:5002"]


def a_cluster() -> Cluster:
    return make_cluster(shard_specs(TABLE, shards=2, bound=3), ENDPOINTS)


def test_the_specs_of_a_job() -> None:
    """The specs differ only in the shard's number; two jobs of one name have different ids."""
    first, second = shard_specs(TABLE, shards=2, name="mine"), shard_specs(TABLE, name="mine")
    assert [spec.shard for spec in first] == [0, 1]
    assert msgspec.structs.replace(first[1], shard=0) == first[0]
    assert first[0].build == ps.build_id()
    assert first[0].job.startswith("mine-")
    assert len(first[0].job) > len("mine-") + 15, "too long to guess"
    assert first[0].job != second[0].job


def test_a_spec_travels() -> None:
    """To a Ray actor, as MessagePack, whatever its rule and schedule."""
    schedule = Inv(base_rate=0.01, gamma=0.0001, power=0.75)
    (spec,) = shard_specs(TABLE, rule=Adam(), schedule=schedule, bound=0, merge=ROUND)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=ShardSpec) == spec


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"shards": 0}, "shards: expected at least 1, got 0"),
        ({"shards": 193}, "expected 1 to 192 shards, got 193"),
        ({"workers": 0}, "workers: expected at least 1, got 0"),
        ({"bound": -1}, "bound: expected at least 0, got -1"),
        ({"lease_s": 0.0}, "lease_s: expected more than 0 s, and finite, got 0"),
        ({"lease_s": float("nan")}, "lease_s: expected more than 0 s, and finite, got nan"),
        ({"lease_s": float("inf")}, "lease_s: expected more than 0 s, and finite, got inf"),
        ({"merge": ROUND}, "bound: expected 0, at which pushes are merged in rounds, got no"),
        ({"merge": ROUND, "bound": 1}, "bound: expected 0, .* got 1"),
    ],
)
def test_numbers_that_make_no_sense(options: dict[str, Any], text: str) -> None:
    """Each error names the argument and what was expected."""
    with pytest.raises(BadInput, match=text):
        shard_specs(TABLE, **options)


def test_a_cluster_file(tmp_path: Path) -> None:
    """It is read back unchanged, and only its owner may read it: the job's id is a secret."""
    path = tmp_path / "cluster.json"
    path.write_text("something longer that was there before, and open to everyone" * 100)
    path.chmod(0o644)
    cluster = a_cluster()
    cluster.save(path)
    assert Cluster.load(path) == cluster
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (cluster.bound, cluster.endpoints) == (3, tuple(ENDPOINTS))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "No such file or directory"),
        ("", "Input data was truncated"),
        ("[]", "Expected `object`, got `array`"),
        ('{"job": "j"}', "missing required field"),
        ("{{one}}", "malformed"),
        ('{"job": "\udcff"}', "'utf-8' codec can't decode byte 0xff"),
        ('{"other": ' + "[" * 100_000, "recursion"),
    ],
)
def test_a_cluster_file_that_is_none(tmp_path: Path, content: str | None, text: str) -> None:
    """The error names the file in one line."""
    path = tmp_path / "cluster.json"
    if content is not None:
        path.write_text(content, errors="surrogateescape")
    with pytest.raises(BadInput, match=text) as caught:
        Cluster.load(path)
    assert str(caught.value).startswith(f"cluster file {path}: ")
    assert "\n" not in str(caught.value)


def test_endpoints_and_shards_are_as_many(tmp_path: Path) -> None:
    """A cluster with a shard without an endpoint can be neither made nor read."""
    with pytest.raises(BadInput, match="expected 2 endpoints, one per shard, got 1"):
        make_cluster(shard_specs(TABLE, shards=2), ENDPOINTS[:1])
    path = tmp_path / "cluster.json"
    plain = msgspec.to_builtins(a_cluster()) | {"endpoints": ENDPOINTS * 2}
    path.write_bytes(msgspec.json.encode(plain))
    with pytest.raises(
        BadInput, match=r"cluster file .*: .*expected 2 endpoints, one per shard, got 4"
    ):
        Cluster.load(path)


# --- the build id ---------------------------------------------------------------------------------


def build_id_of(path: Path) -> str:
    """The build id in a fresh interpreter that imports our packages from `path`."""
    done = subprocess.run(
        [sys.executable, "-c", "import ps; print(ps.__file__, ps.build_id())"],
        cwd="/",
        env=os.environ | {"PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        check=True,
    )
    file, build = done.stdout.split()
    assert file.startswith(str(path)), "another copy was imported"
    return build


def zipped(path: Path, last: str = "") -> Path:
    """Our packages in a zip, with `last` appended to one of the files."""
    with zipfile.ZipFile(path, "w") as archive:
        for package in PACKAGES:
            for file in sorted((ROOT / package).rglob("*")):
                name = file.relative_to(ROOT).as_posix()
                if file.is_file() and "__pycache__" not in name:
                    extra = last if name == "worker/training/training_loop.py" else ""
                    archive.writestr(name, file.read_bytes() + extra.encode())
    return path


def test_the_build_is_the_code(tmp_path: Path) -> None:
    """A checkout and a zip of it have one build id; one more comment changes it."""
    assert len(ps.build_id()) == 16
    assert build_id_of(ROOT) == build_id_of(zipped(tmp_path / "same.zip"))
    assert build_id_of(ROOT) != build_id_of(zipped(tmp_path / "other.zip", "# one more\n"))


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """One line of ours, as for a file that cannot be read."""
    path = tmp_path / "gone" / "cluster.json"
    with pytest.raises(BadInput, match=f"^cluster file {path}: No such file or directory$"):
        a_cluster().save(path)
