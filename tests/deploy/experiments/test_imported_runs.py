"""Runs that trained for real as trials: imported, compared, reported and fitted."""

import re
from pathlib import Path

import msgspec
import numpy as np
import pytest

from deploy.experiments.cluster import ClusterModel, StepTimes
from deploy.experiments.imported_runs import import_run, load_imported, point_values
from deploy.experiments.real_runs import run_real
from deploy.experiments.runner import run_sweep
from deploy.experiments.sweeps import read_sweep
from deploy.experiments.trials import Trial
from deploy.experiments.workloads import workload_of
from deploy.run.updates_parquet import UpdatesWriter
from shards.errors import BadInput
from tests.support.cli_in_process import command

SWEEP = """
name = "one"
seeds = [0, 1]
workload = "quad"
gradients = 60
strategy = "{kind}"
[cluster]
workers = 3
[grid]
kind = ["asp", "softsync:n=1"]
rate = [0.01, 0.02]
"""

CLUSTER = ClusterModel(workers=3, times=StepTimes(mean_s=0.002, cv=0.3))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder as `downpour train` leaves it, with the record of real workers and a shard."""
    folder = tmp_path_factory.mktemp("runs") / "demo"
    folder.mkdir()
    trial = Trial(workload="quad", rate=0.01, gradients=60, seed=5, cluster=CLUSTER)
    records = run_real(trial, workload_of("quad")).records
    records["samples"] = 4
    with UpdatesWriter(folder / "updates.parquet", job="j", seed=5) as writer:
        writer.write([records])
    settings = {"solver": "/nets/lenet_solver.prototxt", "strategy": "asp", "link": "rtt=1ms"}
    (folder / "settings.json").write_bytes(msgspec.json.encode({**settings, "seed": 5}))
    (folder / "evaluations.csv").write_text(
        "iteration,samples,seconds,accuracy,loss\n0,0,0.0,0.1,2.3\n10,120,0.5,0.75,0.9\n"
    )
    return folder


@pytest.fixture
def swept(tmp_path: Path) -> Path:
    """The folder of a sweep that has run."""
    file = tmp_path / "one.toml"
    file.write_text(SWEEP)
    run_sweep(read_sweep(file), tmp_path / "out", note=lambda _: None)
    return tmp_path / "out"


def test_a_run_becomes_a_trial_with_its_record(run: Path, tmp_path: Path) -> None:
    """Settings, tests and figures of the run's files; staleness is recounted from the record."""
    import_run(run, tmp_path / "real", {"kind": "asp"}, "first")
    (found,) = load_imported(tmp_path / "real")
    result = found.result
    assert (found.name, found.label) == ("first", "kind asp")
    assert (result.trial.workload, result.trial.strategy) == ("lenet_solver", "asp")
    assert (result.trial.seed, result.trial.cluster.workers) == (5, 3)
    assert (result.updates, result.gradients, sum(result.staleness)) == (60, 60, 60)
    assert [point.error for point in result.curve] == pytest.approx([90.0, 25.0, 25.0])
    assert [point.gradients for point in result.curve] == [0, 30, 60]
    assert [point.updates for point in result.curve] == [0, 30, 60]


def test_the_commands_take_it(
    run: Path, swept: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a user types them: import to a point of a sweep, compare, report; fit of both records."""
    exp = command(capsys, monkeypatch, "exp")
    given = ("import", run, swept, "--point", "kind=asp", "--point", "rate=0.01")
    assert re.search(r"demo: 60 updates of 3 workers, staleness \d\.\d\d", exp(*given)[1])
    lines = exp("compare", swept)[1].splitlines()
    assert len(lines) == 2
    assert re.search(r"kind asp, rate 0.01: demo: error 25 real, .* simulated;", lines[1])
    assert re.search(r"staleness KS 0\.\d{3}$", lines[1])
    assert exp("report", swept)[0] == 0
    page = (swept / "report.html").read_text()
    assert "Real runs" in page
    assert "simulated, kind asp, rate 0.01" in page
    file = swept / "imported" / "demo.parquet"
    sections = [exp("fit", place)[1] for place in (run, run / "updates.parquet", file)]
    assert "[cluster]\nworkers = 3" in sections[0]
    assert len(set(sections)) == 1
    status, _, message = exp(*given)
    assert status == 2
    assert "expected a new name, got one that is there; choose another --name" in message


def test_real_runs_alone_are_an_experiment(run: Path, tmp_path: Path, swept: Path) -> None:
    """A folder without a sweep holds them too, and another folder is compared with it."""
    from deploy.experiments.comparison import compare_experiments
    from deploy.experiments.report import write_report

    real = tmp_path / "real"
    import_run(run, real, {"rate": 0.01, "kind": "asp"}, "one")
    assert write_report(real, tmp_path / "page.html") < 100_000
    lines = compare_experiments(swept, real)
    assert "kind asp, rate 0.01: one: error 25 real" in lines[1]
    assert sum(line.endswith(f"only in {swept}") for line in lines) == 3
    with pytest.raises(BadInput, match="expected a second folder, or runs of `exp import`"):
        compare_experiments(swept, None)


@pytest.mark.parametrize(
    ("point", "message"),
    [
        ({"kind": "asp"}, r"expected values of one point of .*, got kind asp, which 2 points have"),
        ({"kind": "bsp"}, r"got kind bsp, which no point has"),
    ],
)
def test_a_point_of_a_sweep_is_selected(
    point: dict[str, str], message: str, run: Path, swept: Path
) -> None:
    with pytest.raises(BadInput, match=message):
        import_run(run, swept, point)


def test_wrong_runs_are_one_sentence(run: Path, tmp_path: Path) -> None:
    """A folder without a record, files that are no record, and values that are none."""
    with pytest.raises(
        BadInput, match=r"expected a run folder or its updates\.parquet, got neither"
    ):
        import_run(tmp_path, tmp_path / "real", {})
    torn = tmp_path / "torn.parquet"
    torn.write_bytes(b"PAR1 and no more")
    with pytest.raises(BadInput, match="expected a record of updates, got: "):
        import_run(torn, tmp_path / "real", {}, "torn")
    with pytest.raises(BadInput, match="name: expected letters, digits, - and _, got 'a/b'"):
        import_run(run, tmp_path / "real", {}, "a/b")
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "updates.parquet").symlink_to(run / "updates.parquet")
    (copy / "summary.json").write_text("[]")
    with pytest.raises(BadInput, match=r"summary.json: expected a run's summary.json, got: "):
        import_run(copy, tmp_path / "real", {})
    (tmp_path / "real" / "imported").mkdir(parents=True)
    (tmp_path / "real" / "imported" / "other.parquet").write_bytes(b"PAR1")
    with pytest.raises(BadInput, match="expected an imported run, got another file"):
        load_imported(tmp_path / "real")
    with pytest.raises(BadInput, match="point: expected KEY=VALUE, each key once, got 'rate'"):
        point_values(["rate"])


def test_values_of_a_point_are_those_of_toml() -> None:
    """Numbers are numbers, and a text needs no quotes."""
    found = point_values(["rate=0.1", "kind=easgd:tau=5", 'cluster.link=""', "cluster.workers=8"])
    assert found == {"rate": 0.1, "kind": "easgd:tau=5", "cluster.link": "", "cluster.workers": 8}


def test_an_untested_run_has_no_error(tmp_path: Path) -> None:
    """Without evaluations and summary its error is not a number, and pages say so."""
    from deploy.experiments.report import write_report

    trial = Trial(workload="quad", rate=0.01, gradients=12, cluster=CLUSTER)
    with UpdatesWriter(tmp_path / "updates.parquet", job="j", seed=0) as writer:
        writer.write([run_real(trial, workload_of("quad")).records])
    found = import_run(tmp_path, tmp_path / "real", {}, "bare")
    assert np.isnan(found.result.error)
    assert found.result.trial.workload == "j"
    write_report(tmp_path / "real", tmp_path / "page.html")
    assert "not tested" in (tmp_path / "page.html").read_text()
