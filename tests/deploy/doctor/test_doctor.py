"""`downpour doctor` from end to end: its output, its exit status, and its warnings."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

import ps
from ps.job_spec import shard_specs
from ps.launch.threads import local_shards
from ps.transport.link_model import parse_link
from tests.support import command_parser
from tests.support.cli_in_process import Run, command
from tests.support.replica_group import Group


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return command(capsys, monkeypatch, "doctor")


@pytest.fixture
def cluster() -> Iterator[ps.Cluster]:
    table = ps.DenseTable("far", (ps.TensorSpec("w", (100_000,)),))
    with local_shards(shard_specs(table, shards=2)) as cluster:
        yield cluster


def test_a_slow_link_is_told_in_words(doctor: Run, cluster: ps.Cluster, tmp_path: Path) -> None:
    """Each shard has a row, and the advice ends in options that the command line accepts."""
    cluster.save(tmp_path / "cluster.json")
    status, out, err = doctor(
        *("--cluster", tmp_path, "--link", "rtt=40ms,rate=40Mbit"),
        *("--compute-ms", 400, "--compute-ms", 800),
    )
    assert (status, err) == (0, "")
    rows = [line for line in out.splitlines() if "tcp://" in line]
    assert [row.split()[:2] for row in rows] == [
        [str(shard), endpoint] for shard, endpoint in enumerate(cluster.endpoints)
    ]
    assert "A step moves 0.4 MB each way" in out
    assert "With decoupled_diloco, which waits for nobody:\n  a model in " in out
    command = out.strip().splitlines()[-1]
    assert command.startswith("downpour train ... --staleness ")
    assert " --prefetch" in command
    (sweep,) = [line for line in out.splitlines() if line.startswith("  downpour exp advise ")]
    words = sweep.split()
    assert words[3:7] == ["--workers", "WORKERS", "--step-s", "0.4"]
    assert parse_link(words[-1]).rtt_s == pytest.approx(0.04, rel=0.5)


def test_the_sweep_to_rank_strategies_is_for_the_workers_of_the_job(
    doctor: Run, cluster: ps.Cluster, tmp_path: Path
) -> None:
    replace(cluster, workers=6).save(tmp_path / "cluster.json")
    _, out, _ = doctor("--cluster", tmp_path, "--compute-ms", 50)
    (sweep,) = [line for line in out.splitlines() if "exp advise" in line]
    command_parser.parse(sweep.split())
    assert sweep.split()[3:7] == ["--workers", "6", "--step-s", "0.05"]


def test_a_thin_link_is_told_how_to_send_less(
    doctor: Run, cluster: ps.Cluster, tmp_path: Path
) -> None:
    """Both directions have a codec, as text and as options, and the cost for the shards is
    named."""
    cluster.save(tmp_path / "cluster.json")
    status, out, _ = doctor(
        "--cluster", tmp_path, "--link", "rtt=1ms,rate=40Mbit", "--compute-ms", 1
    )
    assert status == 0
    assert "  compress pushes as topk:0.01: plain ones take longer than a step\n" in out
    assert "  compress pulls as topk:0.01: plain ones take longer than a step\n" in out
    assert "each shard keeps a copy of its weights for every worker" in out
    command = out.strip().splitlines()[-1]
    assert command.endswith(" --compress topk:0.01 --compress-pull topk:0.01")


def test_json_has_it_all(doctor: Run, cluster: ps.Cluster, tmp_path: Path) -> None:
    """As JSON: the figures of each shard, and the advice."""
    cluster.save(tmp_path / "c.json")
    status, out, _ = doctor("--cluster", tmp_path / "c.json", "--json")
    told = json.loads(out)
    assert status == 0
    assert [link["shard"] for link in told["links"]] == [0, 1]
    assert told["advice"]["staleness"] >= 1
    assert told["fragments"]["period"] >= 24
    assert told["failed"] == told["amiss"] == []


def test_a_shard_that_is_gone_is_named(doctor: Run, cluster: ps.Cluster, tmp_path: Path) -> None:
    """The other shards are still measured, but there is no advice."""
    gone = replace(cluster, endpoints=(cluster.endpoints[0], "tcp://127.0.0.1:1"))
    gone.save(tmp_path / "c.json")
    status, out, _ = doctor("--cluster", tmp_path / "c.json", "--patience-s", 0.5)
    assert status == 1
    assert "! shard 1 at tcp://127.0.0.1:1: nothing listens there: Connection refused" in out
    assert cluster.endpoints[0] in out
    assert "No advice until every shard answers." in out


def test_another_job_is_told_so(doctor: Run, cluster: ps.Cluster, tmp_path: Path) -> None:
    """A stale file names shards that now serve another job."""
    replace(cluster, job="yesterday-0123456789abcdef").save(tmp_path / "c.json")
    status, out, _ = doctor("--cluster", tmp_path / "c.json", "--patience-s", 60)
    assert status == 1
    assert "! shard 0 at " in out
    assert "serves another job than yesterday-" in out
    assert "0123456789abcdef" not in out, "the id is a secret"


def test_a_primary_that_has_moved_is_followed(doctor: Run, group: Group, tmp_path: Path) -> None:
    """After a failover the file names a dead copy, and the coordinator knows the primary.
    Without an answer of the coordinator, there is a warning, and the addresses in the file
    are used."""
    group.copies[0].stop()
    group.await_holders(2)
    group.cluster.save(tmp_path / "c.json")
    status, out, _ = doctor("--cluster", tmp_path / "c.json", "--json", "--patience-s", 60)
    told = json.loads(out)
    assert (status, told["failed"], told["amiss"]) == (0, [], [])
    assert [link["shard"] for link in told["links"]] == [0]
    assert told["endpoints"] == [group.copies[1].endpoint]

    group.stop()
    at = group.coordinator.endpoint
    status, out, _ = doctor("--cluster", tmp_path / "c.json", "--patience-s", 0.3)
    assert status == 1
    assert f"! coordinator at {at} has not answered for 0.3 s: no shard fails over" in out
    assert "! shard 0 at tcp://127.0.0.1:1: nothing listens there: Connection refused" in out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--cluster", "nowhere.json"], "cluster file nowhere.json: No such file"),
        (["--cluster", "/"], "cluster file /cluster.json: No such file"),
        (["--cluster", "c.json", "--link", "rtt=1"], "expected a number with one of us, ms, s"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    doctor: Run, arguments: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bad input is one line on standard error."""
    monkeypatch.chdir(tmp_path)
    status, out, err = doctor(*arguments)
    assert (status, out) == (2, "")
    assert line in err
    assert err.count("\n") == 1


def test_a_run_that_has_ended_is_not_probed(doctor: Run, tmp_path: Path) -> None:
    """A run has ended if its summary is newer than its cluster file, unless it was resumed
    since."""
    (tmp_path / "cluster.json").write_text("{}")
    (tmp_path / "summary.json").write_text("{}")
    os.utime(tmp_path / "cluster.json", (1, 1))
    status, out, err = doctor("--cluster", tmp_path)
    assert (status, out) == (2, "")
    assert "expected a run under way, got one that has ended" in err
    os.utime(tmp_path / "summary.json", (0, 0))
    _, _, err = doctor("--cluster", tmp_path)
    assert "missing required field" in err
