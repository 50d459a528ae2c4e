"""A sweep: its file, its runner, which may be killed at any moment, and its report."""

import csv
import errno
import html
import multiprocessing
import re
import resource
import shutil
import signal
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from msgspec import structs

from deploy.experiments import runner
from deploy.experiments.comparison import compare_experiments
from deploy.experiments.report import write_report
from deploy.experiments.runner import Folder, judge_sweep, run_sweep
from deploy.experiments.shapes.base import Check, ShapeVerdict
from deploy.experiments.sweeps import read_sweep
from deploy.experiments.trial_limits import TrialLimits
from deploy.experiments.trial_table import COLUMNS, write_table
from deploy.experiments.trials import Trial, rule_named, run_trial
from shards.errors import BadInput
from shards.rules import Momentum
from tests.support.cli_in_process import command
from tests.support.shape_outcomes import keep_outcome

ROOT = Path(__file__).parents[3]

HEAD = """
name = "first"
seeds = [0, 1]
workload = "quad"
strategy = "{kind}:scale={scale}"
gradients = 40
look_every = 10
"""
SWEEP = f"""{HEAD}
[cluster]
workers = 4
[grid]
kind = ["asp", "downpour"]
"cluster.link" = ["", "rtt=2s"]
[zip]
scale = [1, 0.5]
rate = [0.01, 0.02]
"""


def written(path: Path, text: str = SWEEP) -> Path:
    file = path / "sweep.toml"
    file.write_text(text)
    return file


def quiet(_: str) -> None:
    """Print nothing."""


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "trials").iterdir()}


def test_grid_zip_and_list_are_crossed(tmp_path: Path) -> None:
    """Each point has one value of each key, zipped ones together, and runs with every seed."""
    text = f"{SWEEP}[[list]]\nstaleness = 3\nkind = 'asp'\n".replace(
        'kind = ["asp", "downpour"]\n', ""
    )
    found = read_sweep(written(tmp_path, text.replace("asp'", "downpour'"))).trials
    assert len(found) == 2 * 2 * 2
    assert {(one.strategy, one.rate, one.staleness) for one in found} == {
        ("downpour:scale=1", 0.01, 3),
        ("downpour:scale=0.5", 0.02, 3),
    }
    assert {one.cluster.link for one in found} == {"", "rtt=2s"}
    assert {one.seed for one in found} == {0, 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("gradients =", "gradient ="), "gradient: expected one of .*, got an unknown key"),
        (("workers = 4", "worker = 4"), "cluster.worker: expected one of"),
        (('kind = ["asp", "downpour"]', "kind = []"), "grid: kind: expected a list"),
        (('["asp", "downpour"]', '["asp", "asp"]'), "expected one trial for each id, got two"),
        (('["asp", "downpour"]', '["asp", "sap"]'), "strategy: expected .*got 'sap:scale=1'"),
        (('["asp", "downpour"]', '["asp:lr=1", "asp"]'), "unknown option|expected"),
        (("seeds = [0, 1]", "seeds = [3, 1]"), "seeds: expected .first, last."),
        (("seeds = [0, 1]", "seeds = [0, 2000]"), "at most 10000 trials without --yes, got 16008"),
        (('name = "first"', 'name = "a b"'), "name: expected letters"),
        (("scale = [1, 0.5]", "scale = [1]"), "zip: expected lists of one length"),
        (("rate = [0.01", 'rate = ["fast"'), "rate: expected a number, or best or greedy"),
        (("rate = [0.01", "lr = [0.01"), "lr: expected a setting"),
        (('workload = "quad"', 'workload = "l2"'), "workload: expected one of .*, got 'l2'"),
        (("[cluster]", "[cluster"), "expected TOML"),
        (
            ("[grid]", "[limits]\ntime = 3\n[grid]"),
            "limits: expected one of time_s",
        ),
        (
            ("workers = 4", "workers = 4\nkill = [{ at = 3 }]"),
            r"kill\[0\]: expected one of at",
        ),
        (("workers = 4", "workers = 4\nkill = 3"), "cluster.kill: expected `array`, got `int`"),
    ],
)
def test_a_wrong_sweep_is_one_sentence(
    change: tuple[str, str], message: str, tmp_path: Path
) -> None:
    """The key, what was expected and what was found; nothing is run."""
    assert change[0] in SWEEP
    with pytest.raises(BadInput, match=message) as refused:
        read_sweep(written(tmp_path, SWEEP.replace(*change)))
    assert "\n" not in str(refused.value)


def test_many_trials_need_consent(tmp_path: Path) -> None:
    text = SWEEP.replace("seeds = [0, 1]", "seeds = [0, 1300]").replace("gradients = 40", "")
    assert len(read_sweep(written(tmp_path, text), consent=True).trials) == 8 * 1301


def test_a_killed_sweep_continues_to_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after each trial, in the middle of a file or before its rename, a sweep ends with the
    same bytes as an unbroken one, and repeats at most one trial a kill."""
    sweep = read_sweep(written(tmp_path))
    assert run_sweep(sweep, tmp_path / "whole", note=quiet).done == len(sweep.trials)
    whole, broken = files(tmp_path / "whole"), tmp_path / "broken"
    runs = 0

    def dying(trial: Trial) -> Any:
        nonlocal runs
        runs += 1
        if runs % 3 == 2:
            (broken / "trials" / f".{trial.id}.parquet.1.partial").write_bytes(b"PAR1 torn")
            raise KeyboardInterrupt
        return run_trial(trial)

    monkeypatch.setattr(runner, "run_trial", dying)
    kills = 0
    while True:
        try:
            status = run_sweep(sweep, broken, note=quiet)
        except KeyboardInterrupt:
            kills += 1
        else:
            break
    assert status.done == len(sweep.trials)
    assert kills > 5
    assert runs == len(sweep.trials) + kills
    assert files(broken) == whole


def test_a_torn_file_is_redone_and_a_stale_one_is_counted(tmp_path: Path) -> None:
    """A Parquet that cannot be read is no result; one of other settings stays, and counts apart."""
    sweep, folder = read_sweep(written(tmp_path)), tmp_path / "out"
    run_sweep(sweep, folder, note=quiet)
    torn = Folder(folder).result(sweep.trials[0].id)
    before = torn.read_bytes()
    torn.write_bytes(before[:-20])
    (folder / "trials" / "0123456789abcdef.parquet").write_bytes(before)
    assert Folder(folder).status(sweep).done == len(sweep.trials) - 1
    status = run_sweep(sweep, folder, note=quiet)
    assert (status.done, status.stale) == (len(sweep.trials), 1)
    assert torn.read_bytes() == before


def test_a_full_disk_ends_the_sweep_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no fault of the trial, which is neither repeated nor marked as failed."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "in another library's words")

    monkeypatch.setattr("pyarrow.parquet.write_table", full)
    with pytest.raises(BadInput, match=r"parquet: expected to write a result, got: No space left"):
        run_sweep(read_sweep(written(tmp_path)), tmp_path / "out", note=quiet)
    assert not list((tmp_path / "out" / "failed").iterdir())


def test_a_failing_trial_is_tried_twice_and_keeps_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others still run; a later runner tries it once more."""
    sweep, folder = read_sweep(written(tmp_path)), tmp_path / "out"
    bad, tries = sweep.trials[3], 0

    def failing(trial: Trial) -> Any:
        nonlocal tries
        if trial == bad:
            tries += 1
            raise BadInput("it does not work")
        return run_trial(trial)

    with monkeypatch.context() as patched:
        patched.setattr(runner, "run_trial", failing)
        status = run_sweep(sweep, folder, note=quiet)
    assert (status.done, status.failed, tries) == (len(sweep.trials) - 1, 1, 2)
    assert "it does not work" in Folder(folder).failure(bad.id).read_text()
    write_report(folder, tmp_path / "report.html")
    assert "it does not work" in (tmp_path / "report.html").read_text()
    assert run_sweep(sweep, folder, note=quiet).failed == 0


def test_a_second_runner_is_refused(tmp_path: Path) -> None:
    sweep, folder = read_sweep(written(tmp_path)), Folder(tmp_path / "out")
    folder.create(sweep)
    with folder.lock(), pytest.raises(BadInput, match="another runner"):
        run_sweep(sweep, folder.path, note=quiet)


def test_a_folder_belongs_to_one_sweep(tmp_path: Path) -> None:
    sweep = read_sweep(written(tmp_path))
    Folder(tmp_path / "out").create(sweep)
    with pytest.raises(BadInput, match=r"another sweep\.toml"):
        Folder(tmp_path / "out").create(sweep._replace(text="other"))


def test_an_id_is_that_of_all_settings() -> None:
    """Any other setting gives another id; the same settings give the same."""
    trial = Trial()
    others = [structs.replace(trial, seed=1), structs.replace(trial, batch=5)]
    assert trial.id == Trial().id
    assert len({one.id for one in (trial, *others)}) == 3


def test_a_rule_is_named_with_its_options() -> None:
    assert rule_named("momentum:momentum=0.5") == Momentum(0.5)
    with pytest.raises(BadInput, match="unknown option 'mu'"):
        rule_named("momentum:mu=0.5")


def test_the_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run, dry run, status, resume, report and list, as a user types them."""
    exp = command(capsys, monkeypatch, "exp")
    file, out = written(tmp_path), tmp_path / "out"
    assert re.search(r"16 trials in .*, about \d", exp("run", file, "--out", out, "--dry-run")[1])
    for given in (("run", file, "--out", out), ("status", out), ("resume", out)):
        status, printed, _ = exp(*given)
        assert status == 0
        assert "16 of 16 trials done" in printed.splitlines()[-1]
    assert "MB" in exp("report", out)[1]
    listed = exp("list")[1].splitlines()
    assert len(listed) == 18
    assert exp("shape", 19)[2].startswith("downpour: error: shape: expected one of 1 to 18, got 19")


def test_the_report_asks_nothing_from_outside(tmp_path: Path) -> None:
    """One page with curves, verdicts, every trial and the sweep itself, below 3 MB."""
    sweep, folder = read_sweep(written(tmp_path)), tmp_path / "out"
    run_sweep(sweep, folder, note=quiet)
    check = Check("a < b", "a is less", "1 < 2", ShapeVerdict.REPRODUCED)
    diverging = Trial(workload="quad", strategy="asp", rate=1e6, gradients=400, look_every=200)
    keep_outcome(folder, 1, [run_trial(diverging)], [check])
    size = write_report(folder, folder / "report.html")
    page = (folder / "report.html").read_text()
    assert size == len(page.encode()) < 3e6
    assert not re.search(r"(src|href)=|url\(|@import|<script", page)
    assert all(trial.id in page for trial in sweep.trials)
    assert page.count("<polyline") == 4 * min(12, len(sweep.points))
    assert "a &lt; b" in page
    with pytest.raises(BadInput, match="or of imported runs, got no folder there"):
        write_report(tmp_path / "trials", tmp_path / "none.html")


def test_pictures_are_files(
    swept: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each picture of the page is an SVG of its own, with the names of its lines in it."""
    exp, figures = command(capsys, monkeypatch, "exp"), tmp_path / "figures"
    page = tmp_path / "report.html"
    assert exp("report", swept / "out", "--out", page, "--figures", figures)[0] == 0
    written_files = sorted(path.stem for path in figures.iterdir())
    assert written_files == [
        "sweep-gradients",
        "sweep-seconds",
        "sweep-staleness",
        "sweep-updates",
    ]
    labels = {point.label for point in read_sweep(swept / "out" / "sweep.toml").points}
    for path in figures.iterdir():
        picture = ET.parse(path).getroot()
        texts = {text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")}
        assert labels <= texts
    assert page.read_text().count("<polygon") == 3 * len(labels)
    status, _, refusal = exp("report", swept / "out", "--out", page, "--figures", page)
    assert (status, refusal.count("\n")) == (2, 1)
    assert "expected to write pictures" in refusal


def test_the_top_of_the_report_is_the_verdict(swept: Path, tmp_path: Path) -> None:
    """The best point of each cluster, and how many of the rules held, before any table."""
    rule = RULES.format(kind="ordering", where=SLOW, rest=f"of = {FAST}")
    text = f"{SWEEP}{rule}"
    shutil.copytree(swept / "out", tmp_path / "out")
    (tmp_path / "out" / "sweep.toml").write_text(text)
    write_report(tmp_path / "out", tmp_path / "report.html")
    top = (tmp_path / "report.html").read_text().partition("<table>")[0]
    verdicts = re.findall('<p class="verdict">(.*?)</p>', top)
    assert [text.partition(":")[0] for text in verdicts] == [
        "With cluster.link none",
        "With cluster.link rtt=2s",
        "Of 1 rules",
    ]
    assert verdicts[-1] == "Of 1 rules: 0 held, 1 not held, 0 inconclusive."
    with pytest.raises(BadInput, match="target: expected 0 or more, got -1"):
        write_report(tmp_path / "out", tmp_path / "report.html", target=-1)


def test_the_trials_are_one_table(swept: Path, tmp_path: Path) -> None:
    """A row for each trial, simulated or of a shape, with settings and figures."""
    result = run_trial(Trial(workload="quad", gradients=8))
    keep_outcome(tmp_path, 3, [result], control=True)
    assert write_table(tmp_path, tmp_path / "shapes.csv") == 1
    header, row = (tmp_path / "shapes.csv").read_text().splitlines()
    found = dict(zip(header.split(","), row.split(","), strict=True))
    assert (found["from"], found["name"]) == ("shape 3 control", result.trial.id)
    assert (found["strategy"], found["gradients"], found["link"]) == ("asp", "8", "")
    assert float(found["staleness"]) == pytest.approx(result.mean_staleness, rel=1e-5)
    assert write_table(swept / "out", tmp_path / "sweep.csv") == 16
    with pytest.raises(BadInput, match="expected an experiment with trials, got none"):
        write_table(tmp_path / "empty", tmp_path / "none.csv")


def test_the_committed_report_is_that_of_the_example() -> None:
    """Page and table have the shipped sweep, every point of it, and no more than 3 MB."""
    folder = ROOT / "docs" / "measurements" / "reports"
    example = ROOT / "deploy" / "examples" / "sweep.toml"
    page = (folder / "slow-link.html").read_text()
    assert html.escape(example.read_text()) in page
    assert len(page) < 3e6
    sweep = read_sweep(example)
    assert "36 of 36 trials done" in page
    rows = (folder / "slow-link.csv").read_text().splitlines()
    assert len(rows) == 1 + len(sweep.trials)


def test_the_committed_table_tells_trials_apart() -> None:
    """No two trials of the shapes have all settings in common, and the page has them all, too."""
    folder = ROOT / "docs" / "measurements" / "reports"
    with (folder / "shapes.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    settings = COLUMNS[2 : COLUMNS.index("error")]
    names: dict[tuple[str, ...], set[str]] = {}
    for row in rows:
        key = row["from"], *(row[column] for column in settings)
        names.setdefault(key, set()).add(row["name"])
    assert [alike for alike in names.values() if len(alike) > 1] == []
    page = (folder / "shapes.html").read_text()
    delayed = [row["name"] for row in rows if row["from"] == "shape 12" and row["delays"] == "32"]
    assert len(delayed) == 35
    trials = dict(re.findall(r"<tr><td>(\w{16})</td>((?:<td>[^<]*</td>)+)", page))
    assert all("delays 0 to 32; tested on 2000" in trials[name] for name in delayed)
    assert {row["name"] for row in rows} == set(trials)


def test_processes_give_the_same_files(tmp_path: Path) -> None:
    """Two processes write what one does."""
    assert multiprocessing.current_process().name == "MainProcess"
    sweep = read_sweep(written(tmp_path))
    for jobs in (1, 2):
        run_sweep(sweep, tmp_path / str(jobs), jobs=jobs, note=quiet)
    assert files(tmp_path / "1") == files(tmp_path / "2")


def test_the_example_is_the_page() -> None:
    """The page shows the file that is shipped, and it is a sweep."""
    example = ROOT / "deploy" / "examples" / "sweep.toml"
    assert len(read_sweep(example).trials) == 3 * 2 * 2 * 3
    page = (ROOT / "docs" / "how-to" / "experiments.md").read_text()
    shown = re.search(r"```toml\n(.*?)```", page, re.DOTALL)
    assert shown
    assert shown[1].strip() in example.read_text()


def test_each_rule_of_the_example_of_own_digits_selects_a_point() -> None:
    """A sweep with a rule about no point would be refused: all of its four can be judged."""
    sweep = read_sweep(ROOT / "deploy" / "examples" / "own_digits.toml")
    assert len(sweep.trials) == 4 * 5
    assert len(sweep.expect) == 4


RULES = """
[[expect]]
kind = "{kind}"
value = "seconds"
where = {where}
{rest}
"""
FAST, SLOW = '{ "cluster.link" = "" }', '{ "cluster.link" = "rtt=2s" }'


@pytest.mark.parametrize(
    ("kind", "where", "rest", "verdict"),
    [
        ("ordering", FAST, f"of = {SLOW}", "held"),
        ("ordering", SLOW, f"of = {FAST}", "not held"),
        ("ordering", FAST, f"of = {FAST}", "not held"),
        ("within", FAST, f"of = {FAST}\nby = 0.1", "held"),
        ("within", FAST, f"of = {SLOW}\nby = 0.1", "not held"),
        ("ratio_in", SLOW, f"of = {FAST}\nrange = [2, 5]", "held"),
        ("monotone", FAST, 'over = "rate"', "held"),
        ("slope_in", FAST, 'over = "rate"\nrange = [-1, 1]', "held"),
        ("argmin_in", "{}", 'over = "cluster.link"\namong = [""]', "held"),
        ("argmin_in", "{}", 'over = "cluster.link"\namong = ["rtt=2s"]', "not held"),
        ("diverges", "{}", "", "not held"),
        ("distribution", FAST, f"of = {FAST}\nby = 0", "held"),
    ],
)
def test_a_sweep_s_own_rules_are_judged(
    kind: str, where: str, rest: str, verdict: str, swept: Path
) -> None:
    """Each kind of rule by the results of a sweep that has run."""
    rule = RULES.format(kind=kind, where=where, rest=rest)
    (judged,) = judge_sweep(read_sweep(written(swept, f"{SWEEP}{rule}")), swept / "out")
    assert judged.verdict == verdict, judged


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sweep's results in `out`."""
    folder = tmp_path_factory.mktemp("swept")
    run_sweep(read_sweep(written(folder)), folder / "out", note=quiet)
    return folder


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ('kind = "sorted"', "expect.*kind: .*sorted"),
        ('kind = "ordering"', "of: expected it with kind ordering, got none"),
        ('kind = "diverges"\nby = 1', "by: expected none of these with kind diverges, got by"),
        ('kind = "diverges"\nvalue = "speed"', "value: expected one of error, .*got 'speed'"),
        ('kind = "diverges"\nwhere = { kind = "sap" }', "where: expected values of a point"),
        ('kind = "monotone"\nover = "bound"', "over: expected a key with two values or more"),
        ('kind = "slope_in"\nover = "kind"\nrange = [0, 1]', "over: expected a key with numbers"),
        ('kind = "diverges"\nwho = 1', r"expect\[0\]: expected one of kind, value, .*, got who"),
    ],
)
def test_a_wrong_rule_is_one_sentence(rule: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=message) as refused:
        read_sweep(written(tmp_path, f"{SWEEP}[[expect]]\n{rule}\n"))
    assert "\n" not in str(refused.value)


def test_an_impossible_bound_is_named_as_the_sweep_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key of the file, as `downpour train` calls it, begins the sentence."""
    exp = command(capsys, monkeypatch, "exp")
    text = (
        'name = "x"\nworkload = "quad"\nstrategy = "downpour:n_push=9,n_fetch=9"\nstaleness = 2\n'
    )
    file = written(tmp_path, text)
    status, _, err = exp("run", file, "--dry-run")
    assert status == 2
    assert re.search(rf"{file}: staleness: pushing every 9 steps .*needs at least \d+, got 2", err)


def test_a_rule_that_does_not_hold_sets_the_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Printed before the summary, and shown in the report."""
    exp = command(capsys, monkeypatch, "exp")
    rule = RULES.format(kind="ordering", where=SLOW, rest=f"of = {FAST}")
    file, out = written(tmp_path, f"{SWEEP}{rule}"), tmp_path / "out"
    status, printed, _ = exp("run", file, "--out", out)
    assert status == 1
    assert printed.splitlines()[-2].startswith("not held     kind ordering value seconds")
    assert exp("resume", out)[0] == 1
    exp("report", out)
    assert "<td>not held</td>" in (out / "report.html").read_text()


def test_a_trial_beyond_its_limits_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time or memory is the reason that is kept; the limits are gone afterwards."""

    def long(trial: Trial) -> Any:
        while True:
            pass

    def large(trial: Trial) -> Any:
        return bytearray(1 << 31)

    before = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGALRM)
    for run, limits, reason in (
        (long, TrialLimits(time_s=0.05), "time_s: expected at most 0.05 s"),
        (large, TrialLimits(memory_mb=500), "memory_mb: expected at most 500 MB"),
    ):
        monkeypatch.setattr(runner, "run_trial", run)
        Folder(tmp_path).create(read_sweep(written(tmp_path)))
        assert reason in runner.run_and_save(tmp_path, limits, Trial())[1]
    assert before == (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGALRM))


def test_two_sweeps_are_compared(swept: Path, tmp_path: Path) -> None:
    """Points in common with paired differences; the others by name."""
    other = written(tmp_path, SWEEP.replace("rtt=2s", "rtt=4s"))
    run_sweep(read_sweep(other), tmp_path / "out", note=quiet)
    lines = compare_experiments(swept / "out", tmp_path / "out")
    same = [line for line in lines if "link none, kind asp, rate 0.01" in line]
    assert "seconds 0 [0, 0] (2 seeds)" in same[0]
    assert sum("only in" in line for line in lines) == 8
    with pytest.raises(BadInput, match=r"expected the folder of a sweep or of imported runs"):
        compare_experiments(swept / "none", tmp_path / "out")
