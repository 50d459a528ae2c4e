"""The fit of a cluster to records: known times and links are found again."""

import re
import tomllib
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deploy.experiments.calibration import fit_run
from deploy.experiments.cluster import ClusterModel
from shards.errors import BadInput
from tests.support.cli_in_process import command
from tests.support.real_records import recorded


def test_known_times_and_links_are_found_again(tmp_path: Path) -> None:
    """Mean, deviation, stragglers, latency and bandwidth; the section is that of a sweep."""
    found = fit_run(recorded(tmp_path, sizes=(10_000, 100_000)))
    assert found.mean_s == pytest.approx(0.05, rel=0.05)
    assert found.cv == pytest.approx(0.2, abs=0.03)
    assert found.stragglers == {"worker-2": pytest.approx(3.0, rel=0.1)}
    assert set(found.links.values()) == {"rtt=20ms,rate=8Mbit"}
    assert found.distance < 0.05
    assert found.throughput == pytest.approx(1.0, abs=0.02)
    cluster = msgspec.convert(tomllib.loads(found.section)["cluster"], ClusterModel)
    assert cluster.workers == 3
    assert cluster.link == "rtt=20ms,rate=8Mbit"


def test_one_size_has_a_round_trip_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Latency and bandwidth cannot be told apart; the command prints fit and section."""
    recorded(tmp_path)
    status, printed, _ = command(capsys, monkeypatch, "exp")("fit", tmp_path)
    assert status == 0
    assert re.match(r"# 900 records of 3 workers; step times differ .* by 0\.\d+ \(Kolm", printed)
    assert 'link = "rtt=120ms"' in printed


def test_records_that_do_not_suffice_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"expected 10 records of each worker .*, got 4"):
        fit_run(recorded(tmp_path, pushes=4))
    other = tmp_path / "other.parquet"
    pq.write_table(pa.table({"time": np.zeros(3)}), other)
    with pytest.raises(BadInput, match=r"other.parquet: expected a column worker, got time"):
        fit_run(other)
